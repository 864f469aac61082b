"""Write a model: named tensors with a card (.safetensors), or a program of its own (.pt2, .onnx)."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedalloy.core.files import write_whole
from fedalloy.core.wire import Items, dump, fingerprint
from fedalloy.errors import FedAlloyError, writing
from fedalloy.trained.card import Card
from fedalloy.trained.program import Program
from fedalloy.trained.samples import stored

ENDINGS = (".safetensors", ".pt2", ".onnx")


def write(program: Program, card: Card, path: Path) -> Path:
    """One model, in the form that the ending names."""
    blob = {".safetensors": packed, ".pt2": _pt2, ".onnx": _onnx}[new(path)](program, card)
    with writing(path, "file"):
        write_whole(path, blob)
    return path


def new(path: Path) -> str:
    """The ending of a file that is to be written: refused before any work is done."""
    if path.suffix not in ENDINGS:
        raise FedAlloyError(f"{path.name}: a model file ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if path.exists():
        raise FedAlloyError(f"{path} exists already; give another file")
    if not path.parent.is_dir():
        raise FedAlloyError(f"cannot write {path}: there is no folder {path.parent}")
    return path.suffix


def tensors(net: nn.Module) -> Items:
    """All that a net computes with, by name: its constants too."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def packed(program: Program, card: Card) -> bytes:
    """Named tensors, and the card."""
    items = {name: value.detach() for name, value in tensors(program.net).items()}
    return dump(items, replace(card, weights_sha256=fingerprint(items)).facts)


def _pt2(program: Program, card: Card) -> bytes:
    """Torch's own archive: graph and weights as JSON and raw numbers; no sample inputs, which would be pickled."""
    graph = _traced(program, card)
    graph._example_inputs = None
    written = io.BytesIO()
    names = json.dumps(card.class_names)
    with _quiet():
        torch.export.save(
            graph, written, extra_files={"class_names.json": names, "card.json": _card(program, card)}
        )
    return written.getvalue()


def _onnx(program: Program, card: Card) -> bytes:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise FedAlloyError('.onnx needs onnx and onnxscript: pip install "fedalloy[onnx]"') from None
    with _quiet():
        made: Any = torch.onnx.export(
            _traced(program, card),
            dynamo=True,
            input_names=["samples"],
            output_names=["probabilities"],
            verbose=False,
        )
    made.model.metadata_props["class_names"] = json.dumps(card.class_names)
    made.model.metadata_props["card"] = _card(program, card)
    blob: bytes = made.model_proto.SerializeToString()
    return blob


def _card(program: Program, card: Card) -> str:
    return json.dumps(replace(card, weights_sha256=fingerprint(tensors(program.net))).facts)


def _traced(program: Program, card: Card) -> "torch.export.ExportedProgram":
    """The program as a graph, for any number of samples."""
    how = card.preprocessing
    kinds = {"image": torch.uint8, "vector": torch.float32, "tokens": torch.int32}
    samples: Tensor = stored(torch.ones(2, *how.shape, dtype=kinds[how.kind]), how)
    program.net.channels_last, before = False, program.net.channels_last
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(program, (samples,), dynamic_shapes=({0: torch.export.Dim("batch")},))
    except Exception as error:  # whatever the tracer says to a net of the user's own
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FedAlloyError(
            f"torch.export cannot trace {card.model} ({first}); write .safetensors instead"
        ) from None
    finally:
        program.net.channels_last = before


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the exporters' notes to their own developers."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(before)

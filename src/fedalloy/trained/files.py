"""Model files: named tensors with a card (.safetensors), or a program of its own (.pt2, .onnx)."""

import io
import json
import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedalloy import models
from fedalloy.core import registry
from fedalloy.core.expression import parse, single
from fedalloy.core.imports import Imports, allowed, outside
from fedalloy.core.net import Net
from fedalloy.core.wire import Items, dump, restore
from fedalloy.errors import FedAlloyError, writing
from fedalloy.experiment.files import fingerprint, write_whole
from fedalloy.experiment.folder import RunFolder
from fedalloy.round.replica import Site
from fedalloy.trained.card import MOST_BYTES, Card
from fedalloy.trained.kept import newest
from fedalloy.trained.model import Model
from fedalloy.trained.samples import stored
from fedalloy.trained.take import Nearest, Opened

ENDINGS = (".safetensors", ".pt2", ".onnx")
MOST_FILE = 4 * 2**30  # bytes of a model file
MOST_NUMBERS = 2**28  # parameters of a net that is built because a file says so


def export(run: str | Path, path: str | Path, client: int | None = None, *, allow_code: bool = False) -> Path:
    """Write the model of a run folder to `.safetensors`, `.pt2` or `.onnx`: the global one, or a client's own.

    `run` may also be a site's folder, for the model that it keeps, or a `.safetensors` file, for another form of it.
    What names code outside of FedAlloy is refused, unless you trust it and allow that.

    >>> import fedalloy as fa
    >>> fed = fa.federate("digits", clients=2, skew="iid")
    >>> result = fa.train(fed, rounds=1, engine="inline")
    >>> written = fa.export(result.folder, result.folder / "model.safetensors")
    >>> fa.load_model(written).card.method
    'fedavg'
    """
    _new(Path(path))
    return write(_found(Path(run), client, allow_code), Path(path))


def _found(path: Path, client: int | None, allow_code: bool) -> Model:
    """The model of a run, of a site, or in a file."""
    kept = path if path.suffix == ".safetensors" else newest(path, client) or newest(path)
    if kept is not None:
        model = load_model(kept, allow_code=allow_code)
        if client not in (None, model.card.client):
            raise FedAlloyError(f"{kept} is not the model of client {client}; leave --client away")
        return model
    folder = RunFolder.existing(path)
    settings = folder.config.model_dump()
    imports = allowed(str(path / "config.toml"), settings, allow_code=allow_code)
    opened = Opened.of(path, imports)
    return opened.model() if client is None else opened.personal(client)


def write(model: Model, path: Path) -> Path:
    """One model, in the form that the ending names."""
    blob = {".safetensors": packed, ".pt2": _pt2, ".onnx": _onnx}[_new(path)](model)
    with writing(path, "file"):
        write_whole(path, blob)
    return path


def load_model(path: str | Path, *, allow_code: bool = False) -> Model:
    """The model in a `.safetensors` file, checked: names, shapes, types, finite numbers, sha256.

    A file whose net is made by code outside of FedAlloy needs `allow_code`, and that code.
    """
    path = Path(path)
    if path.suffix != ".safetensors":
        raise FedAlloyError(
            f"{path}: FedAlloy reads .safetensors; .pt2 is for torch.export.load, .onnx for onnxruntime"
        )
    if not path.is_file():
        raise FedAlloyError(f"there is no model {path}; write one with 'fedalloy export RUN {path.name}'")
    if (size := path.stat().st_size) > MOST_FILE:
        raise FedAlloyError(f"{path} has {size:,} bytes; at most {MOST_FILE:,} are read")
    blob = path.read_bytes()
    if int.from_bytes(blob[:8], "little") > MOST_BYTES:
        raise FedAlloyError(f"{path} is no model: what it says of itself is longer than {MOST_BYTES:,} bytes")
    try:
        items, facts = restore(blob)
    except FedAlloyError as error:
        raise FedAlloyError(f"{path} is no model, or damaged ({error})") from None
    card = Card.read(facts, str(path))
    if card.code and not allow_code:
        raise outside(card.code, str(path))
    if fingerprint(items) != card.weights_sha256:
        raise FedAlloyError(f"{path} is damaged: its weights are not those that were written")
    net = _skeleton(card, path, Imports() if allow_code else None)
    _fill(net, items, path)
    return Model(net, card)


def _new(path: Path) -> str:
    """The ending of a file that is to be written: refused before any work is done."""
    if path.suffix not in ENDINGS:
        raise FedAlloyError(f"{path.name}: a model file ends in {', '.join(ENDINGS[:-1])} or {ENDINGS[-1]}")
    if path.exists():
        raise FedAlloyError(f"{path} exists already; give another file")
    if not path.parent.is_dir():
        raise FedAlloyError(f"cannot write {path}: there is no folder {path.parent}")
    return path.suffix


def _tensors(net: nn.Module) -> Items:
    """All that a net computes with, by name: its constants too."""
    return {**dict(net.named_parameters()), **dict(net.named_buffers())}


def packed(model: Model) -> bytes:
    """Named tensors, and the card."""
    items = {name: value.detach() for name, value in _tensors(model.net).items()}
    return dump(items, replace(model.card, weights_sha256=fingerprint(items)).facts)


def _skeleton(card: Card, path: Path, imports: Imports | None) -> Net:
    """The net that a card describes, with weights that do not matter."""
    inputs = card.preprocessing.inputs
    if not card.code:
        _refuse_giants(card, path)
    method = registry.make(card.method, imports)
    site = Site(method, card.model, inputs, card.seed, card.models, rounds=card.rounds, imports=imports)
    if card.which == "aux" and not hasattr(site.net, "aux"):
        raise FedAlloyError(f"{path}: {card.method[:80]!r} has no auxiliary model")
    net = site.net.aux if card.which == "aux" else site.net
    if card.which == "personal" and hasattr(net, "aux"):
        del net.aux
    if card.head == "prototypes":
        net.neck = nn.Identity()
        net.head = Nearest(torch.zeros(inputs.classes, net.width), torch.zeros(inputs.classes))
    return net.eval()


def _refuse_giants(card: Card, path: Path) -> None:
    """Nets that would take more memory than any of FedAlloy's do, those of a method's parameters too."""
    named = [word for term in parse(card.method) for word in term.parameters.values()]
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        for name in dict.fromkeys((card.model, *card.models, *filter(_is_net, named))):
            net = models.build(str(name), card.preprocessing.inputs)
            parameters = sum(p.numel() for p in net.parameters())
            if parameters > MOST_NUMBERS:
                raise FedAlloyError(f"{path}: {name!r} would have {parameters:,} parameters here")


def _is_net(word: object) -> bool:
    with suppress(FedAlloyError):  # of a word that is no expression
        return isinstance(word, str) and single(word).name in {
            model.name.replace("-", "") for model in models.names()
        }
    return False


def _fill(net: Net, items: Items, path: Path) -> None:
    wanted = _tensors(net)
    if items.keys() != wanted.keys():
        wrong = sorted(items.keys() ^ wanted.keys())[0]
        raise FedAlloyError(f"{path}: tensor {wrong[:80]!r} is missing, or the net has none of that name")
    for name, place in wanted.items():
        value = items[name]
        if value.shape != place.shape or value.dtype != place.dtype:
            raise FedAlloyError(
                f"{path}: {name} is {value.dtype} {tuple(value.shape)}; expected {place.dtype} {tuple(place.shape)}"
            )
        if not bool(torch.isfinite(value).all()):
            raise FedAlloyError(f"{path}: {name} is not finite")
        place.data.copy_(value)


def _pt2(model: Model) -> bytes:
    """Torch's own archive: graph and weights as JSON and raw numbers; no sample inputs, which would be pickled."""
    program = _traced(model)
    program._example_inputs = None
    written = io.BytesIO()
    names = json.dumps(model.class_names)
    with _quiet():
        torch.export.save(
            program, written, extra_files={"class_names.json": names, "card.json": _card(model)}
        )
    return written.getvalue()


def _onnx(model: Model) -> bytes:
    try:
        import onnx  # noqa: F401
        import onnxscript  # noqa: F401
    except ImportError:
        raise FedAlloyError('.onnx needs onnx and onnxscript: pip install "fedalloy[onnx]"') from None
    with _quiet():
        made: Any = torch.onnx.export(
            _traced(model),
            dynamo=True,
            input_names=["samples"],
            output_names=["probabilities"],
            verbose=False,
        )
    made.model.metadata_props["class_names"] = json.dumps(model.class_names)
    made.model.metadata_props["card"] = _card(model)
    blob: bytes = made.model_proto.SerializeToString()
    return blob


def _card(model: Model) -> str:
    return json.dumps(replace(model.card, weights_sha256=fingerprint(_tensors(model.net))).facts)


def _traced(model: Model) -> "torch.export.ExportedProgram":
    """The program as a graph, for any number of samples."""
    how = model.preprocessing
    kinds = {"image": torch.uint8, "vector": torch.float32, "tokens": torch.int32}
    samples: Tensor = stored(torch.ones(2, *how.shape, dtype=kinds[how.kind]), how)
    model.net.channels_last, before = False, model.net.channels_last
    try:
        with _quiet(), torch.no_grad():
            return torch.export.export(
                model.program, (samples,), dynamic_shapes=({0: torch.export.Dim("batch")},)
            )
    except Exception as error:  # whatever the tracer says to a net of the user's own
        first = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise FedAlloyError(
            f"torch.export cannot trace {model.card.model} ({first}); write .safetensors instead"
        ) from None
    finally:
        model.net.channels_last = before


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

"""Model files: export what a run has trained, and load it again."""

from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from fedalloy import models
from fedalloy.core import registry
from fedalloy.core.expression import parse, single
from fedalloy.core.imports import Imports, allowed, outside
from fedalloy.core.net import Net
from fedalloy.core.wire import Items, fingerprint, restore
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.folder import RunFolder
from fedalloy.round.replica import Replica
from fedalloy.trained.card import MOST_BYTES, Card
from fedalloy.trained.kept import newest
from fedalloy.trained.model import Model
from fedalloy.trained.take import Nearest, Opened
from fedalloy.trained.write import new, tensors

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
    new(Path(path))
    return _found(Path(run), client, allow_code).save(path)


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


def _skeleton(card: Card, path: Path, imports: Imports | None) -> Net:
    """The net that a card describes, with weights that do not matter."""
    inputs = card.preprocessing.inputs
    if not card.code:
        _refuse_giants(card, path)
    method = registry.make(card.method, imports)
    replica = Replica(method, card.model, inputs, card.seed, card.models, rounds=card.rounds, imports=imports)
    if card.which == "aux" and not hasattr(replica.net, "aux"):
        raise FedAlloyError(f"{path}: {card.method[:80]!r} has no auxiliary model")
    net = replica.net.aux if card.which == "aux" else replica.net
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
    wanted = tensors(net)
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

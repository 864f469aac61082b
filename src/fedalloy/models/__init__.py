"""The model zoo: nets by name, sized by the data they read."""

from collections.abc import Callable
from inspect import getdoc, signature
from typing import Any, NamedTuple

import torch

from fedalloy.core.expression import Foreign, Term, single
from fedalloy.core.imports import Imports, found, installed
from fedalloy.core.measure import Size, measure
from fedalloy.core.net import Inputs, Kind, Net, Outputs
from fedalloy.core.parameters import checked
from fedalloy.errors import FedAlloyError, unknown
from fedalloy.models.adopt import adopt, made_by
from fedalloy.models.bilstm import bilstm
from fedalloy.models.cnn import cnn, cnn_bn, cnn_feddw, cnn_fedrda
from fedalloy.models.densenet import densenet
from fedalloy.models.efficientnet import efficientnet_b0
from fedalloy.models.lenet import lenet
from fedalloy.models.mlp import mlp
from fedalloy.models.mobilenet import mobilenetv2
from fedalloy.models.resnet import resnet18, resnet34, resnet50, resnet110
from fedalloy.models.shufflenet import shufflenet
from fedalloy.models.vgg import vgg11
from fedalloy.models.vit import vit_b16, vit_b32, vit_tiny

__all__ = [
    "Inputs",
    "Kind",
    "Model",
    "Net",
    "Outputs",
    "Size",
    "adopt",
    "build",
    "names",
    "size_of",
    "spelled",
    "width_of",
]


class Model(NamedTuple):
    """One line of `fedalloy models`."""

    name: str
    description: str
    kinds: tuple[Kind, ...]


_FACTORIES: dict[str, Callable[..., Net]] = {
    "mlp": mlp,
    "cnn": cnn,
    "cnn-bn": cnn_bn,
    "cnn-feddw": cnn_feddw,
    "cnn-fedrda": cnn_fedrda,
    "lenet": lenet,
    "vgg11": vgg11,
    "resnet18": resnet18,
    "resnet34": resnet34,
    "resnet50": resnet50,
    "resnet110": resnet110,
    "mobilenetv2": mobilenetv2,
    "shufflenet": shufflenet,
    "efficientnet-b0": efficientnet_b0,
    "densenet": densenet,
    "vit-tiny": vit_tiny,
    "vit-b16": vit_b16,
    "vit-b32": vit_b32,
    "bilstm": bilstm,
}
_READS: dict[str, tuple[Kind, ...]] = {"mlp": ("image", "vector"), "bilstm": ("tokens",)}  # else images
_CHANNELS_FIRST = {"mlp", "vgg11", "vit-tiny", "vit-b16", "vit-b32", "bilstm"}  # no faster channels last
_PRETTY = {name.replace("-", ""): name for name in _FACTORIES}
_PLURAL: dict[Kind, str] = {"image": "images", "vector": "vectors", "tokens": "tokens"}
_INSTEAD: dict[Kind, str] = {"image": "cnn, resnet18 or mlp", "vector": "mlp", "tokens": "bilstm"}
_LARGEST = 500_000_000  # parameters, 2 GB: of which a federation holds several copies
_SMALLEST = 8  # the least side of an image that every convolutional model can read


def build(text: str, inputs: Inputs, imports: Imports | None = None) -> Net:
    """A net such as `resnet18`, `mlp(hidden=64)` or, for who may import it, a user's own `package.module:factory`.

    Weights are drawn from torch's global generator: seed it first.

    >>> build("mlp(hidden=16)", Inputs("image", (1, 8, 8), classes=10)).head
    Linear(in_features=16, out_features=10, bias=True)
    """
    term = single(text)
    if isinstance(term, Foreign):
        return made_by(found(term, imports), term, inputs)
    if term.name not in _PRETTY:
        if factory := installed("fedalloy.models", term.name):
            return made_by(factory, term, inputs)
        raise _unknown(text)
    model = _PRETTY[term.name]
    _require_readable(model, inputs)
    parameters = checked(model, _FACTORIES[model], term.parameters)
    if parameters:
        _require_moderate(model, inputs, parameters)
    net = _FACTORIES[model](inputs, **parameters)
    net.channels_last = model not in _CHANNELS_FIRST
    return net


def spelled(text: str) -> str:
    """A model's one name, however it was typed: its weights are drawn by it.

    Parameters stand in the order of the model's own; those that have their default are left out.

    >>> spelled("CNN_BN"), spelled("mlp( depth=2, hidden = 64 )"), spelled("resnet18(width=1.0, norm='group')")
    ('cnn-bn', 'mlp(depth=2)', 'resnet18(norm=group)')
    """
    term = single(text)
    if isinstance(term, Foreign):
        return str(Term(f"{term.module}:{term.name}", term.parameters))
    if term.name not in _PRETTY:
        if installed("fedalloy.models", term.name):
            return str(term)
        raise _unknown(text)
    name = _PRETTY[term.name]
    given = checked(name, _FACTORIES[name], term.parameters)
    known = signature(_FACTORIES[name]).parameters
    changed = [key for key in known if key in given and given[key] != known[key].default]
    inside = ", ".join(f"{key}={_typed(given[key])}" for key in changed)
    return f"{name}({inside})" if inside else name


def names() -> list[Model]:
    """Every model of the zoo: its name, a line about it and the kinds of data it reads."""
    return [
        Model(name, (getdoc(factory) or "").partition("\n")[0], _kinds(name))
        for name, factory in _FACTORIES.items()
    ]


def size_of(text: str, inputs: Inputs, imports: Imports | None = None) -> Size:
    """The size of a net and the work of its forward pass; the global random state is left alone.

    >>> size_of("mlp(hidden=16)", Inputs("image", (1, 8, 8), classes=10))
    Size(parameters=1210, buffers=0, flops=2368)
    """
    # shapes suffice, except where a forward pass looks at values: a text's length, a user's own code
    device = "cpu" if ":" in text or inputs.kind == "tokens" else "meta"
    with torch.random.fork_rng(devices=[]):
        with torch.device(device):
            net = build(text, inputs, imports)
        return measure(net, inputs)


def width_of(text: str, inputs: Inputs, imports: Imports | None = None) -> int:
    """The width of a net's features; the global random state is left alone.

    >>> width_of("mlp(hidden=16)", Inputs("image", (1, 8, 8), classes=10))
    16
    """
    with torch.random.fork_rng(devices=[]), torch.device("cpu" if ":" in text else "meta"):
        return build(text, inputs, imports).width


def _typed(value: Any) -> str:
    """A value as people type it: 2 for 2.0, and a word without quotes."""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return value if isinstance(value, str) else repr(value)


def _unknown(text: str) -> FedAlloyError:
    return unknown("model", text.partition("(")[0].strip().lower(), _FACTORIES)


def _kinds(name: str) -> tuple[Kind, ...]:
    return _READS.get(name, ("image",))


def _require_moderate(model: str, inputs: Inputs, parameters: dict[str, Any]) -> None:
    """Refuse what no memory holds, before any of it is taken."""
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        size = sum(p.numel() for p in _FACTORIES[model](inputs, **parameters).parameters())
    if size > _LARGEST:
        raise FedAlloyError(
            f"{Term(model, parameters)} has {size:,} parameters; a model may have {_LARGEST:,}: make it smaller"
        )


def _require_readable(model: str, inputs: Inputs) -> None:
    kinds = _kinds(model)
    if inputs.kind not in kinds:
        reads, holds = " and ".join(_PLURAL[kind] for kind in kinds), _PLURAL[inputs.kind]
        raise FedAlloyError(
            f"{model} reads {reads}, this data set holds {holds}; use {_INSTEAD[inputs.kind]} instead"
        )
    if kinds == ("image",) and min(inputs.shape[1:]) < _SMALLEST:
        size = "x".join(map(str, inputs.shape[1:]))
        raise FedAlloyError(
            f"{model} reads images from {_SMALLEST}x{_SMALLEST} on, these are {size}; use mlp instead"
        )

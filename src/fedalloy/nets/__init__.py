"""The model zoo: nets by name, sized by the data they read."""

from collections.abc import Callable
from inspect import getdoc
from typing import NamedTuple

import torch

from fedalloy.errors import FedAlloyError, unknown
from fedalloy.expression import Foreign, single
from fedalloy.imports import Imports, found, installed
from fedalloy.nets.adopt import adopt, made_by
from fedalloy.nets.base import Inputs, Kind, Net, Outputs
from fedalloy.nets.bilstm import bilstm
from fedalloy.nets.cnn import cnn, cnn_bn, cnn_feddw, cnn_fedrda
from fedalloy.nets.densenet import densenet
from fedalloy.nets.efficientnet import efficientnet_b0
from fedalloy.nets.lenet import lenet
from fedalloy.nets.measure import Size, measure
from fedalloy.nets.mlp import mlp
from fedalloy.nets.mobilenet import mobilenetv2
from fedalloy.nets.resnet import resnet18, resnet34, resnet50, resnet110
from fedalloy.nets.shufflenet import shufflenet
from fedalloy.nets.vgg import vgg11
from fedalloy.nets.vit import vit_b16, vit_b32, vit_tiny
from fedalloy.ranges import checked

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
        raise unknown("model", text.partition("(")[0].strip().lower(), _FACTORIES)
    model = _PRETTY[term.name]
    _require_readable(model, inputs)
    net = _FACTORIES[model](inputs, **checked(model, _FACTORIES[model], term.parameters))
    net.channels_last = model not in _CHANNELS_FIRST
    return net


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


def _kinds(name: str) -> tuple[Kind, ...]:
    return _READS.get(name, ("image",))


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

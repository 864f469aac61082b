"""A user's own module as a net: its last linear layer becomes the head, the rest the body."""

import sys
from collections.abc import Callable
from importlib import import_module
from inspect import Parameter, signature
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedalloy.errors import FedAlloyError, unknown
from fedalloy.nets.base import Inputs, Net
from fedalloy.nets.measure import samples

ACCEPTED = (
    "write a module whose last nn.Linear makes the logits, one per class and nothing after it, "
    "out of features of shape (batch, width); or a fedalloy.nets.Net(body, head)"
)


def adopt(module: nn.Module, inputs: Inputs) -> Net:
    """The module as body and head: the head is taken out of it, and what it computes stays the same.

    >>> module = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    >>> adopt(module, Inputs("vector", (4,), classes=3)).head
    Linear(in_features=8, out_features=3, bias=True)
    """
    if isinstance(module, Net):
        return module
    place, head = _last_linear(module, inputs.classes)
    modes = {part: part.training for part in module.modules()}
    batch = samples(inputs, 2)
    try:
        logits = _run(module.eval(), batch)
        net = Net(_replace(module, place, nn.Identity()), head)
        if not _agrees(net.body, head, batch, logits):
            _replace(module, place, head)
            name = type(module).__name__
            raise FedAlloyError(f"{name} is not a body followed by the linear layer {place!r}; {ACCEPTED}")
    finally:
        for part, training in modes.items():
            part.training = training
    net.training = module.training
    return net


def load(text: str, inputs: Inputs) -> Net:
    """`package.module:factory`, called with the inputs if it requires an argument, and adopted."""
    factory = _find(text)
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature(factory).parameters.values()
    required = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
    if len(required) > 1:
        raise FedAlloyError(
            f"{text!r} requires {', '.join(required)}; it may require one argument, the Inputs"
        )
    made = factory(inputs) if required else factory()
    if not isinstance(made, nn.Module):
        raise FedAlloyError(
            f"{text!r} makes something of type {type(made).__name__}; it must make an nn.Module"
        )
    return adopt(made, inputs)


def _find(text: str) -> Callable[..., Any]:
    path, _, name = text.strip().partition(":")
    if not path or not name or path.startswith("."):
        raise FedAlloyError(f"cannot read {text!r}; write 'package.module:factory'")
    if (here := str(Path.cwd())) not in sys.path:  # a console script does not see the working directory
        sys.path.insert(0, here)
    try:
        module = import_module(path)
    except ModuleNotFoundError as error:
        if not f"{path}.".startswith(f"{error.name}."):
            raise  # it is the user's module that imports something missing: show where
        raise FedAlloyError(f"{text!r}: no module {error.name!r} in this folder or installed") from None
    if not hasattr(module, name):
        callables = [key for key, value in vars(module).items() if callable(value)]
        raise unknown(f"name in module {path}", name, callables)
    factory: object = getattr(module, name)
    if not callable(factory):
        kind = type(factory).__name__
        raise FedAlloyError(f"{text!r} is of type {kind}; it must be a function or an nn.Module class")
    return factory


def _last_linear(module: nn.Module, classes: int) -> tuple[str, nn.Linear]:
    linear = [(place, part) for place, part in module.named_modules() if isinstance(part, nn.Linear)]
    heads = [(place, part) for place, part in linear if part.out_features == classes]
    if not heads:
        outputs = ", ".join(str(part.out_features) for _, part in linear) or "none"
        name = type(module).__name__
        raise FedAlloyError(f"{name} has no nn.Linear with {classes} outputs (it has: {outputs}); {ACCEPTED}")
    return heads[-1]


def _replace(module: nn.Module, place: str, part: nn.Module) -> nn.Module:
    if not place:  # the module is itself the linear layer
        return part
    parent, _, name = place.rpartition(".")
    setattr(module.get_submodule(parent), name, part)
    return module


def _run(module: nn.Module, batch: Tensor) -> Tensor:
    name = type(module).__name__
    try:
        with torch.no_grad():
            out = module(batch)
    except Exception as error:
        raise FedAlloyError(f"{name} fails on a batch of shape {tuple(batch.shape)}: {error}") from error
    if not isinstance(out, Tensor):
        raise FedAlloyError(f"{name} gives a {type(out).__name__}, not logits; {ACCEPTED}")
    return out


def _agrees(body: nn.Module, head: nn.Linear, batch: Tensor, logits: Tensor) -> bool:
    try:
        features = _run(body, batch)
    except FedAlloyError:
        return False
    return features.shape == (len(batch), head.in_features) and torch.equal(head(features), logits)

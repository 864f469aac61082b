"""A user's own module as a net: its last linear layer becomes the head, the rest the body."""

from inspect import Parameter, isclass, signature
from typing import Any

import torch
from torch import Tensor, nn

from fedalloy.core.expression import Term
from fedalloy.core.imports import promised
from fedalloy.core.measure import samples
from fedalloy.core.net import Inputs, Net
from fedalloy.errors import FedAlloyError

ACCEPTED = (
    "write a module whose last nn.Linear makes the logits, one per class and nothing after it, "
    "out of features of shape (batch, width); or a fedalloy.models.Net(body, head)"
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


def made_by(factory: Any, term: Term, inputs: Inputs) -> Net:
    """The net of a user's own factory or module class, which is given the inputs if it requires an argument.

    What does not promise an nn.Module is not called.
    """
    text, made = str(term), promised(factory)
    if not (isclass(made) and issubclass(made, nn.Module)):
        raise FedAlloyError(
            f"{text!r} is no model; it must be an nn.Module class, or a function that says '-> nn.Module'"
        )
    positional = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
    parameters = signature(factory).parameters.values()
    required = [p.name for p in parameters if p.kind in positional and p.default is p.empty]
    required = [name for name in required if name not in term.parameters]
    if len(required) > 1:
        raise FedAlloyError(
            f"{text!r} requires {', '.join(required)}; it may require one argument, the Inputs"
        )
    given = (inputs,) if required else ()
    try:
        signature(factory).bind(*given, **term.parameters)
    except TypeError as error:
        raise FedAlloyError(f"cannot call model {text!r}: {error}") from None
    net = factory(*given, **term.parameters)
    if not isinstance(net, nn.Module):
        raise FedAlloyError(
            f"{text!r} makes something of type {type(net).__name__}; it must make an nn.Module"
        )
    return adopt(net, inputs)


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

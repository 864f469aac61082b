"""What a net says at several depths: at the stem and at the end of every resolution, each before its activation."""

from collections.abc import Callable
from itertools import count
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from fedalloy.core.measure import samples
from fedalloy.core.net import Inputs, Net

ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.ELU, nn.CELU, nn.SELU),
    *(nn.GELU, nn.SiLU, nn.Mish, nn.Hardswish, nn.Softplus, nn.Tanh),
)


class Levels:
    """Listens to a net: after a forward pass with gradient, `pooled` holds one matrix per level, B x channels.

    A level is the input of an activation, averaged over places: of the first one (the stem) and of the last one at
    each resolution. The forward pass stays what it is, and copies of the net are not listened to. A net whose
    activations are no modules has no levels.
    """

    def __init__(self, net: Net, inputs: Inputs) -> None:
        self.chosen = depths(net, inputs)
        self.pooled: list[Tensor] = []
        _listen(net.body, self._hear)

    def _hear(self, call: int, x: Tensor) -> None:
        if torch.is_grad_enabled():
            if call == 0:
                self.pooled = []
            if call in self.chosen:
                self.pooled.append(pooled(x))


def pooled(x: Tensor) -> Tensor:
    """The mean over places: of maps B C H W, of words B T D; of vectors a copy: activations may work in place."""
    if x.dim() == 2:
        return x.clone()
    return x.mean(1) if x.dim() == 3 else x.flatten(2).mean(2)


@torch.no_grad()
def depths(net: Net, inputs: Inputs) -> list[int]:
    """The activations that are levels, counted in the order of a forward pass.

    Inside a block, only those at the resolution that it puts out: neither gates on 1x1 maps nor the first layers of a
    block that halves its maps end anything.
    """
    places: list[tuple[int, ...]] = []
    inside: set[int] = set()
    began: list[int] = []

    def leave(block: nn.Module, _: tuple[Any, ...], out: object) -> None:
        calls = range(began.pop(), len(places))
        if isinstance(out, Tensor) and out.dim() == 4:
            inside.update(call for call in calls if places[call] != _places(out))

    blocks = [m for m in net.body.modules() if m is not net.body and not isinstance(m, nn.Sequential)]
    handles = [
        *_listen(net.body, lambda call, x: places.append(_places(x))),
        *(block.register_forward_pre_hook(lambda m, x: began.append(len(places))) for block in blocks),
        *(block.register_forward_hook(leave) for block in blocks),
    ]
    training = net.training
    net.eval().body(samples(inputs, 2).to(next(net.parameters()).device))
    net.train(training)
    for handle in handles:
        handle.remove()
    ends = {
        place: call for call, place in enumerate(places) if call not in inside
    }  # the last of each resolution
    return sorted({0, *ends.values()}) if places else []


def _places(x: Tensor) -> tuple[int, ...]:
    return tuple(x.shape[1:2] if x.dim() == 3 else x.shape[2:])


def _listen(body: nn.Module, hear: Callable[[int, Tensor], None]) -> list[RemovableHandle]:
    """Call `hear` with the number and the input of every activation, in each forward pass of this very body."""
    own = set(body.modules())  # a deep copy of the body brings the hooks along
    calls = count()

    def begin(module: nn.Module, _: tuple[Tensor, ...]) -> None:
        nonlocal calls
        calls = count()

    def activate(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if module in own:
            hear(next(calls), inputs[0])

    activations = [module for module in body.modules() if isinstance(module, ACTIVATIONS)]
    return [
        body.register_forward_pre_hook(begin),
        *(module.register_forward_pre_hook(activate) for module in activations),
    ]

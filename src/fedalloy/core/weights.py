"""One flat vector per model: parameters are views into it, gradients are views into a second one.

Optimiser step, proximal term, control variate, average, distance and wire are then each one operation on
one tensor. Float buffers (BatchNorm's running statistics) live in a third vector beside it.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from fedalloy.errors import FedAlloyError

MODEL = ("body", "neck", "head")  # what is deployed, in the order of its layers
BASE, HEAD = ":-1", "-1:"  # all layers but the last, and the last


@dataclass(frozen=True)
class Layout:
    """Where each named tensor sits in a flat vector."""

    spans: Mapping[str, tuple[int, int]]
    shapes: Mapping[str, torch.Size]
    size: int
    layers: Mapping[str, int] = field(default_factory=dict)  # which layer of the model a tensor belongs to

    @classmethod
    def of(cls, tensors: Iterable[tuple[str, Tensor]], layers: Mapping[str, int] | None = None) -> "Layout":
        spans, shapes, start = {}, {}, 0
        for name, tensor in tensors:
            spans[name] = (start, start + tensor.numel())
            shapes[name] = tensor.shape
            start += tensor.numel()
        return cls(spans, shapes, start, layers or {})

    def span(self, part: str = "") -> slice:
        """The slice of one part.

        "" is everything, "main" all but the auxiliary model; a colon cuts the layers of the model as Python would
        (":-2" all but the last two, "-2:" those two); else a name prefix.
        """
        if part == "":
            return slice(0, self.size)
        chosen = self._chosen(part)
        inside = [span for name, span in self.spans.items() if _belongs(name, part) or name in chosen]
        if not inside:
            return slice(0, 0)
        start, stop = inside[0][0], inside[-1][1]
        assert stop - start == sum(b - a for a, b in inside), f"{part!r} is not one span"
        return slice(start, stop)

    def _chosen(self, part: str) -> set[str]:
        """The tensors of the layers that a part with a colon names."""
        if ":" not in part:
            return set()
        try:
            start, stop = (int(end) if end else None for end in part.split(":"))
        except ValueError:
            raise FedAlloyError(
                f"cannot read the part {part!r}; write a name such as 'body', or layers such as ':-1'"
            ) from None
        numbers = range(max(self.layers.values(), default=-1) + 1)[start:stop]
        return {name for name, number in self.layers.items() if number in numbers}

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        """Named views into a vector of this layout."""
        return {name: flat[a:b].view(self.shapes[name]) for name, (a, b) in self.spans.items()}


def _belongs(name: str, part: str) -> bool:
    if part == "main":
        return not name.startswith("aux.")
    return name == part or name.startswith(part + ".")


class Weights:
    """The state of a net: `flat` parameters, `grad` their gradients, `buffers` the float buffers.

    Buffers registered with `persistent=False` are constants of the net (an ETF classifier), not state.
    """

    def __init__(self, net: nn.Module) -> None:
        parameters = list(net.named_parameters())
        buffers = [(name, b) for name, b in _state_buffers(net) if b.is_floating_point()]
        layers = _layers(net)
        device = parameters[0][1].device if parameters else None
        self.layout = Layout.of(parameters, layers)
        self.buffer_layout = Layout.of(buffers, layers)
        self.flat = torch.empty(self.layout.size, device=device)
        self.grad = torch.zeros(self.layout.size, device=device)
        self.buffers = torch.empty(self.buffer_layout.size, device=device)
        self.counters = [b for _, b in _state_buffers(net) if not b.is_floating_point()]
        self._parameters = [(p, *self.layout.spans[name]) for name, p in parameters]
        self._open: slice | None = None
        for (_, p), w, g in zip(
            parameters, self.views(self.flat).values(), self.views(self.grad).values(), strict=True
        ):
            w.copy_(p.data)
            p.data, p.grad = w, g
        for (name, b), view in zip(buffers, self.buffer_layout.views(self.buffers).values(), strict=True):
            view.copy_(b)
            owner, _, leaf = name.rpartition(".")
            net.get_submodule(owner)._buffers[leaf] = view

    def views(self, flat: Tensor) -> dict[str, Tensor]:
        return self.layout.views(flat)

    def zeros(self, part: str = "") -> Tensor:
        """A zero vector as long as a part's parameters."""
        return torch.zeros_like(self.flat[self.span(part)])

    def span(self, part: str = "") -> slice:
        return self.layout.span(part)

    def buffer_span(self, part: str = "") -> slice:
        return self.buffer_layout.span(part)

    def open(self, part: str) -> slice:
        """Let gradients reach the parameters of a part and no others."""
        span = self.span(part)
        if span != self._open:
            for parameter, start, stop in self._parameters:
                parameter.requires_grad_(span.start <= start and stop <= span.stop)
            self._open = span
        return span

    @property
    def all_open(self) -> bool:
        """Whether gradients reach every parameter."""
        return self._open == self.span("")

    @torch.no_grad()
    def load(self, flat: Tensor, buffers: Tensor, part: str = "") -> None:
        """Take over the state of a part. Integer counters start anew: no state that travels depends on them."""
        self.flat[self.span(part)].copy_(flat)
        self.buffers[self.buffer_span(part)].copy_(buffers)
        for counter in self.counters:
            counter.zero_()


def _state_buffers(net: nn.Module) -> list[tuple[str, Tensor]]:
    persistent = net.state_dict(keep_vars=True).keys()
    return [(name, b) for name, b in net.named_buffers() if name in persistent]


def _layers(net: nn.Module) -> dict[str, int]:
    """The number of the layer that each tensor of the model belongs to.

    A layer is a module with parameters of its own; a module that has only buffers goes with the layer before it.
    """
    layers: dict[str, int] = {}
    number = -1
    for place, module in net.named_modules():
        if place.partition(".")[0] in MODEL:
            parameters = [name for name, _ in module.named_parameters(recurse=False)]
            number += bool(parameters)
            for name in (*parameters, *(name for name, _ in module.named_buffers(recurse=False))):
                layers[f"{place}.{name}"] = max(number, 0)
    return layers

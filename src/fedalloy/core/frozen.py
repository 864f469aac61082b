"""A model that only looks."""

import copy

import torch
from torch import Tensor

from fedalloy.core.net import Net, Outputs
from fedalloy.core.weights import Weights

REMEMBERED = 2**25  # numbers, that a frozen net remembers at most of what it has seen


class Frozen:
    """A net that only looks: `frozen(x)` is a forward pass that leaves no trace."""

    def __init__(self, net: Net) -> None:
        self.net = copy.deepcopy(net).requires_grad_(False).eval()
        self.weights = Weights(self.net)
        self._known = torch.empty(0)  # which samples it has seen
        self._tables: list[Tensor] = []  # what it said of them

    @torch.no_grad()
    def __call__(self, x: Tensor) -> Outputs:
        outputs: Outputs = self.net(x)
        return outputs

    def once(self, x: Tensor, index: Tensor, samples: int) -> Outputs:
        """The outputs for x, the samples at these places of so many: computed when they are first asked for."""
        if self._tables and bool(self._known[index].all()):
            return Outputs(*(table[index] for table in self._tables))
        found = self(x)
        if not self._tables and samples * sum(part[0].numel() for part in found) <= REMEMBERED:
            self._known = torch.zeros(samples, dtype=torch.bool)
            self._tables = [part.new_empty(samples, *part.shape[1:]) for part in found]
        if self._tables:
            self._known[index] = True
            for table, part in zip(self._tables, found, strict=True):
                table[index] = part
        return found

    def forget(self) -> None:
        """What it has seen belongs to one client and one round."""
        self._tables = []

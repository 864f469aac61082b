"""How the values of many clients become one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.wire import Reply, Slot


class Fold:
    """Streams replies into one float64 accumulator for each of a mechanism's slots; never holds them."""

    def __init__(self, slots: Mapping[str, Slot]) -> None:
        self.slots = slots
        self.replies = 0
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor | float] = {}
        self._all: dict[str, dict[int, Tensor]] = {
            name: {} for name, slot in slots.items() if slot.reduce == "all"
        }

    def add(self, reply: Reply, weight: float = 1.0) -> None:
        """One more reply, its items by the names of the slots."""
        self.replies += 1
        for name, slot in self.slots.items():
            value = reply.items[name]
            if slot.reduce == "all":
                self._all[name][reply.client] = value
            elif slot.reduce == "class_mean":
                counts = reply.items[slot.counts].double()
                rows = value.new_zeros(len(counts), *value.shape[1:], dtype=torch.float64)
                rows[counts > 0] = value.double() if slot.shape[0] == "held" else value[counts > 0].double()
                weights = (counts > 0).double() if slot.uniform else counts
                self._accumulate(name, rows * _rows(weights, rows), weights)
            else:
                scale = weight if slot.reduce == "mean" else 1.0
                self._accumulate(name, value.double() * scale, scale)

    def got(self) -> Mapping[str, Any]:
        """The folded value of each slot; nothing if no reply came."""
        return (
            {}
            if self.replies == 0
            else {name: self._result(name, slot.reduce, slot.dtype) for name, slot in self.slots.items()}
        )

    def _accumulate(self, key: str, value: Tensor, weight: Tensor | float) -> None:
        if key in self._sums:
            self._sums[key] += value
            self._weights[key] = self._weights[key] + weight
        else:
            self._sums[key], self._weights[key] = value, weight

    def _result(self, key: str, reduce: str, dtype: torch.dtype) -> object:
        if reduce == "all":
            return self._all[key]
        total, weight = self._sums[key], self._weights[key]
        if reduce == "sum":
            return total.to(dtype)
        if reduce == "class_mean":  # a class nobody holds: rows of zeros, told apart by its count of zero
            assert isinstance(weight, Tensor)
            return (total / _rows(weight.clamp(min=1), total)).to(dtype)
        return (total / weight).to(dtype)


def _rows(counts: Tensor, like: Tensor) -> Tensor:
    return counts.view(-1, *[1] * (like.dim() - 1))

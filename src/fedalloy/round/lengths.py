"""Finite but absurd: a reply that is many times as long as the others' is refused before anything is folded.

A length is a root mean square: of the change for weights, of the value itself for all else. It is held against the
median of the round, which fewer than half of the clients cannot move. Very short lengths are all alike; and where one
or two replies have no median worth the name, what was sent is the measure.
"""

import math
import statistics
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from fedalloy.core.wire import Reply, Slot

FEW = 2  # replies that have no median worth the name
SHORT = 0.1  # of the measure: below this, lengths are all alike
USUAL = 100.0  # for a few replies, of what is no change of weights and has no measure of its own


def too_long(
    replies: Sequence[Reply], slots: Mapping[str, Slot], shared: Tensor, most: float
) -> dict[int, str]:
    """Why replies cannot be used, by client; items by "label.slot", as they will be folded."""
    found: dict[int, str] = {}
    for key, slot in slots.items():
        if not slot.dtype.is_floating_point:
            continue
        origin = shared if slot.relative else None
        lengths = {reply.client: _length(reply.items[key], origin) for reply in replies}
        usual = _usual(list(lengths.values()), _measure(slot, shared))
        for client, length in lengths.items():
            if length > most * usual:
                times = length / usual
                found.setdefault(
                    client, f"{key} is {times:.3g} times as long as is usual; at most {most:g} is allowed"
                )
    return found


def _length(value: Tensor, origin: Tensor | None) -> float:
    if not value.numel():
        return 0.0
    moved = value.double() if origin is None else value.double() - origin.double()
    return float(torch.linalg.vector_norm(moved)) / math.sqrt(value.numel())


def _measure(slot: Slot, shared: Tensor) -> float | None:
    """What a change of weights is held against; None for what is no change."""
    return max(_length(shared, None), 1e-3) if slot.relative or slot.increment else None


def _usual(lengths: Sequence[float], measure: float | None) -> float:
    if len(lengths) <= FEW:
        return USUAL if measure is None else measure
    return max(statistics.median_low(lengths), SHORT * (1.0 if measure is None else measure))

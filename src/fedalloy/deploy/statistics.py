"""Counts, sums and squares on their way: whole numbers in limbs of 16 bits, which secure aggregation adds exactly."""

from collections.abc import Mapping
from fractions import Fraction
from statistics import median_low

import torch

from fedalloy.core.net import Inputs
from fedalloy.core.wire import Items, Reply, Slot, Spec, refusal
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.data.totals import Totals
from fedalloy.errors import FedAlloyError

STATISTICS = "statistics"
LIMB = 16  # bits
LIMBS = {"count": 4, "sums": 22, "squares": 40}  # enough for 2^40 numbers of float32
FAR = 10**6  # times the usual size of numbers in a column: more than grams for micrograms
CLIP = float(2**21)  # with SecAgg+'s 2^22 steps over twice this, whole numbers stay whole


def declared(width: int) -> dict[str, Spec]:
    """The slots of what a site sends, for so many channels or columns."""
    shapes = {
        "count": (1, LIMBS["count"]),
        "sums": (width, LIMBS["sums"]),
        "squares": (width, LIMBS["squares"]),
    }
    return {
        f"{STATISTICS}.{name}": Spec(Slot("sum", shape, torch.int64), shape) for name, shape in shapes.items()
    }


def to_items(totals: Totals) -> Items:
    """Totals as they are sent; a negative number has negative limbs."""
    columns = {"count": (totals.count,), "sums": totals.sums, "squares": totals.squares}
    return {
        f"{STATISTICS}.{name}": torch.tensor([_limbs(value, LIMBS[name]) for value in values])
        for name, values in columns.items()
    }


def from_items(items: Items, inputs: Inputs, samples: int | None = None) -> Totals:
    """The inverse of `to_items`, of one site (which told how many samples it holds) or summed over sites."""
    why = refusal(Reply(0, 0, items), declared(inputs.shape[0]), weighed=False)
    if why is None and any(bool((value.abs() >= 2**40).any()) for value in items.values()):
        why = "sends limbs beyond their range"
    if why:
        raise FedAlloyError(why)
    count, sums, squares = (
        tuple(sum(limb << (LIMB * place) for place, limb in enumerate(row)) for row in items[name].tolist())
        for name in (f"{STATISTICS}.{key}" for key in ("count", "sums", "squares"))
    )
    found = Totals(inputs.kind, count[0], sums, squares)
    if why := found.nonsense():
        raise FedAlloyError(why)
    each = inputs.shape[1] * inputs.shape[2] if inputs.kind == "image" else 1
    if samples is not None and found.count != samples * each:
        raise FedAlloyError(f"counts {found.count} numbers in {samples} samples")
    return found


def far_off(heard: Mapping[int, Totals]) -> list[int]:
    """Clients whose numbers are, in some column, far beyond those of most: among three or more, one may be wrong."""
    if len(heard) < 3:
        return []
    power = {k: [Fraction(square, totals.count) for square in totals.squares] for k, totals in heard.items()}
    middle = [median_low(column) for column in zip(*power.values(), strict=True)]
    return [
        k
        for k, squares in power.items()
        if any(usual and square > FAR**2 * usual for square, usual in zip(squares, middle, strict=True))
    ]


def in_order(totals: Totals, columns: tuple[str, ...], agreed: tuple[str, ...]) -> Totals:
    """The same totals by the agreed order of columns."""
    if columns == agreed or not columns:
        return totals
    places = [columns.index(column) for column in agreed]
    sums, squares = (tuple(values[place] for place in places) for values in (totals.sums, totals.squares))
    return Totals(totals.kind, totals.count, sums, squares)


def shown(agreed: Preprocessing) -> str:
    """The agreement in a line for a log."""
    numbers = [" ".join(f"{value:.4g}" for value in values[:4]) for values in (agreed.mean, agreed.std)]
    more = " ..." if len(agreed.mean) > 4 else ""
    scale = f", mean {numbers[0]}{more}, std {numbers[1]}{more}" if agreed.mean else ""
    words = f", {agreed.vocab} token ids, {agreed.shape[0]} to a text" if agreed.kind == "tokens" else ""
    return f"preprocessing {agreed.sha256[:12]}: {agreed.kind}{scale}{words}"


def _limbs(value: int, count: int) -> list[int]:
    sign, size = (-1, -value) if value < 0 else (1, value)
    assert size < 1 << (LIMB * count)
    return [sign * ((size >> (LIMB * place)) & (2**LIMB - 1)) for place in range(count)]

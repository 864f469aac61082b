"""Counts, sums and squares of samples as whole numbers: the same mean to the last bit, however they are grouped."""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from fedalloy.core.net import Kind

Stats = tuple[tuple[float, ...], tuple[float, ...]]

CHUNK = 4096  # samples taken at a time, so that no float copy of a whole image set is made
SMALLEST = 149  # every float32 is a multiple of 2^-149
_SPARE = 13  # bits that 4096 summands need beyond those of the largest


@dataclass(frozen=True)
class Totals:
    """How many numbers a channel (0 .. 255) or column (in units of 2^-149) has, their sums and their squares' sums."""

    kind: Kind
    count: int
    sums: tuple[int, ...]
    squares: tuple[int, ...]

    @staticmethod
    def of(kind: Kind, x: Tensor) -> Totals:
        """Of samples as a data set stores them: uint8 images N C H W, or float32 vectors N F."""
        total = Totals(kind, 0, (0,) * x.shape[1], (0,) * x.shape[1])
        for chunk in torch.split(x, CHUNK):
            total = total + (_pixels(chunk) if kind == "image" else _columns(chunk.double()))
        return total

    def __add__(self, other: Totals) -> Totals:
        return Totals(
            self.kind,
            self.count + other.count,
            tuple(a + b for a, b in zip(self.sums, other.sums, strict=True)),
            tuple(a + b for a, b in zip(self.squares, other.squares, strict=True)),
        )

    @property
    def unit(self) -> Fraction:
        """What a sum counts in: pixels are scaled to [0, 1]."""
        return Fraction(1, 255) if self.kind == "image" else Fraction(1, 2**SMALLEST)

    def stats(self) -> Stats:
        """Mean and standard deviation per channel or column; what hardly varies is left at its scale."""
        mean, std = [], []
        for total, squares in zip(self.sums, self.squares, strict=True):
            centre = float(total * self.unit / self.count)
            spread = self.count * squares - total * total
            width = math.sqrt(spread * self.unit**2 / self.count**2)
            constant = width <= 1e-7 * abs(
                centre
            )  # below float32's resolution: it would only blow up rounding
            mean.append(centre)
            std.append(1.0 if constant else width)
        return tuple(mean), tuple(std)

    def nonsense(self) -> str | None:
        """Why no samples have these totals, or None."""
        if self.count <= 0:
            return f"counts {self.count} numbers"
        for total, squares in zip(self.sums, self.squares, strict=True):
            if squares < 0 or self.count * squares < total * total:
                return "sends sums that contradict its squares"
            if self.kind == "image" and not 0 <= squares <= 255 * total <= 255 * 255 * self.count:
                return "sends sums that no pixels have"
        return None


def _pixels(chunk: Tensor) -> Totals:
    counts = torch.stack(
        [chunk[:, channel].flatten().bincount(minlength=256) for channel in range(chunk.shape[1])]
    )
    level = torch.arange(256)
    sums, squares = (counts * level).sum(1), (counts * level.square()).sum(1)
    return Totals("image", int(counts[0].sum()), tuple(sums.tolist()), tuple(squares.tolist()))


def _columns(chunk: Tensor) -> Totals:
    return Totals("vector", len(chunk), _exact(chunk, SMALLEST), _exact(chunk.square(), 2 * SMALLEST))


def _exact(values: Tensor, bits: int) -> tuple[int, ...]:
    """Exact sums of columns in units of 2^-bits; the square of a float32 is exact in float64.

    The leading bits of all values are added first: cut at a power of two so large that no sum of them is rounded; then
    those of what is left.
    """
    totals = [0] * values.shape[1]
    while bool(values.any()):
        exponent = torch.frexp(values.abs().amax(0)).exponent
        power = torch.ldexp(torch.ones_like(values[0]), exponent + _SPARE)
        leading = (values + power) - power
        values = values - leading
        for column, part in enumerate(leading.sum(0).tolist()):
            over, under = part.as_integer_ratio()
            totals[column] += (over << bits) // under
    return tuple(totals)

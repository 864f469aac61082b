"""What a reader hands over: arrays as they were found, not yet checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Part:
    """Samples with their labels; texts are an array of dtype object."""

    x: Array
    y: Array
    domain: Array | None = None

    def take(self, index: Array) -> Part:
        """The samples at `index` (positions or a mask)."""
        return Part(self.x[index], self.y[index], None if self.domain is None else self.domain[index])

    def with_labels(self, y: Array) -> Part:
        """The same samples under other labels."""
        return Part(self.x, y, self.domain)


@dataclass(frozen=True)
class Raw:
    """A training and a test part; without a test part one is held out later."""

    train: Part
    test: Part | None = None
    class_names: tuple[str, ...] = ()
    domain_names: tuple[str, ...] = ()
    feature_names: tuple[str, ...] = ()  # columns of a table of numbers

    @property
    def parts(self) -> tuple[Part, ...]:
        """The parts there are, training first."""
        return (self.train,) if self.test is None else (self.train, self.test)


def divided(whole: Part, test: Array | None, class_names: tuple[str, ...] = ()) -> Raw:
    """Samples in one array, with a mask of those for testing if the source says which these are."""
    if test is None:
        return Raw(whole, class_names=class_names)
    return Raw(whole.take(np.flatnonzero(~test)), whole.take(np.flatnonzero(test)), class_names)

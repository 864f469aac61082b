"""How samples become what a net takes: agreed once for a federation, kept with its model."""

import hashlib
import json
import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Self, cast

from fedalloy.core.net import Inputs, Kind
from fedalloy.errors import FedAlloyError

FORMAT = "fedalloy preprocessing 1"
MOST_BYTES = 16 * 1024 * 1024  # of JSON: twenty thousand words take about 200 KiB
MOST = 2**31  # no dimension, number of classes or vocabulary is larger
SMALLEST, LARGEST = 2.0**-126, 2.0**120  # what float32 divides by, pixels' levels included
KINDS = ("image", "vector", "tokens")


@dataclass(frozen=True)
class Preprocessing:
    """What a sample looks like, what the classes are called, and how numbers are scaled and words numbered.

    Pixels are scaled to [0, 1], then `mean` and `std` are per channel; those of vectors are per column. Words get the
    numbers 2, 3, ... in the order of `vocabulary`; 0 is padding, 1 any other word.
    """

    kind: Kind
    shape: tuple[int, ...]  # of one sample; of texts the number of words that are read
    classes: int
    class_names: tuple[str, ...] = ()  # empty: classes are numbers
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    vocab: int = 0  # tokens only: ids run from 0 to vocab - 1
    vocabulary: tuple[str, ...] = ()  # empty: samples come as ids
    feature_names: tuple[str, ...] = ()  # columns of a table; empty: entries have no names

    @property
    def inputs(self) -> Inputs:
        """What a net is sized by."""
        return Inputs(self.kind, self.shape, self.classes, self.vocab)

    def to_json(self) -> str:
        """The same value gives the same text; numbers come back to the last bit."""
        return json.dumps({"format": FORMAT, **asdict(self)}, sort_keys=True, allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes, source: str = "this preprocessing") -> Self:
        """The inverse of `to_json`; anything else is refused."""
        if len(text) > MOST_BYTES:
            raise FedAlloyError(f"{source} has {len(text):,} bytes; at most {MOST_BYTES:,} are read")
        try:
            found = json.loads(text, parse_constant=_no_number)
        except (ValueError, RecursionError):
            raise FedAlloyError(f"{source} is no JSON") from None
        if not isinstance(found, dict) or found.pop("format", None) != FORMAT:
            raise FedAlloyError(f"{source} was not written by this version of FedAlloy ({FORMAT!r})")
        wanted = set(cls.__dataclass_fields__)
        if found.keys() != wanted:
            wrong = sorted(found.keys() ^ wanted)[0]
            raise FedAlloyError(f"{source}: {wrong[:40]!r} is {'missing' if wrong in wanted else 'unknown'}")
        values: dict[str, Any] = {name: _plain(source, name, value) for name, value in found.items()}
        made = cls(**values)
        if why := made.nonsense():
            raise FedAlloyError(f"{source}: {why}")
        return made

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    def nonsense(self) -> str | None:
        """Why no data can be prepared like this, or None."""
        if self.kind not in KINDS:
            return f"kind is {str(self.kind)[:20]!r}; expected image, vector or tokens"
        if len(self.shape) != (3 if self.kind == "image" else 1):
            return f"a sample of kind {self.kind} does not have shape {self.shape[:9]}"
        if any(not 1 <= size <= MOST for size in (*self.shape, self.classes)):
            return "a size or the number of classes is below 1 or beyond 2^31"
        if self.class_names and len(self.class_names) != self.classes:
            return f"there are {self.classes} classes but {len(self.class_names)} class names"
        for title, names in (("class name", self.class_names), ("word", self.vocabulary)):
            if len(set(names)) != len(names):
                return f"a {title} stands there twice"
        return self._scale_nonsense() or self._words_nonsense()

    def _scale_nonsense(self) -> str | None:
        if len(self.mean) != len(self.std) or len(self.mean) not in (0, *self._scaled):
            wanted = self._scaled[0] if self._scaled else 0
            return f"mean has {len(self.mean)} numbers and std {len(self.std)}; expected {wanted} each"
        if not all(map(math.isfinite, (*self.mean, *self.std))):
            return "mean or std is not finite"
        if any(value <= 0 for value in self.std):
            return "a standard deviation is not positive"
        if any(value < SMALLEST for value in self.std) or any(
            abs(value) > LARGEST for value in self.mean + self.std
        ):
            return "mean or std is beyond float32"
        return None

    @property
    def _scaled(self) -> tuple[int, ...]:
        return () if self.kind == "tokens" else self.shape[:1]

    def _words_nonsense(self) -> str | None:
        if self.kind != "tokens":
            return (
                "only tokens have a vocabulary" if self.vocab or self.vocabulary else self._names_nonsense()
            )
        if not 1 <= self.vocab <= MOST:
            return f"the vocabulary holds {self.vocab} ids"
        if self.vocabulary and self.vocab != len(self.vocabulary) + 2:
            return f"{len(self.vocabulary)} words need {len(self.vocabulary) + 2} ids, not {self.vocab}"
        return "only tables have columns" if self.feature_names else None

    def _names_nonsense(self) -> str | None:
        if not self.feature_names:
            return None
        if self.kind != "vector" or len(self.feature_names) != self.shape[0]:
            return f"there are {len(self.feature_names)} names of columns for samples of shape {self.shape}"
        return "a column stands there twice" if len(set(self.feature_names)) != self.shape[0] else None

    def scaled_by(self, mean: tuple[float, ...], std: tuple[float, ...]) -> Self:
        """The same with other statistics."""
        return replace(self, mean=mean, std=std)


_WHOLE, _NUMBERS = {"classes", "vocab"}, {"mean", "std"}
_WORDS = {"class_names", "vocabulary", "feature_names"}


def _plain(source: str, name: str, value: object) -> object:
    """A value of the type that the field has; True is no number, 1 is no text."""
    if name == "kind" and isinstance(value, str):
        return value
    if name in _WHOLE and type(value) is int:
        return value
    if isinstance(value, list) and name not in {"kind", *_WHOLE}:
        listed = cast("list[object]", value)
        if name in _NUMBERS and all(type(one) in (int, float) for one in listed):
            try:
                return tuple(float(cast(float, one)) for one in listed)
            except OverflowError:
                raise FedAlloyError(f"{source}: {name} is not finite") from None
        if name in _WORDS and all(type(one) is str for one in listed):
            return tuple(listed)
        if name == "shape" and len(listed) <= 3 and all(type(one) is int for one in listed):
            return tuple(listed)
    raise FedAlloyError(f"{source}: {name} is not what it should be")


def _no_number(word: str) -> float:
    raise ValueError(f"{word} is no number")

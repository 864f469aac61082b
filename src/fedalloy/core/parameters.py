"""Parameters of methods and models: their ranges as annotations, checked when typed, spelt out for people."""

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from dataclasses import is_dataclass
from functools import cache
from typing import Annotated, Any, Literal

import pydantic
from annotated_types import Interval

from fedalloy.errors import FedAlloyError, shown, unknown

MOST = 1_000_000  # of anything that is counted or weighed: beyond it there are only slips of the keyboard
LEAST = (
    1e-12  # of what must not be zero: smaller numbers vanish, or overflow where something is divided by them
)
LONGEST = 200  # letters of a word

Positive = Annotated[float, Interval(ge=LEAST, le=MOST)]
NonNegative = Annotated[float, Interval(ge=0, le=MOST)]
Fraction = Annotated[float, Interval(ge=0, le=1)]
Momentum = Annotated[float, Interval(ge=0, lt=1)]
Share01 = Annotated[float, Interval(ge=1e-6, le=1)]
Chance = Annotated[float, Interval(ge=LEAST, lt=1)]
Percent = Annotated[float, Interval(ge=0.001, le=100)]
Noise = Annotated[float, Interval(ge=0.001, le=1000)]
AtLeastZero = Annotated[int, Interval(ge=0, le=MOST)]
AtLeastOne = Annotated[int, Interval(ge=1, le=MOST)]
Count = Annotated[int, Interval(ge=0, le=MOST)]
Seed = Annotated[int, Interval(ge=0, le=2**63 - 1)]
Samples = Annotated[int, Interval(ge=0, le=100_000)]
Few = Annotated[int, Interval(ge=1, le=1000)]

Width = Annotated[int, Interval(ge=1, le=16384)]
Depth = Annotated[int, Interval(ge=0, le=64)]
Layers = Annotated[int, Interval(ge=1, le=64)]
Scale = Annotated[float, Interval(ge=0.1, le=8)]
Dropout = Annotated[float, Interval(ge=0, le=0.9)]

_PLAIN = {
    int: Annotated[int, Interval(ge=-(10**9), le=10**9)],
    float: Annotated[float, Interval(ge=-MOST, le=MOST)],
}


@cache
def hints(function: Callable[..., object]) -> dict[str, Any]:
    """The annotated keyword parameters of a function or dataclass that can be typed, in order.

    A plain number has bounds too.
    """
    source = inspect.unwrap(function)
    found = typing.get_type_hints(source, include_extras=True)
    kinds = (inspect.Parameter.KEYWORD_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    listed = [p for p in inspect.signature(source).parameters.values() if p.kind in kinds]
    return {
        p.name: _PLAIN.get(found[p.name], found[p.name])
        for p in listed
        if p.default is not inspect.Parameter.empty and not is_dataclass(found[p.name])
    }


def checked(what: str, function: Callable[..., object], given: Mapping[str, Any]) -> dict[str, Any]:
    """The given parameters, or an error that says which ones there are and what they accept.

    >>> def fedprox(mu: NonNegative = 0.01) -> None: ...
    >>> checked("fedprox", fedprox, {"mu": -1})
    Traceback (most recent call last):
    fedalloy.errors.FedAlloyError: fedprox: mu must be a number from 0 to 1000000, not -1
    """
    known = hints(function)
    taken = {}
    for name, value in given.items():
        if not known:
            raise FedAlloyError(f"{what} takes no parameters; write {what!r} without {name!r}")
        if name not in known:
            raise unknown(f"parameter of {what}", name, known)
        try:
            taken[name] = _fitted(known[name], value)
        except (pydantic.ValidationError, OverflowError):
            raise FedAlloyError(
                f"{what}: {name} must be {expected(known[name])}, not {shown(value)}"
            ) from None
    return taken


def _fitted(hint: Any, value: Any) -> Any:
    if value is None and typing.get_origin(hint) is Literal:
        value = "none"  # norm=none, without quotes, is read as None
    if isinstance(value, str) and len(value) > LONGEST:
        raise OverflowError
    return _adapter(hint).validate_python(value)


@cache
def _adapter(hint: Any) -> pydantic.TypeAdapter[Any]:
    return pydantic.TypeAdapter(hint, config=pydantic.ConfigDict(strict=True, allow_inf_nan=False))


def expected(hint: Any) -> str:
    """What a parameter accepts, in words.

    >>> expected(Momentum | None)
    'a number of at least 0 and below 1, or none'
    """
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Literal:
        return " or ".join(map(repr, inner))
    if origin is tuple:
        some = "values" if inner[-1] is Ellipsis else f"{len(inner)} values"
        return f"{some}, each {expected(inner[0])}"
    if origin in (typing.Union, types.UnionType):
        return ", or ".join(expected(one) for one in inner)
    if origin is Annotated:
        return f"{expected(inner[0])} {_bounds(inner[1])}"
    return {int: "a whole number", float: "a number", str: "a word", bool: "true or false"}.get(hint, "none")


def _bounds(limit: Any) -> str:
    low, high = getattr(limit, "ge", None), getattr(limit, "le", None)
    if low is not None and high is not None:
        return f"from {_number(low)} to {_number(high)}"
    words = {"gt": "above", "ge": "of at least", "lt": "below", "le": "of at most"}
    known = {word: getattr(limit, field, None) for field, word in words.items()}
    return " and ".join(f"{word} {_number(value)}" for word, value in known.items() if value is not None)


def _number(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:g}"

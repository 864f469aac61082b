"""A model's parameters, checked against the annotations of the function that builds it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from inspect import Parameter, signature
from typing import Annotated, Any, Literal, get_args, get_origin, get_type_hints

from fedalloy import expression
from fedalloy.errors import FedAlloyError, unknown


@dataclass(frozen=True)
class Between:
    """The range of a number, both ends included."""

    low: float
    high: float

    def __str__(self) -> str:
        return f"from {self.low:g} to {self.high:g}"


Count = Annotated[int, Between(1, 16384)]
Depth = Annotated[int, Between(0, 64)]
Scale = Annotated[float, Between(0.1, 8)]
Rate = Annotated[float, Between(0, 0.9)]


def checked(
    model: str, factory: Callable[..., object], given: Mapping[str, expression.Literal]
) -> dict[str, expression.Literal]:
    """The given parameters, or an error that says which ones there are and what they accept."""
    known = [p.name for p in signature(factory).parameters.values() if p.kind is Parameter.KEYWORD_ONLY]
    hints = get_type_hints(factory, include_extras=True)
    taken: dict[str, expression.Literal] = {}
    for name, value in given.items():
        if not known:
            raise FedAlloyError(f"{model} takes no parameters; write {model!r} without {name!r}")
        if name not in known:
            raise unknown(f"parameter of {model}", name, known)
        taken[name] = "none" if value is None else value  # norm=none, without quotes, is read as None
        if not _fits(hints[name], taken[name]):
            raise FedAlloyError(f"{model}: {name} must be {_expected(hints[name])}, not {value!r}")
    return taken


def _fits(hint: Any, value: expression.Literal) -> bool:
    if get_origin(hint) is Literal:
        return value in get_args(hint)
    if get_origin(hint) is tuple:
        inner = get_args(hint)
        return isinstance(value, tuple) and len(value) == len(inner) and all(map(_fits, inner, value))
    if isinstance(value, bool) or not isinstance(value, int if hint.__origin__ is int else int | float):
        return False
    span: Between = hint.__metadata__[0]
    return span.low <= value <= span.high


def _expected(hint: Any) -> str:
    if get_origin(hint) is Literal:
        return " or ".join(map(repr, get_args(hint)))
    if get_origin(hint) is tuple:
        return f"{len(get_args(hint))} values, each {_expected(get_args(hint)[0])}"
    return f"{'a whole number' if hint.__origin__ is int else 'a number'} {hint.__metadata__[0]}"

"""Methods by name: what users type becomes a checked alloy."""

import importlib
import inspect
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

from fedalloy.alloy import Alloy, Mechanism, alloy
from fedalloy.errors import FedAlloyError, unknown
from fedalloy.expression import Term, single, split
from fedalloy.ranges import checked

Family = Literal[
    "floor",
    "classic",
    "representation",
    "calibration",
    "optimisation",
    "personal",
    "different models",
    "communication",
]


@dataclass(frozen=True)
class Recipe:
    """A published method: how to make it, and where it comes from."""

    name: str
    title: str
    family: Family
    paper: str
    make: Callable[..., Alloy]

    @property
    def parameters(self) -> dict[str, inspect.Parameter]:
        return dict(inspect.signature(self.make).parameters)


RECIPES: dict[str, Recipe] = {}


def recipe(title: str, family: Family, paper: str) -> Callable[[Callable[..., Alloy]], Callable[..., Alloy]]:
    """Register a method under its function's name; its parameters are checked by their annotations."""

    def register(make: Callable[..., Alloy]) -> Callable[..., Alloy]:
        name = make.__name__.replace("_", "")

        @wraps(make)
        def build(**parameters: Any) -> Alloy:
            made = make(**checked(name, make, parameters))
            return Alloy(title, made.pieces, str(Term(name, parameters)))

        RECIPES[name] = Recipe(name, title, family, paper, build)
        return build

    return register


def parts() -> dict[str, type[Mechanism]]:
    """Every mechanism by its lower-case name, a user's own included."""
    found: dict[str, type[Mechanism]] = {}
    todo = [Mechanism]
    while todo:
        kind = todo.pop()
        todo += kind.__subclasses__()
        if kind is not Mechanism and not kind.__name__.startswith("_"):
            found[kind.__name__.lower()] = kind
    return found


def make(text: str) -> Alloy:
    """The method that a user typed.

    >>> make("fedprox(mu=0.1)").title
    'FedProx'
    """
    pieces = [_piece(word) for word in split(text, "+")]
    if not pieces:
        raise FedAlloyError("no method given; try 'fedavg'")
    if len(pieces) == 1 and isinstance(pieces[0], Alloy):
        return pieces[0]
    titles = [piece.title if isinstance(piece, Alloy) else type(piece).__name__ for piece in pieces]
    expression = "+".join(piece.expression if isinstance(piece, Alloy) else str(piece) for piece in pieces)
    return alloy(" + ".join(titles), *pieces, expression=expression)


def _piece(word: str) -> Alloy | Mechanism:
    if ":" in word.partition("(")[0]:
        return _imported(word)
    term = single(word)
    if term.name in RECIPES:
        return RECIPES[term.name].make(**term.parameters)
    known = parts()
    if kind := known.get(term.name):
        return kind(**checked(term.name, kind, term.parameters))
    raise unknown("method", term.name, [*RECIPES, *known])


def _imported(word: str) -> Alloy:
    """`package.module:function(mu=1)`: a user's own recipe."""
    module_name, _, rest = word.partition(":")
    term = single(rest)
    name = rest.partition("(")[0].strip()
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, TypeError, ValueError) as error:  # the last two: '..x:y' and ':y'
        raise FedAlloyError(f"cannot import method {word!r}: {error}") from None
    try:
        inspect.signature(function).bind(**term.parameters)
    except (TypeError, ValueError) as error:
        raise FedAlloyError(f"cannot call method {word!r}: {error}") from None
    made = function(**term.parameters)
    if not isinstance(made, Alloy):
        raise FedAlloyError(
            f"{word!r} returned {type(made).__name__}, not an alloy; build it with fedalloy.alloy(...)"
        )
    return Alloy(made.title, made.pieces, word)

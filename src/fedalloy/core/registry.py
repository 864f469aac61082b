"""Methods by name: what users type becomes a checked alloy."""

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import wraps
from typing import Any, Literal

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.expression import Foreign, Term, parse
from fedalloy.core.imports import Imports, found, installed, promised
from fedalloy.core.parameters import checked
from fedalloy.errors import FedAlloyError, unknown

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


def method(text: str) -> Alloy:
    """The method that you type, such as `moon+prox(mu=0.1)`, or your own as `package.module:recipe`.

    >>> method("fedprox(mu=0.1)").title
    'FedProx'
    """
    return make(text, Imports())


def make(text: str, imports: Imports | None = None) -> Alloy:
    """The method of this name; code outside of FedAlloy only for who may import it."""
    if not text.strip(" +"):
        raise FedAlloyError("no method given; try 'fedavg'")
    terms = parse(text)
    pieces = [_piece(term, imports) for term in terms]
    if len(pieces) == 1 and isinstance(pieces[0], Alloy):
        return pieces[0]
    titles = [piece.title if isinstance(piece, Alloy) else type(piece).__name__ for piece in pieces]
    typed = [
        str(term if isinstance(term, Foreign) else piece) for term, piece in zip(terms, pieces, strict=True)
    ]
    expression = "+".join(
        piece.expression if isinstance(piece, Alloy) else word
        for word, piece in zip(typed, pieces, strict=True)
    )
    return alloy(" + ".join(titles), *pieces, expression=expression)


def _piece(term: Term, imports: Imports | None) -> Alloy | Mechanism:
    if isinstance(term, Foreign):
        return _called(term, found(term, imports))
    if term.name in RECIPES:
        return RECIPES[term.name].make(**term.parameters)
    known = parts()
    if kind := known.get(term.name):
        return kind(**checked(term.name, kind, term.parameters))
    if function := installed("fedalloy.methods", term.name):
        return _called(term, function)
    raise unknown("method", term.name, [*RECIPES, *known])


def _called(term: Term, function: Any) -> Alloy | Mechanism:
    """A user's own recipe or mechanism; what promises neither is not called."""
    made = promised(function)
    if not (inspect.isclass(made) and issubclass(made, Alloy | Mechanism)):
        raise FedAlloyError(
            f"{term} is no method: name a function made with @fedalloy.recipe, or one that says "
            "'-> fedalloy.Alloy', or a Mechanism"
        )
    try:
        inspect.signature(function).bind(**term.parameters)
    except (TypeError, ValueError) as error:
        raise FedAlloyError(f"cannot call method {str(term)!r}: {error}") from None
    if inspect.isclass(function) and issubclass(function, Mechanism):
        return function(**checked(function.__name__.lower(), function, term.parameters))
    made = function(**term.parameters)
    if isinstance(made, Mechanism):
        return made
    if not isinstance(made, Alloy):
        raise FedAlloyError(
            f"{str(term)!r} returned {type(made).__name__}, not an alloy; build it with fedalloy.alloy(...)"
        )
    return Alloy(made.title, made.pieces, str(term))

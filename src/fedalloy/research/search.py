"""Where good hyper-parameters may lie: for each method the values that its paper tried, and learning rates."""

import itertools
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from fedalloy.core import registry
from fedalloy.core.expression import Foreign, Term, single, split
from fedalloy.core.imports import Imports
from fedalloy.errors import FedAlloyError

MOST_POINTS = 100_000

Values = tuple[float, ...]
Point = dict[str, float]

SPACES: dict[str, dict[str, Values]] = {
    "fedprox": {"mu": (0.001, 0.01, 0.1, 0.5, 1)},
    "feddyn": {"alpha": (0.001, 0.01, 0.1)},
    "moon": {
        "mu": (0.001, 0.01, 0.1, 1, 5, 10),
        "temperature": (0.1, 0.5, 1),
        "proj_dim": (64, 128, 256),
    },
    "feddw": {"mu": (0.01, 0.1, 1, 10, 100)},
    "fedrda": {
        "alpha": (0.01, 0.1, 1),
        "gamma": (0.01, 0.1, 1),  # 10 does not train
        "width": (0.25, 0.5, 0.75, 1),
        "rank": (0.1, 0.25, 0.5, 0.75),
    },
    "fedblade": {
        "beta": (0.001, 0.005, 0.01, 0.05),
        "gamma": (0.1, 1, 2, 5),
        "tau": (0.01, 0.05, 0.1, 0.5),
    },
    "fedetf": {"scale_init": (1, 10)},
    "balancedsoftmax": {"absent_count": (0, 1)},
    "feddecorr": {"beta": (0.01, 0.03, 0.1, 0.3)},
    "fedsce": {
        "mu": (0.1, 1, 5, 10),
        "p": (1, 3, 5, 10, 20, 30),
        "rank": (3, 6, 9, 12, 15),
    },  # p = 1: small nets
    "fedrep": {"head_epochs": (1, 10)},
    "ditto": {"lam": (0.1, 1, 2)},
    "feduv": {"lambda_v": (0.5, 2.5, 12.5), "lambda_u": (0.1, 0.5, 2.5)},  # around the paper's only values
    "fedlc": {"tau": (0.1, 1, 10)},
    "fedsol": {"rho": (0.1, 0.5, 1, 2)},
    "fedfa": {"lam": (0.01, 0.1, 1)},  # around the paper's only value
    "fedfm": {
        "lam": (0.1, 1, 10, 50),
        "tau": (0.05, 0.1, 0.5, 1),
    },  # 1 in FedBlade's comparison, 50 in the authors' code
    "fedrcl": {"tau": (0.05, 0.1), "kappa": (0.5, 0.7, 0.9)},
    "ccvr": {"samples": (100, 200, 1000, 2000)},
    "perfedavg": {"alpha": (0.001, 0.01, 0.1), "beta": (0.001, 0.01, 0.1)},
    "fedpac": {"lam": (0.1, 1, 10)},
    "fedproto": {"lam": (0.1, 1, 10)},  # 1 in the authors' code, 10 in a public comparison
    "fedtgp": {"lam": (1, 10), "tau": (10, 100)},
    "feddistill": {"lam": (0.1, 1, 10)},
    "feddistillplus": {"lam": (0.1, 1, 10)},
    "fml": {"alpha": (0.1, 0.5, 0.9), "beta": (0.1, 0.5, 0.9)},
}
"""In ascending order, the default among them. Methods that are not here are tuned over the learning rate alone."""

RATES: dict[str, Values] = {
    "sgd": (0.01, 0.03, 0.1),
    "adam": (0.0003, 0.001, 0.003),
    "adamw": (0.0003, 0.001, 0.003),
}
"""Learning rates by optimiser."""


@dataclass(frozen=True)
class Space:
    """What can be varied in a method: an axis for each parameter that was left open, and `lr` for learning rates."""

    method: str
    axes: dict[str, Values]

    @classmethod
    def of(cls, method: str, rates: Iterable[float] = (), imports: Imports | None = None) -> "Space":
        """The space of a method or of a sum.

        >>> Space.of("fedprox", rates=[0.1, 0.01]).axes
        {'mu': (0.001, 0.01, 0.1, 0.5, 1), 'lr': (0.01, 0.1)}
        """
        made = registry.make(method, imports).expression
        axes = {name: values for word in _words(made) for name, values in word.axes.items()}
        if rates := sorted(set(rates)):
            axes["lr"] = tuple(rates)
        if not axes:
            raise FedAlloyError(
                f"{made} has nothing to search but the learning rate; "
                "give --lr-values 0.01,0.03,0.1 in place of --lr"
            )
        if (size := math.prod(map(len, axes.values()))) > MOST_POINTS:
            raise FedAlloyError(
                f"{made} has {size:,} points to search, {MOST_POINTS:,} are the most; "
                f"type some of {', '.join(axes)} to fix them"
            )
        return cls(made, axes)

    def holds(self, point: object) -> bool:
        """Whether this is one of its points."""
        if not isinstance(point, dict) or point.keys() != self.axes.keys():
            return False
        return all(type(value) in (int, float) and value in self.axes[name] for name, value in point.items())

    @property
    def grid(self) -> list[Point]:
        """All points, the last axis running fastest."""
        rows = itertools.product(*self.axes.values())
        return [dict(zip(self.axes, row, strict=True)) for row in rows]

    @property
    def start(self) -> Point:
        """The method as it comes, at the middle learning rate."""
        defaults = {name: value for word in _words(self.method) for name, value in word.defaults.items()}
        rates = self.axes.get("lr", ())
        return defaults | ({"lr": rates[len(rates) // 2]} if rates else {})

    def at(self, point: Point) -> str:
        """The method at a point, as it is typed.

        >>> Space.of("fedprox+dw(mu=2.5)").at({"fedprox.mu": 0.5})
        'fedprox(mu=0.5)+dw(mu=2.5)'
        """
        return "+".join(word.at(point) for word in _words(self.method))


@dataclass(frozen=True)
class _Word:
    """A summand of a method and its open parameters, by the names of their axes."""

    text: str
    open: dict[str, str] = field(default_factory=dict)

    @property
    def term(self) -> Term:
        return single(self.text)

    @property
    def axes(self) -> dict[str, Values]:
        return {axis: SPACES[self.term.name][name] for axis, name in self.open.items()}

    @property
    def defaults(self) -> Point:
        known = registry.RECIPES[self.term.name].parameters if self.open else {}
        return {
            axis: values[values.index(known[self.open[axis]].default)] for axis, values in self.axes.items()
        }

    def at(self, point: Point) -> str:
        if not self.open:
            return self.text
        chosen = {name: point[axis] for axis, name in self.open.items()}
        return str(Term(self.term.name, {**self.term.parameters, **chosen}))


def _words(method: str) -> list[_Word]:
    texts = split(method, "+")
    words = []
    for text in texts:
        term = single(text)
        if isinstance(term, Foreign):  # somebody's own recipe, of which nothing is known
            words.append(_Word(text))
            continue
        names = [name for name in SPACES.get(term.name, {}) if _matters(term, name)]
        words.append(
            _Word(text, {name if len(texts) == 1 else f"{term.name}.{name}": name for name in names})
        )
    return words


def _matters(term: Term, name: str) -> bool:
    """Whether a parameter was left open and changes the method: without a projection, its width does not."""
    if name in term.parameters:
        return False
    make, values = registry.RECIPES[term.name].make, SPACES[term.name][name]
    first, *others = [make(**term.parameters, **{name: value}).pieces for value in values]
    return any(other != first for other in others)

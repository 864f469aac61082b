"""How unlike the clients' data are, as users type it: `iid`, `dirichlet:0.1`, `pathological:2`, ..."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from fedalloy.errors import FedAlloyError, shown, unknown

SMALLEST = 1e-6  # of what a user types; beyond these nothing changes any more
LARGEST = 1_000_000


@dataclass(frozen=True)
class IID:
    """Samples dealt at random, shards of equal size."""

    def __str__(self) -> str:
        return "iid"


@dataclass(frozen=True)
class Dirichlet:
    """Label skew: per class, the clients' shares are drawn from Dir(alpha); small is harsh."""

    alpha: float

    def __post_init__(self) -> None:
        _positive("dirichlet", "alpha", self.alpha)

    def __str__(self) -> str:
        return f"dirichlet:{_plain(self.alpha)}"


@dataclass(frozen=True)
class BalancedDirichlet:
    """Dirichlet class by class, but who holds an even share of all samples gets none of the next class.

    The rule of the code behind NIID-Bench and MOON, which many papers deal with and call Dirichlet.
    """

    alpha: float

    def __post_init__(self) -> None:
        _positive("balanced-dirichlet", "alpha", self.alpha)

    def __str__(self) -> str:
        return f"balanced-dirichlet:{_plain(self.alpha)}"


@dataclass(frozen=True)
class Pathological:
    """Label skew: every client holds this many classes, a class is shared equally by its holders."""

    classes_per_client: int

    def __post_init__(self) -> None:
        if self.classes_per_client < 1:
            raise FedAlloyError(
                f"pathological:{self.classes_per_client}: a client holds at least one class; "
                "type for example pathological:2"
            )

    def __str__(self) -> str:
        return f"pathological:{self.classes_per_client}"


@dataclass(frozen=True)
class Domain:
    """Feature skew: client i holds samples of domain i mod D only."""

    def __str__(self) -> str:
        return "domain"


@dataclass(frozen=True)
class Quantity:
    """Quantity skew: the sizes of the shards are drawn from Dir(beta), the classes are not skewed."""

    beta: float

    def __post_init__(self) -> None:
        _positive("quantity", "beta", self.beta)

    def __str__(self) -> str:
        return f"quantity:{_plain(self.beta)}"


Skew = IID | Dirichlet | BalancedDirichlet | Pathological | Domain | Quantity

_PLAIN: dict[str, Callable[[], Skew]] = {"iid": IID, "domain": Domain}
_WITH_NUMBER: dict[str, tuple[Callable[[str], Skew], str]] = {
    "dirichlet": (lambda number: Dirichlet(float(number)), "a number such as dirichlet:0.1"),
    "balanced-dirichlet": (
        lambda number: BalancedDirichlet(float(number)),
        "a number such as balanced-dirichlet:0.1",
    ),
    "pathological": (lambda number: Pathological(int(number)), "a whole number such as pathological:2"),
    "quantity": (lambda number: Quantity(float(number)), "a number such as quantity:0.5"),
}


def parse_skew(text: str) -> Skew:
    """The skew a user typed.

    >>> parse_skew("dirichlet:0.1")
    Dirichlet(alpha=0.1)
    >>> str(parse_skew("pathological:2"))
    'pathological:2'
    """
    kind, colon, number = (piece.strip() for piece in text.lower().partition(":"))
    if kind in _PLAIN:
        if colon:
            raise FedAlloyError(f"skew {shown(text)}: {kind} takes no number; type {kind}")
        return _PLAIN[kind]()
    if kind not in _WITH_NUMBER:
        raise unknown("skew", kind, [*_PLAIN, *_WITH_NUMBER])
    make, expected = _WITH_NUMBER[kind]
    try:
        if not (abs(float(number)) > LARGEST or 0 < float(number) < SMALLEST):
            return make(number)
    except FedAlloyError:
        raise
    except ValueError:
        raise FedAlloyError(f"skew {shown(text)}: expected {expected}") from None
    raise FedAlloyError(
        f"skew {shown(text)}: the number must lie from {SMALLEST:g} to {LARGEST}; expected {expected}"
    )


def _positive(kind: str, symbol: str, value: float) -> None:
    if not (math.isfinite(value) and value > 0):
        raise FedAlloyError(f"{kind}:{_plain(value)}: {symbol} must be a finite number above 0")


def _plain(value: float) -> str:
    return repr(float(value)).removesuffix(".0")

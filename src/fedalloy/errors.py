"""Errors that speak to the user: what was wrong, what was expected, what to type instead."""

from collections.abc import Iterable
from difflib import get_close_matches


class FedAlloyError(ValueError):
    """Anything the user can mend; the command line prints it without a traceback and exits with 2."""


def unknown(kind: str, name: str, known: Iterable[str]) -> FedAlloyError:
    """An error for a name that does not exist, with the nearest one that does.

    >>> print(unknown("method", "fedprx", ["fedavg", "fedprox"]))
    unknown method 'fedprx'; did you mean 'fedprox'?
    """
    names = sorted(known)
    near = get_close_matches(name, names, n=1, cutoff=0.55)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
    return FedAlloyError(f"unknown {kind} {name!r}; {hint}")

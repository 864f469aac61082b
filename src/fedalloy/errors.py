"""Errors that speak to the user: what was wrong, what was expected, what to type instead."""

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path


class FedAlloyError(ValueError):
    """Anything the user can mend; the command line prints it without a traceback and exits with 2."""


class FedAlloyWarning(UserWarning):
    """Something that runs but is probably not what the user wants."""


def unknown(kind: str, name: str, known: Iterable[str]) -> FedAlloyError:
    """An error for a name that does not exist, with the nearest one that does.

    >>> print(unknown("method", "fedprx", ["fedavg", "fedprox"]))
    unknown method 'fedprx'; did you mean 'fedprox'?
    """
    names = sorted(known)
    near = get_close_matches(name[:MOST_SHOWN], names, n=1, cutoff=0.55)
    hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(names)}"
    return FedAlloyError(f"unknown {kind} {shown(name)}; {hint}")


@contextmanager
def writing(path: Path, other: str = "--out") -> Iterator[None]:
    """Turn the system's refusal to write into a sentence about what the user named."""
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise FedAlloyError(f"cannot write {path}: {reason}; give another {other}") from None


MOST_SHOWN = 300  # characters of what somebody else said
SHORT = 60  # characters of a value that was refused


def shown(value: object, *, quoted: bool = True) -> str:
    """A value that was refused, in an error: cut if it is long.

    >>> shown("9" * 400)
    "'999999999999999999999999999999999999999... (402 characters)"
    """
    try:
        said = repr(value) if quoted or not isinstance(value, str) else value
    except ValueError:  # Python does not print whole numbers of more than 4300 digits
        return "a number of thousands of digits"
    return said if len(said) <= SHORT else f"{said[:40]}... ({len(said)} characters)"


def plain(text: object) -> str:
    """What somebody else said, fit for a log: printable, on one line and short.

    >>> plain("a\\x1b[2J\\nb")
    'a?[2J?b'
    """
    shown = "".join(letter if letter.isprintable() else "?" for letter in str(text)[: MOST_SHOWN + 1])
    return shown if len(shown) <= MOST_SHOWN else f"{shown[:MOST_SHOWN]}..."


def renamed(old: str, new: str) -> None:
    """Warn who wrote an old name; the caller's caller is named."""
    warnings.warn(f"{old} is now called {new}; rename it", FedAlloyWarning, stacklevel=3)

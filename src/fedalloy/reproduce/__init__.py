"""Studies of papers, run again from scratch: a command gives their tables and figures beside ours."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalloy.errors import unknown
from fedalloy.report.tables import Table
from fedalloy.reproduce import matrix_report
from fedalloy.reproduce.matrix_study import OnRound

__all__ = ["Reproduction", "items", "reproduce"]


@dataclass(frozen=True)
class Reproduction:
    """What a study brought: tables to print, files to open, everything as JSON values."""

    item: str
    tables: Sequence[Table]
    files: Mapping[str, Path]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class _Study:
    says: str
    parts: Sequence[str]  # what `only` may name
    write: Callable[[Path, Sequence[str], OnRound | None], matrix_report.Written]


_STUDIES = {
    "ssf/matrix": _Study(
        "SSF, SCAFFOLD, FedAvg and FedSub on matrix regression: heterogeneity, rank, noise (about a minute)",
        matrix_report.PARTS,
        matrix_report.write,
    )
}


def items() -> dict[str, str]:
    """What can be reproduced, and a line on each.

    >>> list(items())
    ['ssf/matrix']
    """
    return {name: study.says for name, study in _STUDIES.items()}


def reproduce(
    item: str, out: Path, only: Sequence[str] = (), on_round: OnRound | None = None
) -> Reproduction:
    """Run a study, or only some of its methods, and write report.html, tables.md and results.json into a folder.

    ``on_round`` hears the rounds played and those there are in all.
    """
    if item not in _STUDIES:
        raise unknown("study", item, _STUDIES)
    study = _STUDIES[item]
    for name in only:
        if name not in study.parts:
            raise unknown(f"method of {item}", name, study.parts)
    out.mkdir(parents=True, exist_ok=True)
    written = study.write(out, tuple(only) or study.parts, on_round)
    return Reproduction(item, written.tables, written.files, written.facts)

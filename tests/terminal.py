"""The command line as tests use it: type words, read what was said."""

import json
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from fedalloy.cli.app import main

INLINE = ("--engine", "inline", "--clients", "4", "--lr", "0.1")
QUICK = (*INLINE, "--rounds", "2")


@dataclass(frozen=True)
class Said:
    """What a command left in the terminal."""

    code: int
    out: str
    err: str

    @property
    def trouble(self) -> list[str]:
        """What was said on standard error, but for notes."""
        return [line for line in self.err.splitlines() if not line.startswith("note: ")]

    @property
    def json(self) -> Any:
        """Standard output as one JSON value, and nothing else in sight."""
        assert (self.code, self.trouble) == (0, []), self.err
        return strict_json(self.out)


def fedalloy(*words: str) -> Said:
    """Run a command in this process."""
    code = 0
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        try:
            main(words)
        except SystemExit as end:
            code = int(end.code or 0)
    return Said(code, out.getvalue(), err.getvalue())


def strict_json(text: str) -> Any:
    """JSON as the standard has it: no NaN, no Infinity."""

    def refuse(constant: str) -> NoReturn:
        raise AssertionError(f"{constant} is not JSON")

    return json.loads(text, parse_constant=refuse)


def history(folder: Path) -> list[dict[str, Any]]:
    return [strict_json(line) for line in (folder / "history.jsonl").read_text().splitlines()]


def summary(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = strict_json((folder / "summary.json").read_text())
    return found


def tree(folder: Path) -> dict[str, tuple[int, bytes | None]]:
    """Every file and folder with its time and content: equal when nothing was touched."""
    return {
        str(path.relative_to(folder)): (
            path.stat().st_mtime_ns,
            path.read_bytes() if path.is_file() else None,
        )
        for path in sorted(folder.rglob("*"))
    }


def save_npz(path: Path, arrays: Mapping[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.savez(path, **arrays)
    return path

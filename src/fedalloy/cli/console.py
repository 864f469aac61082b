"""The terminal: standard output, a progress bar with life in it, and how to carry on after an interruption."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

from cyclopts import Parameter
from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from fedalloy.errors import FedAlloyError

NARROW = 100  # columns; below, the bar is short
PAUSE = 0.1  # seconds between two drawings of the bar

AsJson = Annotated[
    bool,
    Parameter(name="--json", negative="", show_default=False, help="Print one JSON object and nothing else."),
]


def console(*, quiet: bool = False) -> Console:
    """Standard output, or nothing at all when only JSON may appear there."""
    return Console(quiet=quiet, highlight=False, emoji=False)


def print_json(value: dict[str, Any]) -> None:
    """One JSON object on standard output."""
    sys.stdout.write(json.dumps(value, indent=2, allow_nan=False) + "\n")
    sys.stdout.flush()


def complain(sentence: str, head: str = "error") -> None:
    """One sentence on standard error."""
    line = Console(stderr=True, highlight=False, soft_wrap=True, emoji=False)
    line.print(f"[bold red]{head}:[/] {escape(sentence)}")


class Bar:
    """Moves with every client that answers; drawn by this thread alone, because workers are forked from it."""

    def __init__(self, bar: Progress, total: int, done: int, room: int) -> None:
        self._method, self._seed = "", ""
        self._bar, self._done, self._drawn, self._room = bar, done, 0.0, room
        self._task = bar.add_task("starting", total=total, completed=done, whole=done, accuracy="")
        bar.refresh()

    def run(self, method: str, seed: int) -> None:
        """Of several runs, this one is next."""
        self._method, self._seed = method, f", seed {seed}, "

    def reply(self, round: int, answered: int, asked: int) -> None:
        """A client answered."""
        if time.monotonic() - self._drawn > PAUSE:
            words = self._words(f"round {round}", f", {answered} of {asked} clients")
            self._draw(completed=self._done + answered / asked, description=words)

    def round(self, record: dict[str, Any]) -> None:
        """A round is over."""
        self._done += 1
        metrics = record["metrics"] or {}
        shown = metrics.get("personal_local_acc", metrics.get("global_acc"))
        news = {} if shown is None else {"accuracy": f"accuracy {100 * shown:.1f} %"}
        words = self._words(f"round {record['round']}")
        self._draw(completed=self._done, whole=self._done, description=words, **news)

    def _words(self, round: str, clients: str = "") -> str:
        """What goes on, as long as there is room for it; a long method is cut before the round is."""
        rest = f"{self._seed}{round}"
        if len(self._method + rest + clients) <= self._room:
            rest += clients
        short = max(1, self._room - len(rest))
        method = self._method if len(self._method) <= short else self._method[: short - 1] + "…"
        return escape(method + rest)

    def _draw(self, **news: Any) -> None:
        self._bar.update(self._task, **news)
        self._bar.refresh()
        self._drawn = time.monotonic()


@contextmanager
def progress(console: Console, total: int, done: int = 0) -> Iterator[Bar]:
    """A bar on standard error for as long as the work lasts; without a terminal there is none."""
    error = Console(stderr=True, emoji=False)
    is_narrow = error.width < NARROW
    width = 8 if is_narrow else 20  # not the whole line, or the echo of Ctrl-C breaks it
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=width),
        TextColumn("{task.fields[whole]}/{task.total}"),
        TextColumn("{task.fields[accuracy]}"),
        *([] if is_narrow else [TimeElapsedColumn()]),
        TimeRemainingColumn(),
    )
    times = [8] if is_narrow else [8, 8]  # what else stands in the line, each with the space before it
    room = error.width - sum([1 + width, 2 + 2 * len(str(total)), len(" accuracy 100.0 %"), *times])
    hidden = console.quiet or not error.is_terminal
    with Progress(*columns, console=error, auto_refresh=False, transient=True, disable=hidden) as bar:
        yield Bar(bar, total, done, room)


@contextmanager
def counting(console: Console, what: str) -> Iterator[Callable[[int, int], None]]:
    """A bar for work that tells how much is done, and of how much."""
    error = Console(stderr=True, emoji=False)
    hidden = console.quiet or not error.is_terminal
    with Progress(console=error, auto_refresh=False, transient=True, disable=hidden) as bar:
        task = bar.add_task(what, total=None)

        def tick(done: int, total: int) -> None:
            bar.update(task, completed=done, total=total)
            bar.refresh()

        yield tick


@contextmanager
def resumable(mark: Path, way: str) -> Iterator[None]:
    """Say how to carry on when the user stops a run, or a new one fails on its way: its folder has this file then."""
    new = not mark.exists()
    try:
        yield
    except (KeyboardInterrupt, FedAlloyError) as error:
        if mark.exists() and (new or isinstance(error, KeyboardInterrupt)):
            error.add_note(f"carry on with: {way}")
        raise

"""Run folders and comparison folders, read back as typed values."""

import math
import tomllib
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedalloy.errors import FedAlloyError
from fedalloy.experiment.folder import RunFolder

MEASURES: Mapping[str, str] = {
    "global_acc": "Global model",
    "personal_local_acc": "Personal models, own data (D.Avg)",
    "personal_local_acc_clients": "Personal models, own data (C.Avg)",
    "personal_on_global_acc": "Personal models, everyone's data",
    "aux_acc": "Auxiliary model, everyone's data",
}
"""Every accuracy a run may record, with the words the report uses for it."""


class Record(BaseModel):
    model_config = ConfigDict(frozen=True)


class Refusal(Record):
    """One update the server would not take."""

    client: int
    why: str


class Metrics(Record):
    """One evaluation; a method records the measures that make sense for it."""

    global_acc: float | None = None
    global_loss: float | None = None
    personal_local_acc: float | None = None
    personal_local_acc_clients: float | None = None
    personal_on_global_acc: float | None = None
    aux_acc: float | None = None
    per_client: tuple[float | None, ...] = ()
    per_class: tuple[float | None, ...] = ()


class Map(Record):
    """Features of samples in two dimensions, with the client that holds them and their class."""

    model_config = ConfigDict(frozen=True, populate_by_name=True)

    x: tuple[float, ...]
    y: tuple[float, ...]
    client: tuple[int, ...]
    label: tuple[int, ...] = Field(alias="class")


class Panel(Map):
    """One client's features after one of the rounds."""

    round: int


class Diagnostics(Record):
    """diagnostics.json: what `fedalloy diagnose` found."""

    numbers: dict[str, float] = {}
    matrices: dict[str, tuple[float, ...] | tuple[tuple[float, ...], ...]] = {}
    clients: dict[int, dict[str, float | tuple[float, ...]]] = {}
    map: Map | None = None
    panels: tuple[Panel, ...] = ()


class Round(Record):
    """One line of history.jsonl."""

    round: int
    refused: tuple[Refusal, ...] = ()
    train_loss: float | None = None
    bytes_up: dict[str, int] = {}
    bytes_down: dict[str, int] = {}
    seconds: dict[str, float] = {}
    metrics: Metrics | None = None
    diagnostics: dict[str, float] = {}
    diverged: bool = False


class Summary(Record):
    """What of summary.json the report needs; everything that can be counted comes from the history."""

    title: str
    metric: str = "global_acc"
    status: Literal["finished", "diverged", "interrupted"] = "finished"
    diverged_round: int | None = None
    parameters: int | None = None
    samples_per_second: float | None = None
    weights_sha256: str | None = None
    epsilon: float | None = None
    delta: float | None = None


class Partition(Record):
    """How many samples of each class each client holds."""

    class_names: tuple[str, ...] = ()
    counts: tuple[tuple[int, ...], ...] = ()


class CompareFile(Record):
    """compare.json as it stands on disk."""

    methods: tuple[str, ...] = Field(min_length=1)
    seeds: tuple[int, ...]
    runs: dict[str, dict[int, str]]
    target: float | None = None
    command: str | None = None


@dataclass(frozen=True)
class Run:
    """One run folder; one still under way has no summary yet."""

    folder: Path
    config: Mapping[str, Any]
    history: tuple[Round, ...]
    summary: Summary | None
    partition: Partition | None
    diagnostics: Diagnostics | None = None

    @property
    def title(self) -> str:
        return self.summary.title if self.summary else str(self.config.get("method", self.folder.name))

    @property
    def status(self) -> str:
        return self.summary.status if self.summary else "unfinished"

    @property
    def at_sites(self) -> bool:
        """Whether sites of a real federation brought data of their own: nothing was dealt to them."""
        return (self.folder / "preprocessing-source.json").exists()

    @property
    def skew(self) -> str:
        """How the data came to the clients."""
        return "data of their own" if self.at_sites else str(self.config.get("skew", ""))

    @property
    def measures(self) -> dict[str, str]:
        """What its accuracies are called; sites try whatever model the method has, not always a personal one."""
        was, now = "Personal models, own data", "Tested at the sites, own data"
        return {key: name.replace(was, now) if self.at_sites else name for key, name in MEASURES.items()}

    @property
    def metric(self) -> str:
        """The headline measure, which accuracies by client and by class belong to as well."""
        return self.summary.metric if self.summary else "global_acc"

    @property
    def diverged_round(self) -> int | None:
        if self.summary and self.summary.diverged_round is not None:
            return self.summary.diverged_round
        return next((entry.round for entry in self.history if entry.diverged), None)

    @property
    def counts(self) -> bool:
        """Whether the run came to its own end, and so belongs in a mean over seeds."""
        return self.status in ("finished", "diverged")

    @property
    def class_names(self) -> tuple[str, ...]:
        return self.partition.class_names if self.partition else ()

    @property
    def last_metrics(self) -> Metrics | None:
        return next((entry.metrics for entry in reversed(self.history) if entry.metrics), None)

    def curve(self, measure: str) -> dict[int, float]:
        """One measure (or train_loss) by round, where it was taken and is a finite number."""
        sources = {entry.round: entry if measure == "train_loss" else entry.metrics for entry in self.history}
        found = {number: getattr(source, measure, None) for number, source in sources.items()}
        return {
            number: value for number, value in found.items() if value is not None and math.isfinite(value)
        }

    @cached_property
    def traffic(self) -> dict[int, int]:
        """Upload and download of all clients until the end of each round."""
        totals = accumulate(
            sum(entry.bytes_up.values()) + sum(entry.bytes_down.values()) for entry in self.history
        )
        return {entry.round: total for entry, total in zip(self.history, totals, strict=True)}


@dataclass(frozen=True)
class Comparison:
    """Methods against seeds; a run that has not begun is not in ``runs``."""

    folder: Path
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    target: float | None
    command: str | None
    runs: Mapping[str, Mapping[int, Run]]

    def label(self, method: str) -> str:
        """The method's title, or the method as it was typed where two would share a title."""
        titles = {name: next((run.title for run in self.runs[name].values()), name) for name in self.methods}
        shared = list(titles.values()).count(titles[method]) > 1
        return method if shared else titles[method]

    def complete(self, method: str) -> dict[int, Run]:
        """The runs of a method that belong in a mean, by seed."""
        return {seed: run for seed, run in self.runs[method].items() if run.counts}

    @property
    def every_run(self) -> list[Run]:
        return [run for runs in self.runs.values() for run in runs.values()]

    @property
    def headlines(self) -> tuple[str, ...]:
        """The headline measures of the methods, each once: accuracies of different kinds do not compare."""
        named = dict.fromkeys(run.metric for run in self.every_run if run.summary)
        return tuple(named) or ("global_acc",)


def read_run(folder: Path) -> Run:
    """Read one run folder; a half-written last line of the history is left out."""
    config = folder / "config.toml"
    if not config.is_file():
        raise FedAlloyError(f"{folder} is not a run folder: it has no config.toml; `fedalloy run` writes one")
    try:
        settings = tomllib.loads(config.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise FedAlloyError(f"{config} is not valid TOML: {error}") from error
    run = Run(
        folder=folder,
        config=settings,
        history=_history(folder / "history.jsonl"),
        summary=_optional(folder / "summary.json", Summary),
        partition=_optional(folder / "partition.json", Partition),
        diagnostics=_optional(folder / "diagnostics.json", Diagnostics),
    )
    RunFolder(folder).summary()  # refuses what does not belong together
    return run


def read_comparison(folder: Path) -> Comparison:
    """Read a comparison folder and those of its runs that have begun."""
    path = folder / "compare.json"
    if not path.is_file():
        raise FedAlloyError(
            f"{folder} is not a comparison folder: it has no compare.json; `fedalloy compare` writes one"
        )
    file = _parse(path.read_bytes(), CompareFile, str(path))
    begun = {
        method: {
            seed: read_run(folder / relative)
            for seed, relative in file.runs.get(method, {}).items()
            if (folder / relative / "config.toml").is_file()
        }
        for method in file.methods
    }
    return Comparison(folder, file.methods, file.seeds, file.target, file.command, begun)


R = TypeVar("R", bound=Record)


def _parse(text: bytes, kind: type[R], where: str) -> R:
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise FedAlloyError(f"{where}: {place + ': ' if place else ''}{first['msg']}") from error


def _optional(path: Path, kind: type[R]) -> R | None:
    return _parse(path.read_bytes(), kind, str(path)) if path.is_file() else None


def _history(path: Path) -> tuple[Round, ...]:
    if not path.is_file():
        return ()
    *lines, rest = path.read_bytes().split(b"\n")
    rounds = [
        _parse(line, Round, f"{path}, line {number}") for number, line in enumerate(lines, 1) if line.strip()
    ]
    with suppress(ValidationError):  # a line without its newline is whole or still being written
        rounds.append(Round.model_validate_json(rest))
    return tuple(rounds)

"""A table or figure of a paper as a grid of runs: rows are methods, columns are settings, cells means over seeds."""

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from fedalloy.core.expression import slug
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import FREE, Config
from fedalloy.report.runs import Run

T = TypeVar("T", "Row", "Column")
Scale = Literal["cpu", "paper"]
Judge = Literal["final", "last10", "best"]
Settings = Mapping[str, Any]
SEEDS = (0, 1, 2)


@dataclass(frozen=True)
class Measure:
    """One number of a run, such as its final accuracy; an accuracy may be judged by other rounds."""

    label: str
    of: Callable[[Run], float | None]
    smaller: bool = False  # is better
    digits: int = 2
    judged: "Callable[[Judge], Measure] | None" = None


@dataclass(frozen=True)
class Column:
    """A setting of the paper; `cpu` is what a small machine changes of it."""

    label: str
    settings: Settings = field(default_factory=dict)
    cpu: Settings = field(default_factory=dict)
    fill: Settings = field(default_factory=dict)  # for methods with places to fill, such as 'feddw(mu={mu})'


@dataclass(frozen=True)
class Row:
    """A method of the paper with the paper's numbers: for every column, one of each measure; None is a dash."""

    label: str
    method: str
    paper: Sequence[float | None] = ()
    settings: Settings = field(default_factory=dict)
    cpu: Settings = field(default_factory=dict)
    columns: Sequence[str] = ()  # only these, by label; all by default


@dataclass(frozen=True)
class Cell:
    """Where a row and a column meet: the runs to play, by seed, and what the paper says."""

    row: Row
    column: Column
    configs: Mapping[int, Config]
    paper: Sequence[float | None]


@dataclass(frozen=True)
class Grid:
    """A table or figure. `cpu` is what the small scale changes in all columns; `reduced` says so in words."""

    says: str
    rows: Sequence[Row]
    columns: Sequence[Column]
    measures: Sequence[Measure]
    base: Settings
    cpu: Settings = field(default_factory=dict)
    reduced: str = ""
    seeds: Sequence[int] = SEEDS
    drawn: Sequence[Literal["curves", "sweep", "inside"]] = ("curves",)
    also: Sequence[str] = ()  # what has curves besides the headline accuracy
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        width = len(self.columns) * len(self.measures)
        for row in self.rows:
            if row.paper and len(row.paper) != width:
                raise ValueError(f"{self.says}: {row.label} has {len(row.paper)} numbers for {width} places")

    def judged(self, judge: Judge) -> "Grid":
        """The same runs with accuracies of other rounds than the item's: which ones a paper has, few say."""
        if not any(one.judged for one in self.measures):
            raise FedAlloyError("this item has no accuracies; leave --judge away")
        return replace(self, measures=[one.judged(judge) if one.judged else one for one in self.measures])

    @property
    def parts(self) -> list[str]:
        """What `only` may name: rows and columns."""
        return [*(slug(row.label) for row in self.rows), *(slug(column.label) for column in self.columns)]

    def data(self, row: Row, column: Column) -> str:
        """The data set that the paper has there."""
        return str({"data": Config().data, **self.base, **column.settings, **row.settings}["data"])

    def cells(
        self, scale: Scale, given: Settings | None = None, only: Sequence[str] = (), seeds: Sequence[int] = ()
    ) -> list[Cell]:
        """All cells, or those of some rows and columns; what is given wins over the grid's settings."""
        rows, columns = _chosen(self.rows, only), _chosen(self.columns, only)
        return [
            Cell(row, column, self._configs(row, column, scale, given or {}, seeds), self._paper(row, column))
            for column in columns
            for row in rows
            if not row.columns or column.label in row.columns
        ]

    def _configs(
        self, row: Row, column: Column, scale: Scale, given: Settings, seeds: Sequence[int]
    ) -> dict[int, Config]:
        less = {**self.cpu, **column.cpu, **row.cpu} if scale == "cpu" else {}
        values = {**self.base, **column.settings, **row.settings, **less, **given}
        method = row.method.format(**column.fill) if column.fill else row.method
        base = Config.of({**values, "method": method}).spelled()
        return {seed: base.model_copy(update={"seed": seed}) for seed in seeds or self.seeds}

    def _paper(self, row: Row, column: Column) -> Sequence[float | None]:
        if not row.paper:
            return [None] * len(self.measures)
        start = list(self.columns).index(column) * len(self.measures)
        return row.paper[start : start + len(self.measures)]


def _chosen(listed: Sequence[T], only: Sequence[str]) -> Sequence[T]:
    """Those that are named; all if none of them is."""
    named = [one for one in listed if slug(one.label) in only]
    return named or listed


def place(config: Config) -> str:
    """Where a run lies, by what it computes: items that need the same run share it.

    Settings that have their default do not count, so that a run is still found when there are new settings.
    """
    chosen = config.model_dump(exclude=set(FREE), exclude_defaults=True)
    digest = hashlib.sha256(json.dumps(chosen, sort_keys=True).encode()).hexdigest()[:10]
    return f"{slug(config.method)}-{slug(config.data)}-{digest}"


def by_seed(cells: Sequence[Cell]) -> Iterator[Config]:
    """All runs, each once: the whole grid for the first seed, then for the next."""
    seen = set()
    for number in range(max((len(cell.configs) for cell in cells), default=0)):
        for cell in cells:
            for config in list(cell.configs.values())[number : number + 1]:
                if (where := place(config)) not in seen:
                    seen.add(where)
                    yield config


def numbers(text: str) -> list[float | None]:
    """The numbers of a printed line; what is none, such as a dash or '200+', is None.

    >>> numbers("55.19/69.26 – 200+")
    [55.19, 69.26, None, None]
    """
    words = text.replace("/", " ").split()
    return [float(word) if word.replace(".", "").isdigit() else None for word in words]


def accuracy(label: str = "", *names: str, last: int = 1, best: bool = False) -> Measure:
    """The first of these accuracies that a run has, in percent: the mean of its last rounds, or the best of all."""
    asked = names or ("global_acc",)

    def of(run: Run) -> float | None:
        if run.diverged_round is not None:
            return None
        curve = next((curve for name in asked if (curve := run.curve(name))), None)
        if not curve:
            return None
        counted = [value for number, value in curve.items() if number > max(curve) - last]
        return 100 * (max(curve.values()) if best else sum(counted) / len(counted))

    def judged(judge: Judge) -> Measure:
        return accuracy(label, *names, last=10 if judge == "last10" else 1, best=judge == "best")

    return Measure(label, of, judged=judged)


def client_accuracy(label: str, client: int, last: int = 1) -> Measure:
    """One client's accuracy in percent."""

    def of(run: Run) -> float | None:
        found = [entry.metrics.per_client for entry in run.history if entry.metrics][-last:]
        values = [one[client] for one in found if len(one) > client and one[client] is not None]
        return 100 * sum(value or 0.0 for value in values) / len(values) if values else None

    return Measure(label, of)


def diagnostic(label: str, name: str, *, smaller: bool = False, digits: int = 3) -> Measure:
    """A number of the last diagnosed round; needs `diagnose_every`."""

    def of(run: Run) -> float | None:
        return next(
            (entry.diagnostics[name] for entry in reversed(run.history) if name in entry.diagnostics), None
        )

    return Measure(label, of, smaller, digits)


def seconds(label: str = "s per round") -> Measure:
    """Seconds of training in a round, on the machine at hand."""

    def of(run: Run) -> float | None:
        found = [entry.seconds.get("train", 0.0) for entry in run.history]
        return sum(found) / len(found) if found else None

    return Measure(label, of, smaller=True)


def parameters(label: str = "parameters (M)") -> Measure:
    """Size of the shared model."""

    def of(run: Run) -> float | None:
        known = run.summary.parameters if run.summary else None
        return None if known is None else known / 1e6

    return Measure(label, of, smaller=True, digits=4)


def megabytes(label: str, way: Literal["up", "down"]) -> Measure:
    """Upload or download of a round, of all clients together."""

    def of(run: Run) -> float | None:
        found = [sum((entry.bytes_up if way == "up" else entry.bytes_down).values()) for entry in run.history]
        return sum(found) / len(found) / 2**20 if found else None

    return Measure(label, of, smaller=True)


def named(only: Sequence[str], grid: Grid, item: str) -> None:
    """Refuse a name that is neither a row nor a column."""
    for name in only:
        if name not in grid.parts:
            raise FedAlloyError(f"{item} has no row or column {name!r}; it has: {', '.join(grid.parts)}")

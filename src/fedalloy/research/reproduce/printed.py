"""A grid of runs as the paper prints it: our number, the paper's, the difference; figures; the commands."""

import json
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import plotly.graph_objects as go

from fedalloy.core.expression import slug
from fedalloy.experiment.config import FREE, Config, words
from fedalloy.report import figures
from fedalloy.report.files import write_markdown, write_text
from fedalloy.report.inside import inside_pictures
from fedalloy.report.page import Picture, card, code, header, page, pictures, section, tables
from fedalloy.report.pictures import BAND
from fedalloy.report.runs import Run, read_run
from fedalloy.report.statistics import Estimate, estimate, marks
from fedalloy.report.tables import Cell as Printed
from fedalloy.report.tables import Table, to_latex
from fedalloy.research.reproduce.grid import Cell, Grid, Judge, Measure, Scale, place

OURS, MARKED = "Ours: mean ± standard deviation over seeds", "Best bold, second underlined."
BESIDE = "; in brackets the paper's number and how far ours is from it"

JUDGED: Mapping[Judge, str] = {
    "final": "Accuracies are those of the last round, whatever is said below.",
    "last10": "Accuracies are means over the last ten rounds, whatever is said below.",
    "best": "Accuracies are the best of all rounds, picked by the test set, whatever is said below.",
}


@dataclass(frozen=True)
class Asked:
    """What was asked for: an item at a scale, settings that win over its own, parts of it, seeds, rounds that count."""

    item: str
    scale: Scale
    given: Mapping[str, Any]
    only: Sequence[str] = ()
    seeds: Sequence[int] = ()
    judge: Judge | None = None

    @property
    def folder(self) -> str:
        return "-".join(filter(None, (slug(self.item), self.scale, self.judge)))

    @property
    def changed(self) -> list[str]:
        """Settings that change the numbers, as flags."""
        return words({name: value for name, value in self.given.items() if name not in FREE})

    @property
    def command(self) -> str:
        typed = ["fedalloy", "reproduce", self.item, "--scale", self.scale, *self.changed]
        typed += ["--only", ",".join(self.only)] if self.only else []
        typed += ["--seeds", ",".join(map(str, self.seeds))] if self.seeds else []
        typed += ["--judge", self.judge] if self.judge else []
        return shlex.join([*typed, "--data-root", "DATA"])


@dataclass(frozen=True)
class Written:
    """What a study left in its folder."""

    tables: Sequence[Table]
    files: Mapping[str, Path]
    facts: Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """One cell with what its finished runs measured."""

    cell: Cell
    runs: Mapping[int, Run]

    def value(self, measure: Measure) -> Estimate | None:
        return estimate(v for run in self.runs.values() if (v := measure.of(run)) is not None)

    def said(self, measure: Measure, paper: float | None) -> str:
        ours = self.value(measure)
        known = "" if paper is None else f"{paper:.{measure.digits}f}"
        if ours is None:
            lost = "diverged" if any(run.diverged_round is not None for run in self.runs.values()) else "–"
            return f"{lost} ({known})" if known else lost
        spread = "" if ours.std is None else f" ± {ours.std:.{measure.digits}f}"
        text = f"{ours.mean:.{measure.digits}f}{spread}"
        return text if paper is None else f"{text} ({known}, {ours.mean - paper:+.{measure.digits}f})"


def found(root: Path, cells: Sequence[Cell]) -> list[Found]:
    """The finished runs of every cell."""
    return [Found(cell, _runs(root, cell)) for cell in cells]


def _runs(root: Path, cell: Cell) -> dict[int, Run]:
    return {
        seed: read_run(root / place(config))
        for seed, config in cell.configs.items()
        if finished(root, config)
    }


def finished(root: Path, config: Config) -> bool:
    return (root / place(config) / "summary.json").exists()


def write(
    out: Path, asked: Asked, grid: Grid, cells: Sequence[Cell], root: Path, *, images: bool = False
) -> Written:
    """Table, figures and commands in a folder."""
    out.mkdir(parents=True, exist_ok=True)
    have = found(root, cells)
    drawn, shown = table(asked, grid, have), [*_drawn(grid, have), *_inside(grid, have)]
    facts = {
        "item": asked.item,
        "scale": asked.scale,
        "command": asked.command,
        "says": grid.says,
        "cells": [_facts(grid, one) for one in have],
    }
    files = {
        "report": write_text(out / "report.html", _page(asked, grid, have, drawn, shown)),
        "table": write_markdown(out / "table.md", asked.command, [drawn], shown if images else ()),
        "latex": write_text(out / "table.tex", to_latex(drawn)),
        "results": write_text(out / "results.json", json.dumps(facts, indent=1, allow_nan=False) + "\n"),
    }
    return Written([drawn], files, facts)


def table(asked: Asked, grid: Grid, have: Sequence[Found]) -> Table:
    """As the paper prints it."""
    columns = _columns(grid, have)
    rows = list(dict.fromkeys(one.cell.row.label for one in have))
    by_place = {(one.cell.row.label, one.cell.column.label): one for one in have}
    heads, texts = [], []
    for column, title in columns.items():
        for number, measure in enumerate(grid.measures):
            heads.append(" ".join(filter(None, (title, measure.label))))
            cells = [by_place.get((row, column)) for row in rows]
            values = [one.value(measure) if one else None for one in cells]
            means = [round(value.mean, measure.digits) if value else None for value in values]
            said = [one.said(measure, one.cell.paper[number]) if one else "" for one in cells]
            texts.append(
                [Printed(*pair) for pair in zip(said, marks(means, smallest=measure.smaller), strict=True)]
            )
    lines = tuple((Printed(row), *(column[place] for column in texts)) for place, row in enumerate(rows))
    return Table(f"{asked.item}: {grid.says}", ("", *heads), lines, _notes(asked, grid, have))


def _columns(grid: Grid, have: Sequence[Found]) -> dict[str, str]:
    """The title of every column, by label; one whose runs are all on another data set than the paper's says so."""
    titles = {}
    for column in dict.fromkeys(one.cell.column.label for one in have):
        cells = [one.cell for one in have if one.cell.column.label == column]
        played = {config.data for cell in cells for config in cell.configs.values()}
        named = {grid.data(cell.row, cell.column) for cell in cells}
        stands_in = "" if played & named else f"(here {', '.join(sorted(played))})"
        titles[column] = " ".join(filter(None, (column, stands_in)))
    return titles


def _setting(asked: Asked, grid: Grid) -> str:
    size = grid.reduced if asked.scale == "cpu" else "the paper's own setting"
    return f"{size}, but {' '.join(asked.changed)}" if asked.changed else size


def _notes(asked: Asked, grid: Grid, have: Sequence[Found]) -> tuple[str, ...]:
    counts = [len(one.runs) for one in have]
    wanted = max(len(one.cell.configs) for one in have)
    seeds = f"{min(counts)} to {max(counts)}" if min(counts) < max(counts) else str(max(counts))
    size = f"Scale {asked.scale}: {_setting(asked, grid)}. Seeds: {seeds} of {wanted}."
    beside = BESIDE if any(number is not None for one in have for number in one.cell.paper) else ""
    return (f"{OURS}{beside}. {MARKED}", *([JUDGED[asked.judge]] if asked.judge else []), size, *grid.notes)


def _facts(grid: Grid, one: Found) -> dict[str, Any]:
    values = {measure.label or "value": one.value(measure) for measure in grid.measures}
    return {
        "row": one.cell.row.label,
        "column": one.cell.column.label,
        "method": next(iter(one.cell.configs.values())).method,
        "paper": list(one.cell.paper),
        "ours": {label: vars(value) if value else None for label, value in values.items()},
        "seeds": sorted(one.runs),
        "diverged": [seed for seed, run in one.runs.items() if run.diverged_round is not None],
    }


def _page(asked: Asked, grid: Grid, have: Sequence[Found], drawn: Table, shown: Sequence[Picture]) -> str:
    facts = {"Item": asked.item, "Scale": asked.scale, "Setting": _setting(asked, grid)}
    sections = [
        header(grid.says, facts),
        section("Results", tables([drawn])),
        section("Figures", pictures(shown)),
        section("Reproduce", [card(code(commands(asked, have)))]),
    ]
    return page(f"{asked.item}: {grid.says}", sections)


def commands(asked: Asked, have: Sequence[Found]) -> str:
    """What to type for all of it, and for each run by itself."""
    configs = [config for one in have for config in one.cell.configs.values()]
    return "\n".join([asked.command, "", *dict.fromkeys(map(_command, configs))])


def _command(config: Config) -> str:
    return shlex.join(["fedalloy", "run", *config.typed("data_root", "workers"), "--data-root", "DATA"])


def _drawn(grid: Grid, have: Sequence[Found]) -> list[Picture]:
    found = []
    if "sweep" in grid.drawn:
        found += [_sweep(grid, have, measure) for measure in grid.measures]
    if "curves" in grid.drawn:
        for number, (column, title) in enumerate(_columns(grid, have).items()):
            here = [one for one in have if one.cell.column.label == column]
            groups = {one.cell.row.label: list(one.runs.values()) for one in here}
            heads = [run.metric for runs in groups.values() for run in runs]
            kinds = dict.fromkeys([*heads, *grid.also])
            found += [
                Picture(
                    f"curve-{number}-{kind}",
                    f"{title or grid.says}, by round",
                    BAND,
                    figures.curves(
                        {
                            label: [run for run in runs if kind in (run.metric, *grid.also)]
                            for label, runs in groups.items()
                        },
                        kind,
                    ),
                )
                for kind in kinds
            ]
    return found


def _sweep(grid: Grid, have: Sequence[Found], measure: Measure) -> Picture:
    """A line for each row over the columns, in their order."""
    figure = go.Figure()
    for number, row in enumerate(dict.fromkeys(one.cell.row.label for one in have)):
        points = {
            one.cell.column.label: value
            for one in have
            if one.cell.row.label == row and (value := one.value(measure))
        }
        figure.add_scatter(
            x=list(points),
            y=[value.mean for value in points.values()],
            error_y={"array": [value.std or 0.0 for value in points.values()]},
            name=figures.text(row),
            line={"color": figures.colour(number), "width": 2},
        )
    figure.update_yaxes(title=measure.label or "accuracy (%)")
    slug = "".join(letter for letter in measure.label if letter.isalnum()) or "value"
    return Picture(f"sweep-{slug}", measure.label or "Accuracy", grid.says, figures.finished(figure))


def _inside(grid: Grid, have: Sequence[Found]) -> list[Picture]:
    """What the first seed's models look like inside."""
    if "inside" not in grid.drawn:
        return []
    found = []
    for number, one in enumerate(have):
        for run in list(one.runs.values())[:1]:
            for picture in inside_pictures(run):
                title = f"{one.cell.row.label}, {one.cell.column.label}: {picture.title}"
                found.append(Picture(f"in-{number}-{picture.slug}", title, picture.caption, picture.figure))
    return found

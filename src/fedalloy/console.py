"""What the command line prints: progress, tables, and the way on after an interruption."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table

from fedalloy.data.picture import partition_figure, partition_table
from fedalloy.federation import Federation
from fedalloy.folder import RunFolder
from fedalloy.report import Comparison, comparison_tables, read_run, run_tables, to_rich
from fedalloy.report.units import in_bytes
from fedalloy.run import Record, Result

Tick = Callable[[Record], None]


def console(*, quiet: bool = False) -> Console:
    """Standard output, or nothing at all when only JSON may appear there."""
    return Console(quiet=quiet, highlight=False, emoji=False)


def plain(text: str) -> str:
    """User text that must not be read as markup."""
    return escape(text)


@contextmanager
def progress(console: Console, total: int, done: int = 0) -> Iterator[Tick]:
    """A bar that moves by one round; it is drawn by this thread alone, because workers are forked from this process."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=None),
        MofNCompleteColumn(),
        TextColumn("{task.fields[accuracy]}"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    error = Console(stderr=True, quiet=console.quiet, emoji=False)
    with Progress(*columns, console=error, auto_refresh=False, transient=True) as bar:
        task = bar.add_task("rounds", total=total, completed=done, accuracy="")

        def tick(record: Record) -> None:
            metrics = record["metrics"] or {}
            shown = metrics.get("global_acc", metrics.get("personal_local_acc"))
            accuracy = "" if shown is None else f"accuracy {100 * shown:.1f} %"
            bar.update(task, advance=1, accuracy=accuracy, description=escape(record.get("doing", "rounds")))
            bar.refresh()

        bar.refresh()
        yield tick


@contextmanager
def resumable(place: Path, *, again: bool = False) -> Iterator[None]:
    """Say how to carry on when the user stops a run."""
    try:
        yield
    except KeyboardInterrupt:
        way = "type the same command again" if again else f"fedalloy run --resume {place}"
        done = "" if again else f" after round {played(place)}"
        Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(
            f"stopped{done}; carry on with: {escape(way)}"
        )
        raise


def played(folder: Path) -> int:
    """Rounds on record."""
    return len(RunFolder(folder).history())


def run(console: Console, result: Result, report: Path) -> None:
    for table in run_tables(read_run(result.folder)):
        console.print(to_rich(table))
    if result.summary["status"] == "diverged":
        console.print(f"[bold red]diverged[/] in round {result.summary['diverged_round']}")
    console.print(f"folder {escape(str(result.folder))}", soft_wrap=True)
    console.print(f"report {escape(str(report))}", soft_wrap=True)


def comparison(console: Console, compared: Comparison, folder: Path) -> None:
    for table in comparison_tables(compared):
        console.print(to_rich(table))
    for name, what in {"report.html": "report", "table.md": "Markdown", "table.tex": "LaTeX"}.items():
        console.print(f"{what:8} {escape(str(folder / name))}", soft_wrap=True)


def methods(console: Console, recipes: list[dict[str, Any]], parts: list[dict[str, str]]) -> None:
    for family in dict.fromkeys(recipe["family"] for recipe in recipes):
        table = Table("method", "paper", "parameters", title=family, title_justify="left")
        for recipe in recipes:
            if recipe["family"] == family:
                defaults = ", ".join(f"{p['name']}={p['default']}" for p in recipe["parameters"])
                table.add_row(f"[bold]{recipe['name']}[/]", escape(recipe["paper"]), escape(defaults))
        console.print(table)
    table = Table("part", "what it does", title="parts, to add with +", title_justify="left")
    for part in parts:
        table.add_row(f"[bold]{part['name']}[/]", escape(part["says"]))
    console.print(table)


def explanation(console: Console, facts: dict[str, Any]) -> None:
    console.rule(f"[bold]{escape(facts['title'])}", align="left")
    console.print(escape(facts["summary"] or facts["method"]))
    if facts["parameters"]:
        table = Table("parameter", "default", "range", title="hyper-parameters", title_justify="left")
        for row in facts["parameters"]:
            table.add_row(row["name"], escape(str(row["default"])), escape(row["range"]))
        console.print(table)
    table = Table("part", "what it does", "when", title="parts, in order", title_justify="left")
    for part in facts["parts"]:
        table.add_row(f"[bold]{part['name']}[/]", escape(part["says"]), ", ".join(part["does"]))
    console.print(table)
    order = " → ".join(["task and losses", *facts["gradient_order"], "optimiser"])
    console.print(f"gradient: {escape(order)}")
    table = Table(
        "", "slot", "shape", "fold", "bytes", title="on the wire, per client and round", title_justify="left"
    )
    for row in facts["wire"]:
        table.add_row(
            row["direction"], row["slot"], str(tuple(row["shape"])), row["reduce"], f"{row['bytes']:,}"
        )
    console.print(table)
    console.print(
        f"down {in_bytes(facts['bytes_down'])}, up {in_bytes(facts['bytes_up'])} per client and round"
    )
    for owner in ("server", "client"):
        state = facts[f"{owner}_state"]
        listed = ", ".join(f"{key} {in_bytes(size)}" for key, size in state.items()) or "nothing"
        console.print(f"the {owner} keeps: {escape(listed)}")
    model = facts["model"]
    console.print(
        f"model {escape(model['name'])}: {model['parameters']:,} parameters, {model['buffers']:,} buffers, "
        f"{model['flops_per_sample']:,} FLOPs per sample and forward pass"
    )


def partition(console: Console, federation: Federation, picture: Path | None) -> None:
    console.print(partition_table(federation.dataset, federation.split))
    if picture:
        console.print(f"picture {escape(str(picture))}", soft_wrap=True)


def partition_picture(federation: Federation, path: Path) -> Path:
    counts = federation.split.counts(federation.dataset)
    partition_figure(counts, federation.dataset.class_names).write_html(path, include_plotlyjs=True)
    return path


def models(console: Console, rows: list[dict[str, Any]], data: str) -> None:
    table = Table(
        "model", "what it is", "parameters", "FLOPs per sample", title=f"models, sized for {escape(data)}"
    )
    for row in rows:
        table.add_row(
            row["name"], escape(row["says"]), f"{row['parameters']:,}", f"{row['flops_per_sample']:,}"
        )
    console.print(table)

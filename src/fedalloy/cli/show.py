"""What the commands print for people: tables and where files lie."""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import rich.box
from rich.console import Console
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from fedalloy import report
from fedalloy.cli.picture import partition_table
from fedalloy.data.federation import Federation
from fedalloy.errors import plain, writing
from fedalloy.experiment.run import Result
from fedalloy.report import comparison_tables, read_comparison, read_run, run_tables
from fedalloy.report.runs import Partition
from fedalloy.report.statistics import LAST, estimate
from fedalloy.report.units import in_bytes, in_percent, in_words
from fedalloy.report.verdict import verdict
from fedalloy.research.tune import Tuning
from fedalloy.trained.predict import Predictions

GAP = 2  # between columns
MOST_ROWS = 20  # of predictions


def run(console: Console, result: Result, page: Path) -> None:
    config, summary, read = result.config, result.summary, read_run(result.folder)
    console.print(
        f"[bold]{escape(summary['title'])}[/] on {escape(config.data)}: {escape(summary['model'])}, "
        f"{config.clients} clients, {escape(read.skew)}, seed {config.seed}"
        + (f"; scored on a validation split of {100 * config.validation:g} %" if config.validation else "")
    )
    for table in run_tables(read):
        _print(console, table)
    if summary["status"] == "diverged":
        console.print(
            f"[bold red]diverged[/] in round {summary['diverged_round']} of {config.rounds}: "
            f"the weights are no longer finite; try a smaller --lr than {config.lr:g}"
        )
    if "epsilon" in summary:
        console.print(f"private: epsilon {summary['epsilon']:.3g} at delta {summary['delta']:g}")
    files(console, folder=result.folder, report=page)


def comparison(console: Console, folder: Path) -> None:
    read = read_comparison(folder)
    for table in comparison_tables(read):
        _print(console, table)
    files(console, report=folder / "report.html", Markdown=folder / "table.md", LaTeX=folder / "table.tex")
    console.print(f"\n{escape(verdict(read))}")


def figures(console: Console, drawn: Sequence[Path]) -> None:
    if drawn:
        files(console, figures=drawn[0].parent)


def tuning(console: Console, found: Tuning) -> None:
    """Trials, best first, and what to type for the best."""
    ranked = found.best_first()
    rows = []
    for trial in ranked:
        values = [f"{trial.point[name]:g}" for name in found.space.axes]
        known = estimate(accuracy for accuracy in trial.accuracies if accuracy is not None)
        shown = "diverged" if trial.accuracy is None else in_percent(known)
        best = trial.accuracy is not None and trial.accuracy == ranked[0].accuracy
        texts = (str(trial.number), *values, shown)
        rows.append(tuple(report.Cell(text, "best" if best else "none") for text in texts))
    held = (
        f"Mean of the last {LAST} evaluations, on {100 * found.base.validation:g} % of the training samples"
    )
    notes = (f"{held}; the test set was not looked at.",)
    columns = ("Trial", *found.space.axes, "Accuracy (%)")
    _print(console, report.Table(f"{found.space.method}: {len(rows)} trials", columns, tuple(rows), notes))
    if ranked[0].accuracy is None:
        console.print("[bold red]every trial diverged[/]; try smaller --lr-values")
    else:
        console.print("\nThe best on the test set:")
        for command in found.commands(ranked[0]).values():
            console.print(escape(command), soft_wrap=True)
    files(console, folder=found.folder)


def tables(console: Console, drawn: Iterable[report.Table]) -> None:
    for table in drawn:
        _print(console, table)


def studies(console: Console, items: list[dict[str, Any]]) -> None:
    """What can be reproduced, and how long it would take."""
    table = _table("item", "what it is", "data", "runs", "about", title="")
    for item in items:
        data = ", ".join(item["data"]) or "none"
        table.add_row(item["item"], escape(item["says"]), data, str(item["runs"]), in_words(item["seconds"]))
    console.print(table)


def files(console: Console, **paths: Path) -> None:
    """Where things lie, one path per line, never wrapped."""
    for what, path in paths.items():
        console.print(f"{what:{max(map(len, paths))}}  {escape(str(path))}", soft_wrap=True)


def predictions(console: Console, found: Predictions, out: Path | None) -> None:
    """The first samples, what the model says of them, and how often that is right."""
    table = Table(box=rich.box.SIMPLE_HEAD)
    for name in ("sample", *(["label"] if found.labels else []), "predicted", "probability"):
        table.add_column(name, justify="right" if name == "probability" else "left")
    for number, row in enumerate(found.rows[:MOST_ROWS]):
        label = [found.class_names[found.labels[number]]] if found.labels else []
        words = (found.titles[number], *label, row.name)  # a stranger's model may have named the classes
        table.add_row(*(escape(plain(word)) for word in words), f"{row.probability:.3f}")
    console.print(table)
    if found.accuracy is not None:
        console.print(f"accuracy {100 * found.accuracy:.2f} % of {len(found.rows)} samples")
    if len(found.rows) > MOST_ROWS and out is None:
        console.print(f"{MOST_ROWS} of {len(found.rows)} samples; all of them with --out predictions.csv")
    if found.ignored:
        console.print(f"columns that the model does not read: {escape(plain(', '.join(found.ignored)))}")
    if out is not None:
        files(console, predictions=out)


def _traits(recipe: dict[str, Any]) -> str:
    """What a method asks for, reveals and costs, in a line."""
    mixes = "one architecture" if recipe["architectures"] == "one" else "any architectures"
    keeps = ", keeps state at clients" if recipe["private_state"] else ""
    sizes = f"upload {recipe['up']:.2g}, download {recipe['down']:.2g} models per client and round"
    sent = sizes if recipe["up"] else "sends nothing"
    seen = f"; server sees {', '.join(recipe['reveals'])}" if recipe["reveals"] else ""
    return f"{mixes}, {recipe['models']} model{keeps}; {sent}{seen}"


def methods(console: Console, recipes: list[dict[str, Any]], parts: list[dict[str, str]]) -> None:
    for family in dict.fromkeys(recipe["family"] for recipe in recipes):
        table = _table("method", "what it does", "parameters", title=family)
        for recipe in recipes:
            if recipe["family"] == family:
                defaults = "\n".join(f"{p['name']}={p['default']}" for p in recipe["parameters"])
                says = f"{escape(recipe['summary'])}\n[dim]{escape(recipe['paper'])}\n{_traits(recipe)}[/]"
                table.add_row(f"[bold]{recipe['name']}[/]", says, escape(defaults))
        console.print(table)
    table = _table("part", "what it does", title="parts, to add with +")
    for part in parts:
        table.add_row(f"[bold]{part['name']}[/]", escape(part["says"]))
    console.print(table)
    console.print("More about one of them: fedalloy explain METHOD")


def explanation(console: Console, facts: dict[str, Any]) -> None:
    console.rule(f"[bold]{escape(facts['title'])}", align="left")
    console.print(escape(facts["summary"] or facts["method"]))
    if facts["parameters"]:
        table = _table("parameter", "default", "in the paper", "what it does", title="hyper-parameters")
        for row in facts["parameters"]:
            said = (str(row["default"]), row["paper"], row["does"] or row["range"])
            table.add_row(f"[bold]{row['name']}[/]", *map(escape, said))
        console.print(table)
    table = _table("part", "what it does", "how", title="parts, in order")
    for part in facts["parts"]:
        table.add_row(f"[bold]{part['name']}[/]", escape(part["says"]), ", ".join(part["does"]))
    console.print(table)
    table = _table("when", "what", title="one round")
    for moment, said in facts["algorithm"]:
        table.add_row(f"[bold]{moment}[/]", escape(said))
    console.print(table)
    table = _table("", "slot", "shape", "fold", "bytes", title="on the wire, per client and round")
    table.columns[-1].justify = "right"
    for row in facts["wire"]:
        shape = " × ".join(map(str, row["shape"])) or "number"
        table.add_row(f"{row['direction']}load", row["slot"], shape, row["reduce"], f"{row['bytes']:,}")
    console.print(table)
    sent = {way: in_bytes(facts[f"bytes_{way}"]) for way in ("down", "up")}
    console.print(f"download {sent['down']}, upload {sent['up']} per client and round")
    for owner in ("server", "client"):
        state = facts[f"{owner}_state"]
        listed = ", ".join(f"{key} {in_bytes(size)}" for key, size in state.items() if size) or "nothing"
        console.print(f"the {owner} keeps: {escape(listed)}")
    model = facts["model"]
    console.print(
        f"model {escape(model['name'])}: {model['parameters']:,} parameters, {model['buffers']:,} buffers, "
        f"{model['flops_per_sample']:,} FLOPs per sample and forward pass"
    )
    for note in facts["notes"]:
        lead, _, rest = note.partition(". ")
        console.print(f"\n[bold]{escape(lead)}.[/] {escape(rest)}")


def partition(console: Console, federation: Federation, picture: Path | None) -> None:
    table = partition_table(federation.dataset, federation.split)
    table.box, table.padding = (
        rich.box.SIMPLE_HEAD,
        (0, 0),
    )  # a column for each class needs all the room there is
    console.print(table)
    if picture:
        files(console, picture=picture)


def partition_facts(federation: Federation) -> dict[str, Any]:
    return {
        "clients": federation.clients,
        "eligible": len(federation.eligible),
        "class_names": list(federation.dataset.class_names),
        "counts": federation.split.counts(federation.dataset).tolist(),
        "test_samples": federation.split.test_offsets.diff().tolist(),
    }


def partition_picture(federation: Federation, path: Path) -> Path:
    """The same picture as in a run's report, in a page of its own."""
    counts = tuple(map(tuple, federation.split.counts(federation.dataset).tolist()))
    found = Partition(class_names=federation.dataset.class_names, counts=counts)
    with writing(path):
        return report.write_partition(path, federation.dataset.name, found)


def models(console: Console, rows: list[dict[str, Any]], data: str) -> None:
    table = _table(
        "model", "what it is", "parameters", "FLOPs per\nsample", title=f"models, sized for {data}"
    )
    for column in table.columns[2:]:
        column.justify = "right"
    for row in rows:
        sizes = (f"{row['parameters']:,}", f"{row['flops_per_sample']:,}")
        table.add_row(f"[bold]{escape(row['name'])}[/]", escape(row["says"]), *sizes)
    console.print(table)


def _print(console: Console, table: report.Table) -> None:
    """A table of results; one too wide for the terminal goes on below, so that no value is ever broken."""
    console.print(f"\n[bold]{escape(table.title)}[/]")
    for piece in _pieces(table, console.width):
        drawn = report.to_rich(piece)
        if sum(width + GAP for width in _widths(piece, str)) > console.width:
            for column, width in zip(drawn.columns, _widths(piece, _longest_word), strict=True):
                column.width = width
                column.header = Text(
                    "\n".join(textwrap.wrap(str(column.header), width))
                )  # never within "80 %"
        console.print(drawn)
    for note in table.notes:
        console.print(f"[dim]{escape(note)}[/]")


def _pieces(table: report.Table, room: int) -> list[report.Table]:
    """As many columns in each as there is room for, always with the first; headings may be broken between words."""
    needs = _widths(table, _longest_word)
    groups = [[0]]
    for column in range(1, len(needs)):
        if len(groups[-1]) > 1 and sum(needs[at] + GAP for at in [*groups[-1], column]) > room:
            groups.append([0])
        groups[-1].append(column)
    return [
        report.Table(
            "",
            tuple(table.columns[at] for at in group),
            tuple(tuple(row[at] for at in group) for row in table.rows),
        )
        for group in groups
    ]


def _widths(table: report.Table, heading: Callable[[str], str]) -> list[int]:
    columns = zip(*[[cell.text for cell in row] for row in table.rows], strict=True)
    held = list(columns) or [()] * len(table.columns)
    return [max(map(len, [heading(name), *cells])) for name, cells in zip(table.columns, held, strict=True)]


def _longest_word(heading: str) -> str:
    return max(heading.split(" "), key=len)


def _table(*columns: str, title: str) -> Table:
    """The first column is never broken."""
    table = Table(
        *columns, title=escape(title), title_justify="left", title_style="bold", box=rich.box.SIMPLE_HEAD,
        pad_edge=False, collapse_padding=True,
    )  # fmt: skip
    table.columns[0].no_wrap = True
    return table


def findings(console: Console, numbers: dict[str, float]) -> None:
    """What diagnostics found, as numbers."""
    table = Table("finding", "value", box=None)
    for name, value in numbers.items():
        table.add_row(escape(name), f"{value:.4g}")
    console.print(table)


def benches(console: Console, found: dict[str, Any]) -> None:
    for name, bench in found.items():
        if name == "methods":
            columns = [f"local epochs: {epochs}" for epochs in next(iter(bench.values()))]
            table = _table("method", *columns, title="CPU time of a client, FedAvg = 1")
            for method, costs in bench.items():
                table.add_row(method, *(f"{cost:.2f}" for cost in costs.values()))
            console.print(table)
            continue
        parts = ("train", "evaluate", "aggregate", "other")
        columns = ["samples/s", "round", "train", "eval", "aggr", "other", "start", "MiB"]
        table = _table("", *columns, title=f"{name}: {bench['says']}; seconds")
        for column in table.columns:
            column.no_wrap = True
        for row, run in bench["rows"].items():
            seconds = [run.get("seconds", {}).get(part) for part in parts]
            facts = (run.get("samples_per_second"), run.get("seconds_per_round"), *seconds)
            values = (*facts, run.get("start_up"), run["peak_mib"])
            table.add_row(
                row.replace("channels_last", "ch. last"),
                *("" if v is None else f"{v:,.0f}" if v >= 100 else f"{v:.3f}" for v in values),
            )
        console.print(table)
        for key, value in bench.items():
            if isinstance(value, float):
                console.print(f"{key.replace('_', ' ')}: [bold]{value:.2f}[/]")
        console.print()

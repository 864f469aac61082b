"""Reports as HTML pages that need no network, and the tables of a comparison for a paper."""

import shlex
from collections import defaultdict
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

import tomli_w

from fedalloy.report import figures
from fedalloy.report.files import ImageForm, write_images, write_text
from fedalloy.report.inside import inside_pictures
from fedalloy.report.page import Picture, card, code, header, page, pictures, section, tables, warnings
from fedalloy.report.pictures import comparison_pictures, run_pictures
from fedalloy.report.results import comparison_tables, run_tables
from fedalloy.report.runs import Comparison, Partition, Run, read_comparison, read_run
from fedalloy.report.tables import Cell, Table, markdown, to_latex, to_markdown

MOST_NAMED = 4  # methods in a heading
QUESTION = {
    "data": "Data",
    "model": "Model",
    "models": "Models",
    "skew": "Skew",
    "clients": "Clients",
    "participation": "Participation",
    "rounds": "Rounds",
    "epochs": "Epochs",
    "batch": "Batch",
    "lr": "Learning rate",
}


def write_run_report(folder: Path) -> Path:
    """Write report.html into a run folder: one file that holds everything."""
    run = read_run(folder)
    title = f"{run.title} on {run.config['data']}" if "data" in run.config else run.title
    facts = _question({**run.config, "skew": run.skew}) | {
        "Seed": str(run.config.get("seed", 0)),
        "Status": run.status,
    }
    if run.summary and run.summary.epsilon is not None:
        facts["Privacy"] = f"epsilon {run.summary.epsilon:.3g} at delta {run.summary.delta:g}"
    if run.summary and run.summary.weights_sha256:
        facts["Weights (SHA-256)"] = run.summary.weights_sha256[:12]
    sections = [
        header(title, facts),
        warnings([f"This run {what}." for what in _ending(run)]),
        section("Results", tables([*run_tables(run), *_refusals({"": run})])),
        section("Figures", pictures(run_pictures(run))),
        *([section("Inside the model", pictures(inside))] if (inside := inside_pictures(run)) else []),
        section("Reproduce", [card(code(_again(run)))]),
        section("Configuration", [card(code(tomli_w.dumps(run.config)))]),
    ]
    return write_text(folder / "report.html", page(title, sections))


def write_comparison_report(folder: Path) -> Path:
    """Write report.html into a comparison folder; runs still under way are named, not counted."""
    comparison = read_comparison(folder)
    labels = [comparison.label(method) for method in comparison.methods]
    shared = _shared_settings(comparison)
    title = _listed(labels) + (f" on {shared['data']}" if "data" in shared else "")
    facts = (
        {"Methods": ", ".join(labels)} | _question(shared) | {"Seeds": ", ".join(map(str, comparison.seeds))}
    )
    if comparison.target is not None:
        facts["Target accuracy"] = f"{100 * comparison.target:g} %"
    sections = [
        header(title, facts),
        warnings(_incidents(comparison)),
        section("Results", tables([*comparison_tables(comparison), *_refusals(_named_runs(comparison))])),
        section("Figures", pictures(comparison_pictures(comparison))),
        section("Reproduce", [card(code(_commands(comparison)))]),
        section("Runs", [card(_links(comparison))]),
        section("Configuration shared by all runs", [card(code(tomli_w.dumps(shared)))]),
    ]
    return write_text(folder / "report.html", page(title, sections))


def write_tables(folder: Path) -> tuple[Path, Path]:
    """Write table.md and table.tex into a comparison folder."""
    comparison = read_comparison(folder)
    drawn = comparison_tables(comparison)
    setting = _setting(comparison)
    return (
        write_text(folder / "table.md", "\n".join([*map(to_markdown, drawn), markdown(setting), ""])),
        write_text(folder / "table.tex", "\n".join(to_latex(table, setting) for table in drawn)),
    )


def write_figures(folder: Path, form: ImageForm) -> list[Path]:
    """Write every figure of a run or a comparison into figures/, for a paper."""
    if (folder / "compare.json").exists():
        shown = comparison_pictures(read_comparison(folder))
    else:
        run = read_run(folder)
        shown = [*run_pictures(run), *inside_pictures(run)]
    return list(write_images(folder / "figures", shown, form).values())


def write_partition(path: Path, data: str, partition: Partition) -> Path:
    """Write who holds what as a page of its own."""
    title = f"Data of the clients: {data}"
    caption = "Training samples of each class at each client."
    drawn = Picture("partition", title, caption, figures.drawn_partition(partition))
    return write_text(path, page(title, pictures([drawn])))


def _again(run: Run) -> str:
    """What to type for the same run once more."""
    if run.at_sites:
        return "fedalloy deploy run DIR --run-config 'run-folder=\"again\"'"
    return "fedalloy run --config config.toml"


def _question(settings: Mapping[str, Any]) -> dict[str, str]:
    return {
        label: ", ".join(map(str, value)) if isinstance(value, list) else str(value)
        for key, label in QUESTION.items()
        if (value := settings.get(key)) not in (None, [], "")
    }


def _setting(comparison: Comparison) -> str:
    """What was compared on what, in a sentence for a caption."""
    facts = [f"{label.lower()} {value}" for label, value in _question(_shared_settings(comparison)).items()]
    return f"Setting: {', '.join(facts)}." if facts else ""


def _shared_settings(comparison: Comparison) -> dict[str, Any]:
    """The settings with one value in every run."""
    first, *others = [run.config for run in comparison.every_run] or [{}]
    return {key: value for key, value in first.items() if all(other.get(key) == value for other in others)}


def _named_runs(comparison: Comparison) -> dict[str, Run]:
    return {
        f"{comparison.label(method)}, seed {seed}": run
        for method, runs in comparison.runs.items()
        for seed, run in runs.items()
    }


def _ending(run: Run) -> list[str]:
    """How a run ended, unless it simply finished."""
    played = run.history[-1].round if run.history else 0
    words = {
        "diverged": f"diverged in round {run.diverged_round}",
        "interrupted": f"was interrupted after round {played}",
        "unfinished": f"is not finished: {played} rounds so far",
    }
    return [words[run.status]] if run.status in words else []


def _incidents(comparison: Comparison) -> list[str]:
    begun = _named_runs(comparison)
    planned = [f"{comparison.label(m)}, seed {seed}" for m in comparison.methods for seed in comparison.seeds]
    ended = [f"{name} {what}" for name, run in begun.items() for what in _ending(run)]
    return ended + [f"{name} has not begun" for name in planned if name not in begun]


def _refusals(runs: Mapping[str, Run]) -> list[Table]:
    """Every client whose updates were refused, with the reason and how often; no table if there is none."""
    rounds: dict[tuple[str, str], list[int]] = defaultdict(list)
    for name, run in runs.items():
        lead = f"{name}, " if name else ""
        for entry in run.history:
            for refusal in entry.refused:
                rounds[f"{lead}client {refusal.client}", refusal.why].append(entry.round)
    rows = tuple(
        (Cell(whose), Cell(why), Cell(str(len(when))), Cell(str(when[0])))
        for (whose, why), when in rounds.items()
    )
    return [Table("Refused updates", ("Client", "Reason", "Times", "First in round"), rows)] if rows else []


def _commands(comparison: Comparison) -> str:
    if comparison.command:
        return comparison.command
    configs = [(run.folder / "config.toml").relative_to(comparison.folder) for run in comparison.every_run]
    return "\n".join(shlex.join(["fedalloy", "run", "--config", config.as_posix()]) for config in configs)


def _links(comparison: Comparison) -> str:
    def link(seed: int, run: Run) -> str:
        name = f"seed {seed}" + (f" ({run.status})" if run.status != "finished" else "")
        if not (run.folder / "report.html").is_file():
            return name
        address = quote((run.folder / "report.html").relative_to(comparison.folder).as_posix())
        return f'<a href="{address}">{name}</a>'

    lines = [
        f"<div><dt>{escape(method)}</dt><dd>{' · '.join(link(*pair) for pair in runs.items())}</dd></div>"
        for method, runs in comparison.runs.items()
    ]
    return f"<dl>{''.join(lines)}</dl>"


def _listed(names: list[str]) -> str:
    if len(names) > MOST_NAMED:
        return f"{len(names)} methods"
    return " and ".join([", ".join(names[:-1]), names[-1]] if len(names) > 1 else names)

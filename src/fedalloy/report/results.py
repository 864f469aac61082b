"""The tables of a report: what a comparison found, what it cost, and what one run came to."""

from collections.abc import Sequence
from statistics import fmean

from fedalloy.report.runs import MEASURES, Comparison, Run
from fedalloy.report.statistics import (
    LAST,
    SEEDS_FOR_A_TEST,
    Costs,
    Estimate,
    Result,
    client_accuracies,
    costs,
    marks,
    results,
)
from fedalloy.report.tables import Cell, Table
from fedalloy.report.units import (
    ABSENT,
    DOWNLOAD,
    TRAFFIC,
    TRAFFIC_MEANS,
    UPLOAD,
    as_p_value,
    in_bytes,
    in_percent,
    in_rounds,
    in_seconds,
)

SUMS = f"{TRAFFIC_MEANS} Sums over all clients and all rounds."

Judged = Sequence[Result | Costs]


def comparison_tables(comparison: Comparison) -> list[Table]:
    """One table for each headline measure, then costs, then every measure if there are several."""
    tables = [_accuracy_table(comparison, measure) for measure in comparison.headlines]
    tables.append(_cost_table(comparison))
    recorded = [name for name in MEASURES if any(run.curve(name) for run in comparison.every_run)]
    if len(recorded) > 1:
        tables.append(_measures_table(comparison, recorded))
    return tables


def run_tables(run: Run) -> list[Table]:
    """Accuracies and costs of one run."""
    rows = []
    for measure, name in run.measures.items():
        if curve := run.curve(measure):
            values = list(curve.values())
            best = max(curve, key=lambda number: curve[number])
            shown = [f"{100 * value:.2f}" for value in (values[-1], curve[best], fmean(values[-LAST:]))]
            if run.status == "diverged":
                shown[0] = shown[2] = ABSENT
            rows.append((name, *shown, str(best)))
    columns = ("Accuracy (%)", "Final", "Best", f"Mean of last {LAST}", "Best in round")
    accuracy = Table("Accuracy", columns, _plain(rows))
    costs = Table("Cost and fairness", ("Quantity", "Value"), _plain(_run_costs(run)), (SUMS,))
    return [accuracy, costs]


def _run_costs(run: Run) -> list[tuple[str, str]]:
    up = sum(sum(entry.bytes_up.values()) for entry in run.history)
    down = sum(sum(entry.bytes_down.values()) for entry in run.history)
    rows = [
        ("Rounds played", str(run.history[-1].round if run.history else 0)),
        (UPLOAD, in_bytes(up)),
        (DOWNLOAD, in_bytes(down)),
        (TRAFFIC, in_bytes(up + down)),
        ("Training time", in_seconds(sum(entry.seconds.get("train", 0.0) for entry in run.history))),
    ]
    if run.summary and run.summary.samples_per_second is not None:
        rows.append(("Samples per second", f"{run.summary.samples_per_second:,.0f}"))
    if run.summary and run.summary.parameters is not None:
        rows.append(("Parameters of the model", f"{run.summary.parameters:,}"))
    if accuracies := client_accuracies(run):
        rows.append(("Worst client (%)", f"{100 * min(accuracies):.2f}"))
    return rows


def _accuracy_table(comparison: Comparison, measure: str) -> Table:
    first, *_ = judged = results(comparison, measure)
    # A method that ran but does not take this measure has no row; one that has yet to run keeps its own, and so
    # does one that diverged before its first evaluation.
    ours = [{run.metric for run in comparison.complete(method).values()} for method in comparison.methods]
    found = [
        result
        for result, measures in zip(judged, ours, strict=True)
        if result.best is not None or not measures or measure in measures
    ]
    planned = len(comparison.seeds)
    columns = {
        "Method": _names(found),
        "Seeds": [Cell(str(r.seeds) if r.seeds == planned else f"{r.seeds} of {planned}") for r in found],
        "Final": _percentages(found, [result.final for result in found]),
        "Best": _percentages(found, [result.best for result in found]),
        f"Last {LAST}": _percentages(found, [result.last for result in found]),
    }
    if comparison.target is not None:
        goal = f"{100 * comparison.target:g}\u00a0%"
        rounds = [result.rounds_to_target for result in found]
        columns |= {
            f"Rounds to {goal}": _ranked(found, rounds, [_rounds(result) for result in found], smallest=True),
            "Speedup": [Cell(f"{r.speed_up:.2f}×" if r.speed_up else ABSENT) for r in found],
            f"{TRAFFIC} to {goal}": _byte_counts(found, [result.bytes_to_target for result in found]),
        }
    if any(result.p_value is not None for result in found):
        columns[f"p vs {first.label}"] = [Cell(as_p_value(result.p_value)) for result in found]
    return _table(f"{MEASURES.get(measure, measure)}: accuracy (%)", columns, _notes(comparison, found))


def _cost_table(comparison: Comparison) -> Table:
    found = costs(comparison)
    columns = {
        "Method": _names(found),
        UPLOAD: _byte_counts(found, [cost.bytes_up for cost in found]),
        DOWNLOAD: _byte_counts(found, [cost.bytes_down for cost in found]),
        TRAFFIC: _byte_counts(found, [cost.traffic for cost in found]),
        "Training time": [Cell(in_seconds(cost.train_seconds)) for cost in found],
        "Spread over clients (%)": _percentages(found, [cost.spread for cost in found], smallest=True),
        "Worst client (%)": _percentages(found, [cost.worst for cost in found]),
    }
    fair = "Spread: standard deviation of the clients' accuracies in the last evaluation."
    return _table("Cost and fairness, mean over seeds", columns, (SUMS, fair))


def _measures_table(comparison: Comparison, measures: Sequence[str]) -> Table:
    judged = {measure: results(comparison, measure) for measure in measures}
    columns = {"Method": _names(judged[measures[0]])}
    for measure, found in judged.items():
        columns[MEASURES[measure]] = _percentages(found, [result.final for result in found])
    return _table("All recorded accuracies, last evaluation (%)", columns, ())


def _notes(comparison: Comparison, found: Sequence[Result]) -> tuple[str, ...]:
    values = "Mean ± sample standard deviation over seeds" if len(comparison.seeds) > 1 else "One seed"
    notes = [f"{values}. Best in bold, second best underlined."]
    if comparison.target is not None:
        first = comparison.label(comparison.methods[0])
        notes.append(
            f"Speedup: rounds of {first} divided by rounds of the method. "
            f"{TRAFFIC}: upload plus download of all clients."
        )
        if any(_rounds(result).startswith(">") for result in found):
            notes.append("“> T”: at least one seed did not reach the target in T rounds.")
    if any(result.p_value is not None for result in found):
        notes.append(
            f"p: two-sided t-test of the final values, paired by seed (from {SEEDS_FOR_A_TEST} seeds on)."
        )
    if any(result.diverged for result in found):
        notes.append("†: at least one seed diverged. It has no final value, and the method is not ranked.")
    return tuple(notes)


def _names(found: Judged) -> list[Cell]:
    return [Cell(f"{one.label} †" if one.diverged else one.label) for one in found]


def _percentages(found: Judged, values: Sequence[Estimate | None], *, smallest: bool = False) -> list[Cell]:
    means = [None if value is None else round(100 * value.mean, 2) for value in values]
    return _ranked(found, means, [in_percent(value) for value in values], smallest=smallest)


def _byte_counts(found: Judged, counts: Sequence[float | None]) -> list[Cell]:
    return _ranked(found, counts, [in_bytes(count) for count in counts], smallest=True)


def _ranked(
    found: Judged, values: Sequence[float | None], texts: Sequence[str], *, smallest: bool
) -> list[Cell]:
    """Cells ranked as they are printed: what reads the same shares a mark."""
    first: dict[str, float | None] = {}
    printed = [first.setdefault(text, value) for text, value in zip(texts, values, strict=True)]
    entered = [None if one.diverged else value for one, value in zip(found, printed, strict=True)]
    ranks = marks(entered, smallest=smallest)
    return [Cell(text, rank) for text, rank in zip(texts, ranks, strict=True)]


def _rounds(result: Result) -> str:
    if result.rounds_to_target is not None:
        return in_rounds(result.rounds_to_target)
    return ABSENT if result.best is None else f"> {result.horizon}"


def _table(title: str, columns: dict[str, list[Cell]], notes: tuple[str, ...]) -> Table:
    """Turn columns into rows, without the columns that hold nothing."""
    kept = {name: cells for name, cells in columns.items() if any(cell.text != ABSENT for cell in cells)}
    return Table(title, tuple(kept), tuple(zip(*kept.values(), strict=True)), notes)


def _plain(rows: Sequence[tuple[str, ...]]) -> tuple[tuple[Cell, ...], ...]:
    return tuple(tuple(Cell(text) for text in row) for row in rows)

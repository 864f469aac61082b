"""What a comparison found, in one sentence: true whatever the results are, and never more than they show."""

from collections.abc import Iterable, Iterator, Sequence

from fedalloy.report.runs import Comparison
from fedalloy.report.statistics import SEEDS_FOR_A_TEST, Result, results
from fedalloy.report.units import as_p_value, in_rounds

CLEAR = 0.05  # what p must stay below, times the number of methods that might have been the best by chance


def verdict(comparison: Comparison) -> str:
    """Which method ended highest, how far above the first one, and whether the seeds show that it is no chance."""
    baseline = comparison.label(comparison.methods[0])
    own, *others = [_judged_by(comparison, measure) for measure in comparison.headlines]
    parts = [_ranking(own, baseline, alone=len(comparison.methods) == 1)]
    if comparison.target is not None:
        parts += _sooner(own, baseline, f"{100 * comparison.target:g} %")
    for row in (row for rows in (own, *others) for row in rows if row.diverged):
        parts.append(f"{row.label} diverged with {len(row.diverged)} of {_counted(row.seeds, 'seed')}")
    if apart := [row.label for rows in others for row in rows]:
        parts.append(f"of {_listed(apart)} another accuracy is measured, in a table of its own")
    missing = len(comparison.methods) * len(comparison.seeds) - sum(
        len(comparison.complete(method)) for method in comparison.methods
    )
    if missing:
        parts.append(f"{_counted(missing, 'run')} still to be finished")
    return "; ".join(parts) + "."


def _judged_by(comparison: Comparison, measure: str) -> list[Result]:
    """The methods that have this for their headline measure."""
    return [
        row
        for method, row in zip(comparison.methods, results(comparison, measure), strict=True)
        if any(run.metric == measure for run in comparison.complete(method).values())
    ]


def _ranking(rows: Sequence[Result], baseline: str, *, alone: bool) -> str:
    ranked = _ranked(rows)
    if not ranked:
        return "No method came to a final accuracy with every seed"
    top = max(_points(row) for row in ranked)
    best = [row for row in ranked if _points(row) == top]
    names, over = _listed(row.label for row in best), f"over {_counted(best[0].seeds, 'seed')}"
    if alone:
        return f"{names} ended at {top:.2f} % {over}; name a second method to compare it with"
    first = next((row for row in ranked if row.label == baseline), None)
    if first is None:
        return f"{names} ended highest, at {top:.2f} % {over}, and {baseline} has no final accuracy to compare with"
    if len(ranked) == 1:
        return f"{names} ended at {top:.2f} % {over}, with no other method to compare it with"
    if first in best:
        rest = f"No method ended above {names}, at {top:.2f} % {over}"
        return rest if len(best) == 1 else f"{names} ended highest, level at {top:.2f} % {over}"
    gap = f"{names} ended highest, {top - _points(first):.2f} points above {baseline} {over}"
    return f"{gap}, {_doubt(best, len(ranked) - 1)}"


def _doubt(best: Sequence[Result], others: int) -> str:
    """Whether the lead may be chance: of many methods one is likely to look better than it is."""
    found = [row.p_value for row in best if row.p_value is not None]
    if len(found) < len(best):
        return f"which may be chance: to tell takes {SEEDS_FOR_A_TEST} seeds or more"
    p = max(found)
    against = f"p {'' if p < 0.001 else '= '}{as_p_value(p)}" + (
        f", {others} comparisons" if others > 1 else ""
    )
    is_clear = "which is clear" if p * others < CLEAR else "which is not clear"
    return f"{is_clear} of the spread between seeds ({against})"


def _sooner(rows: Sequence[Result], baseline: str, target: str) -> Iterator[str]:
    """Who needed the fewest rounds, as they are printed."""
    needed = {row.label: row.rounds_to_target for row in _ranked(rows) if row.rounds_to_target is not None}
    if not needed:
        yield f"no method reached {target} with every seed"
        return
    least = in_rounds(min(needed.values()))
    quick = [label for label, rounds in needed.items() if in_rounds(rounds) == least]
    after = f"after {least} round{'' if least == '1' else 's'}"
    if baseline in quick and len(rows) > 1:
        yield f"none reached {target} sooner than {baseline}, {after}"
    elif len(rows) == 1:
        yield f"{quick[0]} reached {target} {after}"
    else:
        theirs = in_rounds(needed[baseline]) if baseline in needed else "not with every seed"
        yield f"{_listed(quick)} reached {target} first, {after} ({baseline}: {theirs})"


def _ranked(rows: Sequence[Result]) -> list[Result]:
    return [row for row in rows if row.final is not None and not row.diverged]


def _points(row: Result) -> float:
    """The final accuracy in percent, as it is printed: what reads the same is the same."""
    assert row.final is not None
    return round(100 * row.final.mean, 2)


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"


def _listed(names: Iterable[str]) -> str:
    """
    >>> _listed(["a"]), _listed(["a", "b", "c"])
    ('a', 'a, b and c')
    """
    *most, last = names
    return f"{', '.join(most)} and {last}" if most else last

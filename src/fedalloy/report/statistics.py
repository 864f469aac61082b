"""What a comparison says: means over seeds, rounds and bytes to a target, significance, ranks."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, pstdev, stdev
from typing import Literal

from fedalloy.report.runs import Comparison, Run

Mark = Literal["best", "second", "none"]

LAST = 10  # evaluations in the "last 10" mean
SEEDS_FOR_A_TEST = 3


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds with the sample standard deviation (n - 1); one seed has none."""

    mean: float
    std: float | None


@dataclass(frozen=True)
class Result:
    """One method judged by one measure."""

    label: str
    seeds: int
    diverged: tuple[int, ...]  # seeds whose run diverged
    final: Estimate | None
    best: Estimate | None
    last: Estimate | None
    rounds_to_target: float | None  # None unless every seed reaches the target
    bytes_to_target: float | None
    horizon: int  # the last round any seed played
    speed_up: float | None  # over the first method, as a ratio of rounds to the target
    p_value: float | None  # of the final values, paired by seed with the first method's


@dataclass(frozen=True)
class Costs:
    """What one method cost, and how evenly it served its clients (means over seeds)."""

    label: str
    diverged: tuple[int, ...]
    bytes_up: float | None
    bytes_down: float | None
    traffic: float | None  # both
    train_seconds: float | None
    spread: Estimate | None  # standard deviation over the clients' accuracies
    worst: Estimate | None  # accuracy of the worst-served client


def results(comparison: Comparison, measure: str) -> list[Result]:
    """Judge every method by one measure; the first method is what the others are compared with."""
    first, *_ = runs = [comparison.complete(method) for method in comparison.methods]
    return [
        _result(comparison.label(method), ours, first, measure, comparison.target)
        for method, ours in zip(comparison.methods, runs, strict=True)
    ]


def costs(comparison: Comparison) -> list[Costs]:
    """Bytes, seconds and fairness of every method."""
    return [_costs(comparison.label(name), comparison.complete(name)) for name in comparison.methods]


def estimate(values: Iterable[float]) -> Estimate | None:
    """Mean and sample standard deviation; None without values.

    >>> estimate([1, 2, 3])
    Estimate(mean=2.0, std=1.0)
    """
    numbers = list(values)
    if not numbers:
        return None
    return Estimate(fmean(numbers), stdev(numbers) if len(numbers) > 1 else None)


def marks(values: Sequence[float | None], *, smallest: bool = False) -> list[Mark]:
    """Best and second best; equal values share a mark, and without two different values there is no contest.

    >>> marks([0.7, 0.9, None, 0.9])
    ['second', 'best', 'none', 'best']
    """
    order = sorted({value for value in values if value is not None}, reverse=not smallest)
    if len(order) < 2:
        return ["none"] * len(values)
    names: dict[float | None, Mark] = dict(zip(order, ("best", "second"), strict=False))
    return [names.get(value, "none") for value in values]


def paired_p_value(ours: Mapping[int, float], theirs: Mapping[int, float]) -> float | None:
    """Two-sided paired t-test over the seeds both have; None with fewer than three."""
    seeds = sorted(ours.keys() & theirs.keys())
    if len(seeds) < SEEDS_FOR_A_TEST:
        return None
    differences = [ours[seed] - theirs[seed] for seed in seeds]
    if max(differences) - min(differences) < 1e-12:  # no variance: t is 0/0 or infinite
        return 1.0 if abs(differences[0]) < 1e-12 else 0.0
    t = fmean(differences) / (stdev(differences) / math.sqrt(len(seeds)))
    return two_sided_t(t, len(seeds) - 1)


def two_sided_t(t: float, freedom: int) -> float:
    """P(|T| > |t|) of Student's t, as a finite sum (Abramowitz and Stegun, 26.7.3 and 26.7.4).

    >>> round(two_sided_t(4.303, 2), 3), round(two_sided_t(2.571, 5), 3)
    (0.05, 0.05)
    """
    angle = math.atan(abs(t) / math.sqrt(freedom))
    odd = freedom % 2
    power, terms = (math.cos(angle) if odd else 1.0), 0.0
    for above in range(2 + odd, freedom + 1, 2):
        terms += power
        power *= math.cos(angle) ** 2 * (above - 1) / above
    inside = math.sin(angle) * terms
    return max(0.0, 1.0 - (2 / math.pi * (angle + inside) if odd else inside))


def round_reaching(run: Run, measure: str, target: float) -> int | None:
    """The first evaluated round at or above the target."""
    return next((number for number, value in run.curve(measure).items() if value >= target), None)


def client_accuracies(run: Run) -> list[float]:
    """Each client's accuracy in the last evaluation, where it has one."""
    metrics = run.last_metrics
    values = metrics.per_client if metrics else ()
    return [value for value in values if value is not None and math.isfinite(value)]


def _result(
    label: str, runs: Mapping[int, Run], first: Mapping[int, Run], measure: str, target: float | None
) -> Result:
    curves = {seed: list(curve.values()) for seed, run in runs.items() if (curve := run.curve(measure))}
    settled = _settled(runs, measure)
    rounds, sent = _to_target(runs, measure, target)
    reference, _ = _to_target(first, measure, target)
    return Result(
        label=label,
        seeds=len(runs),
        diverged=_diverged(runs),
        final=estimate(values[-1] for values in settled.values()),
        best=estimate(max(values) for values in curves.values()),
        last=estimate(fmean(values[-LAST:]) for values in settled.values()),
        rounds_to_target=rounds,
        bytes_to_target=sent,
        horizon=max((run.history[-1].round for run in runs.values() if run.history), default=0),
        speed_up=reference / rounds if reference and rounds else None,
        p_value=None if runs is first else paired_p_value(_finals(runs, measure), _finals(first, measure)),
    )


def _costs(label: str, runs: Mapping[int, Run]) -> Costs:
    histories = [run.history for run in runs.values()]
    clients = [values for run in runs.values() if (values := client_accuracies(run))]
    return Costs(
        label=label,
        diverged=_diverged(runs),
        bytes_up=_mean(sum(sum(entry.bytes_up.values()) for entry in history) for history in histories),
        bytes_down=_mean(sum(sum(entry.bytes_down.values()) for entry in history) for history in histories),
        traffic=_mean(max(run.traffic.values(), default=0) for run in runs.values()),
        train_seconds=_mean(
            sum(entry.seconds.get("train", 0.0) for entry in history) for history in histories
        ),
        spread=estimate(pstdev(values) for values in clients),
        worst=estimate(min(values) for values in clients),
    )


def _to_target(
    runs: Mapping[int, Run], measure: str, target: float | None
) -> tuple[float | None, float | None]:
    """Mean rounds and mean bytes until the target; None unless every run reaches it."""
    if target is None or not runs:
        return None, None
    reached = [(run, round_reaching(run, measure, target)) for run in runs.values()]
    pairs = [(number, run.traffic[number]) for run, number in reached if number is not None]
    if len(pairs) < len(reached):
        return None, None
    return fmean(number for number, _ in pairs), fmean(sent for _, sent in pairs)


def _diverged(runs: Mapping[int, Run]) -> tuple[int, ...]:
    return tuple(seed for seed, run in runs.items() if run.status == "diverged")


def _settled(runs: Mapping[int, Run], measure: str) -> dict[int, list[float]]:
    """The evaluations of the seeds that came to a final value: a diverged run has none."""
    return {
        seed: list(curve.values())
        for seed, run in runs.items()
        if run.status != "diverged" and (curve := run.curve(measure))
    }


def _finals(runs: Mapping[int, Run], measure: str) -> dict[int, float]:
    return {seed: values[-1] for seed, values in _settled(runs, measure).items()}


def _mean(values: Iterable[float]) -> float | None:
    numbers = list(values)
    return fmean(numbers) if numbers else None

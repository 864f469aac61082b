"""The numbers of a comparison against numbers worked out by hand."""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import scipy.stats
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.report import read_comparison, read_run
from fedalloy.report.runs import Comparison
from fedalloy.report.statistics import Estimate, costs, estimate, marks, paired_p_value, results, two_sided_t
from fuzzing import examples
from test_report_runs import curve_run, fake_comparison, fake_run, write_history

Curves = Mapping[str, Sequence[Sequence[float]]]


def compared(folder: Path, curves: Curves, target: float | None = 0.5) -> Comparison:
    """A comparison whose every round was evaluated; one curve for each seed."""

    def make(place: Path, method: str, seed: int) -> Path:
        return curve_run(place, dict(enumerate(curves[method][seed], 1)), method=method, title=method)

    seeds = range(len(next(iter(curves.values()))))
    fake_comparison(folder, list(curves), list(seeds), make, target=target)
    return read_comparison(folder)


def pair(value: Estimate | None) -> tuple[float, float]:
    assert value is not None
    assert value.std is not None
    return value.mean, value.std


def test_final_best_and_last_over_seeds(tmp_path: Path) -> None:
    # Twelve rounds: the first two fall out of the mean of the last ten.
    steady = [0.0, 0.0, *[0.4] * 9, 0.5]
    peaked = [0.0, 0.9, *[0.6] * 9, 0.7]
    (result,) = results(compared(tmp_path, {"a": [steady, peaked]}), "global_acc")
    assert pair(result.final) == pytest.approx((0.6, 0.2 / math.sqrt(2)))
    assert pair(result.best) == pytest.approx((0.7, 0.4 / math.sqrt(2)))
    assert pair(result.last) == pytest.approx(((0.41 + 0.61) / 2, 0.2 / math.sqrt(2)))


def test_one_seed_has_no_deviation(tmp_path: Path) -> None:
    (result,) = results(compared(tmp_path, {"a": [[0.2, 0.4]]}), "global_acc")
    assert result.final == Estimate(0.4, None)
    assert result.p_value is None


def test_rounds_and_bytes_to_target(tmp_path: Path) -> None:
    slow = [[0.1, 0.2, 0.5, 0.6], [0.1, 0.2, 0.3, 0.5]]
    quick = [[0.5, 0.6, 0.6, 0.6], [0.5, 0.4, 0.6, 0.6]]
    never = [[0.5, 0.6, 0.6, 0.6], [0.1, 0.2, 0.3, 0.4]]
    a, b, c = results(compared(tmp_path, {"a": slow, "b": quick, "c": never}), "global_acc")
    assert (a.rounds_to_target, b.rounds_to_target, c.rounds_to_target) == (3.5, 1.0, None)
    assert (a.speed_up, b.speed_up, c.speed_up) == (1.0, 3.5, None)
    assert (a.bytes_to_target, b.bytes_to_target, c.bytes_to_target) == (350, 100, None)
    assert c.horizon == 4


def test_without_a_target_nothing_is_reached(tmp_path: Path) -> None:
    (result,) = results(compared(tmp_path, {"a": [[0.9]]}, target=None), "global_acc")
    assert (result.rounds_to_target, result.speed_up, result.bytes_to_target) == (None, None, None)


def test_a_target_reached_between_evaluations_counts_at_the_next(tmp_path: Path) -> None:
    folder = fake_comparison(
        tmp_path, ["a"], [0], lambda place, m, s: curve_run(place, {5: 0.4, 10: 0.7}), target=0.5
    )
    (result,) = results(read_comparison(folder), "global_acc")
    assert (result.rounds_to_target, result.bytes_to_target) == (10, 1000)


def test_paired_test_against_the_first_method(tmp_path: Path) -> None:
    # Differences 0.1, 0.2, 0.3: t = 0.2 / (0.1 / sqrt 3) = 2 sqrt 3; with 2 degrees of freedom the
    # two-sided p is 1 - t / sqrt(2 + t^2).
    t = 2 * math.sqrt(3)
    a, b = results(compared(tmp_path, {"a": [[0.5]] * 3, "b": [[0.6], [0.7], [0.8]]}), "global_acc")
    assert a.p_value is None
    assert b.p_value == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_paired_test_without_variance() -> None:
    same = {0: 0.5, 1: 0.6, 2: 0.7}
    assert paired_p_value(same, same) == 1.0
    assert paired_p_value({seed: value + 0.1 for seed, value in same.items()}, same) == 0.0


def test_paired_test_needs_three_shared_seeds() -> None:
    assert paired_p_value({0: 0.1, 1: 0.2, 5: 0.3}, {0: 0.2, 1: 0.1, 2: 0.4}) is None


def test_a_measure_nobody_recorded(tmp_path: Path) -> None:
    (result,) = results(compared(tmp_path, {"a": [[0.5], [0.6]]}), "personal_local_acc")
    assert (result.final, result.best, result.last, result.rounds_to_target) == (None,) * 4


def test_a_diverged_seed_is_named_and_has_no_final_value(tmp_path: Path) -> None:
    def make(place: Path, method: str, seed: int) -> Path:
        return fake_run(place, rounds=5, seed=seed, status="diverged" if seed == 1 else "finished")

    comparison = read_comparison(fake_comparison(tmp_path, ["fedavg"], [0, 1], make))
    (result,) = results(comparison, "global_acc")
    curves = [run.curve("global_acc") for run in comparison.runs["fedavg"].values()]
    assert result.diverged == (1,)
    assert result.final == Estimate(curves[0][5], None)
    assert result.best == estimate(max(curve.values()) for curve in curves)


def test_costs_and_spread(tmp_path: Path) -> None:
    def make(place: Path, method: str, seed: int) -> Path:
        curve_run(place, {1: 0.5, 2: 0.5})
        last = {
            "round": 3,
            "bytes_up": {"share.weights": 100},
            "metrics": {"global_acc": 0.5, "per_client": [0.2, None, 0.6 + seed / 10]},
        }
        entries = [entry.model_dump() for entry in read_run(place).history]
        write_history(place, [*entries, last])
        return place

    (cost,) = costs(read_comparison(fake_comparison(tmp_path, ["a"], [0, 2], make)))
    assert (cost.bytes_up, cost.bytes_down, cost.train_seconds) == (220, 80, 1.0)
    assert pair(cost.spread) == pytest.approx((0.25, 0.1 / math.sqrt(2)))
    assert pair(cost.worst) == pytest.approx((0.2, 0.0))


def test_marks_share_ties_and_leave_out_what_is_missing() -> None:
    assert marks([3, 2, 3, None, 1]) == ["best", "second", "best", "none", "none"]
    assert marks([3, 2, 2, 1], smallest=True) == ["none", "second", "second", "best"]
    assert marks([1.0, None]) == ["none", "none"]
    assert marks([1.0, 1.0]) == ["none", "none"]
    assert marks([]) == []


@examples(200)
@given(t=st.floats(-1e6, 1e6), freedom=st.integers(1, 200))
def test_students_t_as_scipy_has_it(t: float, freedom: int) -> None:
    assert two_sided_t(t, freedom) == pytest.approx(2 * scipy.stats.t.sf(abs(t), freedom), abs=1e-12)

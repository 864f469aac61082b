"""What is said of a comparison, on results that are made up."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.report import read_comparison
from fedalloy.report.verdict import verdict
from fuzzing import examples
from test_report_runs import curve_run, fake_comparison, fake_run

Curves = Mapping[str, Sequence[Sequence[float] | None]]  # of every seed of a method; None if it diverged


def said(folder: Path, curves: Curves, target: float | None = None, **personal: float) -> str:
    """The verdict on methods with these curves, and on methods whose personal models end at this accuracy."""

    def make(place: Path, method: str, seed: int) -> Path:
        if method in personal:
            measures, height = ("personal_local_acc",), personal[method]
            return fake_run(place, method=method, title=method, measures=measures, height=height, seed=seed)
        if (curve := curves[method][seed]) is None:
            return fake_run(place, method=method, title=method, status="diverged", seed=seed)
        return curve_run(place, dict(enumerate(curve, 1)), method=method, title=method)

    seeds = range(len(next(iter(curves.values()))))
    return verdict(
        read_comparison(fake_comparison(folder, [*curves, *personal], list(seeds), make, target=target))
    )


A, B, C = "FedAvg", "FedDW", "SSF"
THREE = [[0.80], [0.82], [0.84]]
ABOVE = [[0.81], [0.8302], [0.8499]]  # one point above, give or take a hundredth
CASES: dict[str, tuple[Curves, str]] = {
    "one method": (
        {A: THREE},
        "FedAvg ended at 82.00 % over 3 seeds; name a second method to compare it with.",
    ),
    "one seed": (
        {A: [[0.8]], B: [[0.9]]},
        "FedDW ended highest, 10.00 points above FedAvg over 1 seed, "
        "which may be chance: to tell takes 3 seeds or more.",
    ),
    "clear": (
        {A: THREE, B: ABOVE},
        "FedDW ended highest, 1.00 points above FedAvg over 3 seeds, "
        "which is clear of the spread between seeds (p < 0.001).",
    ),
    "not clear": (
        {A: THREE, B: [[0.9], [0.8], [0.8]]},
        "FedDW ended highest, 1.33 points above FedAvg over 3 seeds, "
        "which is not clear of the spread between seeds (p = 0.789).",
    ),
    "one of many may look good": (
        {A: THREE, B: [[0.81], [0.8328], [0.8472]], C: THREE, "FedRDA": THREE},
        "FedDW ended highest, 1.00 points above FedAvg over 3 seeds, "
        "which is not clear of the spread between seeds (p = 0.025, 3 comparisons).",
    ),
    "the baseline is best": ({A: ABOVE, B: THREE}, "No method ended above FedAvg, at 83.00 % over 3 seeds."),
    "a tie": ({A: THREE, B: [[0.82]] * 3}, "FedAvg and FedDW ended highest, level at 82.00 % over 3 seeds."),
    "a tie above": (
        {A: THREE, B: [[0.9]] * 3, C: [[0.9]] * 3},
        "FedDW and SSF ended highest, 8.00 points above FedAvg over 3 seeds, "
        "which is clear of the spread between seeds (p = 0.020, 2 comparisons).",
    ),
    "another diverged": (
        {A: THREE, B: ABOVE, C: [None, [0.9], [0.9]]},
        "FedDW ended highest, 1.00 points above FedAvg over 3 seeds, which is clear of the spread between seeds "
        "(p < 0.001); SSF diverged with 1 of 3 seeds.",
    ),
    "the baseline diverged": (
        {A: [None, [0.9]], B: [[0.5], [0.5]]},
        "FedDW ended highest, at 50.00 % over 2 seeds, and FedAvg has no final accuracy to compare with; "
        "FedAvg diverged with 1 of 2 seeds.",
    ),
    "one of two is left": (
        {A: [[0.5]], B: [None]},
        "FedAvg ended at 50.00 % over 1 seed, with no other method to compare it with; "
        "FedDW diverged with 1 of 1 seed.",
    ),
    "all diverged": (
        {A: [None], B: [None]},
        "No method came to a final accuracy with every seed; FedAvg diverged with 1 of 1 seed; "
        "FedDW diverged with 1 of 1 seed.",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_said(case: str, tmp_path: Path) -> None:
    curves, sentence = CASES[case]
    assert said(tmp_path, curves) == sentence


@pytest.mark.parametrize(
    ("curves", "end"),
    [
        ({A: [[0.5, 0.9]], B: [[0.8, 0.9]]}, "FedDW reached 80 % first, after 1 round (FedAvg: 2)."),
        (
            {A: [[0.5, 0.6]], B: [[0.5, 0.9]]},
            "FedDW reached 80 % first, after 2 rounds (FedAvg: not with every seed).",
        ),
        ({A: [[0.8, 0.8]], B: [[0.8, 0.9]]}, "none reached 80 % sooner than FedAvg, after 1 round."),
        ({A: [[0.1]], B: [[0.2]]}, "no method reached 80 % with every seed."),
        ({A: [[0.1, 0.9], [0.9, 0.9]]}, "FedAvg reached 80 % after 1.5 rounds."),
    ],
)
def test_who_was_there_first(curves: Curves, end: str, tmp_path: Path) -> None:
    assert said(tmp_path, curves, 0.8).endswith("; " + end)


def test_personal_models_are_named_apart(tmp_path: Path) -> None:
    sentence = said(tmp_path, {A: THREE, B: [[0.7]] * 3}, FedSCE=0.99)
    assert sentence == (
        "No method ended above FedAvg, at 82.00 % over 3 seeds; "
        "of FedSCE another accuracy is measured, in a table of its own."
    )


def test_runs_that_are_missing_are_counted(tmp_path: Path) -> None:
    fake_comparison(tmp_path, [A], [0], lambda place, m, s: curve_run(place, {1: 0.5}, title=m), target=None)
    text = (tmp_path / "compare.json").read_text().replace('"seeds": [0]', '"seeds": [0, 1]')
    (tmp_path / "compare.json").write_text(text)
    assert verdict(read_comparison(tmp_path)).endswith("; 1 run still to be finished.")


LEVELS = st.none() | st.integers(0, 20).map(lambda level: [level / 20])


@pytest.mark.fuzz
@examples(40)
@given(
    data=st.data(), seeds=st.integers(1, 4), methods=st.integers(1, 4), target=st.sampled_from([None, 0.5])
)
def test_whatever_the_results_one_true_sentence(
    tmp_path_factory: pytest.TempPathFactory,
    data: st.DataObject,
    seeds: int,
    methods: int,
    target: float | None,
) -> None:
    column = st.lists(LEVELS, min_size=seeds, max_size=seeds)
    curves = {f"M{number}": data.draw(column) for number in range(methods)}
    sentence = said(tmp_path_factory.mktemp("made-up"), curves, target)
    assert sentence.count(".\n") == 0
    assert sentence.endswith(".")
    means = {
        name: round(100 * sum(level[0] for level in levels if level) / seeds, 2)
        for name, levels in curves.items()
        if None not in levels
    }
    if len(means) > 1 and " ended highest" in sentence:
        named = set(sentence.partition(" ended highest")[0].replace(" and ", ", ").split(", "))
        assert named == {name for name, mean in means.items() if mean == max(means.values())}
    if "is clear" in sentence:
        assert seeds >= 3
    for name in curves:
        assert (f"{name} diverged" in sentence) == (None in curves[name])

"""Studies of papers: the matrix regression of SSF, its numbers, tables, figures and files."""

import json
from collections.abc import Sequence
from dataclasses import replace
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedalloy.errors import FedAlloyError
from fedalloy.report.tables import Table
from fedalloy.research.reproduce import items, matrix_report, matrix_study, reproduce
from fedalloy.research.reproduce.matrix import STEPS, Method, Problem, Run
from fedalloy.research.reproduce.matrix_study import METHODS, RANKS, Curve, gradient_noise
from terminal import strict_json

SMALL = {"clients": 3, "samples": 24, "rows": 12, "columns": 2}


# The problem


def test_the_problem_is_the_regression() -> None:
    """f_i(W) = |A_i W - B_i|^2 / (2 n): its gradient is H_i W - G_i, and the optimum is that of the mean."""
    problem = Problem.drawn(1.0, **SMALL)
    w = torch.randn(12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    for i in range(3):
        loss = ((problem.a[i] @ w - problem.b[i]) ** 2).sum() / (2 * 24)
        (gradient,) = torch.autograd.grad(loss, w)
        assert torch.allclose(gradient, problem.hessians[i] @ w - problem.targets[i], atol=1e-13)
    stacked: Tensor = torch.linalg.lstsq(problem.a.flatten(0, 1), problem.b.flatten(0, 1)).solution
    assert torch.allclose(stacked, problem.optimum, atol=1e-12)


def test_heterogeneity_moves_the_clients_and_not_the_truth() -> None:
    """D_i are centred and shared by all zeta, so that B grows linearly in zeta and A_i stay the same."""
    low, medium, high = (Problem.drawn(zeta, **SMALL) for zeta in (0.0, 1.0, 5.0))
    assert torch.equal(low.a, high.a)
    assert torch.allclose(high.b - low.b, 5 * (medium.b - low.b), atol=1e-12)
    apart: Tensor = torch.linalg.lstsq(medium.a, medium.b - low.b).solution
    assert float(apart.mean(0).abs().max()) < 1e-12
    assert float(apart.std()) == pytest.approx(12**-0.5 * (2 / 3) ** 0.5, rel=0.25)
    assert not torch.equal(low.a, Problem.drawn(0.0, seed=1, **SMALL).a)


def test_the_problem_is_that_of_the_paper_study() -> None:
    """Client eigenvalues up to about 3, the mean Hessian within [0.55, 1.55]."""
    problem = Problem.drawn(1.0)
    assert problem.a.shape == (10, 200, 100)
    assert problem.b.shape == (10, 200, 10)
    mean = torch.linalg.eigvalsh(problem.hessians.mean(0))
    assert 2.8 < float(torch.linalg.eigvalsh(problem.hessians).max()) < 3.1
    assert 0.55 < float(mean.min()) < 0.65
    assert 1.4 < float(mean.max()) < 1.55


# The runs


@pytest.mark.parametrize(
    ("method", "rounds", "low", "high"),
    [(Method("SSF", 20), 300, 0.0, 1e-6), (Method("FedAvg"), 100, 1e-2, 0.1)],
)
def test_behaviour(method: Method, rounds: int, low: float, high: float) -> None:
    """Check, behaviour: eta = 0.05, 300 rounds: SSF r = 20 is below 1e-6 while FedAvg stays above 1e-2."""
    run = Run(method, [Problem.drawn(1.0)], [0.05])
    for _ in range(rounds):
        run.step()
    assert low < float(run.errors) < high


def test_settings_side_by_side_are_settings_alone() -> None:
    zetas, rates = (0.1, 5.0), (0.1, 0.02)
    problems = [Problem.drawn(zeta, **SMALL) for zeta in zetas]
    noise = torch.randn(STEPS, 3, 12, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for method in (Method("SCAFFOLD"), Method("SSF", 5), Method("FedSub", 5, "gaussian")):
        both = Run(method, problems, rates)
        alone = [Run(method, [problem], [rate]) for problem, rate in zip(problems, rates, strict=True)]
        for at in (None, noise, noise, None):
            for run in (both, *alone):
                run.step(at)
        assert torch.allclose(both.x, torch.cat([run.x for run in alone], 1), rtol=0, atol=1e-13)
        assert torch.allclose(both.errors, torch.cat([run.errors for run in alone]), atol=1e-13)


def test_noise_is_added_to_every_gradient() -> None:
    """One step of FedAvg by hand; the same noise whatever the method, of standard deviation 0.05."""
    problem = Problem.drawn(1.0, **SMALL)
    run = Run(Method("FedAvg"), [problem], [0.1])
    noise = gradient_noise(run, 0, 1)
    assert noise.shape == (STEPS, 3, 12, 2)
    assert float(noise.std()) == pytest.approx(0.05, rel=0.1)
    assert torch.equal(noise, gradient_noise(Run(Method("SSF", 3), [problem], [0.1]), 0, 1))
    assert not torch.equal(noise, gradient_noise(run, 0, 2))
    w = torch.zeros(3, 12, 2, dtype=torch.float64)
    for k in range(STEPS):
        w = w - 0.1 * (problem.hessians @ w - problem.targets + noise[k])
    run.step(noise)
    assert torch.allclose(run.x, w.mean(0), atol=1e-14)


def test_the_full_study_is_the_one_promised() -> None:
    """Ranks, heterogeneities, learning rates and rounds of the tables."""
    assert RANKS == (20, 40, 60, 80, 100)
    assert {zeta for zeta, _ in matrix_study.EXACT} == {0.1, 1.0, 5.0}
    assert [lr for zeta, lr in matrix_study.EXACT if zeta == 1.0] == [0.01, 0.02, 0.05, 0.1]
    assert (matrix_study.ROUNDS, matrix_study.FEDSUB_ROUNDS, matrix_study.NOISY_ROUNDS) == (300, 200, 400)
    assert matrix_report.EXACT_REFERENCE.keys() <= {
        f"{label} r={method.rank}" if method.rank else label
        for label, methods in METHODS.items()
        for method in methods
    }


def curve(errors: Sequence[float], **changes: Any) -> Curve:
    return replace(Curve("SSF", 20, 1.0, 0.05, False, 0, tuple(errors)), **changes)


def test_results_of_a_curve() -> None:
    assert curve([0.5, 0.2]).result == 0.2
    assert curve([0.9] * 10 + [0.1] * 9 + [0.3] * 11, noisy=True).result == 0.3  # median of the last 20
    gone = curve([0.5, 2e3, 0.1])
    assert (gone.diverged, gone.result) == (2, inf)
    assert curve([1.0, nan, nan]).diverged == 2
    assert curve([1e3]).diverged is None


def test_facts_are_json() -> None:
    facts = curve([1.0] * 9 + [0.123456] + [inf] * 10).facts
    assert json.loads(json.dumps(facts, allow_nan=False))["every_tenth"] == [0.1235, None]
    assert (facts["result"], facts["diverged_round"]) == (None, 11)


# The paper form


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole study, small and for a few rounds."""
    for name, rounds in {"ROUNDS": 4, "FEDSUB_ROUNDS": 3, "NOISY_ROUNDS": 5}.items():
        monkeypatch.setattr(matrix_study, name, rounds)
    monkeypatch.setattr(
        matrix_study,
        "_problem",
        lambda zeta, seed: Problem.drawn(zeta, seed, clients=2, samples=101, rows=100, columns=1),
    )


@pytest.mark.usefixtures("short")
def test_the_files_of_the_study(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    made = reproduce(
        "ssf/matrix", tmp_path / "a" / "b", on_round=lambda done, total: heard.append((done, total))
    )
    assert heard == [(done, 19) for done in range(1, 20)]
    assert {name: path.name for name, path in made.files.items()} == {
        "report": "report.html",
        "tables": "tables.md",
        "results": "results.json",
    }
    stored = strict_json(made.files["results"].read_text())
    assert stored == made.facts
    assert len(stored["runs"]) == 17 * (6 + 3 + 1 + 1)  # exact settings; noisy ones of the three seeds
    lengths = {(run["method"], run["noisy"]) for run in stored["runs"]}
    assert lengths == {(label, noisy) for label in METHODS for noisy in (False, True)}
    text = made.files["tables"].read_text()
    assert text.count("### ") == 4
    assert text.count("| SSF r=60 |") == 3
    assert r"\[5.59–5.91e-2\]" in text
    page = made.files["report"].read_text()
    assert "FedSub diverges at large rank with a Gaussian projector only" in page
    assert "With an orthonormal projector (Haar) they do not grow" in page
    assert page.count('class="plot"') == 6
    assert page.count('"kind":"log"') == 6
    assert "Not drawn" not in page


@pytest.mark.usefixtures("short")
def test_only_some_methods(tmp_path: Path) -> None:
    made = reproduce("ssf/matrix", tmp_path, only=["scaffold", "fedsub-haar"])
    assert {run["method"] for run in made.facts["runs"]} == {"SCAFFOLD", "FedSub Haar"}
    assert [len(table.rows) for table in made.tables] == [6, 6, 6]  # and no claims about what was not run
    assert (tmp_path / "ssf-matrix" / "report.html").exists()


@pytest.mark.usefixtures("short")
def test_the_study_gives_the_same_bits_again(tmp_path: Path) -> None:
    runs = [reproduce("ssf/matrix", tmp_path, only=["ssf", "fedavg"]).facts["runs"] for _ in range(2)]
    assert runs[0] == runs[1]
    alone = reproduce("ssf/matrix", tmp_path, only=["fedavg"]).facts["runs"]
    assert alone == [run for run in runs[0] if run["method"] == "FedAvg"]


def test_unknown_names() -> None:
    assert {"ssf/matrix", "feddw/table1"} <= items().keys()
    with pytest.raises(FedAlloyError, match="unknown study 'ssf/matrx'; did you mean 'ssf/matrix'"):
        reproduce("ssf/matrx", Path("nowhere"))
    with pytest.raises(FedAlloyError, match="did you mean 'fedsub-haar'"):
        reproduce("ssf/matrix", Path("nowhere"), only=["fedsub-har"])
    assert not Path("nowhere").exists()


def pretended(**results: float) -> list[Curve]:
    """Runs of every method that end at given errors; SSF and SCAFFOLD at 1e-15, the others at 1e-2 unless told."""
    found = []
    for label, methods in METHODS.items():
        for method in methods:
            settled = 1e-15 if label in ("SSF", "SCAFFOLD") else 1e-2
            name = f"{label} r={method.rank}" if method.rank else label
            last = results.get(name.replace(" ", "_").replace("=", ""), settled)
            base = Curve(label, method.rank, 1.0, 0.05, False, 0, (last,))
            exact = [replace(base, zeta=zeta, lr=lr) for zeta, lr in matrix_study.EXACT]
            noisy = [replace(base, zeta=zeta, noisy=True) for zeta in matrix_study.ZETAS]
            seeds = [replace(base, noisy=True, seed=seed, errors=(last * (1 + seed),)) for seed in (1, 2)]
            found += [*exact, *noisy, *seeds]
    return found


def claims(**results: float) -> list[str]:
    (table,) = matrix_report.claims(pretended(**results))
    return [row[2].text for row in table.rows]


def test_claims_are_judged_by_the_runs() -> None:
    usual = {"SSF_r20": 1e-8, "FedSub_Gaussian_r100": 1e9}
    assert claims(**usual, SCAFFOLD=1e-8) == ["yes", "yes", "no", "yes", "yes", "no"]
    assert claims() == ["yes", "no", "yes", "yes", "no", "no"]
    assert claims(SSF_r20=1e-3) == ["no", "yes", "yes", "no", "no", "no"]
    assert claims(FedSub_Haar_r80=inf)[5] == "yes"
    (table,) = matrix_report.claims(pretended(FedSub_Haar_r80=inf, FedSub_Gaussian_r80=nan))
    assert [row[1].text for row in table.rows[4:]] == ["at r = 80", "at r = 80"]


def cell(table: Table, row: str, column: int) -> str:
    return next(cells[column].text for cells in table.rows if cells[0].text == row)


def test_tables_show_ours_beside_the_reference() -> None:
    rates, zetas, noisy, _ = matrix_report.all_tables(pretended(SSF_r20=3.14e-8, FedSub_Gaussian_r80=1e9))
    assert [len(table.rows) for table in (rates, zetas, noisy)] == [17, 17, 17]
    assert cell(rates, "SSF r=20", 3) == "3.1e-8 [6.3e-8]"
    assert cell(rates, "SSF r=60", 3) == "1.0e-15"
    assert cell(zetas, "SSF r=20", 2) == "3.1e-8 [6.3e-8]"
    assert cell(zetas, "SSF r=20", 3) == "3.1e-8"
    assert cell(noisy, "SSF r=20", 2) == "3.14–9.42e-8 [2.54–2.58e-2]"
    assert cell(noisy, "SCAFFOLD", 1) == "1.00e-15 [2.74e-2]"
    assert cell(noisy, "FedSub Gaussian r=80", 3) == "diverged, 1 [diverged, 248]"


def test_ranges_over_seeds() -> None:
    """One exponent where both ends share it; the first and last round of a divergence."""
    said = matrix_report._said
    assert said([curve([9e-3], noisy=True), curve([2e-2], noisy=True)]) == "9.00e-3–2.00e-2"
    assert said([curve([2e-2], noisy=True), curve([2e-2], noisy=True)]) == "2.00e-2"
    assert said([curve([1.0, 1e4]), curve([1e4, 1e4]), curve([1.0, 0.1])]) == "diverged, 1–2"


def test_a_line_ends_where_it_leaves_the_picture() -> None:
    figure = matrix_report.error_curves([curve([0.1, 2e3, 1e5, 0.1])])
    assert figure is not None
    assert list(figure.data[0].y) == [0.1, 2e3]
    assert matrix_report.error_curves([]) is None

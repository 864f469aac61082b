"""Tables of papers: what is played, what is shared, what is printed beside the paper's numbers."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from browser import needs_browser
from fedalloy.cli.app import main
from fedalloy.core import registry
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.folder import RunFolder
from fedalloy.report import files
from fedalloy.report.runs import read_run
from fedalloy.research import reproduce
from fedalloy.research.reproduce import costs
from fedalloy.research.reproduce.grid import (
    Column,
    Grid,
    Judge,
    Row,
    Scale,
    accuracy,
    by_seed,
    client_accuracy,
    diagnostic,
    megabytes,
    parameters,
    place,
    seconds,
)
from test_report_runs import fake_run

SMALL: dict[str, Any] = {"clients": 3, "batch": 64, "model": "mlp(hidden=8)", "engine": "inline", "lr": 0.1}
JUDGES: tuple[Judge | None, ...] = (None, "final", "last10", "best")
GRID = Grid(
    "A table of two settings",
    rows=[Row("FedAvg", "fedavg", (50.0, None)), Row("FedProx", "fedprox(mu={mu})", (60.0, 70.0))],
    columns=[
        Column("even", {"skew": "iid"}, fill={"mu": 0.1}),
        Column("skewed", {"skew": "dirichlet:0.5"}, {"rounds": 1}, {"mu": 1}),
    ],
    measures=[accuracy()],
    base={**SMALL, "rounds": 4},
    cpu={"rounds": 2},
    reduced="two rounds",
    seeds=(0, 1),
    drawn=("curves", "sweep"),
    notes=("A note.",),
)


@pytest.fixture(autouse=True)
def known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(reproduce.GRIDS, "paper/table1", GRID)
    monkeypatch.setitem(costs.DATA, "digits", costs.DATA["mnist"])


def shas(out: Path) -> dict[str, str]:
    found = {path.name: RunFolder(path).summary() for path in (out / "runs").iterdir()}
    return {name: summary["weights_sha256"] for name, summary in found.items() if summary}


def test_a_table_as_the_paper_prints_it(tmp_path: Path) -> None:
    heard: list[tuple[int, int]] = []
    made = reproduce.reproduce("paper/table1", tmp_path, on_round=lambda *done: heard.append(done))
    assert heard[0] == (0, 12)
    assert heard[-1] == (12, 12)  # two rounds, and one where the column says so; two rows, two seeds
    (table,) = made.tables
    assert table.columns == ("", "even", "skewed")
    (ours,) = (cell for cell in made.facts["cells"] if (cell["row"], cell["column"]) == ("FedProx", "skewed"))
    mean, std = ours["ours"]["value"]["mean"], ours["ours"]["value"]["std"]
    assert table.rows[1][2].text == f"{mean:.2f} ± {std:.2f} (70.00, {mean - 70:+.2f})"
    assert "(" not in table.rows[0][2].text  # the paper has a dash
    assert {row[1].mark for row in table.rows} in ({"best", "second"}, {"none"})
    assert "Scale cpu: two rounds. Seeds: 2 of 2." in table.notes
    assert "A note." in table.notes
    assert ours["method"] == "fedprox(mu=1)"
    page = made.files["report"].read_text()
    assert page.count('class="plot"') == 3
    assert "fedalloy reproduce paper/table1 --scale cpu --data-root DATA" in page
    assert json.loads(made.files["results"].read_text())["cells"] == made.facts["cells"]
    assert r"\toprule" in made.files["latex"].read_text()


def test_what_is_there_is_not_played_again_and_what_was_cut_carries_on(tmp_path: Path) -> None:
    reproduce.reproduce("paper/table1", tmp_path / "whole")

    def cut(done: int, total: int) -> None:
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        reproduce.reproduce("paper/table1", tmp_path / "cut", on_round=cut)
    some = shas(tmp_path / "cut")
    assert 0 < len(some) < 8
    heard: list[int] = []
    reproduce.reproduce("paper/table1", tmp_path / "cut", on_round=lambda done, total: heard.append(done))
    assert heard[0] == 5
    assert shas(tmp_path / "cut") == shas(tmp_path / "whole")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "cut").rglob("summary.json")}
    reproduce.reproduce("paper/table1", tmp_path / "cut")
    assert before == {path: path.stat().st_mtime_ns for path in before}


def test_what_is_finished_is_shown_without_playing(tmp_path: Path) -> None:
    with pytest.raises(FedAlloyError, match=r"no run of it is finished in .*; leave --no-play away"):
        reproduce.reproduce("paper/table1", tmp_path, missing=False)
    with pytest.raises(FedAlloyError, match="always played"):
        reproduce.reproduce("ssf/matrix", tmp_path, missing=False)
    assert not list(tmp_path.iterdir())
    reproduce.reproduce("paper/table1", tmp_path, ["fedavg", "even"], seeds=[0])
    before = shas(tmp_path)
    (table,) = reproduce.reproduce("paper/table1", tmp_path, missing=False).tables
    assert shas(tmp_path) == before
    assert re.fullmatch(r"\d+\.\d\d \(\d+\.\d\d, [+-]\d+\.\d\d\)", table.rows[0][1].text)
    assert table.rows[1][1].text.startswith("–")
    assert "Seeds: 0 to 1 of 2." in table.notes[1]


def test_side_by_side_gives_the_same_bits(tmp_path: Path) -> None:
    reproduce.reproduce("paper/table1", tmp_path / "one", seeds=[3])
    reproduce.reproduce("paper/table1", tmp_path / "two", seeds=[3], jobs=2)
    assert shas(tmp_path / "one") == shas(tmp_path / "two") != {}


def test_only_some_rows_and_columns(tmp_path: Path) -> None:
    (table,) = reproduce.reproduce("paper/table1", tmp_path, ["fedavg", "even"], seeds=[0]).tables
    assert [row[0].text for row in table.rows] == ["FedAvg"]
    assert table.columns == ("", "even")
    (table,) = reproduce.reproduce("paper/table1", tmp_path, ["fedprox", "skewed"], seeds=[0]).tables
    assert table.columns == ("", "skewed")
    with pytest.raises(
        FedAlloyError, match="has no row or column 'fedavgg'; it has: fedavg, fedprox, even, skewed"
    ):
        reproduce.reproduce("paper/table1", tmp_path, ["fedavgg"])


def test_the_same_runs_judged_by_other_rounds(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"only": ["fedavg", "even"], "seeds": [0], "given": {"rounds": 12, "lr": 2.0}}
    made = {judge: reproduce.reproduce("paper/table1", tmp_path, judge=judge, **chosen) for judge in JUDGES}
    assert len({one.files["table"].parent for one in made.values()}) == 4
    (run,) = (read_run(path) for path in (tmp_path / "runs").iterdir())
    curve = list(run.curve("global_acc").values())
    found = {judge: one.facts["cells"][0]["ours"]["value"]["mean"] for judge, one in made.items()}
    assert found[None] == found["final"] == pytest.approx(100 * curve[-1])
    assert found["last10"] == pytest.approx(10 * sum(curve[-10:]))
    assert found["best"] == pytest.approx(100 * max(curve))
    assert len(set(found.values())) == 3
    assert made["best"].facts["command"].endswith("--judge best --data-root DATA")
    assert "the best of all rounds" in made["best"].tables[0].notes[1]
    for item in ("ssf/matrix", "feddw/table3"):
        with pytest.raises(FedAlloyError, match="has no accuracies; leave --judge away"):
            reproduce.reproduce(item, tmp_path, judge="best")


def test_what_is_given_wins_and_is_told(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"only": ["fedavg", "even"], "seeds": [0]}
    given = {"rounds": 3, "workers": 2, "personal_on_global": False}
    plain = reproduce.reproduce("paper/table1", tmp_path, **chosen)
    made = reproduce.reproduce("paper/table1", tmp_path, given=given, **chosen)
    assert made.facts["command"] == (
        "fedalloy reproduce paper/table1 --scale cpu --rounds 3 --no-personal-on-global "
        "--only fedavg,even --seeds 0 --data-root DATA"
    )
    assert "two rounds, but --rounds 3 --no-personal-on-global. Seeds: 1 of 1." in made.tables[0].notes[1]
    assert "but" not in plain.tables[0].notes[1]
    page = made.files["report"].read_text()
    assert made.facts["command"] in page
    assert len(shas(tmp_path)) == 2
    with pytest.raises(FedAlloyError, match="leave --rounds away"):
        reproduce.reproduce("ssf/matrix", tmp_path, given={"rounds": 3})


def test_a_column_says_when_another_data_set_stands_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base, cpu = {**GRID.base, "data": "mnist"}, {**GRID.cpu, "data": "digits"}
    monkeypatch.setitem(reproduce.GRIDS, "paper/table1", replace(GRID, base=base, cpu=cpu))
    (table,) = reproduce.reproduce("paper/table1", tmp_path, ["fedavg"], seeds=[0]).tables
    assert table.columns == ("", "even (here digits)", "skewed (here digits)")


@needs_browser
def test_figures_as_files(tmp_path: Path) -> None:
    chosen: dict[str, Any] = {"only": ["even"], "seeds": [0]}
    plain = reproduce.reproduce("paper/table1", tmp_path, **chosen).files["table"].read_text()
    assert "fedalloy reproduce paper/table1 --scale cpu --only even" in plain
    assert "![" not in plain
    made = reproduce.reproduce("paper/table1", tmp_path, images=True, **chosen).files["table"]
    named = re.findall(r"!\[.+?\]\((.+?)\)", made.read_text())
    assert named == ["sweep-value.svg", "curve-0-global_acc.svg"]
    for name in named:
        drawn = (made.parent / name).read_text()
        assert drawn.startswith("<svg")
        assert "FedProx" in drawn
        assert re.search(r"<rect[^>]+fill: (white|rgb\(255, 255, 255\)); fill-opacity: 1", drawn)


def test_figures_as_files_take_a_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(FedAlloyError, match=r"fedalloy\[images\]"):
        reproduce.reproduce("paper/table1", tmp_path, ["fedavg", "even"], seeds=[0], images=True)


def test_figures_as_files_take_a_browser(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setenv("BROWSER_PATH", str(tmp_path / "none"))
    with pytest.raises(FedAlloyError, match="images need Chrome or Chromium"):
        reproduce.reproduce("paper/table1", tmp_path, ["fedavg", "even"], seeds=[0], images=True)


@pytest.mark.parametrize("flag", ["--method fedavg", "--data digits", "--seed 1"])
def test_method_data_and_seeds_are_the_items_own(flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["reproduce", "paper/table1", *flag.split()])
    assert ended.value.code == 2
    assert f"leave {flag.split()[0]} away" in capsys.readouterr().err


def test_items_share_their_runs() -> None:
    other = Grid("The same again", [Row("Plain", "fedavg")], GRID.columns[:1], GRID.measures, GRID.base)
    mine = {place(config) for config in by_seed(GRID.cells("paper"))}
    theirs = {place(config) for config in by_seed(other.cells("paper", seeds=[0, 1]))}
    assert theirs < mine
    moved = {place(config) for config in by_seed(GRID.cells("paper", {"data_root": "elsewhere"}))}
    assert moved == mine  # where the data lie makes no other run
    assert len({place(config) for config in by_seed(GRID.cells("cpu"))} - mine) == 8


def test_numbers_of_a_run(tmp_path: Path) -> None:
    run = read_run(fake_run(tmp_path / "run"))
    curve = run.curve("global_acc")
    assert accuracy().of(run) == pytest.approx(100 * list(curve.values())[-1])
    assert accuracy(last=2).of(run) == pytest.approx(50 * sum(list(curve.values())[-2:]))
    assert accuracy("", "aux_acc", "global_acc").of(run) == accuracy().of(run)
    assert accuracy("", "aux_acc").of(run) is None
    assert client_accuracy("", 99).of(run) is None
    assert diagnostic("", "nothing").of(run) is None
    assert (seconds().of(run) or 0) > 0
    assert (megabytes("", "up").of(run) or 0) > 0
    assert parameters().of(run) is None or parameters().of(run)


def test_a_table_with_the_wrong_number_of_numbers_is_refused() -> None:
    with pytest.raises(ValueError, match="FedAvg has 3 numbers for 2 places"):
        Grid("x", [Row("FedAvg", "fedavg", (1.0, 2.0, 3.0))], GRID.columns, GRID.measures, {})


@pytest.mark.parametrize("scale", ["cpu", "paper"])
@pytest.mark.parametrize("item", list(reproduce.GRIDS))
def test_every_item_is_sound(item: str, scale: Scale) -> None:
    """Every method and every setting can be read, every name of a row or column is its own, and costs are known."""
    grid = reproduce.GRIDS[item]
    assert len(set(grid.parts)) == len(grid.parts)
    assert grid.reduced
    for config in by_seed(grid.cells(scale)):
        registry.make(config.method)
        assert config.data in costs.DATA


def test_the_list_says_what_each_item_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduce, "GRIDS", {"paper/table1": GRID})
    found = {row["item"]: row for row in reproduce.listed("cpu")}
    assert found["paper/table1"]["runs"] == 8
    assert found["paper/table1"]["seconds"] >= 0
    one, *_ = by_seed(GRID.cells("cpu"))
    twice = one.model_copy(update={"epochs": 2, "method": "ditto"})
    assert costs.run_seconds(twice) > 2 * costs.run_seconds(one)
    alone = one.model_copy(update={"data": "mnist", "method": "local", "clients": 100, "limit": 100})
    few = alone.model_copy(update={"eval_clients": 5})
    unseen = alone.model_copy(update={"personal_on_global": False})
    assert costs.run_seconds(alone) > 10 * costs.run_seconds(few) > 20 * costs.run_seconds(unseen)
    half = {
        method: one.model_copy(update={"method": method, "participation": 0.5, "personal_on_global": False})
        for method in ("fedavg", "local", "local(participation_applies=true)")
    }
    fedavg, local, sampled = map(costs.run_seconds, half.values())
    assert local > 1.5 * fedavg == 1.5 * sampled  # everybody trains alone in every round

"""A comparison is fair, carries on, and runs nothing twice."""

import re
from pathlib import Path
from typing import Any

import pytest

from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.research.compare import Comparison
from terminal import INLINE, QUICK, fedalloy, history, strict_json, summary, tree

BASE = Config(engine="inline", clients=4, rounds=2, lr=0.1)
SEEDS = ("--seeds", "0,1,2")


def only_runs(folder: Path) -> dict[str, Any]:
    """Everything in the folders of the runs, the tables and reports above them left aside."""
    return {name: what for name, what in tree(folder).items() if "/seed" in name}


class Killed(Exception):
    """Stands for a crash."""


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three methods, three seeds; fedprox(mu=0) is fedavg by another name."""
    folder = tmp_path_factory.mktemp("compare") / "c"
    methods = ("fedavg", "fedprox(mu=0)", "scaffold")
    said = fedalloy(
        "compare", *methods, *QUICK, *SEEDS, "--participation", "0.5", "--target", "0.2", "--out", str(folder)
    )
    assert (said.code, said.err) == (0, "")
    return folder


class TestFairness:
    def test_the_same_clients_take_part_whatever_the_method(self, done: Path) -> None:
        for seed in range(3):
            drawn = [
                [line["participants"] for line in history(done / method / f"seed{seed}")]
                for method in ("fedavg", "fedprox-mu-0", "scaffold")
            ]
            assert drawn[0] == drawn[1] == drawn[2]

    def test_the_same_partition_whatever_the_method(self, done: Path) -> None:
        for seed in range(3):
            dealt = {(done / m / f"seed{seed}/partition.json").read_text() for m in ("fedavg", "scaffold")}
            assert len(dealt) == 1
        assert len({(done / f"fedavg/seed{seed}/partition.json").read_text() for seed in range(3)}) == 3

    def test_the_same_initial_weights_and_batches_to_the_bit(self, done: Path) -> None:
        """A proximal term of weight 0 is all that differs here: so nothing else may."""
        for seed in range(3):
            plain, prox = (summary(done / m / f"seed{seed}") for m in ("fedavg", "fedprox-mu-0"))
            assert plain["weights_sha256"] == prox["weights_sha256"]
            assert plain["weights_sha256"] != summary(done / f"scaffold/seed{seed}")["weights_sha256"]
        assert len({summary(done / f"fedavg/seed{seed}")["weights_sha256"] for seed in range(3)}) == 3

    def test_a_run_in_a_comparison_is_the_run_alone(self, done: Path, tmp_path: Path) -> None:
        alone = fedalloy(
            "run", *QUICK, "--participation", "0.5", "--seed", "2", "--json", "--out", str(tmp_path / "r")
        ).json
        assert alone["weights_sha256"] == summary(done / "fedavg/seed2")["weights_sha256"]
        again = fedalloy(
            "run",
            "--config",
            str(done / "scaffold/seed1/config.toml"),
            "--json",
            "--out",
            str(tmp_path / "s"),
        )
        assert again.json["weights_sha256"] == summary(done / "scaffold/seed1")["weights_sha256"]


class TestResults:
    def test_tables_and_reports_are_written(self, done: Path) -> None:
        assert "FedAvg" in (done / "table.md").read_text()
        assert r"\begin{tabular}" in (done / "table.tex").read_text()
        assert "Accuracy" in (done / "report.html").read_text()
        assert max(page.stat().st_size for page in done.rglob("report.html")) < 200_000

    def test_json_has_means_p_values_and_rounds_to_the_target(self, done: Path) -> None:
        """The same command again only reads what is there."""
        flags = (*QUICK, *SEEDS, "--participation", "0.5", "--target", "0.2", "--out", str(done))
        found = fedalloy("compare", "fedavg", "fedprox(mu=0)", "scaffold", *flags, "--json").json
        first, same, other = found["results"]["global_acc"]
        assert (first["label"], first["seeds"], first["p_value"]) == ("FedAvg", 3, None)
        assert same["p_value"] == 1.0
        assert 0 <= other["p_value"] < 1
        finals = [summary(done / f"fedavg/seed{seed}")["accuracy"]["final"] for seed in range(3)]
        assert first["final"]["mean"] == pytest.approx(sum(finals) / 3)
        assert first["final"]["std"] > 0
        assert (same["rounds_to_target"], same["speed_up"]) == (first["rounds_to_target"], 1.0)
        assert len(found["runs"]) == 9
        assert found["costs"][2]["bytes_up"] > found["costs"][0]["bytes_up"]

    def test_the_table_fits_a_narrow_terminal(self, done: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        flags = (*QUICK, *SEEDS, "--participation", "0.5", "--target", "0.2", "--out", str(done))
        for width in range(48, 121, 8):
            monkeypatch.setenv("COLUMNS", str(width))
            said = fedalloy("compare", "fedavg", "fedprox(mu=0)", "scaffold", *flags)
            wide = [line for line in said.out.splitlines() if len(line) > width]
            assert wide == [line for line in wide if "/" in line]  # paths are never broken
            for method in ("fedavg", "scaffold"):
                finals = [100 * summary(done / method / f"seed{s}")["accuracy"]["final"] for s in range(3)]
                assert re.search(rf"{sum(finals) / 3:.2f} ± \d", said.out)
            assert "p vs" in said.out.replace("\n", " ")

    def test_the_command_is_recorded_whole(self, done: Path) -> None:
        command = strict_json((done / "compare.json").read_text())["command"]
        assert command == (
            "fedalloy compare fedavg 'fedprox(mu=0)' scaffold --seeds 0,1,2 --target 0.2 "
            "--clients 4 --participation 0.5 --rounds 2 --lr 0.1 --engine inline"
        )

    def test_two_seeds_have_no_p_value(self, tmp_path: Path) -> None:
        found = fedalloy(
            "compare", "fedavg", "local", *QUICK, "--seeds", "0,1", "--out", str(tmp_path / "c"), "--json"
        ).json
        assert found["results"].keys() == {"global_acc", "personal_local_acc"}
        assert all(row["p_value"] is None for rows in found["results"].values() for row in rows)


class TestCarryingOn:
    def test_what_is_finished_is_not_touched(self, done: Path) -> None:
        before = only_runs(done)
        flags = (*QUICK, *SEEDS, "--participation", "0.5", "--target", "0.3", "--out", str(done))
        assert fedalloy("compare", "fedavg", "fedprox(mu=0)", "scaffold", *flags).code == 0
        assert only_runs(done) == before

    def test_a_new_method_is_all_that_runs(self, tmp_path: Path) -> None:
        folder = tmp_path / "c"
        assert fedalloy("compare", "fedavg", *QUICK, "--seeds", "0,1", "--out", str(folder)).code == 0
        before = only_runs(folder)
        plan = Comparison.plan(BASE, ["fedavg", "scaffold"], [0, 1], folder)
        assert plan.rounds_left() == 4
        begun: list[tuple[str, int]] = []
        played: list[tuple[str, int]] = []
        plan.run(
            lambda *run: begun.append(run), lambda record: played.append((begun[-1][0], record["round"]))
        )
        assert played == [("scaffold", 1), ("scaffold", 2)] * 2
        after = only_runs(folder)
        assert {name: after[name] for name in before} == before
        assert any(name.startswith("scaffold/seed1/") for name in after)

    def test_a_killed_comparison_carries_on_to_the_same_bits(self, tmp_path: Path) -> None:
        whole = Comparison.plan(BASE, ["fedavg", "scaffold"], [0, 1], tmp_path / "whole")
        whole.run()
        cut = Comparison.plan(BASE, ["fedavg", "scaffold"], [0, 1], tmp_path / "cut")
        count = 0

        def kill(record: dict[str, Any]) -> None:
            nonlocal count
            count += 1
            if count == 5:  # the first round of the third run
                raise Killed

        with pytest.raises(Killed):
            cut.run(on_round=kill)
        assert cut.rounds_left() == 3
        finished = {name: what for name, what in only_runs(tmp_path / "cut").items() if "/seed0/" in name}
        assert {name.split("/")[0] for name in finished} == {"fedavg", "scaffold"}
        results = Comparison.plan(BASE, ["fedavg", "scaffold"], [0, 1], tmp_path / "cut").run()
        assert cut.rounds_left() == 0
        for seed in (0, 1):
            for method in ("fedavg", "scaffold"):
                mine, theirs = (
                    summary(tmp_path / name / method / f"seed{seed}") for name in ("cut", "whole")
                )
                assert mine["weights_sha256"] == theirs["weights_sha256"]
        assert [result.summary["seed"] for result in results] == [0, 0, 1, 1]
        assert (tmp_path / "cut" / "report.html").exists()
        assert only_runs(tmp_path / "cut").items() >= finished.items()

    def test_an_unfinished_comparison_can_be_reported(self, tmp_path: Path) -> None:
        plan = Comparison.plan(BASE, ["fedavg", "scaffold"], [0], tmp_path / "c")
        count = 0

        def kill(record: dict[str, Any]) -> None:
            nonlocal count
            count += 1
            if count == 3:
                raise Killed

        with pytest.raises(Killed):
            plan.run(on_round=kill)
        assert fedalloy("report", str(tmp_path / "c")).code == 0

    def test_other_settings_in_the_same_folder_are_refused_before_anything_is_written(
        self, tmp_path: Path
    ) -> None:
        folder = tmp_path / "c"
        assert fedalloy("compare", "fedavg", *QUICK, "--out", str(folder)).code == 0
        before = tree(folder)
        said = fedalloy("compare", "scaffold", "fedavg", *INLINE, "--rounds", "3", "--out", str(folder))
        assert said.code == 2
        assert "was run with other settings (--rounds 2 instead of 3); give another --out" in said.err
        assert tree(folder) == before


class TestPlaces:
    def test_the_folder_is_named_by_the_settings(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.chdir(tmp_path)

        def place(*methods: str, **settings: Any) -> str:
            return str(Comparison.plan(BASE.model_copy(update=settings), methods, [0]).folder)

        mine = place("fedavg")
        assert re.fullmatch(r"runs/compare-digits-dirichlet-0\.1-[0-9a-f]{8}", mine)
        assert place("fedavg", "scaffold", engine="workers", workers=3, timeout=9.0, seed=4) == mine
        assert place("fedavg", rounds=9) != mine
        assert place("fedavg", data_root="elsewhere") != mine
        assert not list(tmp_path.iterdir())

    def test_one_seed_may_be_given_as_for_a_run(self, tmp_path: Path) -> None:
        found = fedalloy(
            "compare", "fedavg", *QUICK, "--seed", "5", "--out", str(tmp_path / "c"), "--json"
        ).json
        assert [run["seed"] for run in found["runs"]] == [5]

    def test_methods_that_would_share_a_folder_are_refused(self, tmp_path: Path) -> None:
        folder = tmp_path / "c"
        Comparison.plan(BASE, ["fedavg"], [0], folder).run()
        (folder / "fedavg").rename(folder / "scaffold")
        with pytest.raises(FedAlloyError, match="--method fedavg instead of scaffold"):
            Comparison.plan(BASE, ["scaffold"], [0], folder)

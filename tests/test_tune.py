"""Tuning: the right points, each once, the same ones after a crash, and never a look at the test set."""

import json
import shlex
import sys
import tomllib
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fedalloy.core import registry
from fedalloy.core.imports import Imports
from fedalloy.core.net import Inputs
from fedalloy.errors import FedAlloyError, FedAlloyWarning
from fedalloy.experiment.config import Config
from fedalloy.research.search import RATES, SPACES, Point, Space
from fedalloy.research.tune import Trial, Tuning, _proposed
from fedalloy.round.replica import Replica
from terminal import INLINE, fedalloy, history, save_npz, strict_json, summary, tree

ONE = (*INLINE[:4], "--rounds", "1", "--limit", "200")
BASE = Config(engine="inline", clients=4, rounds=2, lr=0.1, limit=200)
ENTRIES = [(method, name) for method, axes in SPACES.items() for name in axes]


class Killed(Exception):
    """Stands for a crash."""


class TestSpaces:
    @pytest.mark.parametrize(("method", "name"), ENTRIES, ids=lambda word: word)
    def test_every_entry_is_a_parameter_and_every_value_is_accepted(self, method: str, name: str) -> None:
        values = SPACES[method][name]
        assert registry.RECIPES[method].parameters[name].default in values
        assert len(values) > 1
        assert list(values) == sorted(set(values))
        for value in values:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", FedAlloyWarning)
                made = registry.make(f"{method}({name}={value!r})")
                Replica(made, "mlp", Inputs("image", (1, 8, 8), 10), seed=0)

    @pytest.mark.parametrize("method", registry.RECIPES)
    def test_every_method_can_be_tuned_and_begins_as_it_comes(self, method: str) -> None:
        space = Space.of(method, RATES["sgd"])
        assert space.axes.keys() == {*SPACES.get(method, {}), "lr"}
        assert space.start in space.grid
        assert registry.make(space.at(space.start)).pieces == registry.make(method).pieces
        made = [registry.make(space.at(point)).pieces for point in space.grid[:: len(RATES["sgd"])]]
        assert all(made.count(pieces) == 1 for pieces in made)

    def test_what_is_typed_stays(self) -> None:
        assert Space.of("fedblade(beta=0.02, tau=0.1)").axes == {"gamma": SPACES["fedblade"]["gamma"]}
        assert Space.of("fedprox(mu=0.2)", [0.1]).axes == {"lr": (0.1,)}

    def test_what_makes_no_difference_is_not_searched(self) -> None:
        assert "proj_dim" in Space.of("moon").axes
        assert "proj_dim" not in Space.of("moon(projection=penultimate)").axes
        assert "beta" not in Space.of("fedblade(decorr=none)").axes

    def test_the_methods_of_a_sum(self) -> None:
        space = Space.of("feddyn + prox(mu=0.5)", [0.1, 0.01, 0.1])
        assert space.axes == {"feddyn.alpha": (0.001, 0.01, 0.1), "lr": (0.01, 0.1)}
        assert space.at({"feddyn.alpha": 0.1, "lr": 0.01}) == "feddyn(alpha=0.1)+prox(mu=0.5)"
        assert len(space.grid) == 6

    def test_a_recipe_of_ones_own_has_a_learning_rate(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(Path(__file__).parent.parent)
        own = "examples.own_method:fedcm(alpha=0.3)"
        space = Space.of(own, [0.1], Imports())
        assert (space.axes, space.at(space.start)) == ({"lr": (0.1,)}, own)

    def test_nothing_to_search(self) -> None:
        with pytest.raises(FedAlloyError, match="scaffold has nothing to search but the learning rate"):
            Space.of("scaffold")


class TestProposals:
    def search(self, trials: int, seed: int = 0) -> list[Trial]:
        """A made-up accuracy with one peak on the grid of FedBlade."""
        space = Space.of("fedblade", RATES["sgd"])
        tried: list[Trial] = []
        while len(tried) < trials:
            known = [trial.point for trial in tried]
            left = [point for point in space.grid if point not in known]
            point = _proposed(space, tried, left, seed)
            tried.append(Trial(len(tried) + 1, point, BASE, (self.accuracy(space, point),)))
        return tried

    def accuracy(self, space: Space, point: Point) -> float:
        places = {name: values.index(point[name]) for name, values in space.axes.items()}
        return 1 - sum(abs(places[name] - peak) for name, peak in (("beta", 2), ("gamma", 1), ("lr", 2))) / 10

    def test_the_same_trials_give_the_same_proposal(self) -> None:
        first, second, other = (self.search(15, seed) for seed in (0, 0, 1))
        assert [trial.point for trial in first] == [trial.point for trial in second]
        assert [trial.point for trial in first] != [trial.point for trial in other]

    def test_what_is_known_is_used(self) -> None:
        """The last trials are better than the first, which were drawn at random."""
        found = [trial.accuracy or 0 for trial in self.search(40)]
        assert np.mean(found[20:]) > np.mean(found[:10]) + 0.1
        assert max(found) == 1

    def test_never_the_same_point_twice(self) -> None:
        points = [str(trial.point) for trial in self.search(60)]
        assert len(set(points)) == 60


class TestTrials:
    @pytest.mark.parametrize("trials", ["3", "9"])
    def test_a_small_grid_is_searched_whole(self, tmp_path: Path, trials: str) -> None:
        flags = (*ONE, "--lr", "0.1", "--trials", trials, "--out", str(tmp_path / "t"))
        found = fedalloy("tune", "feddyn", *flags, "--json").json
        tried = sorted(found["trials"], key=lambda trial: trial["number"])
        assert [trial["point"] for trial in tried] == [{"alpha": alpha} for alpha in (0.001, 0.01, 0.1)]

    def test_a_large_grid_is_searched_in_part_beginning_with_the_defaults(self, tmp_path: Path) -> None:
        flags = (*ONE, "--trials", "8", "--lr-values", "0.1,0.05", "--out", str(tmp_path / "t"))
        found = fedalloy("tune", "fedprox", *flags, "--json").json
        tried = sorted(found["trials"], key=lambda trial: trial["number"])
        assert [trial["number"] for trial in tried] == list(range(1, 9))
        assert tried[0]["point"] == {"mu": 0.01, "lr": 0.1}
        assert len({str(trial["point"]) for trial in tried}) == 8

    def test_every_trial_is_an_ordinary_run_on_held_out_samples(self, tmp_path: Path) -> None:
        flags = ("--lr-values", "0.05,0.1", "--seeds", "0,1", "--out", str(tmp_path / "t"))
        found = fedalloy("tune", "fedavg", *ONE, *flags, "--json").json
        assert found["validation"] == 0.2
        for trial in found["trials"]:
            runs = [tmp_path / "t" / run for run in trial["runs"]]
            configs = [tomllib.loads((run / "config.toml").read_text()) for run in runs]
            assert [config["seed"] for config in configs] == [0, 1]
            assert {config["validation"] for config in configs} == {0.2}
            assert {config["lr"] for config in configs} == {trial["lr"]} == {trial["point"]["lr"]}
            means = [summary(run)["accuracy"]["mean_last_10"] for run in runs]
            assert trial["accuracies"] == means
            assert trial["accuracy"] == pytest.approx(sum(means) / 2)
        again = fedalloy("run", "--resume", str(tmp_path / "t" / found["best"]["runs"][0]), "--json")
        assert again.json["accuracy"]["mean_last_10"] == found["best"]["accuracies"][0]

    def test_the_mean_of_the_last_evaluations_counts(self, tmp_path: Path) -> None:
        flags = (*INLINE[:4], "--rounds", "3", "--lr-values", "0.1", "--out", str(tmp_path / "t"))
        found = fedalloy("tune", "local", *flags, "--json").json
        rounds = history(tmp_path / "t" / found["best"]["runs"][0])
        means = [line["metrics"]["personal_local_acc"] for line in rounds]  # what Local is judged by
        assert found["best"]["accuracy"] == pytest.approx(sum(means) / 3)

    @pytest.mark.parametrize("method", ["fedavg", "local"])
    def test_the_test_set_makes_no_difference(self, tmp_path: Path, method: str) -> None:
        dice = np.random.default_rng(0)
        pixels = dice.integers(0, 256, (120, 8, 8), np.uint8)
        found = []
        for number, tests in enumerate((8, 40)):
            arrays: dict[str, Any] = {"x_train": pixels, "y_train": np.arange(120) % 4}
            arrays["x_test"] = dice.integers(0, 256, (tests, 8, 8), np.uint8)
            arrays["y_test"] = np.arange(tests) % 4
            root = save_npz(tmp_path / f"{number}/mine.npz", arrays).parent
            flags = ("--data", "mine", "--data-root", str(root), "--skew", "iid", "--limit", "100")
            place = ("--out", str(root / "t"))
            said = " ".join(fedalloy("tune", method, *ONE[:6], *flags, *place).out.split())
            assert "on 20 % of the training samples; the test set was not looked at." in said
            facts = fedalloy("tune", method, *ONE[:6], *flags, *place, "--json").json
            found.append([trial["accuracies"] for trial in facts["trials"]])
        assert found[0] == found[1]

    def test_a_trial_that_diverges_comes_last(self, tmp_path: Path) -> None:
        flags = (
            *ONE,
            "--epochs",
            "9",
            "--weight-decay",
            "1",
            "--lr-values",
            "0.1,1e6",
            "--out",
            str(tmp_path / "t"),
        )
        found = fedalloy("tune", "fedavg", *flags, "--json").json
        assert [trial["lr"] for trial in found["trials"]] == [0.1, 1e6]
        assert found["trials"][1]["accuracy"] is None
        assert found["best"]["lr"] == 0.1
        assert "diverged" in fedalloy("tune", "fedavg", *flags).out

    def test_when_all_diverge_there_is_no_best(self, tmp_path: Path) -> None:
        flags = (
            *ONE,
            "--epochs",
            "9",
            "--weight-decay",
            "1",
            "--lr-values",
            "1e6",
            "--out",
            str(tmp_path / "t"),
        )
        assert fedalloy("tune", "fedavg", *flags, "--json").json["best"] is None
        assert "every trial diverged; try smaller --lr-values" in fedalloy("tune", "fedavg", *flags).out


class TestWhatIsPrinted:
    def test_a_table_best_first_and_commands_that_run(self, tmp_path: Path) -> None:
        flags = ("--skew", "iid", "--lr-values", "0.001,0.1", "--seed", "3", "--no-personal-on-global")
        said = fedalloy("tune", "fedavg", *ONE, *flags, "--out", str(tmp_path / "t"))
        assert (said.code, said.err) == (0, "")
        rows = [line.split() for line in said.out.splitlines() if line.split()[:1] in (["1"], ["2"])]
        assert [row[:2] for row in rows] == [["2", "0.1"], ["1", "0.001"]]
        facts = fedalloy("tune", "fedavg", *ONE, *flags, "--out", str(tmp_path / "t"), "--json").json
        for way in ("run", "compare"):
            command = facts["best"][way]
            assert command in said.out
            assert "validation" not in command
            out = tmp_path / way
            assert fedalloy(*shlex.split(command)[1:], "--out", str(out)).code == 0
            place = out if way == "run" else out / "fedavg/seed3"
            config = tomllib.loads((place / "config.toml").read_text())
            assert (config["validation"], config["lr"], config["seed"]) == (0.0, 0.1, 3)
            assert (config["skew"], config["personal_on_global"]) == ("iid", False)

    def test_the_command_is_recorded_whole(self, tmp_path: Path) -> None:
        flags = ("--trials", "2", "--lr-values", "0.1,0.05", "--seeds", "1", "--out", str(tmp_path / "t"))
        assert fedalloy("tune", "fedprox(mu=0.1)", *ONE, *flags).code == 0
        command = strict_json((tmp_path / "t/tune.json").read_text())["command"]
        assert command == (
            "fedalloy tune 'fedprox(mu=0.1)' --trials 2 --seeds 1 --lr-values 0.05,0.1 "
            "--limit 200 --clients 4 --validation 0.2 --rounds 1 --engine inline"
        )

    @pytest.mark.parametrize(
        "flags",
        [
            ("--lr", "0.05"),  # the default
            ("--lr", "0.1"),
            ("--lr-values", "0.03,0.1"),
            ("--lr", "0.05", "--validation", "0.3", "--seeds", "1,2"),
            ("--lr", "0.05", "--model", "MLP( hidden=8 )", "--no-personal-on-global"),
        ],
        ids=" ".join,
    )
    def test_the_recorded_command_is_accepted_by_its_folder(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
    ) -> None:
        monkeypatch.chdir(tmp_path)
        first = fedalloy(
            "tune",
            "fedavg+prox" if "values" in flags[0] else "fedprox",
            *ONE,
            *flags,
            "--trials",
            "2",
            "--json",
        ).json
        folder = tmp_path / first["folder"]
        command = strict_json((folder / "tune.json").read_text())["command"]
        before = {name: kept for name, kept in tree(folder).items() if name != "tune.json"}
        again = fedalloy(*shlex.split(command)[1:], "--json").json
        assert again == first
        assert {name: kept for name, kept in tree(folder).items() if name != "tune.json"} == before
        assert (
            fedalloy(*shlex.split(command)[1:], "--out", str(folder), "--json").json["trials"]
            == first["trials"]
        )
        assert [path.name for path in (tmp_path / "runs").iterdir()] == [folder.name]

    def test_learning_rates_fit_the_optimiser(self, tmp_path: Path) -> None:
        plan = Tuning.plan(Config(optimizer="adam"), "fedavg", [0], 9, out=tmp_path / "t")
        assert plan.space.axes == {"lr": RATES["adam"]}
        fixed = Tuning.plan(Config(optimizer="adam", lr=0.01), "fedprox", [0], 9, out=tmp_path / "t")
        assert "lr" not in fixed.space.axes
        assert fixed.config(fixed.space.start).lr == 0.01

    def test_the_folder_is_named_by_the_search(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.chdir(tmp_path)

        def place(
            method: str = "fedprox", seeds: tuple[int, ...] = (0,), trials: int = 5, **news: Any
        ) -> str:
            return str(Tuning.plan(BASE.model_copy(update=news), method, seeds, trials).folder)

        mine = place()
        assert mine.startswith("runs/tune-fedprox-digits-dirichlet-0.1-")
        assert place(trials=9, engine="workers", seed=5) == mine
        assert len({mine, place("feddyn"), place(seeds=(1,)), place(rounds=3), place(validation=0.3)}) == 5
        assert not list(tmp_path.iterdir())


def planned(folder: Path, trials: int = 4) -> Tuning:
    return Tuning.plan(BASE, "fedprox", [0, 1], trials, rates=[0.05, 0.1], out=folder)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A search that was never interrupted."""
    folder = tmp_path_factory.mktemp("whole") / "t"
    planned(folder).run()
    return folder


class TestCarryingOn:
    @pytest.mark.parametrize("rounds", [1, 6, 15])
    def test_a_killed_search_carries_on_with_the_same_trials(
        self, whole: Path, tmp_path: Path, rounds: int
    ) -> None:
        cut, played = planned(tmp_path / "t"), 0

        def kill(record: dict[str, Any]) -> None:
            nonlocal played
            played += 1
            if played == rounds:
                raise Killed

        with pytest.raises(Killed):
            cut.run(on_round=kill)
        assert cut.rounds_left() == 16 - rounds
        planned(tmp_path / "t").run(on_round=kill)
        assert played == 16
        assert planned(tmp_path / "t").rounds_left() == 0
        ours, theirs = (strict_json((folder / "tune.json").read_text()) for folder in (tmp_path / "t", whole))
        assert ours == theirs
        for trial in ours["trials"]:
            for run in trial["runs"]:
                hashes = {summary(folder / run)["weights_sha256"] for folder in (tmp_path / "t", whole)}
                assert len(hashes) == 1

    def test_killed_before_a_trial_has_begun(self, whole: Path, tmp_path: Path) -> None:
        def kill(method: str, seed: int) -> None:
            if method.startswith("3 of 4"):
                raise Killed

        with pytest.raises(Killed):
            planned(tmp_path / "t").run(kill)
        assert len(planned(tmp_path / "t").done()) == 2
        planned(tmp_path / "t").run()
        assert (tmp_path / "t/tune.json").read_text() == (whole / "tune.json").read_text()

    def test_what_is_finished_is_not_touched(self, whole: Path) -> None:
        before = {name: what for name, what in tree(whole).items() if "/seed" in name}
        found = planned(whole).run()
        assert len(found) == 4
        assert {name: what for name, what in tree(whole).items() if "/seed" in name} == before

    def test_fewer_trials_are_the_first_ones(self, whole: Path) -> None:
        text = (whole / "tune.json").read_text()
        assert [trial.number for trial in planned(whole, 2).run()] == [1, 2]
        recorded = strict_json((whole / "tune.json").read_text())
        assert recorded["trials"] == strict_json(text)["trials"]
        planned(whole).run()
        assert (whole / "tune.json").read_text() == text

    def test_more_trials_come_on_top(self, tmp_path: Path) -> None:
        base = BASE.model_copy(update={"rounds": 1})
        first = Tuning.plan(base, "feddyn", [0], 2, out=tmp_path / "t").run()
        more = Tuning.plan(base, "feddyn", [0], 3, out=tmp_path / "t").run()
        assert more[:2] == first
        assert sorted(trial.point["alpha"] for trial in more) == [0.001, 0.01, 0.1]

    def test_another_search_in_the_same_folder_is_refused(self, whole: Path) -> None:
        before = tree(whole)
        for method, seeds, rates in (("feddyn", [0, 1], [0.05, 0.1]), ("fedprox", [0], [0.05, 0.1])):
            with pytest.raises(FedAlloyError, match=r"holds another search .*; give another --out"):
                Tuning.plan(BASE, method, seeds, 4, rates, whole)
        with pytest.raises(FedAlloyError, match=r"was run with other settings .*--rounds 2 instead of 3"):
            Tuning.plan(BASE.model_copy(update={"rounds": 3}), "fedprox", [0, 1], 4, [0.05, 0.1], whole)
        assert tree(whole) == before

    @pytest.mark.parametrize("text", ["{", "[" * 100_000, "[]", "{}", '{"trials": 3}', '{"trials": [{}]}'])
    def test_a_damaged_record(self, tmp_path: Path, text: str) -> None:
        (tmp_path / "tune.json").write_text(text)
        with pytest.raises(FedAlloyError, match="is damaged; give another --out"):
            planned(tmp_path)

    @pytest.mark.parametrize(
        "change",
        [
            lambda points: points[0].update(mu=0.0123),
            lambda points: points[0].update(lr=1e300),
            lambda points: points[0].update(more=1),
            lambda points: points[0].pop("mu"),
            lambda points: points[0].update(mu="0.1"),
            lambda points: points[0].update(mu=True),
            lambda points: points[0].update(mu=[[0.1]]),
            lambda points: points[1].update(points[0]),
        ],
    )
    def test_points_that_are_none_of_this_search(
        self, whole: Path, tmp_path: Path, change: Callable[[list[dict[str, Any]]], None]
    ) -> None:
        record = strict_json((whole / "tune.json").read_text())
        change([trial["point"] for trial in record["trials"]])
        record.pop("sha256")  # as an earlier version wrote it
        (tmp_path / "tune.json").write_text(json.dumps(record))
        with pytest.raises(FedAlloyError, match="is damaged; give another --out"):
            planned(tmp_path)


BAD = [
    ("tune", "the METHOD is missing. See 'fedalloy tune --help'."),
    ("tune fedprx", "did you mean 'fedprox'?"),
    ("tune fedprox --method fedavg", "name the method without --method, such as: fedalloy tune fedprox"),
    ("tune fedprox --trials 0", "--trials must be a whole number from 1 to 1000000, not 0"),
    ("tune fedprox --seeds a", "--seeds must be whole numbers of at least 0"),
    ("tune fedprox --seeds 0 --seed 1", "give --seeds or --seed, not both"),
    ("tune fedprox --lr 0.1 --lr-values 0.1", "give --lr-values to try some, or --lr to fix one, not both"),
    (
        "tune fedprox --lr-values x",
        "--lr-values must be numbers from 1e-12 to 1000000, not 'x'; for example 0.01,0.03,0.1",
    ),
    ("tune fedprox --lr-values 0.1,", "--lr-values must be numbers from 1e-12 to 1000000"),
    ("tune fedprox --lr-values 0.1,-1", "--lr-values must be numbers from 1e-12 to 1000000"),
    ("tune fedprox --lr-values nan", "--lr-values must be numbers from 1e-12 to 1000000"),
    ("tune fedprox --validation 0", "--validation 0 would choose by the test set; leave it away"),
    ("tune fedprox --validation 0.0001", "leaves some on both sides"),
    ("tune fedavg --lr 0.1", "give --lr-values 0.01,0.03,0.1 in place of --lr"),
    ("tune fedprox --data mnist", "give --data-root DIR"),
    ("tune fedprox --models mlp,cnn", "FedProx averages whole models"),
    ("tune fedprox --out file", "cannot write file: file exists; give another --out"),
]


@pytest.mark.parametrize(("typed", "fragment"), BAD, ids=[typed for typed, _ in BAD])
def test_bad_input_ends_in_a_sentence_and_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, typed: str, fragment: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    before = tree(tmp_path)
    said = fedalloy(*typed.split())
    assert (said.code, said.out, said.err.count("\n")) == (2, "", 1)
    assert fragment in said.err
    assert tree(tmp_path) == before


def test_without_optuna_a_whole_grid_can_still_be_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(FedAlloyError, match=r'needs the library optuna: pip install "fedalloy\[tune\]"'):
        Tuning.plan(BASE, "feddyn", [0], 2, out=tmp_path / "t")
    assert not (tmp_path / "t").exists()
    base = BASE.model_copy(update={"rounds": 1})
    assert len(Tuning.plan(base, "feddyn", [0], 3, out=tmp_path / "t").run()) == 3


def test_an_interrupted_search_says_how_to_carry_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(*_: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("fedalloy.cli.console.Bar.round", stop)
    said = fedalloy("tune", "feddyn", *ONE, "--lr", "0.1", "--out", str(tmp_path / "t"))
    assert (said.code, said.out) == (130, "")
    assert said.err == "stopped: carry on with: the same command\n"

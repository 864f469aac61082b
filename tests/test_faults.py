"""Things that go wrong on the way: divergence, a full disk, damaged folders, processes that die."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from disk import disk_with
from fedalloy.core import registry
from fedalloy.core.alloy import Mechanism
from fedalloy.core.state import State
from fedalloy.core.views import Oracle, StepView
from fedalloy.data.federation import federate
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.run import resume, start, train
from terminal import INLINE, QUICK, fedalloy, history, strict_json, summary, tree

AT_ONCE = ("--lr", "1e6", "--weight-decay", "1e6", "--engine", "inline", "--clients", "3", "--rounds", "5")
IN_ROUND_TWO = ("--lr", "5", "--weight-decay", "3", "--engine", "inline", "--clients", "3", "--rounds", "6")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


class TestDivergence:
    @pytest.mark.parametrize(("flags", "round"), [(AT_ONCE, 1), (IN_ROUND_TWO, 2)], ids=["at once", "later"])
    def test_it_is_recorded_with_its_round(self, flags: tuple[str, ...], round: int) -> None:
        found = fedalloy("run", *flags, "--out", "r", "--json").json
        assert (found["status"], found["diverged_round"], found["rounds"]) == ("diverged", round, round)
        assert found["accuracy"]["final"] is None
        assert (found["accuracy"]["best"] is None) == (round == 1)
        lines = history(Path("r"))  # strict JSON: a NaN in it would fail
        assert [line.get("diverged", False) for line in lines] == [False] * (round - 1) + [True]
        assert lines[-1]["metrics"] is None
        assert "diverged" in Path("r/report.html").read_text()

    def test_it_is_said(self) -> None:
        said = fedalloy("run", *IN_ROUND_TWO, "--out", "r")
        assert (said.code, said.err) == (0, "")
        assert "diverged in round 2 of 6" in " ".join(said.out.split())
        assert "try a smaller --lr than 5" in " ".join(said.out.split())

    def test_a_diverged_run_is_finished_and_not_played_on(self) -> None:
        first = fedalloy("run", *IN_ROUND_TWO, "--out", "r", "--json").json
        assert fedalloy("run", "--resume", "r", "--json").json == first
        Path("r/summary.json").unlink()  # as if killed just before it was written
        again = fedalloy("run", "--resume", "r", "--json").json
        assert (again["status"], again["rounds"]) == ("diverged", 2)
        assert again["weights_sha256"] == first["weights_sha256"]

    def test_a_comparison_goes_on_after_it(self) -> None:
        flags = (
            "--lr",
            "1e6",
            "--weight-decay",
            "1e6",
            "--engine",
            "inline",
            "--clients",
            "3",
            "--rounds",
            "2",
            "--seeds",
            "0,1,2",
        )
        found = fedalloy("compare", "fedavg", "fedprox(mu=0.1)", *flags, "--out", "c", "--json").json
        assert [run["status"] for run in found["runs"]] == ["diverged"] * 6
        assert found["results"]["global_acc"][0]["final"] is None
        said = fedalloy("compare", "fedavg", "fedprox(mu=0.1)", *flags, "--out", "c")
        assert (said.code, said.err) == (0, "")
        assert "FedAvg †" in said.out
        assert "at least one seed diverged" in " ".join(said.out.split())
        assert "One seed" not in said.out
        assert "FedProx †" in Path("c/report.html").read_text()


@dataclass(frozen=True)
class BlowsUp(Mechanism):
    """One client's gradients are not finite in one round."""

    client: int = 1
    round: int = 2

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        here = (step.client.id, step.client.round) == (self.client, self.round)
        return oracle(step) * (torch.nan if here else 1.0)


@pytest.mark.parametrize("method", ["scaffold", "local", "fedper", "moon"])
def test_a_client_that_blows_up_once_is_back_in_the_next_round(method: str) -> None:
    """Its private state is that of the round before, so it is refused once and not for ever."""
    federation = federate("digits", clients=3, seed=0)
    settings: dict[str, Any] = {"rounds": 4, "engine": "inline", "lr": 0.05}
    result = train(federation, method=registry.make(method) + BlowsUp(), **settings)
    assert [[one["client"] for one in line["refused"]] for line in result.history] == [[], [1], [], []]
    assert "not finite" in result.history[1]["refused"][0]["why"]


class TestFullDisk:
    def test_the_checkpoint_does_not_fit(self) -> None:
        whole = fedalloy("run", *QUICK, "--out", "whole", "--json").json
        with disk_with(10_000):  # the model has 19,240 bytes
            said = fedalloy("run", *QUICK, "--out", "cut")
        assert said.code == 2
        assert "no room left to write cut/checkpoint/server.safetensors" in said.err
        assert said.err.rstrip().endswith("carry on with: fedalloy run --resume cut")
        assert not [path for path in Path("cut").rglob("*") if path.suffix == ".safetensors"]
        found = fedalloy("run", "--resume", "cut", "--json").json
        assert found["weights_sha256"] == whole["weights_sha256"]
        assert [line["round"] for line in history(Path("cut"))] == [1, 2]

    def test_the_report_does_not_fit(self) -> None:
        with disk_with(30_000):  # the model fits, a page does not
            said = fedalloy("run", *QUICK, "--out", "r")
        assert said.code == 2
        assert "no room left to write r/report.html" in said.err
        assert summary(Path("r"))["status"] == "finished"
        assert not Path("r/report.html").exists()
        assert fedalloy("report", "r").code == 0

    def test_not_even_the_config_fits(self) -> None:
        with disk_with(10):
            said = fedalloy("run", *QUICK, "--out", "r")
        assert said.code == 2
        assert "no room left" in said.err
        assert not [path for path in Path("r").rglob("*") if path.is_file()]


class TestDamage:
    """A folder that is no longer as it was written: named, and left as it is."""

    @pytest.fixture
    def run(self) -> Path:
        assert fedalloy("run", *QUICK, "--out", "r").code == 0
        return Path("r")

    @pytest.mark.parametrize("content", [b"", b"{", b"[1]", b"\xff\xfe"])
    def test_summary(self, run: Path, content: bytes) -> None:
        good = summary(run)["weights_sha256"]
        (run / "summary.json").write_bytes(content)
        before = tree(run)
        for words in (("run", "--resume", "r"), ("report", "r")):
            said = fedalloy(*words)
            assert said.code == 2
            assert "r/summary.json" in said.err
            assert tree(run) == before
        assert "delete it, then 'fedalloy run --resume r'" in fedalloy("run", "--resume", "r").err
        (run / "summary.json").unlink()
        assert fedalloy("run", "--resume", "r", "--json").json["weights_sha256"] == good

    @pytest.mark.parametrize("words", [("run", "--resume", "r"), ("report", "r")])
    def test_history(self, run: Path, words: tuple[str, ...]) -> None:
        lines = (run / "history.jsonl").read_text().splitlines()
        (run / "history.jsonl").write_text(f"{lines[0][:20]}\n{lines[1]}\n")
        said = fedalloy(*words)
        assert said.code == 2
        assert "history.jsonl" in said.err
        assert "line 1" in said.err

    @pytest.mark.parametrize(
        ("content", "fragment"),
        [
            (b"\xff\xfe\x00", "r/config.toml"),
            (b"clients = ", "r/config.toml is not valid TOML"),
            (b"clients = 0\n", "r/config.toml: clients must be a whole number from 1 to 1000000, not 0"),
            (b"colour = 3\n", "r/config.toml: unknown setting 'colour'"),
        ],
    )
    def test_config(self, run: Path, content: bytes, fragment: str) -> None:
        (run / "config.toml").write_bytes(content)
        said = fedalloy("run", "--resume", "r")
        assert said.code == 2
        assert fragment in said.err

    @pytest.mark.parametrize("content", [b"", b"garbage" * 9])
    def test_checkpoint(self, run: Path, content: bytes) -> None:
        (run / "summary.json").unlink()
        (run / "checkpoint" / "server.safetensors").write_bytes(content)
        said = fedalloy("run", "--resume", "r")
        assert said.code == 2
        assert "Traceback" not in said.err

    def test_comparison(self) -> None:
        assert fedalloy("compare", "fedavg", *QUICK, "--out", "c").code == 0
        Path("c/compare.json").write_text("{}")
        said = fedalloy("report", "c")
        assert said.code == 2
        assert "c/compare.json" in said.err


class TestProcesses:
    def test_a_client_that_takes_too_long_is_named_with_the_way_out(self) -> None:
        flags = (
            "--engine",
            "workers",
            "--workers",
            "1",
            "--clients",
            "2",
            "--epochs",
            "100000",
            "--timeout",
            "0.5",
        )
        said = fedalloy("run", *flags, "--out", "r")
        assert said.code == 2
        assert "did not answer within 0.5 s; raise --timeout" in said.err
        assert "carry on with: fedalloy run --resume r" in said.err

    def test_an_error_of_the_users_leaves_no_folder_behind_in_python(self) -> None:
        with pytest.raises(FedAlloyError, match="did you mean 'fedprox'"):
            start(Config(method="fedprx"), Path("r"))
        assert not Path("r").exists()

    def test_a_run_cut_at_every_round_ends_in_the_same_bits(self) -> None:
        """Killed after each round in turn, with checkpoints every second round only."""
        config = Config(engine="inline", clients=3, rounds=4, checkpoint_every=2, method="scaffold", lr=0.1)
        whole = start(config, Path("whole")).summary["weights_sha256"]

        class Killed(Exception):
            pass

        for cut in range(1, 4):
            place = Path(f"cut{cut}")

            def kill(record: dict[str, object], cut: int = cut) -> None:
                if record["round"] == cut:
                    raise Killed

            with pytest.raises(Killed):
                start(config, place, kill)
            result = resume(place)
            assert result.summary["weights_sha256"] == whole
            assert [line["round"] for line in history(place)] == [1, 2, 3, 4]


def test_refused_updates_are_in_the_history() -> None:
    """Every client's line: nobody is refused in an ordinary run."""
    assert fedalloy("run", *INLINE, "--rounds", "1", "--out", "r").code == 0
    (line,) = Path("r/history.jsonl").read_text().splitlines()
    assert strict_json(line)["refused"] == []

"""The command line with good input: what it prints, what it writes, and that both can be used again."""

import os
import pty
import re
import signal
import subprocess
import sys
import time
import tomllib
from pathlib import Path
from typing import Any

import pytest

import fedalloy as fa
from fedalloy.cli.app import app
from fedalloy.core import registry
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import start
from terminal import INLINE, QUICK, Said, fedalloy, history, strict_json, summary, tree

EXECUTABLE = Path(sys.executable).with_name("fedalloy")
COMMANDS = (
    "run",
    "compare",
    "tune",
    "methods",
    "explain",
    "partition",
    "report",
    "diagnose",
    "export",
    "predict",
    "preprocessing",
    "reproduce",
    "bench",
    "models",
    "preprocessing",
    "deploy",
)
WIDEST = 80
SLOW = """
import time
from torch import nn

class Slow(nn.Module):
    def forward(self, x):
        time.sleep(0.05)
        return x

def net(inputs) -> nn.Module:
    return nn.Sequential(nn.Flatten(), Slow(), nn.Linear(64, inputs.classes))
"""


@pytest.fixture(autouse=True)
def narrow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 80 columns in an empty folder."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", str(WIDEST))


def executed(*words: str, **settings: Any) -> Said:
    """The real executable, in a process of its own."""
    done = subprocess.run(
        [EXECUTABLE, *words], capture_output=True, text=True, timeout=120, check=False, **settings
    )
    return Said(done.returncode, done.stdout, done.stderr)


class TestHelp:
    def test_alone_it_shows_help(self) -> None:
        said = fedalloy()
        assert said.code == 0
        assert all(re.search(rf"^│ {command} ", said.out, re.MULTILINE) for command in COMMANDS)

    @pytest.mark.parametrize("command", [*COMMANDS[:-1], "deploy run", "deploy status"])
    def test_every_command_explains_itself(self, command: str) -> None:
        said = fedalloy(*command.split(), "--help")
        assert said.code == 0
        assert f"Usage: fedalloy {command}" in said.out
        assert "--json" in said.out
        assert all(len(line) <= WIDEST for line in said.out.splitlines())

    def test_every_flag_of_a_run_is_explained(self) -> None:
        words = " ".join(fedalloy("run", "--help").out.replace("│", " ").split())
        named = (
            "method data data-root model models clients skew participation rounds epochs batch lr momentum "
            "optimizer seed engine workers eval-every out config resume json"
        )
        for flag in named.split():
            assert re.search(rf" --{flag} ([A-Z]+ )?\w+ \w+", words), flag
        for name, field in Config.model_fields.items():
            assert field.description, name
            assert field.description in words, name

    def test_version(self) -> None:
        assert fedalloy("--version").out.strip() == fa.__version__


class TestRun:
    def test_a_run_folder_holds_everything(self) -> None:
        said = fedalloy("run", *QUICK, "--out", "r")
        assert (said.code, said.err) == (0, "")
        folder = Path("r")
        assert {path.name for path in folder.iterdir()} >= {
            "config.toml",
            "history.jsonl",
            "summary.json",
            "checkpoint",
            "report.html",
        }
        found = summary(folder)
        assert found.keys() >= {
            *("method", "seed", "rounds", "accuracy", "bytes_up", "bytes_down"),
            *("train_seconds", "samples_per_second", "weights_sha256"),
        }
        assert found["accuracy"].keys() >= {"final", "best", "mean_last_10"}
        lines = history(folder)
        assert [line["round"] for line in lines] == [1, 2]
        for line in lines:
            assert line.keys() >= {"metrics", "bytes_up", "bytes_down", "seconds", "participants", "refused"}
        assert found["bytes_up"] == sum(sum(line["bytes_up"].values()) for line in lines)
        assert found["bytes_down"] == sum(sum(line["bytes_down"].values()) for line in lines)
        assert found["accuracy"]["final"] == lines[-1]["metrics"]["global_acc"]
        assert f"{100 * found['accuracy']['final']:.2f}" in said.out
        assert "FedAvg on digits: mlp, 4 clients, dirichlet:0.1, seed 0" in said.out
        assert said.out.endswith("folder  r\nreport  r/report.html\n")
        assert all(len(line) <= WIDEST for line in said.out.splitlines())

    def test_json_is_one_object_and_nothing_else(self) -> None:
        found = fedalloy("run", *QUICK, "--json", "--out", "r").json
        assert found == {**summary(Path("r")), "folder": "r", "report": "r/report.html"}

    def test_a_new_run_has_a_folder_with_a_name_that_says_what_it_is(self) -> None:
        places = {
            fedalloy("run", *QUICK, "--method", "FedProx(mu=0.1)", "--json").json["folder"] for _ in range(2)
        }
        assert len(places) == 2
        for place in places:
            assert re.fullmatch(r"runs/fedprox-mu-0\.1-digits-seed0-\d{8}-\d{6}-\d{3}", place)

    def test_the_config_of_a_run_runs_it_again(self) -> None:
        flags = ("--method", "Fed-Prox(mu=0.1)", "--participation", "0.5", "--skew", "pathological:3")
        first = fedalloy("run", *QUICK, *flags, "--seed", "3", "--batch", "16", "--out", "a", "--json").json
        again = fedalloy("run", "--config", "a/config.toml", "--out", "b", "--json").json
        assert again["weights_sha256"] == first["weights_sha256"]
        assert Path("a/config.toml").read_text() == Path("b/config.toml").read_text()
        other = fedalloy("run", "--config", "a/config.toml", "--seed", "4", "--out", "c", "--json").json
        assert other["weights_sha256"] != first["weights_sha256"]

    def test_flags_win_over_the_file_and_names_may_have_hyphens(self) -> None:
        Path("c.toml").write_text('rounds = 1\nclients = 3\neval-every = 1\nengine = "inline"\n')
        assert fedalloy("run", "--config", "c.toml", "--rounds", "2", "--out", "r").code == 0
        stored = tomllib.loads(Path("r/config.toml").read_text())
        assert (stored["rounds"], stored["clients"]) == (2, 3)

    def test_the_config_of_a_run_is_complete(self) -> None:
        assert fedalloy("run", *QUICK, "--out", "r").code == 0
        stored = tomllib.loads(Path("r/config.toml").read_text())
        unset = {name for name, field in Config.model_fields.items() if field.default is None}
        assert stored.keys() == Config.model_fields.keys() - unset

    @pytest.mark.parametrize("typed", ["FEDAVG", "Fed-Avg", "fedavg()", "fed_avg"])
    def test_names_are_read_in_any_case_and_with_hyphens(self, typed: str) -> None:
        assert (
            fedalloy("run", *INLINE, "--rounds", "1", "--method", typed, "--json").json["method"] == "fedavg"
        )

    def test_all_engines_and_both_ways_to_start_give_the_same_bits(self) -> None:
        flags = ("--clients", "4", "--rounds", "2", "--json")
        hashes = {
            fedalloy("run", *flags, *engine).json["weights_sha256"]
            for engine in (("--engine", "inline"), ("--engine", "workers", "--workers", "3"))
        }
        federation = fa.federate("digits", clients=4)
        hashes.add(fa.train(federation, rounds=2, engine="inline").summary["weights_sha256"])
        assert len(hashes) == 1


class TestResume:
    def interrupted(self, place: Path, after: int) -> None:
        def stop(record: dict[str, Any]) -> None:
            if record["round"] == after:
                raise KeyboardInterrupt

        config = Config(clients=4, rounds=4, lr=0.1, method="scaffold", engine="inline")
        with pytest.raises(KeyboardInterrupt):
            start(config, place, stop)

    @pytest.mark.parametrize("engine", ["inline", "workers"])
    def test_a_run_carries_on_to_the_same_bits(self, engine: str) -> None:
        flags = (*INLINE, "--rounds", "4", "--method", "scaffold")
        whole = fedalloy("run", *flags, "--out", "whole", "--json").json
        self.interrupted(Path("cut"), after=2)
        assert not Path("cut/summary.json").exists()
        assert len(history(Path("cut"))) == 2
        found = fedalloy("run", "--resume", "cut", "--engine", engine, "--json").json
        assert found["weights_sha256"] == whole["weights_sha256"]
        assert found["private_sha256"] == whole["private_sha256"]
        assert found["rounds"] == 4

    def test_half_a_line_of_history_is_forgotten(self) -> None:
        self.interrupted(Path("cut"), after=2)
        with Path("cut/history.jsonl").open("a") as file:
            file.write('{"round": 3, "partici')
        assert fedalloy("run", "--resume", "cut").code == 0
        assert [line["round"] for line in history(Path("cut"))] == [1, 2, 3, 4]

    def test_a_finished_run_is_shown_again_and_not_touched(self) -> None:
        first = fedalloy("run", *QUICK, "--out", "r", "--json").json
        Path("r/report.html").unlink()
        before = tree(Path("r"))
        assert fedalloy("run", "--resume", "r", "--json").json == first
        after = tree(Path("r"))
        assert after.pop("report.html")
        assert after == before

    def test_two_processes_cannot_write_one_run(self) -> None:
        self.interrupted(Path("cut"), after=1)
        with RunFolder(Path("cut")).locked():
            said = fedalloy("run", "--resume", "cut")
        assert said.code == 2
        assert "another process is writing cut; wait for it or stop it" in said.err


class TestOtherCommands:
    def test_methods(self) -> None:
        found = fedalloy("methods", "--json").json
        assert [method["name"] for method in found["methods"]] == list(registry.RECIPES)
        prox = next(method for method in found["methods"] if method["name"] == "fedprox")
        assert (prox["title"], prox["paper"]) == ("FedProx", "Li et al., MLSys 2020")
        mu = prox["parameters"][0]
        assert (mu["name"], mu["default"], mu["range"]) == ("mu", 0.01, "a number from 0 to 1000000")
        assert "0.001, 0.01, 0.1, 0.5, 1" in mu["paper"]
        assert all(method["summary"] and method["family"] for method in found["methods"])
        assert {part["name"] for part in found["parts"]} >= {"prox", "share"}
        said = fedalloy("methods")
        assert all(f" {name} " in said.out for name in registry.RECIPES)
        assert all(len(line) <= WIDEST for line in said.out.splitlines())

    def test_models(self) -> None:
        found = {row["name"]: row for row in fedalloy("models", "--json").json["models"]}
        assert found["mlp"]["parameters"] == 64 * 64 + 64 + 64 * 10 + 10
        assert found["vit-b16"]["flops_per_sample"] > found["cnn"]["flops_per_sample"]
        assert "bilstm" not in found  # digits are no text
        said = fedalloy("models", "--model", "mlp(hidden=16)")
        assert "1,210" in said.out
        assert all(len(line) <= WIDEST for line in said.out.splitlines())

    def test_partition(self) -> None:
        flags = ("--clients", "5", "--skew", "pathological:2")
        found = fedalloy("partition", *flags, "--json").json
        assert found["clients"] == 5
        assert all(sum(count > 0 for count in row) == 2 for row in found["counts"])
        assert sum(map(sum, found["counts"])) == 1438
        assert found["picture"] is None
        assert not list(Path().iterdir())
        said = fedalloy("partition", *flags)
        for row in found["counts"]:
            assert re.search(rf" {sum(row)} .*" + r"\s+".join(str(n) if n else "·" for n in row), said.out)
        assert "…" not in said.out
        assert '<div class="plot" id="partition"' in Path("partition.html").read_text()
        assert fedalloy("partition", *flags, "--out", "p.html", "--json").json["picture"] == "p.html"
        assert Path("p.html").exists()

    def test_report_of_a_run_and_of_a_comparison(self) -> None:
        assert fedalloy("run", *QUICK, "--out", "r").code == 0
        assert fedalloy("compare", "fedavg", "local", *QUICK, "--out", "c").code == 0
        for folder, names in {"r": ["report.html"], "c": ["report.html", "table.md", "table.tex"]}.items():
            for name in names:
                Path(folder, name).unlink()
            assert fedalloy("report", folder, "--json").json == {
                "written": [f"{folder}/{name}" for name in names]
            }
            assert all(Path(folder, name).stat().st_size for name in names)

    def test_report_of_a_run_on_its_way(self) -> None:
        TestResume().interrupted(Path("cut"), after=2)
        assert fedalloy("report", "cut").code == 0
        assert "2 rounds so far" in Path("cut/report.html").read_text()


class TestExecutable:
    def test_json_through_a_pipe(self) -> None:
        found = executed("run", "--clients", "4", "--rounds", "1", "--json").json
        assert found["status"] == "finished"

    def test_an_error(self) -> None:
        said = executed("run", "--rouns", "3")
        assert (said.code, said.out) == (2, "")
        assert "Did you mean --rounds?" in said.err
        assert "Traceback" not in said.err

    def test_a_reader_that_leaves_early_is_no_error(self) -> None:
        done = subprocess.run(
            f"{EXECUTABLE} models --json | head -1",
            shell=True,
            capture_output=True,
            text=True,
            timeout=120,
            check=True,
        )
        assert (done.stdout, done.stderr) == ("{\n", "")

    def test_a_person_sees_the_clients_answer_and_may_stop(self) -> None:
        """In a terminal: the bar moves within a round; Ctrl-C leaves a run that carries on."""
        Path("slow.py").write_text(SLOW)  # on any machine a client takes longer than two drawings of the bar
        main, side = pty.openpty()
        words = (
            "run",
            "--rounds",
            "1000",
            "--clients",
            "20",
            "--skew",
            "iid",
            "--model",
            "slow:net",
            "--out",
            "r",
        )
        process = subprocess.Popen(
            [EXECUTABLE, *words], stdout=subprocess.PIPE, stderr=side, env={**os.environ, "TERM": "xterm"}
        )
        os.close(side)
        seen = b""
        deadline = time.monotonic() + 240
        moving = re.compile(rb"round [2-9], \d+ of 20 clients")
        while not moving.search(seen) and time.monotonic() < deadline:
            seen += os.read(main, 1 << 16)
        process.send_signal(signal.SIGINT)
        out, _ = process.communicate(timeout=60)
        while chunk := _read(main):
            seen += chunk
        os.close(main)
        assert moving.search(seen)
        assert (process.returncode, out) == (130, b"")
        assert b"fedalloy run --resume r" in seen
        assert len(history(Path("r"))) >= 1


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 1 << 16)
    except OSError:  # the other side is closed
        return b""


def test_the_bar_is_drawn_for_a_terminal_only() -> None:
    said = fedalloy("run", *INLINE, "--rounds", "1", "--out", "r")
    assert "\r" not in said.out + said.err
    assert said.err == ""


def test_every_command_is_listed_here() -> None:
    assert {name for name in app if not name.startswith("-")} == set(COMMANDS)


def test_strict_json_is_strict() -> None:
    with pytest.raises(AssertionError, match="NaN"):
        strict_json('{"x": NaN}')

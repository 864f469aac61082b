"""A run that is killed at any moment, and resumed, ends with the bits of a run that was left alone."""

import itertools
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from fedalloy.cli.app import main
from fedalloy.experiment.config import Config
from fedalloy.experiment.run import Result, resume, start

pytestmark = [pytest.mark.xdist_group("kill"), pytest.mark.timeout(900)]

FEDALLOY = str(Path(sys.executable).with_name("fedalloy"))
ROUNDS = 40
SETTINGS = (
    "--method scaffold --model mlp(hidden=8) --clients 8 --skew dirichlet:0.3 --participation 0.5 --batch 16"
    f" --rounds {ROUNDS} --eval-every 5 --engine workers --workers 2"
).split()
PATIENCE = 120.0  # seconds until a test gives up on a process
FORKS = multiprocessing.get_context("forkserver")
FORKS.set_forkserver_preload(["fedalloy.cli.app"])


def until(true: Callable[[], Any], what: str) -> None:
    limit = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < limit, f"waited in vain until {what}"
        time.sleep(0.002)


def lines(folder: Path) -> int:
    """Rounds on record."""
    with suppress(FileNotFoundError):
        return (folder / "history.jsonl").read_bytes().count(b"\n")
    return 0


def reached(folder: Path, rounds: int) -> bool:
    return lines(folder) >= rounds


def running(pid: int) -> bool:
    """A zombie that nobody has reaped yet does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def words(folder: Path, *more: str) -> list[str]:
    """What to type for a new run, or for the rest of one."""
    known = (folder / "config.toml").exists()
    return [
        "run",
        *(["--resume", str(folder)] if known else [*SETTINGS, *more, "--out", str(folder)]),
        "--json",
    ]


def children(pid: int) -> list[int]:
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        with suppress(FileNotFoundError, ProcessLookupError):
            found += [int(pid) for pid in path.read_text().split()]
    return found


class Play:
    """`fedalloy run` in a process of its own, which has imported everything already: that takes longer than the run."""

    def __init__(self, folder: Path, *more: str) -> None:
        self.folder = folder
        self.process = FORKS.Process(target=main, args=(words(folder, *more),))
        self.process.start()

    def reaches(self, rounds: int) -> None:
        until(lambda: lines(self.folder) >= rounds or not self.process.is_alive(), f"round {rounds} is over")

    def starts(self, seconds: float) -> None:
        """Wait, but not beyond the first round."""
        done, limit = lines(self.folder), time.monotonic() + seconds
        while lines(self.folder) <= done and time.monotonic() < limit:
            time.sleep(0.002)

    def kill(self) -> bool:
        """SIGKILL; whether it was still at work. Its workers go by themselves."""
        workers = children(self.process.pid or 0)
        self.process.kill()
        self.process.join(PATIENCE)
        until(lambda: not any(running(pid) for pid in workers), "the workers are gone")
        return self.process.exitcode == -signal.SIGKILL

    def finish(self) -> dict[str, Any]:
        """The bits it ends with when it is left alone."""
        self.process.join(PATIENCE)
        assert self.process.exitcode == 0
        return bits(self.folder)


def bits(folder: Path) -> dict[str, Any]:
    summary = json.loads((folder / "summary.json").read_text())
    return {
        "weights": summary["weights_sha256"],
        "private": summary["private_sha256"],
        "history": history(folder),
    }


def history(folder: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if key != "seconds"} for line in found]


@dataclass(frozen=True)
class Whole:
    """The run that was left alone, and its pace."""

    bits: dict[str, Any]
    startup: float  # seconds until the first round was over
    round: float  # seconds for each of the others


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Whole:
    folder = tmp_path_factory.mktemp("whole") / "run"
    began = time.monotonic()
    play = Play(folder)
    play.reaches(1)
    first = time.monotonic()
    play.reaches(ROUNDS)
    last = time.monotonic()
    found = play.finish()
    assert found["private"]
    assert len(found["history"]) == ROUNDS
    return Whole(found, first - began, (last - first) / (ROUNDS - 1))


# Each chain is one run, killed five times and then left alone. A number is how many rounds a process may finish before
# it is killed somewhere in the next one; 0 means somewhere in its start.
CHAINS = {
    "while it starts": [0, 0, 0, 0, 3],
    "at once": [1, 1, 1, 1, 1],
    "here and there": [0, 7, 2, 5, 9],
    "between rare checkpoints": [4, 0, 9, 13, 6],
}


@pytest.mark.parametrize("chain", CHAINS)
def test_killed_and_resumed_is_never_killed(chain: str, whole: Whole, tmp_path: Path) -> None:
    dice, folder = random.Random(chain), tmp_path / "run"
    rare = ["--checkpoint-every", "7"] if "rare" in chain else []
    killed = 0
    for rounds in CHAINS[chain]:
        done = lines(folder)
        play = Play(folder, *rare)
        if rounds:
            play.reaches(min(done + rounds, ROUNDS - 1))
            time.sleep(dice.uniform(0, whole.round))
        else:
            play.starts(dice.uniform(0, whole.startup))
        killed += play.kill()
    assert killed == len(CHAINS[chain])
    assert Play(folder, *rare).finish() == whole.bits
    assert not [path for path in folder.rglob(".*") if path.name != ".lock"]


def test_ctrl_c(whole: Whole, tmp_path: Path) -> None:
    """Exit code 130, the command to carry on with, and nobody left; from a terminal every process hears it."""
    folder = tmp_path / "run"
    for rounds, hit in {2: os.killpg, 5: os.kill}.items():
        process = subprocess.Popen(
            [FEDALLOY, *words(folder)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        until(partial(reached, folder, rounds), f"round {rounds} is over")
        workers = children(process.pid)
        assert len(workers) == 2
        hit(process.pid, signal.SIGINT)
        out, error = process.communicate(timeout=PATIENCE)
        assert process.returncode == 130, error
        assert f"fedalloy run --resume {folder}" in error
        assert "Traceback" not in error
        assert out == ""
        assert not any(running(pid) for pid in workers)
    assert Play(folder).finish() == whole.bits


# The moments that chance seldom hits: between any two changes to the disk.

SMALL = Config.of(
    {
        "method": "scaffold",
        "model": "mlp(hidden=4)",
        "clients": 5,
        "skew": "dirichlet:0.5",
        "participation": 0.4,
        "rounds": 3,
        "batch": 256,
        "checkpoint_every": 2,
        "engine": "inline",
    }
)


def dies_at(number: int, folder: Path) -> bool:
    """Play in a child process that ends, without any cleaning up, before its n-th change to the disk."""
    child = os.fork()
    if child == 0:
        left = itertools.count(number, -1)

        def fatal(change: Callable[..., Any]) -> Callable[..., Any]:
            def changed(*given: Any, **named: Any) -> Any:
                if next(left) == 0:
                    os._exit(9)
                return change(*given, **named)

            return changed

        for owner, name in ((os, "fsync"), (Path, "replace"), (Path, "unlink"), (Path, "mkdir")):
            setattr(owner, name, fatal(getattr(owner, name)))
        try:
            start(SMALL, folder)
        finally:
            os._exit(0)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status) == 9


def test_killed_between_any_two_changes_to_the_disk(tmp_path: Path) -> None:
    def told(result: Result) -> tuple[Any, ...]:
        kept = [{key: value for key, value in line.items() if key != "seconds"} for line in result.history]
        return result.summary["weights_sha256"], result.summary["private_sha256"], kept

    expected = told(start(SMALL, tmp_path / "whole"))
    for number in itertools.count():
        folder = tmp_path / str(number)
        if not dies_at(number, folder):
            break
        again = resume(folder) if (folder / "config.toml").exists() else start(SMALL, folder)
        assert told(again) == expected, f"killed before change {number}"
        assert not [path for path in folder.rglob(".*") if path.name != ".lock"]
        shutil.rmtree(folder)
    assert number > 30

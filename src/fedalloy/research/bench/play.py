"""The benches, run: every row is a process of its own, so that start-up and memory are those of a user."""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from fedalloy.core import registry
from fedalloy.errors import FedAlloyError, unknown
from fedalloy.research.bench.cases import CASES, FEW, MANY, Case

ROWS = ("bare", "bare_channels_last", "fp32", "bf16")
NAMES = (*CASES, "N", "methods")
WATCH = (
    0.5  # seconds between two looks at the memory, each of which walks all pages of the processes it measures
)
Row = dict[str, Any]
OnRow = Callable[[str], None]


def chosen(only: str) -> list[str]:
    """The benches that are asked for; all of them by default.

    >>> chosen("t, A")
    ['T', 'A']
    """
    known = {name.lower(): name for name in NAMES}
    asked = [word.strip().lower() for word in only.split(",") if word.strip()] or list(known)
    for word in asked:
        if word not in known:
            raise unknown("bench", word, NAMES)
    return [known[word] for word in asked]


def play(
    names: Iterable[str], rounds: int, repeats: int, data_root: Path | None, on_row: OnRow
) -> dict[str, Any]:
    """Every bench by name; ratios are to the bare loop of the same bench in this run."""
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        room = Path(folder)
        for name in names:
            if name == "methods":
                from fedalloy.research.bench.steps import step_costs

                on_row("methods")
                found[name] = step_costs(list(registry.RECIPES), repeats=repeats)
            elif name == "N":
                found[name] = _many(room, rounds, on_row)
            else:
                case = CASES[name].prepare(room, data_root)
                runs = [
                    _measured(name, row, case, rounds, room, on_row) for _ in range(repeats) for row in ROWS
                ]
                found[name] = _beside([run for run in runs if run])
    return found


def _beside(runs: list[Row]) -> Row:
    best: dict[str, Row] = {}
    for run in runs:
        if run["row"] not in best or run["samples_per_second"] > best[run["row"]]["samples_per_second"]:
            best[run["row"]] = run
    speed = {row: run["samples_per_second"] for row, run in best.items()}
    return {
        "says": runs[0]["says"],
        "ratio_fp32": speed["fp32"] / speed["bare"],
        "ratio_fp32_channels_last": speed["fp32"] / speed["bare_channels_last"],
        "ratio_bf16": speed["bf16"] / speed["bare"],
        "rows": best,
    }


def _many(room: Path, rounds: int, on_row: OnRow) -> Row:
    many, few = (
        _measured("N", "fp32", case.prepare(room, None), 4 * rounds, room, on_row) for case in (MANY, FEW)
    )
    return {
        "says": MANY.says,
        "seconds_to_few": many["seconds_per_round"] / few["seconds_per_round"],
        "memory_to_few": many["peak_mib"] / few["peak_mib"],
        "rows": {"many": many, "few": few},
    }


def _measured(name: str, row: str, case: Case, rounds: int, room: Path, on_row: OnRow) -> Row:
    """Run one row in a process of its own and watch the memory of all its processes."""
    on_row(f"{name} {row}")
    task = json.dumps(
        {"row": row, "case": vars(case), "rounds": rounds, "room": str(room), "began": time.time()}
    )
    child = subprocess.Popen(
        [sys.executable, "-m", "fedalloy.research.bench.play", task],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    peak = 0
    while child.poll() is None:
        peak = max(peak, sum(_memory(pid) for pid in _family(child.pid)))
        time.sleep(WATCH)
    said, complaint = child.communicate()
    if child.returncode:
        raise FedAlloyError(f"bench {name} {row} failed: {complaint.strip().splitlines()[-1]}")
    return {"row": row, "says": case.says, **json.loads(said.splitlines()[-1]), "peak_mib": peak / 2**20}


def _ours(case: Case, rounds: int, room: Path, precision: str, began: float) -> Row:
    """FedAlloy, everything on; the quickest round but the first counts."""
    from fedalloy.experiment.run import start

    out = room / f"run-{time.time_ns()}"
    ends: list[float] = []
    result = start(case.config(room, rounds, precision), out, lambda record: ends.append(time.time()))
    shutil.rmtree(out)
    first, *others = result.history
    best = max(others, key=lambda line: line["samples"] / line["seconds"]["train"])
    seconds = best["seconds"]
    return {
        "samples_per_second": best["samples"] / seconds["train"],
        "seconds_per_round": sum(seconds.values()),
        "seconds": seconds,
        "overhead": (seconds["aggregate"] + seconds["other"]) / (sum(seconds.values()) - seconds["evaluate"]),
        "start_up": ends[0] - sum(first["seconds"].values()) - began,
        "accuracy": result.accuracy,
    }


def _family(pid: int) -> list[int]:
    """A process and everything it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in _family(int(child)))]


def _memory(pid: int) -> int:
    """Bytes of a process, where a page that n processes share counts one n-th."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


def _main(text: str) -> None:
    """One row, in this process."""
    task = json.loads(text)
    case = Case(**{**task["case"], "shape": tuple(task["case"]["shape"])})
    room, rounds, row = Path(task["room"]), task["rounds"], task["row"]
    if row.startswith("bare"):
        from fedalloy.research.bench import bare

        print(json.dumps(bare.play(case, room, rounds, channels_last=row == "bare_channels_last")))
    else:
        print(json.dumps(_ours(case, rounds, room, row, task["began"])))


if __name__ == "__main__":
    _main(sys.argv[1])

"""Time a round of FedAvg and its parts, beside a bare PyTorch loop that takes the same steps.

    python benchmarks/rounds.py [--only mlp|cnn] [--rounds N] [--repeats N] [--out FILE]

Every row is a process of its own, in turn: the inline engine beside a bare loop in one process, two workers
beside a bare loop in two; all have one thread. Seconds are those of the quickest round but the first, which other work
on the machine disturbs least. Only `of bare`, the speed as a multiple of the bare loop's in the same run and without
evaluation, is worth quoting: the machine decides the rest.
"""

import argparse
import json
import multiprocessing
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from operator import itemgetter
from pathlib import Path
from typing import Any

BEGAN = time.time()
CASES = {"mlp": ("digits", "mlp"), "cnn": ("noise", "cnn")}  # data, model
ROWS = ("bare-1", "inline", "bare-2", "workers")
CLIENTS, SKEW, BATCH, LR = 20, "dirichlet:0.1", 64, 0.01
TRAIN, TEST = 6000, 2000  # random 28 x 28 images
COLUMNS = ("samples/s", "round", "train", "evaluate", "aggregate", "other", "start-up", "peak MiB", "of bare")
Row = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description="Time a round of FedAvg and its parts.")
    parser.add_argument("--only", choices=list(CASES), help="one case instead of all")
    parser.add_argument("--rounds", type=int, default=6, help="rounds in each row, at least 2")
    parser.add_argument("--repeats", type=int, default=2, help="times that all rows are run; the best counts")
    parser.add_argument("--out", type=Path, help="write everything as JSON to this file")
    parser.add_argument(
        "--row", choices=ROWS, help=argparse.SUPPRESS
    )  # these two are for the processes below
    parser.add_argument("--room", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.rounds < 2:
        parser.error("--rounds must be 2 or more: the first round is not counted")
    if asked.row:
        play = bare if asked.row.startswith("bare") else ours
        print(json.dumps(play(asked.row, asked.only, asked.rounds, asked.room)))
        return
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as room:
        make_images(Path(room))
        for case in CASES if asked.only is None else [asked.only]:
            runs = [measured(row, case, asked.rounds, room) for _ in range(asked.repeats) for row in ROWS]
            found = {
                row: max((r for r in runs if r["row"] == row), key=itemgetter("samples/s")) for row in ROWS
            }
            for engine, loop in (("inline", "bare-1"), ("workers", "bare-2")):
                found[engine]["of bare"] = found[engine]["samples/s"] / found[loop]["samples/s"]
            rows += found.values()
    print(f"{'case':5}{'row':9}" + "".join(f"{column:>11}" for column in COLUMNS))
    for row in rows:
        print(
            f"{row['case']:5}{row['row']:9}" + "".join(f"{cell(row.get(column)):>11}" for column in COLUMNS)
        )
    if asked.out:
        asked.out.write_text(json.dumps(rows, indent=2) + "\n")


def cell(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.3f}"


def make_images(room: Path) -> None:
    import numpy as np

    draw = np.random.default_rng(0)
    x = draw.integers(0, 256, (TRAIN + TEST, 28, 28), dtype=np.uint8)
    y = draw.permutation(np.arange(TRAIN + TEST) % 10)
    np.savez(room / "noise.npz", x_train=x[:TRAIN], y_train=y[:TRAIN], x_test=x[TRAIN:], y_test=y[TRAIN:])


def measured(row: str, case: str, rounds: int, room: str) -> Row:
    """Run one row in a process of its own and watch the memory of all its processes."""
    print(f"{case}: {row} ...", file=sys.stderr)
    flags = ["--row", row, "--only", case, "--rounds", str(rounds), "--room", room]
    child = subprocess.Popen([sys.executable, __file__, *flags], stdout=subprocess.PIPE, text=True)
    peak = 0
    while child.poll() is None:
        peak = max(peak, sum(memory(pid) for pid in family(child.pid)))
        time.sleep(0.1)
    said = child.stdout.read() if child.stdout else ""
    if child.returncode:
        sys.exit(f"{case}: {row} failed")
    return {"case": case, "row": row, **json.loads(said), "peak MiB": peak / 2**20}


def ours(row: str, case: str, rounds: int, room: Path) -> Row:
    """FedAlloy with the engine that the row names."""
    from fedalloy.config import Config
    from fedalloy.run import start

    data, model = CASES[case]
    values = {
        "data": data,
        "data_root": str(room),
        "model": model,
        "clients": CLIENTS,
        "skew": SKEW,
        "batch": BATCH,
    }
    config = Config.of({**values, "lr": LR, "rounds": rounds, "engine": row, "workers": 2})
    ends: list[float] = []
    result = start(config, room / f"{case}-{row}-{time.time_ns()}", lambda record: ends.append(time.time()))
    first, *others = (line["seconds"] for line in result.history)
    best = min(others, key=lambda seconds: sum(seconds.values()) - seconds["evaluate"])
    whole = sum(best.values())
    speed = result.history[0]["samples"] / (whole - best["evaluate"])
    return {"samples/s": speed, "round": whole, **best, "start-up": ends[0] - sum(first.values()) - BEGAN}


def bare(row: str, case: str, rounds: int, room: Path) -> Row:
    """What one would write by hand: ordinary modules and optimisers, an average of state dicts, no evaluation."""
    import torch

    import fedalloy as fa

    torch.set_num_threads(1)
    fed = fa.federate(CASES[case][0], CLIENTS, SKEW, data_root=room)
    shares: list[list[int]] = [[] for _ in range(int(row[-1]))]
    for client in sorted(fed.eligible, key=lambda client: -int(fed.sizes[client])):
        min(shares, key=lambda share: int(fed.sizes[share].sum())).append(client)  # to whoever has least
    context = multiprocessing.get_context("fork")
    barrier, ticks = context.Barrier(len(shares)), context.Queue()
    team = [context.Process(target=loop, args=(case, fed, s, rounds, barrier, ticks)) for s in shares]
    for process in team:
        process.start()
    seconds: list[list[float]] = [ticks.get() for _ in team]
    best = min(max(together) for together in zip(*seconds, strict=True))
    return {"samples/s": int(fed.sizes.sum()) / best, "round": best}


def loop(case: str, fed: Any, clients: Iterable[int], rounds: int, barrier: Any, ticks: Any) -> None:
    import torch
    from torch.nn.functional import cross_entropy

    from fedalloy import nets

    torch.manual_seed(0)
    net = nets.build(CASES[case][1], fed.dataset.inputs)
    start = {name: value.clone() for name, value in net.state_dict().items()}
    seconds = []
    for _ in range(rounds):
        barrier.wait()
        began = time.perf_counter()
        mean = {name: torch.zeros_like(value) for name, value in start.items()}
        for client in clients:
            own = fed.client(client)
            net.load_state_dict(start)
            optimiser = torch.optim.SGD(net.parameters(), lr=LR)
            for index in torch.split(torch.randperm(own.samples), BATCH):
                optimiser.zero_grad()
                loss: Any = cross_entropy(net(own.prepare(own.x[index], None)).logits, own.y[index])
                loss.backward()
                optimiser.step()
            for name, value in net.state_dict().items():
                mean[name] += value * (own.samples / fed.info.samples)
        barrier.wait()
        seconds.append(time.perf_counter() - began)
    ticks.put(seconds[1:])


def family(pid: int) -> list[int]:
    """A process and everything it started."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    except OSError:
        return []
    return [pid, *(one for child in children for one in family(int(child)))]


def memory(pid: int) -> int:
    """Bytes of a process, where a page that n processes share counts one n-th."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((1024 * int(line.split()[1]) for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    main()

"""What Flower adds to a round: three sites and a tiny model over loopback, with Flower's processes and with ours.

python benchmarks/flower_rounds.py
"""

import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from fedalloy.deploy.deploy import Deployment, environment, free_port, start, stop, tool
from fedalloy.deploy.terms import Terms
from fedalloy.experiment.config import Config

SITES, ROUNDS = 3, 5

Site = Callable[[Deployment, int], "subprocess.Popen[bytes]"]


def plain(made: Deployment, client: int) -> "subprocess.Popen[bytes]":
    """A SuperNode as Flower starts it: a new process, and a new import of torch, for every message."""
    bundle = made.folder / "sites" / f"site-{client}"
    state = bundle / "state"
    state.mkdir()
    command = [
        tool("flower-supernode"),
        *("--superlink", made.address, "--root-certificates", str(bundle / "ca.pem")),
        *("--auth-supernode-private-key", str(bundle / "key"), "--port", str(free_port())),
        *("--node-config", f"client={client} state={json.dumps(str(state))}"),
    ]
    return start(command, environment(state / ".flwr"), state)


def ours(made: Deployment, client: int) -> "subprocess.Popen[bytes]":
    """`fedalloy deploy site`."""
    bundle = made.folder / "sites" / f"site-{client}"
    return start(
        [sys.executable, "-m", "fedalloy", "deploy", "site", str(bundle)], made.environment, made.folder
    )


def seconds_per_round(site: Site, room: Path) -> list[float]:
    config = Config(clients=SITES, rounds=ROUNDS)
    made = Deployment.create(room, config, Terms(sites="dealt"), ["127.0.0.1"], free_port())
    running = [made.start_server("127.0.0.1")]
    try:
        made.register_sites(running[0])
        running += [site(made, client) for client in range(SITES)]
        made.start_run()
        summary = made.run_folder / "summary.json"
        while not summary.exists():
            time.sleep(0.5)
    finally:
        for process in reversed(running):
            stop(process)
    lines = (made.run_folder / "history.jsonl").read_text().splitlines()
    return [sum(json.loads(line)["seconds"].values()) for line in lines]


def main() -> None:
    with tempfile.TemporaryDirectory() as room:
        for name, site in (("Flower's processes", plain), ("deploy site", ours)):
            found = seconds_per_round(site, Path(room) / name.partition(" ")[0])
            listed = ", ".join(f"{one:.1f}" for one in found)
            print(f"{name}: {statistics.mean(found):.1f} s a round ({listed})", flush=True)


if __name__ == "__main__":
    main()

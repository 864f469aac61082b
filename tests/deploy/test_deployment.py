"""A real federation over loopback: a SuperLink and three SuperNodes in processes of their own, with TLS and keys."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedalloy.deploy.credentials import make_site_key, renew_authority, renew_certificate
from fedalloy.deploy.deploy import Deployment, dies_with_us, free_port, site_process
from fedalloy.deploy.terms import Terms
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import start

pytestmark = [pytest.mark.xdist_group("deployment"), pytest.mark.timeout(600)]
LONG = pytest.mark.skipif(
    not os.environ.get("FEDALLOY_DEPLOYMENT"), reason="minutes of waiting for processes: make deployment"
)

SETTINGS: dict[str, Any] = {
    "clients": 3,
    "rounds": 2,
    "model": "mlp(hidden=8, norm=batch)",
    "batch": 64,
    "lr": 0.1,
}
SITES = 3
PATIENCE = 90.0  # seconds for anything to happen


class Federation:
    """A deployment with its processes, each of which may be killed and started again."""

    def __init__(self, folder: Path, **terms: Any) -> None:
        config = Config.of(SETTINGS)
        agreed = Terms(sites="dealt", join_limit=120.0, **terms)
        self.made = Deployment.create(folder, config, agreed, ["127.0.0.1"], free_port())
        self.folder = folder
        self.server: subprocess.Popen[bytes] | None = None
        self.sites: dict[int, subprocess.Popen[bytes]] = {}

    def fedalloy(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "fedalloy", *words]

    def begin(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self.folder / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                self.fedalloy(*words),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                preexec_fn=dies_with_us(),
            )

    def start_server(self) -> None:
        mark = self.log("server").count("ready:")
        self.server = self.begin("server", "deploy", "server", str(self.folder), "--bind", "127.0.0.1")
        until(lambda: self.log("server").count("ready:") > mark, "the server to be ready")

    def start_site(self, client: int) -> None:
        bundle = self.folder / "sites" / f"site-{client}"
        self.sites[client] = self.begin(f"site-{client}", "deploy", "site", str(bundle))

    def kill_site(self, client: int) -> None:
        kill(self.sites.pop(client))

    def kill_server(self) -> None:
        assert self.server
        kill(self.server)

    def log(self, name: str) -> str:
        file = self.folder / f"{name}.log"
        return file.read_text(errors="replace") if file.exists() else ""

    def play(self, folder: str, *overrides: str) -> dict[str, Any]:
        """A run to its end, without the processes of a command that waits for it; its summary."""
        self.made.start_run([" ".join([f'run-folder="{folder}"', *overrides])])
        place = RunFolder(self.folder / "server" / folder)
        until(lambda: place.summary() is not None, f"the run {folder}", 300)
        return place.summary() or {}

    def run(self, folder: str, *overrides: str) -> dict[str, Any]:
        """The same by the command that users type."""
        done = subprocess.run(
            self.fedalloy(*self.words(folder, *overrides), "--json"),
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )
        assert done.returncode == 0, done.stderr + self.log("server")[-3000:]
        found: dict[str, Any] = json.loads(done.stdout)
        return found

    def words(self, folder: str, *overrides: str) -> list[str]:
        settings = " ".join([f'run-folder="{folder}"', *overrides])
        return ["deploy", "run", str(self.folder), "--run-config", settings]

    def history(self, folder: str) -> list[dict[str, Any]]:
        file = self.folder / "server" / folder / "history.jsonl"
        if not file.exists():
            return []
        return [json.loads(line) for line in file.read_text().splitlines()]

    def missing(self, folder: str) -> list[list[int]]:
        """By round, the clients without a usable reply."""
        return [[one["client"] for one in line["refused"]] for line in self.history(folder)]

    def end(self) -> None:
        for process in [*self.sites.values(), *([self.server] if self.server else [])]:
            process.send_signal(signal.SIGTERM)
        for process in [*self.sites.values(), *([self.server] if self.server else [])]:
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                kill(process)


def kill(process: subprocess.Popen[bytes]) -> None:
    """Everything that a command started, at once and without a word."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def until(happened: Callable[[], bool], what: str, limit: float = PATIENCE) -> None:
    deadline = time.monotonic() + limit
    while not happened():
        assert time.monotonic() < deadline, f"waited {limit:g} s for {what}"
        time.sleep(0.1)


def inline(room: Path, **settings: Any) -> str:
    """What the same config gives on the inline engine."""
    config = Config.of({**SETTINGS, "engine": "inline", **settings})
    return str(start(config, room).summary["weights_sha256"])


@pytest.fixture(scope="module")
def federation(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Federation]:
    before = os.umask(0)  # the laxest there is
    found = Federation(tmp_path_factory.mktemp("federation") / "made", round_limit=60.0)
    try:
        found.start_server()
        for client in range(SITES):
            found.start_site(client)
        yield found
    finally:
        found.end()
        os.umask(before)


@pytest.mark.parametrize(
    "method",
    [
        *("fedavg", "scaffold", "fedblade", "ssf", "fedsce(p=1, mu=0.1)", "fedpac"),
        *(pytest.param(method, marks=LONG) for method in ("feddw(mu=1)", "fedrda")),
    ],
)
def test_same_bits_as_in_a_simulation(federation: Federation, tmp_path: Path, method: str) -> None:
    summary = federation.play(method.partition("(")[0], f'method="{method}"')
    assert summary["weights_sha256"] == inline(tmp_path / "inline", method=method)


def test_nothing_of_a_run_is_readable_by_others(federation: Federation) -> None:
    """Server and sites were started, and ran, under umask 000: databases, logs, vaults, secrets, checkpoints."""
    loose = []
    for name in ("credentials", "sites", "server", ".flwr"):
        for path in [federation.folder / name, *(federation.folder / name).rglob("*")]:
            if path.lstat().st_mode & 0o077 and not path.is_symlink():
                loose.append(str(path.relative_to(federation.folder)))
    assert loose == []
    assert (federation.folder / "sites" / "site-0" / "state" / "audit.jsonl").exists()
    assert list((federation.folder / "server").glob("*/history.jsonl"))


@LONG
def test_a_masked_run(federation: Federation, tmp_path: Path) -> None:
    """Through Flower's SecAgg+ the server sees sums alone, rounded to its steps."""
    summary = federation.play("masked", "masked=true", "rounds=1", 'model="mlp(hidden=8)"')
    alone = start(Config.of({**SETTINGS, "rounds": 1, "model": "mlp(hidden=8)"}), tmp_path / "inline")
    assert summary["weights_sha256"] != alone.summary["weights_sha256"]
    masked = federation.folder / "server" / "masked"
    (_, found), (_, wanted) = (RunFolder(path).checkpoint() for path in (masked, alone.folder))
    for name, value in wanted.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=2e-3)


@LONG
def test_a_private_run(federation: Federation) -> None:
    """Noise is drawn from a secret of the site's, so that two runs differ; both have spent the same."""
    method = 'method="fedavg+private(clip=1, noise=2)"'
    runs = [federation.play(f"private-{one}", method, "rounds=1", 'model="mlp(hidden=8)"') for one in "ab"]
    assert runs[0]["weights_sha256"] != runs[1]["weights_sha256"]
    for one in "ab":
        (line,) = federation.history(f"private-{one}")
        assert line["epsilon"] == pytest.approx(2.17, abs=0.01)
    for client in range(SITES):
        secrets = federation.folder / "sites" / f"site-{client}" / "state" / "secrets"
        assert len({path.read_bytes() for path in secrets.iterdir()}) == 2


@LONG
def test_a_site_is_killed_and_comes_back(federation: Federation) -> None:
    """Its round ends without it in time, the history names it, and it goes on from the state on its own disk."""
    limit = 15.0
    words = federation.words("killed", 'method="scaffold"', "rounds=40", f"round-limit={limit}")
    running = federation.begin("run", *words)
    try:
        until(lambda: len(federation.history("killed")) == 1, "round 1")
        federation.kill_site(1)
        until(lambda: len(federation.history("killed")) == 2, "round 2", 3 * limit)  # Flower: a minute
        lost = federation.history("killed")[1]["refused"]
        assert {"client": 1, "why": "did not answer within 15 s"} in lost
        federation.start_site(1)  # Flower lets it in again once it has noticed that it was gone
        until(lambda: 1 not in federation.missing("killed")[-1], "the site to be back", 150)
        back = len(federation.history("killed"))
        state = federation.folder / "sites" / "site-1" / "state"
        (kept,) = {path.parent for path in state.glob(f"*/000001/{back:06d}.safetensors")}
        assert not (kept / "000002.safetensors").exists()
        stopped = subprocess.run(
            federation.fedalloy("deploy", "stop", str(federation.folder)),
            capture_output=True,
            text=True,
            check=False,
        )
        assert stopped.returncode == 0, stopped.stderr
        assert running.wait(60) != 0
        assert "stopped" in federation.log("run")
    finally:
        if running.poll() is None:
            kill(running)
        if federation.sites.keys() != set(range(SITES)):
            federation.start_site(1)


@LONG
def test_the_server_is_killed_and_carries_on(federation: Federation, tmp_path: Path) -> None:
    """The SuperLink and the training on it die at once; started again, the run ends with the bits of one never cut."""
    words = federation.words("cut", 'method="scaffold"', "rounds=3")
    running = federation.begin("cut", *words, "--detach")
    assert running.wait(60) == 0, federation.log("cut")
    until(lambda: len(federation.history("cut")) >= 1, "round 1")
    federation.kill_server()
    assert not (federation.folder / "server" / "cut" / "summary.json").exists()
    federation.start_server()
    summary = federation.run("cut", 'method="scaffold"', "rounds=3")
    assert summary["weights_sha256"] == inline(tmp_path / "inline", method="scaffold", rounds=3)
    assert summary["rounds"] == 3


@LONG
def test_the_authority_is_replaced_while_sites_live(federation: Federation, tmp_path: Path) -> None:
    """They hold both before the server shows a certificate of the new one, and are back without a hand on them."""
    place = federation.folder / "credentials"
    renew_authority(place, federation.folder / "sites")
    renew_certificate(place)
    until(lambda: "the new certificate is in use" in federation.log("server"), "the new certificate")
    federation.kill_server()  # all have to connect anew
    federation.start_server()
    summary = federation.play("authority", 'method="scaffold"')
    assert summary["weights_sha256"] == inline(tmp_path / "inline", method="scaffold")


@LONG
def test_too_few_sites_are_an_error_in_time(federation: Federation) -> None:
    words = federation.words("lonely", "clients=4", "join-limit=8.0")
    done = subprocess.run(
        federation.fedalloy(*words), capture_output=True, text=True, timeout=90, check=False
    )
    assert done.returncode != 0
    assert "3 of 4 sites joined within 8 s; missing: client 3" in done.stderr.replace("\n", " ")


@pytest.mark.parametrize("who", ["a stranger's key", "no key", "no TLS"])
def test_strangers_are_refused(federation: Federation, tmp_path: Path, who: str) -> None:
    bundle = federation.folder / "sites" / "site-0"
    stranger = tmp_path / "stranger"
    make_site_key(stranger)
    (stranger / "ca.pem").write_bytes((bundle / "ca.pem").read_bytes())
    before = federation.log("server").count("Created node_id")
    with site_process(
        stranger,
        federation.made.address,
        {"client": 0},
        tmp_path / "state",
        keyed=who == "a stranger's key",
        trusted=who != "no TLS",
        extra=("--max-retries", "1"),
    ) as (process, _, _):
        code = process.wait(60)
    # Flower's SuperNode interrupts itself when its key is refused, and calls that a success: `deploy site` does not
    assert (code == 0) == (who == "a stranger's key")
    assert federation.log("server").count("Created node_id") == before

"""The Ray engine: the bits of inline for every method; actors that die, hang or fail; a cluster; nothing is left."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch
from settings import ROWS, Row
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.alloy import Mechanism
from fedalloy.core.imports import Imports
from fedalloy.core.state import State
from fedalloy.core.views import StepView
from fedalloy.core.wire import Mail
from fedalloy.data import Dataset
from fedalloy.data.federation import Federation, federate
from fedalloy.engines.cluster import Cluster, ray
from fedalloy.engines.plain import packed, unpacked
from fedalloy.engines.ray import RayActors, _device
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Record, Setup, one_thread, play, resume, train
from fedalloy.research.compare import Comparison
from fedalloy.round.engine import TRIES

pytestmark = pytest.mark.xdist_group("ray")

FED = federate("digits", clients=5, skew="pathological:3", seed=0, limit=300)
EVERYBODY = list(range(5))
SMALL: dict[str, Any] = {"model": "mlp(hidden=8)", "lr": 0.1, "batch": 32}
PATIENCE = 120.0


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[Cluster]:
    """One local Ray for all of these tests: actors go from one run to the next."""
    with Cluster(cpus=2) as found:
        yield found


def setup_of(method: str, federation: Federation = FED, **settings: Any) -> Setup:
    values = {**federation.origin, **SMALL, "method": method, "engine": "ray", "workers": 2, **settings}
    return Setup(Config.of(values), federation, imports=Imports())


def bits(setup: Setup, folder: Path, stop: int | None = None) -> tuple[str, str | None, list[Any]]:
    """All that must be the same when a run is the same; or a run that is stopped after a round."""

    def on_round(record: Record) -> None:
        if record["round"] == stop:
            raise InterruptedError

    return bits_of(play(setup, RunFolder.create(folder, setup.config), on_round).summary, folder)


def bits_of(summary: Record, folder: Path) -> tuple[str, str | None, list[Any]]:
    lines = [json.loads(line) for line in (folder / "history.jsonl").read_text().splitlines()]
    history = [{key: value for key, value in line.items() if key != "seconds"} for line in lines]
    return summary["weights_sha256"], summary["private_sha256"], history


class Stage:
    """A server and an engine, round by round."""

    def __init__(self, folder: Path, method: str = "trouble:troubled", **settings: Any) -> None:
        self.setup = setup_of(method, **settings)
        self.folder = RunFolder(folder)
        self.server = self.setup.server()
        self.engine = self.setup.engine(self.setup.runtime(self.folder))

    def mails(self, round: int = 1, clients: list[int] = EVERYBODY) -> list[Mail]:
        self.server.round = round
        return [self.server.send(client) for client in clients]

    def play(self, rounds: int = 2) -> tuple[dict[str, list[float]], str | None]:
        for round in range(1, rounds + 1):
            outcome = self.server.receive(EVERYBODY, self.engine.carry(self.mails(round)))
            assert len(outcome.accepted) == len(EVERYBODY)
        state = {key: value.tolist() for key, value in self.server.state().items()}
        return state, self.folder.vault.fingerprint()

    @property
    def actors(self) -> RayActors:
        assert isinstance(self.engine, RayActors)
        return self.engine


Staged = Callable[..., Stage]


@pytest.fixture
def staged(tmp_path: Path) -> Iterator[Staged]:
    """Stages whose engines are closed when the test ends, however it ends."""
    made: list[Stage] = []

    def make(method: str = "trouble:troubled", **settings: Any) -> Stage:
        made.append(Stage(tmp_path / f"stage{len(made)}", method, **settings))
        return made[-1]

    with one_thread():
        yield make
    for stage in made:
        stage.engine.close()


def troubled(what: str, once: Path | None = None) -> str:
    return f"trouble:troubled(what={what!r}, once={str(once or '')!r})"


# Same bits


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.method)
def test_same_bits_as_inline(row: Row, tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": row.models[-1], "rounds": 2, "participation": 0.6}
    inline = bits(setup_of(row.method, engine="inline", **settings), tmp_path / "inline")
    assert bits(setup_of(row.method, **settings), tmp_path / "ray") == inline


@pytest.mark.parametrize("method", ["scaffold", "ssf(ratio=0.5)", "fedkd"])
def test_a_run_moves_from_engine_to_engine(method: str, tmp_path: Path) -> None:
    def at(engine: str) -> Setup:
        return setup_of(method, engine=engine, rounds=3)

    whole = bits(at("inline"), tmp_path / "whole")
    for first, then in (("inline", "ray"), ("ray", "inline")):
        folder = tmp_path / first
        with pytest.raises(InterruptedError):
            bits(at(first), folder, stop=1)
        assert bits_of(resume(folder, at(then).config).summary, folder) == whole


@pytest.mark.parametrize("workers", [1, None])
def test_any_number_of_actors(workers: int | None, staged: Staged) -> None:
    assert staged("scaffold", workers=workers).play() == staged("scaffold", engine="inline").play()


def test_a_users_own_tensors_and_model(tmp_path: Path) -> None:
    """A federation that no config can deal again, and a model whose weights are placed, not sent."""
    draw = torch.Generator().manual_seed(0)
    x, y = torch.randn(200, 64, generator=draw), torch.arange(200) % 3
    mean, std = tuple(x.mean(0).tolist()), tuple(x.std(0).tolist())
    data = Dataset("mine", x, y, 150, "vector", 3, ("a", "b", "c"), mean=mean, std=std)
    federation = federate(data, clients=3, skew="iid")
    settings: dict[str, Any] = {"model": "trouble:net", "method": "ditto", "rounds": 2, "workers": 2}
    found = [
        train(federation, **settings, engine=engine, out=tmp_path / engine) for engine in ("inline", "ray")
    ]
    one, other = (bits_of(result.summary, result.folder) for result in found)
    assert one == other


def test_augmented_images_of_two_models(tmp_path: Path) -> None:
    federation = federate("digits", clients=4, skew="iid", augment="crop:1,flip", limit=100, test_share=0.2)
    settings: dict[str, Any] = {"models": "mlp(hidden=8), mlp(hidden=4)", "rounds": 2}
    inline = bits(setup_of("fedproto", federation, engine="inline", **settings), tmp_path / "inline")
    assert bits(setup_of("fedproto", federation, **settings), tmp_path / "ray") == inline


DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 2), (4, 5)], ids=str)
def test_tensors_as_plain_arrays(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    value = torch.randint(2, shape).to(dtype)
    entries, arrays = packed({"a": value, "b": value.T if value.dim() == 2 else value})
    for copy in (True, False):
        found = unpacked(entries, arrays, copy=copy)
        assert found["a"].dtype == dtype
        assert torch.equal(found["a"], value)
        assert torch.equal(found["b"], value.T if value.dim() == 2 else value)
        assert all(tensor.data_ptr() % 64 == 0 for tensor in found.values())


# Actors that die


def test_an_actor_that_dies_is_replaced_and_the_bits_are_the_same(staged: Staged, tmp_path: Path) -> None:
    clean, stage = staged(engine="inline"), staged(troubled("die", tmp_path / "once"))
    before = stage.actors.pids
    assert stage.play() == clean.play()
    assert (tmp_path / "once").exists()
    assert len(set(stage.actors.pids) & set(before)) == 1


def test_actors_killed_from_outside(staged: Staged) -> None:
    """In the middle of a round, and all of them between two rounds."""
    clean, stage = staged(engine="inline"), staged(troubled("sleep"))
    pids = stage.actors.pids
    carried = stage.engine.carry(stage.mails())
    replies = [next(carried)]
    os.kill(pids[0], signal.SIGKILL)
    replies += list(carried)
    stage.server.receive(EVERYBODY, replies)
    for pid in stage.actors.pids:
        os.kill(pid, signal.SIGKILL)
    stage.server.receive(EVERYBODY, stage.engine.carry(stage.mails(round=2)))
    clean.play()
    found, expected = stage.server.state(), clean.server.state()
    assert all(torch.equal(found[key], expected[key]) for key in expected)
    assert stage.folder.vault.fingerprint() == clean.folder.vault.fingerprint()


def test_a_client_that_always_kills_its_actor(staged: Staged) -> None:
    stage = staged(troubled("die"))
    with pytest.raises(FedAlloyError, match=rf"died {TRIES} times on client 2 \(\w+\).*--engine inline"):
        list(stage.engine.carry(stage.mails()))
    replies = list(stage.engine.carry(stage.mails(clients=[0, 1])))  # the engine is still good
    assert sorted(reply.client for reply in replies) == [0, 1]


# Named errors


def test_a_client_that_hangs(staged: Staged) -> None:
    stage = staged(troubled("hang"), timeout=5.0)
    with pytest.raises(FedAlloyError, match="client 2 did not answer within 5 s; raise --timeout"):
        list(stage.engine.carry(stage.mails()))
    assert [reply.client for reply in stage.engine.carry(stage.mails(clients=[0]))] == [0]


def test_errors_come_back(staged: Staged) -> None:
    stage = staged(troubled("bug"))
    with pytest.raises(RuntimeError, match="client 2 failed in a worker process") as caught:
        list(stage.engine.carry(stage.mails()))
    assert "ZeroDivisionError: a bug in a mechanism" in str(caught.value)
    assert "in loss" in str(caught.value)
    assert not isinstance(caught.value, FedAlloyError)
    stage.engine.close()  # two engines would share two CPUs
    stage = staged(troubled("user"))
    with pytest.raises(FedAlloyError, match=r"^something the user can mend$"):
        list(stage.engine.carry(stage.mails(clients=[2])))


def _ask_until_gone(handle: Any) -> None:
    """Ray ends an actor when it comes to it: one at rest may answer once more."""
    limit = time.monotonic() + PATIENCE
    while time.monotonic() < limit:
        ray.get(handle.pid.remote(), timeout=PATIENCE)


def test_a_round_left_early_does_not_leak_into_the_next(staged: Staged) -> None:
    stage = staged(troubled("sleep"))
    assert len(stage.actors.pids) == 2  # both are there
    carried = stage.engine.carry(stage.mails(round=1))
    next(carried)
    busy = [actor.handle for actor in stage.actors._actors if actor.busy]
    assert busy
    carried.close()  # type: ignore[attr-defined]
    for handle in busy:  # nothing works on
        with pytest.raises(ray.exceptions.RayActorError):
            _ask_until_gone(handle)
    replies = list(stage.engine.carry(stage.mails(round=2)))
    assert sorted(reply.client for reply in replies) == EVERYBODY
    assert {reply.round for reply in replies} == {2}


@dataclass(frozen=True)
class _Mine(Mechanism):
    """In a module that actors find, but under a name that no expression has."""

    def loss(self, step: StepView, my: State) -> Tensor | None:
        return None


def test_a_method_that_cannot_be_made_again_is_refused_by_name(tmp_path: Path) -> None:
    method = registry.make("fedavg") + _Mine()
    with pytest.raises(
        FedAlloyError, match=re.escape(f"{method.expression!r} cannot be made again in a Ray")
    ):
        train(FED, method=method, rounds=1, engine="ray", workers=1, **SMALL)
    hidden = replace(method, expression="fedavg")  # an expression that makes something else
    with pytest.raises(FedAlloyError, match="it comes out different"):
        train(FED, method=hidden, rounds=1, engine="ray", workers=1, **SMALL)


def test_too_little_room(staged: Staged) -> None:
    with pytest.raises(FedAlloyError, match="Ray has 2 CPUs and 0 GPUs: too few for 3 actors"):
        staged(workers=3)
    with pytest.raises(FedAlloyError, match=r"too few for 2 actors with 0\.5 of a GPU each"):
        staged(gpus_per_worker=0.5)


def test_the_device_of_an_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    assert _device(0.0) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    assert _device(0.25) == torch.device("cuda")
    assert torch.backends.cudnn.deterministic


# Ray as it is found


def test_our_own_ray_is_for_us_alone(cluster: Cluster) -> None:
    assert ray.get_runtime_context().gcs_address.startswith("127.0.0.1:")
    assert os.environ["RAY_AUTH_MODE"] == "token"
    assert os.environ["RAY_USAGE_STATS_ENABLED"] == "0"


def test_runs_share_actors(tmp_path: Path, cluster: Cluster) -> None:
    def idle() -> set[str]:
        return {handle._actor_id.hex() for handle in cluster.idle[0.0]}

    base = setup_of("fedavg", rounds=1, clients=3).config
    Comparison.plan(base, ["fedavg", "fedprox"], [0], tmp_path / "one").run()
    before = idle()
    assert len(before) == 2
    Comparison.plan(base, ["fedavg", "fedprox"], [0], tmp_path / "two").run()
    assert idle() == before


def test_a_ray_that_is_there_is_joined_and_left(monkeypatch: pytest.MonkeyPatch, cluster: Cluster) -> None:
    for handle in cluster.idle.pop(0.0, []):
        ray.kill(handle)
    monkeypatch.setattr(Cluster, "current", None)
    result = train(FED, method="fedavg", rounds=1, engine="ray", workers=1, **SMALL)
    assert result.summary["status"] == "finished"
    assert ray.is_initialized()
    assert not cluster.idle.get(0.0)


@pytest.mark.parametrize(
    ("address", "said"),
    [("127.0.0.1:9", "no Ray answers at 127.0.0.1:9"), ("nowhere", "must be HOST:PORT, such as")],
)
def test_an_address_where_nobody_is(address: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ray, "is_initialized", lambda: False)
    with pytest.raises(FedAlloyError, match=said):
        Cluster(address).connect()


# In processes of their own

HERE = Path(__file__).parent
RUN: tuple[str, ...] = (
    "run",
    "--engine",
    "ray",
    "--workers",
    "2",
    "--clients",
    "5",
    "--limit",
    "300",
    "--rounds",
    "2",
)
RUN += ("--model", "mlp(hidden=8)", "--json")


@pytest.fixture(scope="module")
def room() -> Iterator[Path]:
    """Where runs are written, and where Ray puts its files: paths of sockets must be short."""
    with TemporaryDirectory(dir="/tmp", prefix="r", ignore_cleanup_errors=True) as room:
        yield Path(room)


def environment(room: Path) -> dict[str, str]:
    """As if this process had no Ray; the modules beside this one can be imported, and files are where we see them."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    paths = [str(HERE), *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**kept, "PYTHONPATH": os.pathsep.join(paths), "TMPDIR": str(room), "OMP_NUM_THREADS": "1"}


def fedalloy(room: Path, *words: str, **extra: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedalloy", *words],
        cwd=room,
        env={**environment(room), **extra},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes(session: int, name: str = "") -> list[int]:
    """What still runs of a session, zombies left out."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            state, _, _, leader = (folder / "stat").read_text().rpartition(")")[2].split()[:4]
            command = (folder / "cmdline").read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(leader) == session and state != "Z" and command.startswith(name):
            found.append(int(folder.name))
    return found


def until(true: Callable[[], Any], what: str) -> None:
    limit = time.monotonic() + PATIENCE
    while not true():
        assert time.monotonic() < limit, f"waited in vain until {what}"
        time.sleep(0.05)


def expected(tmp_path: Path, method: str) -> str:
    setup = setup_of(method, federate("digits", clients=5, limit=300), engine="inline", lr=0.05, rounds=2)
    return bits(setup, tmp_path / "expected")[0]


def test_a_run_leaves_nothing_behind_and_says_nothing_else(room: Path, tmp_path: Path) -> None:
    """Also when an actor dies, of which Ray would like to tell."""
    method = troubled("die", tmp_path / "once")
    process = fedalloy(room, *RUN, "--method", method, "--out", "quiet")
    out, err = process.communicate(timeout=PATIENCE)
    assert (process.returncode, err) == (0, "")
    assert json.loads(out)["weights_sha256"] == expected(tmp_path, "trouble:troubled")
    assert (tmp_path / "once").exists()
    until(lambda: not processes(process.pid), "all processes of Ray are gone")
    assert not list(room.glob("ray-*"))


@pytest.mark.parametrize("what", [signal.SIGINT, signal.SIGKILL], ids=["ctrl-c", "killed"])
def test_a_run_that_is_ended(room: Path, tmp_path: Path, what: signal.Signals) -> None:
    """In the middle of a client's work: the actors end as well."""
    once = tmp_path / "once"
    process = fedalloy(room, *RUN, "--method", troubled("hang", once), "--out", f"ended{what}")
    until(lambda: once.exists() or process.poll() is not None, "a client is at work")
    assert processes(process.pid, "ray::Worker")
    os.kill(process.pid, what)
    out, err = process.communicate(timeout=PATIENCE)
    if what == signal.SIGINT:
        assert (process.returncode, out) == (130, "")
        assert f"carry on with: fedalloy run --resume ended{what}" in err
        assert len(err.splitlines()) == 1
        assert not list(room.glob("ray-*"))
        until(lambda: not processes(process.pid), "all processes of Ray are gone")
    until(lambda: not processes(process.pid, "ray::Worker"), "all actors are gone")
    for pid in processes(process.pid):  # of a run that was killed, Ray's agents need a minute to notice
        os.kill(pid, signal.SIGKILL)


@contextmanager
def head(room: Path) -> Iterator[tuple[str, dict[str, str]]]:
    """A cluster as an administrator would start one: its address, and the token that lets users in."""
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "c0ffee" * 10}
    words = f"start --head --block --port {port} --num-cpus 2 --num-gpus 1 --include-dashboard false"
    process = subprocess.Popen(
        [Path(sys.executable).with_name("ray"), *words.split(), "--disable-usage-stats"],
        cwd=room,
        env={**environment(room), **token},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        yield f"{socket.gethostbyname(socket.gethostname())}:{port}", token
        assert process.poll() is None  # a run leaves the cluster as it is
    finally:
        process.terminate()
        process.wait(PATIENCE)
        for pid in processes(process.pid):
            os.kill(pid, signal.SIGKILL)


def test_a_cluster_that_is_there_already(room: Path, tmp_path: Path) -> None:
    with head(room) as (address, token):
        port = int(address.rpartition(":")[2])
        until(lambda: listening(port), "the cluster answers")
        words = (*RUN, "--method", "trouble:troubled", "--ray-address", address)
        process = fedalloy(room, *words, "--out", "there", **token)
        out, err = process.communicate(timeout=PATIENCE)
        assert (process.returncode, err) == (0, "")
        assert json.loads(out)["weights_sha256"] == expected(tmp_path, "trouble:troubled")
        process = fedalloy(room, *words, "--gpus-per-worker", "0.5", "--out", "gpu", **token)
        _, err = process.communicate(
            timeout=PATIENCE
        )  # both fit on its one GPU, of which torch knows nothing
        assert process.returncode == 2
        assert "a Ray actor holds a share of a GPU, but its torch sees none" in err


def listening(port: int) -> bool:
    with socket.socket() as line:
        return line.connect_ex((socket.gethostbyname(socket.gethostname()), port)) == 0


def test_without_ray(room: Path) -> None:
    """It is an extra: nothing else needs it, and who asks for it is told what to type."""
    code = (
        "import sys, fedalloy.cli.app; assert 'ray' not in sys.modules; sys.modules['ray'] = None; "
        "fedalloy.cli.app.main(['run', '--engine', 'ray', '--clients', '2', '--out', 'without'])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=room, env=environment(room), capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "the ray engine needs Ray; type: pip install 'fedalloy[ray]'" in done.stderr

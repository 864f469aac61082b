"""Engines: workers that die, hang or fail, nothing left behind, and tensors through shared memory."""

import gc
import math
import os
import platform
import signal
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.alloy import Mechanism
from fedalloy.core.state import State
from fedalloy.core.training import Local
from fedalloy.core.views import ClientView, StepView
from fedalloy.core.wire import Items, Mail, Reply
from fedalloy.data.federation import federate
from fedalloy.engines.arena import Arena
from fedalloy.engines.inline import Inline
from fedalloy.engines.workers import Workers
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.run import one_thread
from fedalloy.round.engine import TRIES, Engine
from fedalloy.round.replica import Replicas
from fedalloy.round.runtime import ClientRuntime, tiny_is_zero
from fedalloy.round.server import Server
from fedalloy.round.vault import Vault
from fuzzing import examples

FED = federate("digits", clients=5, skew="dirichlet:0.5", seed=0)
CLIENTS = list(range(5))


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    with one_thread():
        yield


@dataclass(frozen=True)
class _Trouble(Mechanism):
    """Trouble at one client, in its worker: always, or only until the file `once` is there."""

    what: str = "die"
    client: int = 2
    once: str = ""

    def loss(self, step: StepView, my: State) -> Tensor | None:
        if step.client.id != self.client or self._already():
            return None
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "exit":
            os._exit(3)
        if self.what == "hang":
            time.sleep(100)
        if self.what == "bug":
            raise ZeroDivisionError("a bug in a mechanism")
        raise FedAlloyError("something the user can mend")

    def before_training(self, client: ClientView, my: State) -> None:
        if self.what == "sleep":
            time.sleep(0.2)

    def _already(self) -> bool:
        if self.what == "sleep":
            return True
        if not self.once:
            return False
        try:
            Path(self.once).touch(exist_ok=False)
        except FileExistsError:
            return True
        return False


class Stage:
    """A workshop and a server for one method."""

    def __init__(self, folder: Path, trouble: Mechanism | None = None, method: str = "scaffold") -> None:
        base = registry.make(method)
        self.method = base + trouble if trouble else base
        self.replicas = Replicas(self.method, ("mlp(hidden=8)",), FED.dataset.inputs, 0)
        self.vault = Vault(folder)
        self.runtime = ClientRuntime(self.method, self.replicas, FED, Local(batch=64, lr=0.05), self.vault, 0)
        self.server = Server(self.method, self.replicas.of(0), FED.info, self.runtime.local, 0)

    def mails(self, round: int = 1, clients: list[int] = CLIENTS) -> list[Mail]:
        self.server.round = round
        return [self.server.send(client) for client in clients]

    def play(self, engine: Engine, rounds: int = 2) -> tuple[dict[str, list[float]], str | None]:
        """Some rounds; the server's state and the fingerprint of all private state."""
        for round in range(1, rounds + 1):
            outcome = self.server.receive(CLIENTS, engine.carry(self.mails(round)))
            assert len(outcome.accepted) == len(CLIENTS)
        return {key: value.tolist() for key, value in self.server.state().items()}, self.vault.fingerprint()


Staged = Callable[..., Stage]


@pytest.fixture
def staged(tmp_path: Path) -> Staged:
    count = iter(range(99))

    def make(trouble: Mechanism | None = None) -> Stage:
        return Stage(tmp_path / f"stage{next(count)}", trouble)

    return make


@pytest.fixture
def workers() -> Iterator[Callable[..., Workers]]:
    """Workers that are closed when the test ends, however it ends."""
    made: list[Workers] = []

    def make(stage: Stage, count: int = 2, timeout: float = 60.0) -> Workers:
        made.append(Workers(stage.runtime, count, timeout))
        return made[-1]

    yield make
    for engine in made:
        if engine.pids:
            engine.close()


def alive(pid: int | None) -> bool:
    return pid is not None and Path(f"/proc/{pid}").exists()


def memfds() -> list[str]:
    links = []
    for fd in os.listdir("/proc/self/fd"):
        try:
            links.append(os.readlink(f"/proc/self/fd/{fd}"))
        except FileNotFoundError:  # the one that listed them
            continue
    return [link for link in links if "memfd:fedalloy" in link]


def children() -> set[int]:
    found = set()
    for path in Path(f"/proc/{os.getpid()}/task").glob("*/children"):
        found |= {int(pid) for pid in path.read_text().split()}
    return found


# Same bits


@pytest.mark.parametrize("count", [1, 2, 3, 8])
def test_same_bits_as_inline(staged: Staged, workers: Callable[..., Workers], count: int) -> None:
    inline, other = staged(), staged()
    assert other.play(workers(other, count)) == inline.play(Inline(inline.runtime))


def test_a_worker_that_dies_is_replaced_and_the_bits_are_the_same(
    staged: Staged, workers: Callable[..., Workers], tmp_path: Path
) -> None:
    for what in ("die", "exit"):
        clean, stage = staged(), staged(_Trouble(what, once=str(tmp_path / what)))
        engine = workers(stage)
        before = engine.pids
        assert stage.play(engine) == clean.play(Inline(clean.runtime))
        assert (tmp_path / what).exists()
        assert len(set(engine.pids) & set(before)) == 1
        assert all(alive(pid) for pid in engine.pids)


@pytest.mark.parametrize("what", ["", "die", "exit"])
@pytest.mark.parametrize("count", [1, 2])
def test_bundles_change_nothing(
    staged: Staged,
    workers: Callable[..., Workers],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    what: str,
    count: int,
) -> None:
    """Mails that go together give the same bits, also when their worker dies in the middle."""
    clean, stage = staged(), staged(_Trouble(what, once=str(tmp_path / "once")) if what else None)
    engine = workers(stage, count)
    sizes: list[int] = []
    monkeypatch.setattr("fedalloy.engines.workers.QUICK", 1e9)  # nobody is slow

    def counted(waiting: deque[Mail], pace: float) -> list[Mail]:
        found = [waiting.popleft() for _ in range(min(2, len(waiting)))]
        sizes.append(len(found))
        return found

    monkeypatch.setattr(engine, "_bundle", counted)
    engine._pace["train"] = 0.0
    assert stage.play(engine, rounds=3) == clean.play(Inline(clean.runtime), rounds=3)
    assert max(sizes) == 2
    assert bool(what) == (tmp_path / "once").exists()


def test_quick_mails_travel_together_but_not_to_one_worker_alone(
    staged: Staged, workers: Callable[..., Workers]
) -> None:
    engine = workers(staged(), 2)
    mail = Mail("train", 1, 0, {})
    assert len(engine._bundle(deque([mail] * 100), 1e-5)) == 16
    assert len(engine._bundle(deque([mail] * 100), 0.001)) == 5
    assert len(engine._bundle(deque([mail] * 9), 1e-5)) == 2
    assert len(engine._bundle(deque([mail] * 2), 1e-5)) == 1


class _Fatal(Vault):
    """Kills its process once, after private state was saved and before the reply leaves."""

    def save(self, client: int, round: int, keep: Items) -> None:
        super().save(client, round, keep)
        mark = self.folder.with_suffix(".killed")
        if client == 2 and round == 2 and not mark.exists():
            mark.touch()
            os.kill(os.getpid(), signal.SIGKILL)


def test_a_worker_that_dies_after_saving_reads_what_it_read_before(
    staged: Staged, workers: Callable[..., Workers]
) -> None:
    clean, stage = staged(), staged()
    stage.vault = stage.runtime.vault = _Fatal(stage.vault.folder)
    assert stage.play(workers(stage), rounds=3) == clean.play(Inline(clean.runtime), rounds=3)
    assert stage.vault.folder.with_suffix(".killed").exists()


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")  # there is a thread beside
def test_kills_from_outside_cost_nothing_but_time(staged: Staged, workers: Callable[..., Workers]) -> None:
    """A thread kills workers at odd moments: idle, busy, and while they answer."""
    clean, stage = staged(), staged(_Trouble("sleep"))
    engine = workers(stage)
    ended = threading.Event()
    killed: list[int] = []

    def killer() -> None:
        while not ended.wait(0.37) and len(killed) < 4:
            there = engine.pids  # one less while a worker is being replaced
            pid = there[len(killed) % len(there)] if there else None
            if pid is not None:
                killed.append(pid)
                os.kill(pid, signal.SIGKILL)

    thread = threading.Thread(target=killer)
    thread.start()
    try:
        found = stage.play(engine, rounds=4)
    finally:
        ended.set()
        thread.join()
    assert killed
    assert found == clean.play(Inline(clean.runtime), rounds=4)


def test_all_workers_dead_between_rounds(staged: Staged, workers: Callable[..., Workers]) -> None:
    clean, stage = staged(), staged()
    engine = workers(stage, 3)
    for pid in engine.pids:
        assert pid is not None
        os.kill(pid, signal.SIGKILL)
    assert stage.play(engine) == clean.play(Inline(clean.runtime))


# Named errors


def test_a_client_that_always_kills_its_worker(staged: Staged, workers: Callable[..., Workers]) -> None:
    stage = staged(_Trouble("die"))
    engine = workers(stage)
    with pytest.raises(
        FedAlloyError, match=rf"died {TRIES} times on client 2 \(exit code -9\).*--engine inline"
    ):
        list(engine.carry(stage.mails()))
    assert all(alive(pid) for pid in engine.pids)
    replies = list(engine.carry(stage.mails(clients=[0, 1])))  # the engine is still good
    assert sorted(reply.client for reply in replies) == [0, 1]


def test_a_client_that_hangs(staged: Staged, workers: Callable[..., Workers]) -> None:
    stage = staged(_Trouble("hang"))
    engine = workers(stage, timeout=5.0)  # what the others take, on the busiest of machines
    with pytest.raises(FedAlloyError, match="client 2 did not answer within 5 s; raise --timeout"):
        list(engine.carry(stage.mails()))
    replies = list(engine.carry(stage.mails(clients=[0])))
    assert [reply.client for reply in replies] == [0]


def test_a_bug_comes_back_with_its_traceback(staged: Staged, workers: Callable[..., Workers]) -> None:
    stage = staged(_Trouble("bug"))
    engine = workers(stage)
    with pytest.raises(RuntimeError, match="client 2 failed in a worker process") as caught:
        list(engine.carry(stage.mails()))
    assert "ZeroDivisionError: a bug in a mechanism" in str(caught.value)
    assert "in loss" in str(caught.value)
    assert not isinstance(caught.value, FedAlloyError)
    with pytest.raises(ZeroDivisionError):
        list(Inline(stage.runtime).carry(stage.mails()))


def test_what_the_user_can_mend_stays_that(staged: Staged, workers: Callable[..., Workers]) -> None:
    stage = staged(_Trouble("user"))
    for engine in (workers(stage), Inline(stage.runtime)):
        with pytest.raises(FedAlloyError, match=r"^something the user can mend$"):
            list(engine.carry(stage.mails()))


def test_a_round_left_early_does_not_leak_into_the_next(
    staged: Staged, workers: Callable[..., Workers]
) -> None:
    stage = staged()
    engine = workers(stage)
    carried = engine.carry(stage.mails(round=1))
    next(carried)
    del carried
    gc.collect()
    replies = list(engine.carry(stage.mails(round=2)))
    assert sorted(reply.client for reply in replies) == CLIENTS
    assert {reply.round for reply in replies} == {2}


def test_facts_survive_the_way_back(staged: Staged, workers: Callable[..., Workers]) -> None:
    """Also what JSON does not know: a loss that is not a number."""

    @dataclass(frozen=True)
    class _Blown(Mechanism):
        def loss(self, step: StepView, my: State) -> Tensor | None:
            return step.out.logits.sum() * math.inf

    stage, clean = staged(_Blown()), staged()
    (blown,) = workers(stage).carry(stage.mails(clients=[0]))
    assert not math.isfinite(blown.loss)
    (there,), (here,) = (e.carry(clean.mails(clients=[1])) for e in (workers(clean), Inline(clean.runtime)))
    for fact in ("round", "client", "samples", "steps", "seen", "loss"):
        assert getattr(there, fact) == getattr(here, fact)


@pytest.mark.skipif(not torch.set_flush_denormal(False), reason="this processor always counts in full")
def test_tiny_numbers_are_zero_for_clients_only(staged: Staged, workers: Callable[..., Workers]) -> None:
    def tiny() -> Tensor:
        return torch.full((3,), 1e-30) * 1e-10

    @dataclass(frozen=True)
    class _Tiny(Mechanism):
        def loss(self, step: StepView, my: State) -> Tensor | None:
            return math.nan * step.out.logits.sum() if tiny().any() else None

    stage = staged(_Tiny())
    for engine in (Inline(stage.runtime), workers(stage)):
        (reply,) = engine.carry(stage.mails(clients=[0]))
        assert math.isfinite(reply.loss)
        assert tiny().all()
    torch.set_flush_denormal(True)
    try:
        with tiny_is_zero():
            pass
        assert not tiny().any()  # as its user had it
    finally:
        torch.set_flush_denormal(False)


# Nothing left


def test_nothing_is_left_after_close(staged: Staged) -> None:
    gc.collect()
    before, files, fds = children(), memfds(), len(os.listdir("/proc/self/fd"))
    stage = staged()
    engine = Workers(stage.runtime, 3)
    pids = engine.pids
    assert len(children() - before) == 3
    assert len(memfds()) > len(files)
    stage.play(engine)
    engine.close()
    gc.collect()
    assert children() == before
    assert not any(alive(pid) for pid in pids)
    assert memfds() == files
    assert len(os.listdir("/proc/self/fd")) == fds


def test_nothing_is_left_after_trouble(staged: Staged, tmp_path: Path) -> None:
    gc.collect()
    before, files = children(), memfds()
    for what in ("die", "bug", "hang"):
        stage = staged(_Trouble(what))
        engine = Workers(stage.runtime, 2, timeout=0.5)
        with pytest.raises((FedAlloyError, RuntimeError)):
            list(engine.carry(stage.mails()))
        engine.close()
    gc.collect()
    assert children() == before
    assert memfds() == files


def test_workers_go_when_the_main_process_is_killed(staged: Staged, tmp_path: Path) -> None:
    """Even in the middle of a long client: they hold the lock of the run."""
    note, stage = tmp_path / "pids", staged(_Trouble("hang"))
    main = os.fork()
    if main == 0:
        engine = Workers(stage.runtime, 2)
        note.with_suffix(".half").write_text(" ".join(map(str, engine.pids)))
        note.with_suffix(".half").rename(note)
        for _ in engine.carry(stage.mails()):
            pass
        os._exit(0)
    until(note.exists)
    pids = [int(word) for word in note.read_text().split()]
    time.sleep(0.5)
    assert all(alive(pid) for pid in pids)
    os.kill(main, signal.SIGKILL)
    os.waitpid(main, 0)
    until(lambda: not any(running(pid) for pid in pids))


def running(pid: int) -> bool:
    """A zombie that nobody has reaped yet does not run."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def until(true: Callable[[], Any], seconds: float = 120.0) -> None:
    limit = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < limit
        time.sleep(0.02)


# The arena

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.uint8, torch.bool]


@st.composite
def items(draw: st.DrawFn) -> dict[str, Tensor]:
    made = {}
    for key in draw(st.lists(st.text(max_size=4), max_size=6, unique=True)):
        shape = draw(st.lists(st.integers(0, 5), max_size=3))
        made[key] = torch.randint(0, 2, shape).to(draw(st.sampled_from(DTYPES)))
    return made


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert (found[key].dtype, found[key].shape) == (value.dtype, value.shape)
        assert torch.equal(found[key], value)


@pytest.fixture
def arena() -> Iterator[Arena]:
    made = Arena()
    yield made
    made.close()


@examples(100)
@given(st.lists(items(), max_size=4))
def test_what_was_put_comes_out(batches: list[dict[str, Tensor]]) -> None:
    arena = Arena()
    entries = [arena.put(batch) for batch in batches]
    for entry, batch in zip(entries, batches, strict=True):
        assert_same(arena.get(entry), batch)
    arena.close()


def test_the_same_tensor_is_copied_once(arena: Arena) -> None:
    value = torch.arange(10.0)
    first, second = arena.put({"a": value}), arena.put({"b": value})
    assert first[0][1:] == second[0][1:]
    assert arena.put({"c": value.clone()})[0][3] != first[0][3]
    arena.clear()
    assert arena.put({"d": torch.zeros(3)})[0][3] == 0


def test_non_contiguous_tensors(arena: Arena) -> None:
    value = torch.arange(6.0).view(2, 3).mT
    assert_same(arena.get(arena.put({"a": value})), {"a": value})


def test_growth_keeps_earlier_views(arena: Arena) -> None:
    small = torch.arange(4.0)
    view = arena.get(arena.put({"small": small}))["small"]
    for power in range(10, 21, 2):
        big = torch.full((2**power,), float(power))
        assert torch.equal(arena.get(arena.put({"big": big}))["big"], big)
    assert torch.equal(view, small)


def test_a_child_reads_what_was_put_after_the_fork(arena: Arena) -> None:
    """The file grows after the fork, so the child must map it again."""
    to_child, to_parent = os.pipe(), os.pipe()
    child = os.fork()
    if child == 0:
        length = int(os.read(to_child[0], 8).decode())
        (value,) = arena.get([("x", "float32", [length], 0)]).values()
        os.write(to_parent[1], str(float(value.sum())).encode())
        os._exit(0)
    arena.put({"x": torch.ones(100_000)})
    os.write(to_child[1], b"100000")
    assert float(os.read(to_parent[0], 32).decode()) == 100_000
    os.waitpid(child, 0)
    for fd in (*to_child, *to_parent):
        os.close(fd)


def test_replies_are_copies(staged: Staged, workers: Callable[..., Workers]) -> None:
    """A reply stays what it was when its worker answers the next mail."""
    stage = staged()
    engine = workers(stage, 1)
    kept: list[tuple[Reply, dict[str, Tensor]]] = []
    for reply in engine.carry(stage.mails()):
        kept.append((reply, {key: value.clone() for key, value in reply.items.items()}))
    for reply, copy in kept:
        assert_same(reply.items, copy)


FAULTS = """
import resource, sys, torch
from fedalloy.engines.processes import keep_memory
if "keep" in sys.argv:
    keep_memory()
def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
def fill():
    return [torch.empty(2**21).fill_(1.0) for _ in range(4)]
fill(), fill(), fill(), fill()
before = faults()
fill(), fill()
print(faults() - before)
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="other allocators have rules of their own")
def test_memory_that_is_freed_is_kept() -> None:
    """Two times four blocks of eight megabytes are sixteen thousand pages."""
    found = {
        how: int(subprocess.check_output([sys.executable, "-c", FAULTS, how], text=True))
        for how in ("keep", "return")
    }
    assert found["keep"] < 5000 < 10_000 < found["return"]

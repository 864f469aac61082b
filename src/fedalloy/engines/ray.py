"""The Ray engine: persistent actors, one thread each, on this machine or on a cluster.

Data are placed once. Private state stays with the main process: it travels with the mail, and its successor comes back
with the reply. An actor that dies is replaced and its client is asked again: a reply depends on nothing but the mail.
"""

import os
import re
import time
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.random import CPU
from fedalloy.core.wire import Mail, Reply
from fedalloy.engines.cluster import Cluster, ray
from fedalloy.engines.plain import Array, Entry, made, packed, plan_of, unpacked
from fedalloy.engines.processes import cores, keep_memory
from fedalloy.errors import FedAlloyError
from fedalloy.round.engine import TRIES, died, fail, failure, late
from fedalloy.round.runtime import ClientRuntime, state_before
from fedalloy.round.vault import Vault

START = 120.0  # seconds until an actor must be at work
QUICK = 0.05  # seconds; if no mail took longer last time, the next one is sent before an actor has answered
LARGE = 100_000  # bytes; larger values are placed once for all mails of a round


class RayActors:
    """Each actor gets its next mail when it has answered one; where the way takes as long as the work, before that."""

    def __init__(
        self,
        runtime: ClientRuntime,
        address: str | None = None,
        workers: int | None = None,
        gpus_per_worker: float = 0.0,
        timeout: float = 3600.0,
    ) -> None:
        self._vault = runtime.vault
        self._timeout, self._gpus = timeout, gpus_per_worker
        self._actors: list[Actor] = []
        self._pace: dict[str, float] = {}  # by errand: seconds that the slowest mail took last time
        self._cluster = Cluster.current or Cluster(address, workers or cores())
        try:
            self._cluster.connect()
            self._count = self._cluster.room(workers, gpus_per_worker, len(runtime.federation.eligible))
            self._plan, arrays = plan_of(runtime)
            self._data = [ray.put(array) for array in arrays]
            self._staff()
        except BaseException:
            self.close()
            raise

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        waiting = deque(mails)
        deaths: dict[int | None, int] = {}
        placed: dict[int, tuple[Tensor, Any]] = {}
        errand = mails[0].errand if mails else ""
        quick, slowest = self._pace.get(errand, QUICK) < QUICK, 0.0
        try:
            while waiting or any(actor.busy for actor in self._actors):
                self._staff()
                for ahead in (0, 1) if quick else (0,):
                    for actor in self._actors:
                        if waiting and len(actor.jobs) == ahead:
                            self._hand(actor, waiting.popleft(), placed)
                actor = self._ready()
                mail, result = actor.jobs[0]
                client = mail.client if mail else None
                try:
                    answer = ray.get(result, timeout=self._timeout)
                except ray.exceptions.RayTaskError:
                    raise
                except ray.exceptions.RayError as error:
                    waiting.extendleft(reversed([later for later, _ in actor.jobs if later]))
                    self._dismiss(actor)
                    deaths[client] = deaths.get(client, 0) + 1
                    if deaths[client] == (TRIES if mail else TRIES * self._count):
                        raise _gave_up(client, error) from None
                    continue
                actor.next(self._timeout)
                if "error" in answer:
                    fail(answer)
                if mail:
                    if answer["kept"]:
                        self._vault.write(mail.client, mail.round, answer["kept"])
                    slowest = max(slowest, answer["facts"]["seconds"])
                    yield Reply(**{**answer["facts"], "items": unpacked(*answer["items"], copy=True)})
            self._pace[errand] = slowest
        finally:
            for actor in [actor for actor in self._actors if actor.busy]:  # the round was left early
                self._dismiss(actor)

    def close(self) -> None:
        shared = self._cluster is Cluster.current
        for actor in self._actors:
            if shared and not actor.busy:  # also one that is still being equipped
                self._cluster.idle.setdefault(self._gpus, []).append(actor.handle)
            else:
                ray.kill(actor.handle)
        self._actors = []
        if not shared:
            self._cluster.close()

    @property
    def pids(self) -> list[int]:
        found: list[int] = ray.get([actor.handle.pid.remote() for actor in self._actors], timeout=START)
        return found

    def _staff(self) -> None:
        """As many actors as there should be; new ones begin with the plan."""
        while len(self._actors) < self._count:
            idle = self._cluster.idle.get(self._gpus)
            actor = Actor(idle.pop() if idle else _hired(self._gpus))
            actor.push(None, actor.handle.equip.remote(self._plan, *self._data), START)
            self._actors.append(actor)

    def _dismiss(self, actor: "Actor") -> None:
        self._actors.remove(actor)
        ray.kill(actor.handle)

    def _hand(self, actor: "Actor", mail: Mail, placed: dict[int, tuple[Tensor, Any]]) -> None:
        before = state_before(mail)
        state = b"" if before is None else self._vault.read(mail.client, before)
        entries, arrays = packed(mail.items)
        sent: list[Any] = []
        for value, array in zip(mail.items.values(), arrays, strict=True):
            if array.nbytes >= LARGE and id(value) not in placed:
                placed[id(value)] = value, ray.put(array)
            sent.append(placed[id(value)][1] if id(value) in placed else array)
        facts = (mail.errand, mail.round, mail.client)
        actor.push(mail, actor.handle.open.remote(facts, state, entries, *sent), self._timeout)

    def _ready(self) -> "Actor":
        """An actor that answered or died; waits at most until somebody's time is up."""
        busy = {actor.jobs[0][1]: actor for actor in self._actors if actor.jobs}
        limit = min(actor.deadline for actor in busy.values())
        ready, _ = ray.wait(list(busy), timeout=max(0.0, limit - time.monotonic()))
        if ready:
            return busy[ready[0]]
        slowest = min(busy.values(), key=lambda actor: actor.deadline)
        if mail := slowest.jobs[0][0]:
            raise late(mail.client, self._timeout)
        raise FedAlloyError(
            f"no Ray actor was ready within {START:g} s; is the cluster busy? try fewer --workers"
        )


@dataclass
class Actor:
    """One actor as the main process sees it: what it was given and has not answered."""

    handle: Any
    jobs: deque[tuple[Mail | None, Any]] = field(default_factory=deque)  # no mail: the plan of a run
    deadline: float = 0.0  # of the first job

    @property
    def busy(self) -> bool:
        return any(mail for mail, _ in self.jobs)

    def push(self, mail: Mail | None, result: Any, limit: float) -> None:
        if not self.jobs:
            self.deadline = time.monotonic() + limit
        self.jobs.append((mail, result))

    def next(self, limit: float) -> None:
        self.jobs.popleft()
        self.deadline = time.monotonic() + limit


class Pouch(Vault):
    """Private state under way: what the mail brought, and what goes back with the reply."""

    brought = kept = b""

    def read(self, client: int, before: int) -> bytes:
        return self.brought

    def write(self, client: int, round: int, blob: bytes) -> None:
        self.kept = blob


class Worker:
    """What lives in an actor's process: a client runtime, exchanged when another run comes."""

    def __init__(self, gpus: float) -> None:
        keep_memory()
        torch.set_num_threads(1)
        warnings.filterwarnings("ignore", "The given NumPy array is not writable")  # nobody writes to it
        self._gpus = gpus
        self._pouch = Pouch(Path())

    def pid(self) -> int:
        return os.getpid()

    def equip(self, plan: dict[str, Any], *arrays: Array) -> dict[str, Any]:
        """Make the client runtime for a run."""
        self.__dict__.pop("_runtime", None)  # whatever happens, not the last run's
        try:
            self._runtime = made(plan, arrays, _device(self._gpus), self._pouch)
        except Exception as error:
            return failure(error, "making the client runtime")
        return {}

    def open(
        self, facts: tuple[Any, int, int], state: bytes, entries: list[Entry], *arrays: Array
    ) -> dict[str, Any]:
        """Open one mail; the reply and the client's new private state."""
        self._pouch.brought, self._pouch.kept = state, b""
        try:
            reply = self._runtime.handle(Mail(*facts, unpacked(entries, arrays)))
        except Exception as error:
            return failure(error, f"client {facts[2]}")
        return {
            "facts": vars(replace(reply, items={})),
            "items": packed(reply.items),
            "kept": self._pouch.kept,
        }


def _hired(gpus: float) -> Any:
    return ray.remote(Worker).options(num_cpus=1, num_gpus=gpus).remote(gpus)


def _device(gpus: float) -> torch.device:
    if not gpus:
        return CPU
    if not torch.cuda.is_available():
        raise FedAlloyError(
            "a Ray actor holds a share of a GPU, but its torch sees none; install one with CUDA there, "
            "or leave --gpus-per-worker away"
        )
    torch.backends.cudnn.deterministic = True
    return torch.device("cuda")


def _gave_up(client: int | None, error: Exception) -> FedAlloyError:
    found = re.search(r"exit type: (\w+)", str(error))
    how = found.group(1) if found else type(error).__name__
    if client is not None:
        return died(client, how)
    return FedAlloyError(f"no Ray actor could be started: {str(error).strip().splitlines()[-1]}")

"""The workers engine: persistent processes, one thread each; mail and replies travel through shared memory.

Workers are forked, so they see the data, the method and everything else that this process has, without a copy.
A worker that dies is replaced and its client is asked again: a client's reply depends on nothing but its mail.
"""

import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from fedalloy.core.wire import Mail, Reply
from fedalloy.engines.arena import Arena
from fedalloy.engines.processes import die_with, keep_memory
from fedalloy.errors import FedAlloyError
from fedalloy.round.engine import TRIES, died, fail, failure, late
from fedalloy.round.runtime import ClientRuntime

QUICK = 0.005  # seconds; if no mail took longer last time, they travel in bundles that take about this long
BUNDLE = 16  # mails at most


@dataclass
class Worker:
    process: multiprocessing.process.BaseProcess
    line: Connection
    replies: tuple[Arena, Arena]  # used in turn: one is read here while the other is written there
    bundles: deque[list[Mail]] = field(default_factory=deque)  # not answered; the first is being worked on
    deadline: float = field(default=float("inf"))

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.line.close()
        for arena in self.replies:
            arena.close()


class Workers:
    """`count` processes; each gets its next mail when it has answered one.

    Where an answer takes less than the way, mails travel in bundles, and the next bundle is at hand before one is done.
    """

    def __init__(self, runtime: ClientRuntime, count: int, timeout: float = 3600.0) -> None:
        if sys.platform != "linux":  # memory is shared by memfd, and a fork of macOS is not safe
            raise FedAlloyError("the workers engine runs on Linux only; use --engine inline")
        self._runtime = runtime
        self._timeout = timeout
        self._mail = Arena()
        self._workers: list[Worker] = []
        self._pace: dict[str, float] = {}  # by errand: seconds that the slowest mail took last time
        runtime.local.optimiser(
            torch.empty(0), lr=1.0
        )  # loads torch's optimiser machinery once, not in every worker
        for _ in range(count):
            self._workers.append(self._hire())

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        self._mail.clear()
        waiting = deque(mails)
        deaths: dict[int, int] = {}
        errand = mails[0].errand if mails else ""
        pace, slowest = self._pace.get(errand, QUICK), 0.0
        try:
            while waiting or any(worker.bundles for worker in self._workers):
                quick = pace < QUICK and not deaths
                for ahead in (0, 1) if quick else (0,):
                    for worker in self._workers:
                        if waiting and len(worker.bundles) == ahead:
                            self._hand(worker, self._bundle(waiting, pace) if quick else [waiting.popleft()])
                for worker in self._ready():
                    replies = self._answers(worker)
                    bundle = worker.bundles.popleft()
                    if replies is not None:
                        worker.deadline = time.monotonic() + self._timeout
                        slowest = max(slowest, *(reply.seconds for reply in replies))
                        yield from replies
                        continue
                    for later in reversed([bundle, *worker.bundles]):
                        waiting.extendleft(reversed(later))
                    self._replace(worker)
                    for mail in bundle:
                        deaths[mail.client] = deaths.get(mail.client, 0) + 1
                    if max(deaths.values()) == TRIES:
                        raise died(bundle[0].client, f"exit code {worker.process.exitcode}")
            self._pace[errand] = slowest
        finally:
            for worker in [worker for worker in self._workers if worker.bundles]:  # the round was left early
                self._replace(worker)

    def close(self) -> None:
        for worker in self._workers:
            worker.stop()
        self._workers = []
        self._mail.close()

    @property
    def pids(self) -> list[int | None]:
        return [worker.process.pid for worker in self._workers]

    def _hire(self) -> Worker:
        mine, theirs = multiprocessing.Pipe()
        replies = Arena(), Arena()
        others = [worker.line for worker in self._workers] + [mine]
        process = multiprocessing.get_context("fork").Process(
            target=_work, args=(self._runtime, os.getpid(), theirs, others, self._mail, replies), daemon=True
        )
        process.start()
        theirs.close()
        return Worker(process, mine, replies)

    def _replace(self, worker: Worker) -> None:
        place = self._workers.index(worker)
        del self._workers[place]
        worker.stop()
        self._workers.insert(place, self._hire())

    def _bundle(self, waiting: deque[Mail], pace: float) -> list[Mail]:
        """Quick mails that go together; never so many that another worker would be left without."""
        fair = len(waiting) // (2 * len(self._workers))
        count = max(1, min(BUNDLE, fair, int(QUICK / max(pace, 1e-6))))
        return [waiting.popleft() for _ in range(count)]

    def _hand(self, worker: Worker, bundle: list[Mail]) -> None:
        notes = [(mail.errand, mail.round, mail.client, self._mail.put(mail.items)) for mail in bundle]
        if not worker.bundles:
            worker.deadline = time.monotonic() + self._timeout
        worker.bundles.append(bundle)
        try:
            worker.line.send_bytes(json.dumps(notes).encode())
        except OSError:
            return  # it died while idle: `_ready` sees that next

    def _ready(self) -> list[Worker]:
        """Workers that answered or died; waits for the first, at most until somebody's time is up."""
        busy = {worker.line: worker for worker in self._workers if worker.bundles}
        limit = min(worker.deadline for worker in busy.values())
        ready = wait(list(busy), timeout=max(0.0, limit - time.monotonic()))
        if not ready:
            slowest = min(busy.values(), key=lambda worker: worker.deadline)
            raise late(slowest.bundles[0][0].client, self._timeout)
        return [busy[line] for line in ready if isinstance(line, Connection)]

    def _answers(self, worker: Worker) -> list[Reply] | None:
        """A worker's replies, or None if it died."""
        try:
            note: dict[str, Any] = json.loads(worker.line.recv_bytes())
        except (EOFError, OSError):
            return None
        if "error" in note:
            fail(note)
        arena = worker.replies[note["arena"]]
        return [_copied(arena, one) for one in note["replies"]]


def _copied(arena: Arena, note: dict[str, Any]) -> Reply:
    views = arena.get([tuple(entry) for entry in note.pop("items")])
    return Reply(items={key: value.clone() for key, value in views.items()}, **note)


def _work(
    runtime: ClientRuntime,
    parent: int,
    line: Connection,
    others: list[Connection],
    mail: Arena,
    replies: tuple[Arena, Arena],
) -> None:
    """A worker's life: open mail until the line closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends its workers
    die_with(parent, signal.SIGKILL)  # else the run stays locked until its workers notice
    keep_memory()
    torch.set_num_threads(1)
    for other in others:
        other.close()  # else nobody notices when the main process is gone
    for turn in itertools.count():
        arena = replies[turn % 2]
        try:
            notes = json.loads(line.recv_bytes())
        except (EOFError, OSError):
            return
        arena.clear()
        answer: dict[str, Any] = {"arena": turn % 2, "replies": []}
        for errand, round, client, entries in notes:
            items = mail.get([tuple(entry) for entry in entries])
            try:
                reply = runtime.handle(Mail(errand, round, client, items))
            except Exception as error:
                answer = failure(error, f"client {client}")
                break
            answer["replies"].append({**vars(replace(reply, items={})), "items": arena.put(reply.items)})
        try:
            line.send_bytes(json.dumps(answer).encode())
        except OSError:
            return

"""The workers engine: persistent processes, one thread each; mail and replies travel through shared memory.

Workers are forked, so they see the data, the method and everything else that this process has, without a copy.
A worker that dies is replaced and its client is asked again: a client's reply depends on nothing but its mail.
"""

import ctypes
import itertools
import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection, wait
from typing import Any, NoReturn

import torch

from fedalloy.engines.arena import Arena
from fedalloy.errors import FedAlloyError
from fedalloy.wire import Mail, Reply
from fedalloy.workshop import Workshop

PR_SET_PDEATHSIG = 1  # from linux/prctl.h
TRIES = 3  # a client that kills its worker this often is not asked again
QUICK = 0.05  # seconds; a worker that answers sooner has its next mail at hand when it does


@dataclass
class Worker:
    process: multiprocessing.process.BaseProcess
    line: Connection
    replies: tuple[Arena, Arena]  # used in turn: one is read here while the other is written there
    mails: deque[Mail] = field(default_factory=deque)  # not answered yet; the first is being worked on
    quick: bool = False
    deadline: float = field(default=float("inf"))

    def stop(self) -> None:
        self.process.kill()
        self.process.join()
        self.line.close()
        for arena in self.replies:
            arena.close()


class Workers:
    """`count` processes; each gets its next mail when it has answered one, or a moment before if it is quick."""

    def __init__(self, workshop: Workshop, count: int, timeout: float = 3600.0) -> None:
        if "fork" not in multiprocessing.get_all_start_methods():
            raise FedAlloyError("the workers engine needs fork, which this system lacks; use --engine inline")
        self._workshop = workshop
        self._timeout = timeout
        self._mail = Arena()
        self._workers: list[Worker] = []
        workshop.local.optimiser(
            torch.empty(0), lr=1.0
        )  # loads torch's optimiser machinery once, not in every worker
        for _ in range(count):
            self._workers.append(self._hire())

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        self._mail.clear()
        waiting = deque(mails)
        deaths: dict[int, int] = {}
        try:
            while waiting or any(worker.mails for worker in self._workers):
                for ahead in (0, 1):
                    for worker in self._workers:
                        if waiting and len(worker.mails) == ahead and (worker.quick or not ahead):
                            self._hand(worker, waiting.popleft())
                for worker in self._ready():
                    reply = self._answer(worker)
                    mail = worker.mails.popleft()
                    if reply is not None:
                        worker.quick = reply.seconds < QUICK
                        worker.deadline = time.monotonic() + self._timeout
                        yield reply
                        continue
                    waiting.extendleft(reversed(worker.mails))
                    self._replace(worker)
                    deaths[mail.client] = deaths.get(mail.client, 0) + 1
                    if deaths[mail.client] == TRIES:
                        raise FedAlloyError(
                            f"the worker process died {TRIES} times on client {mail.client} (exit code "
                            f"{worker.process.exitcode}); out of memory? try fewer --workers or --engine inline"
                        )
                    waiting.appendleft(mail)
        finally:
            for worker in [worker for worker in self._workers if worker.mails]:  # the round was left early
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
            target=_work, args=(self._workshop, os.getpid(), theirs, others, self._mail, replies), daemon=True
        )
        process.start()
        theirs.close()
        return Worker(process, mine, replies)

    def _replace(self, worker: Worker) -> None:
        place = self._workers.index(worker)
        del self._workers[place]
        worker.stop()
        self._workers.insert(place, self._hire())

    def _hand(self, worker: Worker, mail: Mail) -> None:
        note = {
            "errand": mail.errand,
            "round": mail.round,
            "client": mail.client,
            "items": self._mail.put(mail.items),
        }
        if not worker.mails:
            worker.deadline = time.monotonic() + self._timeout
        worker.mails.append(mail)
        try:
            worker.line.send_bytes(json.dumps(note).encode())
        except OSError:
            return  # it died while idle: `_ready` sees that next

    def _ready(self) -> list[Worker]:
        """Workers that answered or died; waits for the first, at most until somebody's time is up."""
        busy = {worker.line: worker for worker in self._workers if worker.mails}
        limit = min(worker.deadline for worker in busy.values())
        ready = wait(list(busy), timeout=max(0.0, limit - time.monotonic()))
        if not ready:
            late = min(busy.values(), key=lambda worker: worker.deadline)
            raise FedAlloyError(
                f"client {late.mails[0].client} did not answer within {self._timeout:g} s; "
                "raise --timeout if it needs longer"
            )
        return [busy[line] for line in ready if isinstance(line, Connection)]

    def _answer(self, worker: Worker) -> Reply | None:
        """A worker's reply, or None if it died."""
        try:
            note: dict[str, Any] = json.loads(worker.line.recv_bytes())
        except (EOFError, OSError):
            return None
        if "error" in note:
            _raise(note)
        arena = worker.replies[note.pop("arena")]
        views = arena.get([tuple(entry) for entry in note.pop("items")])
        return Reply(items={key: value.clone() for key, value in views.items()}, **note)


def _raise(note: dict[str, Any]) -> NoReturn:
    if note["user"]:
        raise FedAlloyError(note["error"])
    raise RuntimeError(f"client {note['client']} failed in a worker process:\n{note['error']}")


def _work(
    workshop: Workshop,
    parent: int,
    line: Connection,
    others: list[Connection],
    mail: Arena,
    replies: tuple[Arena, Arena],
) -> None:
    """A worker's life: open mail until the line closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the main process, which ends its workers
    _die_with(parent)
    torch.set_num_threads(1)
    for other in others:
        other.close()  # else nobody notices when the main process is gone
    for turn in itertools.count():
        arena = replies[turn % 2]
        try:
            note = json.loads(line.recv_bytes())
        except (EOFError, OSError):
            return
        items = mail.get([tuple(entry) for entry in note["items"]])
        try:
            reply = workshop.open(Mail(note["errand"], note["round"], note["client"], items))
        except Exception as error:
            user = isinstance(error, FedAlloyError)
            text = str(error) if user else traceback.format_exc()
            answer: dict[str, Any] = {"error": text, "user": user, "client": note["client"]}
        else:
            arena.clear()
            answer = {**vars(replace(reply, items={})), "items": arena.put(reply.items), "arena": turn % 2}
        try:
            line.send_bytes(json.dumps(answer).encode())
        except OSError:
            return


def _die_with(parent: int) -> None:
    """When the main process is killed its workers end at once, else the run stays locked until they notice."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:  # it died before it could be watched
            os._exit(1)

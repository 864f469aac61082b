"""The round loop: sample, send, carry, receive, evaluate, record, checkpoint.

sample ─► server.send ─► engine.carry ─► client_round ─► server.receive ─► evaluate ─► history ─► checkpoint
"""

import itertools
import shutil
import statistics
import tempfile
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch

from fedalloy.core import registry
from fedalloy.core.alloy import Alloy, Mechanism
from fedalloy.core.files import unless_refused
from fedalloy.core.imports import Imports, allowed, refuse_cluster
from fedalloy.core.random import CPU, generator
from fedalloy.core.wire import Mail, Reply, bytes_of, diverged, fingerprint
from fedalloy.data.federation import Federation, federate
from fedalloy.engines.inline import Inline
from fedalloy.engines.processes import require_cores
from fedalloy.engines.workers import Workers
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.snapshot import snapshot
from fedalloy.round.engine import Engine
from fedalloy.round.evaluate import evaluate
from fedalloy.round.examine import examine, mean_notes, numbers
from fedalloy.round.replica import Replicas
from fedalloy.round.replies import Outcome
from fedalloy.round.runtime import ClientRuntime
from fedalloy.round.server import Server

Record = dict[str, Any]
OnRound = Callable[[Record], None]
OnReply = Callable[[int, int, int], None]  # round, clients that have answered, clients that were asked


@dataclass(frozen=True)
class Result:
    """A finished run."""

    folder: Path
    config: Config
    history: list[Record]
    summary: Record
    _room: "Room | None" = field(default=None, repr=False)  # goes with the result
    _imports: Imports | None = field(default=None, repr=False)  # what the run was allowed, its model is

    @property
    def accuracy(self) -> float | None:
        """The final value of the method's own metric."""
        value: float | None = self.summary["accuracy"]["final"]
        return value


class Setup:
    """A config made real: everything is checked here, before anything is written."""

    def __init__(
        self,
        config: Config,
        federation: Federation | None = None,
        method: Alloy | None = None,
        device: torch.device = CPU,
        imports: Imports | None = None,
    ) -> None:
        self.config = config
        self.imports = imports
        if config.engine == "workers":
            require_cores("--workers", min(config.processes, config.clients))
        self.method = method or registry.make(config.method, imports)
        self.federation = federation or federate(**config.dealing)
        self.replicas = Replicas(
            self.method,
            config.architectures,
            self.federation.dataset.inputs,
            config.seed,
            config.precision,
            config.rounds,
            device,
            imports,
        )
        self.replicas.check()
        for model in dict.fromkeys(config.architectures):
            self.replicas.named(model)
        self.most_norm: float | None = (
            None  # how many times as long as usual a reply may be: a real federation's
        )
        self.secret = 0  # what noise is drawn from; only a real federation has anything to hide

    def server(self) -> Server:
        config = self.config
        info = self.federation.info
        server = Server(self.method, self.replicas.of(0), info, config.local, config.seed, self.secret)
        server.most_norm = self.most_norm
        return server

    def runtime(self, folder: RunFolder) -> ClientRuntime:
        config = self.config
        return ClientRuntime(
            self.method,
            self.replicas,
            self.federation,
            config.local,
            folder.vault,
            config.seed,
            config.personal_on_global,
            self.secret,
        )

    def engine(self, runtime: ClientRuntime) -> Engine:
        """What carries mail to clients; a federation over a network brings its own."""
        if self.config.engine == "inline":
            return Inline(runtime)
        if self.config.engine == "ray":
            from fedalloy.engines.ray import RayActors  # an extra, and slow to import

            config = self.config
            return RayActors(
                runtime, config.ray_address, config.workers, config.gpus_per_worker, config.timeout
            )
        count = min(self.config.processes, max(1, len(self.federation.eligible)))
        return Workers(runtime, count, self.config.timeout)


def train(
    federation: Federation,
    model: str = "mlp",
    method: str | Alloy = "fedavg",
    *,
    out: str | Path | None = None,
    **settings: Any,
) -> Result:
    """Train a federation: `train(fed, model="mlp", method="fedprox(mu=0.1)", rounds=20, lr=0.1)`.

    Settings are those of the command line. Without `out` the run lives in a temporary folder, as long as the result.
    """
    imports = Imports()  # names that are typed in Python are the user's own word
    alloy = registry.make(method, imports) if isinstance(method, str) else method
    origin = federation.origin
    if dealt := sorted(name for name in settings if name in origin and settings[name] != origin[name]):
        raise FedAlloyError(
            f"{', '.join(dealt)} belong to the federation; give them to federate(...) instead"
        )
    values = {**federation.origin, "model": model, "method": alloy.expression, **settings}
    setup = Setup(Config.of(values).spelled(), federation, alloy, imports=imports)
    setup.server()
    room = Room() if out is None else None
    folder = RunFolder.create(room.path / "run" if room else Path(str(out)), setup.config)
    return play(setup, folder, room=room)


def start(
    config: Config,
    out: Path,
    on_round: OnRound | None = None,
    on_reply: OnReply | None = None,
    imports: Imports | None = None,
) -> Result:
    """A new run in a new folder."""
    config = config.spelled()
    setup = Setup(config, imports=imports)
    setup.server()  # what a method refuses, it refuses before anything is written
    return play(setup, RunFolder.create(out, config), on_round, on_reply)


def resume(
    path: str | Path,
    config: Config | None = None,
    on_round: OnRound | None = None,
    on_reply: OnReply | None = None,
    *,
    allow_code: bool = False,
) -> Result:
    """Carry on after the last checkpoint; the end is bit for bit that of a run never interrupted.

    A folder that names code outside of FedAlloy is refused, unless you trust it and allow that.
    """
    path = Path(path)
    folder = RunFolder.existing(path)
    stored = folder.config
    imports = allowed(str(path / "config.toml"), stored.model_dump(), allow_code=allow_code)
    if config is None and not allow_code:
        refuse_cluster(str(path / "config.toml"), stored.model_dump())
    config = config.like(stored) if config else stored
    if changed := stored.differences(config):
        raise FedAlloyError(
            f"{path} was started with other settings ({', '.join(changed)}); resume it without them, or start a new run"
        )
    if summary := folder.summary():
        return Result(path, stored, folder.history(), summary, _imports=imports)
    return play(Setup(config, imports=imports), folder, on_round, on_reply)


def reopen(path: Path, *, allow_code: bool = False) -> tuple[Server, Replicas, Federation]:
    """The server of a run as its last checkpoint left it."""
    folder = RunFolder.existing(path)
    config = folder.config.model_copy(update={"engine": "inline"})  # whatever machine it was played on
    setup = Setup(
        config, imports=allowed(str(path / "config.toml"), config.model_dump(), allow_code=allow_code)
    )
    server = setup.server()
    round, state = folder.checkpoint(setup.federation.dataset.fingerprint)
    if not round:
        raise FedAlloyError(f"{path} has no checkpoint yet; carry on with 'fedalloy run --resume {path}'")
    server.resume(state, round)
    return server, setup.replicas, setup.federation


def play(
    setup: Setup,
    folder: RunFolder,
    on_round: OnRound | None = None,
    on_reply: OnReply | None = None,
    room: "Room | None" = None,
    engine: Callable[[ClientRuntime], Engine] | None = None,
) -> Result:
    """All rounds from the folder's last checkpoint to the end; the config says on which engine, unless one is given."""
    with folder.locked(), one_thread():
        with unless_refused(folder.path, folder.made):
            server = setup.server()
            data = setup.federation.dataset.fingerprint
            last, state = folder.restore(data)
            if last:
                server.resume(state, last)
            folder.preprocess(setup.federation.dataset.preprocessing)
            history = folder.history()
            accounts(setup, history)  # what that needs is there, or no round begins
            carrier = (engine or setup.engine)(setup.runtime(folder))
        since_checkpoint: set[int] = set()
        try:
            for number in range(last + 1, setup.config.rounds + 1):
                if history and history[-1].get("diverged"):
                    break
                record = one_round(setup, server, carrier, number, on_reply)
                history.append(record)
                record |= accounts(setup, history)
                folder.record(record)
                since_checkpoint.update(record["participants"])
                if setup.config.diagnose_every and number % setup.config.diagnose_every == 0:
                    snapshot(server, setup.replicas, setup.federation, folder)
                if (
                    number % setup.config.checkpoint_every == 0
                    or number == setup.config.rounds
                    or record.get("diverged")
                ):
                    folder.save(number, server.state(), data, since_checkpoint)
                    folder.vault.trim(since_checkpoint, number)
                    since_checkpoint.clear()
                if on_round:
                    on_round(record)
        finally:
            carrier.close()
        summary = summarise(setup, server, folder, history)
        write_partition(setup, folder)
        summary = folder.finish(summary)
    return Result(folder.path, setup.config, history, summary, room, setup.imports)


def one_round(
    setup: Setup, server: Server, engine: Engine, number: int, on_reply: OnReply | None = None
) -> Record:
    """One round and its line in the history."""
    config, federation = setup.config, setup.federation
    watch = Stopwatch()
    server.round = number
    chosen = sample(
        federation, config.participation, config.seed, number, everyone=setup.method.full_participation
    )
    mails = [server.send(client) for client in chosen]
    bytes_down = sent_by(mails)
    watch.lap("other")
    mails.sort(key=lambda mail: -int(federation.sizes[mail.client]))  # longest first
    waiting = Waiting(engine.carry(mails), partial(on_reply, number) if on_reply else None, len(mails))
    outcome = server.receive(chosen, waiting)
    watch.lap("aggregate")
    watch.move("aggregate", "train", waiting.seconds)
    blown = _diverged(server, outcome)
    for asker in [] if blown else setup.method.asking(last=number == config.rounds):
        bytes_down |= ask(setup, server, engine, asker, outcome)
        watch.lap("train")
    metrics, tests = None, Outcome()
    if not blown and (number % config.eval_every == 0 or number == config.rounds):
        metrics, tests = evaluate(
            server, federation, engine, config.eval_clients, on_global=config.personal_on_global
        )
        watch.lap("evaluate")
    accepted = outcome.accepted
    diagnostics = None
    if not blown and config.diagnose_every and number % config.diagnose_every == 0:
        diagnostics = numbers(examine(server, federation)) | mean_notes(accepted)
        watch.lap("other")
    return {
        "round": number,
        "participants": chosen,
        **({"sampled": len(chosen) / len(federation.eligible)} if setup.method.with_hook("account") else {}),
        "refused": named(outcome),
        **({"refused_evaluation": named(tests)} if tests.refused else {}),
        "train_loss": statistics.fmean(told) if (told := losses(accepted)) else None,
        "samples": sum(reply.seen for reply in accepted),
        "steps": sum(reply.steps for reply in accepted),
        "bytes_up": outcome.bytes_up,
        "bytes_down": bytes_down,
        "seconds": watch.seconds,
        "metrics": metrics,
        **({"diagnostics": diagnostics} if diagnostics else {}),
        **({"diverged": True} if blown else {}),
    }


def named(outcome: Outcome) -> list[Record]:
    """Whose reply was not used, and why."""
    return [{"client": client, "why": why} for client, why in outcome.refused.items()]


def losses(replies: Sequence[Reply]) -> list[float]:
    """The clients' training losses, where they tell anything of their training at all."""
    return [reply.loss for reply in replies] if any(reply.steps for reply in replies) else []


def accounts(setup: Setup, history: Sequence[Record]) -> Record:
    """What mechanisms add to the latest line, and to the summary: a function of all lines so far."""
    found: Record = {}
    for piece in setup.method.with_hook("account"):
        found |= piece.account([line["sampled"] for line in history])
    return found


def ask(setup: Setup, server: Server, engine: Engine, asker: Mechanism, outcome: Outcome) -> dict[str, int]:
    """Put a mechanism's question about the new global model; the round's outcome takes it in. The bytes sent down."""
    participants = [reply.client for reply in outcome.accepted]
    asked = setup.federation.eligible if asker.asks_everyone else participants
    mails = server.ask(asker, asked)
    heard = server.hear(asker, asked, engine.carry(mails))
    outcome.refused |= heard.refused
    outcome.bytes_up |= heard.bytes_up
    return sent_by(mails)


def sent_by(mails: Sequence[Mail]) -> dict[str, int]:
    """Bytes per item, over all mails."""
    total: dict[str, int] = {}
    for mail in mails:
        for key, count in bytes_of(mail.items).items():
            total[key] = total.get(key, 0) + count
    return total


def sample(
    federation: Federation, participation: float, seed: int, round: int, *, everyone: bool = False
) -> list[int]:
    """max(int(C K), 1) clients, uniformly without replacement, of those that hold data."""
    eligible = federation.eligible
    if everyone:
        return list(eligible)
    wanted = int(
        participation * federation.clients + 1e-9
    )  # 0.29 of 100 is 29, whatever binary fractions say
    count = min(max(wanted, 1), len(eligible))
    order = torch.randperm(len(eligible), generator=generator(seed, round, "sample"))
    return sorted(eligible[i] for i in order[:count].tolist())


def _diverged(server: Server, outcome: Outcome) -> bool:
    """Whether training blew up. A round that brought nothing usable for another reason is an error."""
    if not outcome.accepted:
        if all(diverged(why) for why in outcome.refused.values()):
            return True
        reasons = "; ".join(f"client {client}: {why}" for client, why in outcome.refused.items())
        raise FedAlloyError(f"round {server.round} brought no usable reply: {reasons}")
    return not bool(torch.isfinite(server.weights).all())


def summarise(setup: Setup, server: Server, folder: RunFolder, history: list[Record]) -> Record:
    """The run in one object."""
    local = setup.federation.judged_locally(setup.method)
    metric = "personal_local_acc" if local else "global_acc"
    values = [
        line["metrics"][metric]
        for line in history
        if line["metrics"] and line["metrics"].get(metric) is not None
    ]
    train_seconds = sum(line["seconds"]["train"] for line in history)
    samples = sum(line["samples"] for line in history)
    blown = next((line["round"] for line in history if line.get("diverged")), None)
    replica = server.replica
    return {
        "method": setup.method.expression,
        "title": setup.method.title,
        "seed": setup.config.seed,
        "rounds": len(history),
        "metric": metric,
        "accuracy": {
            "final": values[-1] if values and blown is None else None,
            "best": max(values, default=None),
            "mean_last_10": statistics.fmean(values[-10:]) if values and blown is None else None,
        },
        "bytes_up": sum(sum(line["bytes_up"].values()) for line in history),
        "bytes_down": sum(sum(line["bytes_down"].values()) for line in history),
        "train_seconds": train_seconds,
        "samples_per_second": samples / train_seconds if train_seconds else None,
        "data_sha256": setup.federation.dataset.fingerprint,
        "weights_sha256": fingerprint(server.state()),
        "private_sha256": folder.vault.fingerprint(),
        "status": "finished" if blown is None else "diverged",
        "diverged_round": blown,
        "model": ", ".join(dict.fromkeys(setup.config.architectures)),
        "parameters": len(replica.initial),
        **accounts(setup, history),
    }


def write_partition(setup: Setup, folder: RunFolder) -> None:
    """Who holds what, for the report; of a very large federation only the first clients."""
    counts = setup.federation.counts
    if counts is not None:
        folder.describe_partition(list(setup.federation.dataset.class_names), counts[:1000].tolist())


@contextmanager
def one_thread() -> Iterator[None]:
    """One intra-op thread, as in every worker: more give other bits, and slow each other down."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Room:
    """A temporary folder that is gone when nobody holds it any more."""

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="fedalloy-"))
        weakref.finalize(self, shutil.rmtree, self.path, ignore_errors=True)


class Waiting:
    """Passes replies on, counts them aloud and adds up the time spent waiting for them."""

    def __init__(
        self, replies: Iterable[Reply], heard: Callable[[int, int], None] | None = None, asked: int = 0
    ) -> None:
        self._replies = iter(replies)
        self._heard, self._asked = heard, asked
        self.seconds = 0.0

    def __iter__(self) -> Iterator[Reply]:
        for answered in itertools.count(1):
            began = time.perf_counter()
            reply = next(self._replies, None)
            self.seconds += time.perf_counter() - began
            if reply is None:
                return
            if self._heard:
                self._heard(answered, self._asked)
            yield reply


class Stopwatch:
    """Seconds by purpose."""

    def __init__(self) -> None:
        self.seconds = {"train": 0.0, "evaluate": 0.0, "aggregate": 0.0, "other": 0.0}
        self._at = time.perf_counter()

    def lap(self, purpose: str) -> None:
        now = time.perf_counter()
        self.seconds[purpose] += now - self._at
        self._at = now

    def move(self, source: str, target: str, seconds: float) -> None:
        self.seconds[source] -= seconds
        self.seconds[target] += seconds

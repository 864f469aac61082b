"""What every method keeps to on every engine: same bits, resume, wire, purity. Rows are in `settings.py`."""

import gc
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from loopback import Loopback
from settings import ROWS, VARIANTS, Row
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.imports import Imports
from fedalloy.core.views import ClientData, Info
from fedalloy.core.wire import Items, Mail, Reply, Spec, bytes_of, restore
from fedalloy.data.federation import federate
from fedalloy.deploy.server import serve
from fedalloy.engines.inline import Inline
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Record, Result, Setup, one_round, one_thread, play, resume, sample
from fedalloy.round.client import Client, client_round
from fedalloy.round.server import Server
from fedalloy.round.vault import Vault

FED = federate("digits", clients=5, skew="pathological:3", seed=0)
ROUNDS = 3
GRID = {f"{row.method} {model}": (row, model) for row in (*ROWS, *VARIANTS) for model in row.models}
# What no variant and no other model could break by itself is tried with one model of each method.
once_per_method = pytest.mark.once_per_method
FIRST = {f"{row.method} {row.models[0]}": [pytest.mark.first_model] for row in ROWS}
CASES = [
    pytest.param(case, id=name, marks=[pytest.mark.xdist_group(name), *FIRST.get(name, [])])
    for name, case in GRID.items()
]


class Stopped(Exception):
    """Stands for whatever may stop a run."""


class Case:
    """A row on one model: runs of it, and its parts."""

    def __init__(self, row: Row, model: str, room: Path) -> None:
        self.row, self.model, self.room = row, model, room
        self.setup = self.prepared()
        self.result = self.run("whole")
        self.bits = bits(self.result)

    def prepared(self, method: str | None = None, **settings: Any) -> Setup:
        values = {
            **FED.origin,
            "method": method or self.row.method,
            "model": self.model,
            "participation": 0.6,
            "rounds": ROUNDS,
            "epochs": 2,
            "batch": 64,
            "lr": 0.1,
            "engine": "inline",
            **settings,
        }
        return Setup(Config.of(values), FED, imports=Imports())

    def run(self, name: str, method: str | None = None, stop: int | None = None, **settings: Any) -> Result:
        """A whole run, or one that is stopped after a round."""
        setup = self.prepared(method, **settings)
        return play(setup, RunFolder.create(self.room / name, setup.config), stopper(stop))

    def stopped(self, name: str, after: int, **settings: Any) -> Path:
        """The folder of a run that was stopped after a round."""
        with pytest.raises(Stopped):
            self.run(name, stop=after, **settings)
        return self.room / name

    def copy(self, path: Path, name: str) -> Path:
        return shutil.copytree(path, self.room / name)

    @property
    def info(self) -> Info:
        return FED.info

    def client(self, mail: Mail, keep: Items, data: ClientData | None = None) -> tuple[Reply, Items]:
        """One client's round, as a function."""
        setup, data = self.setup, data or FED.client(mail.client)
        replica = setup.replicas.of(mail.client)
        with one_thread():
            return client_round(
                setup.method, replica, data, self.info, setup.config.local, keep, mail, seed=0
            )


def stopper(stop: int | None) -> Callable[[Record], None]:
    def on_round(record: Record) -> None:
        if record["round"] == stop:
            raise Stopped

    return on_round


def bits(result: Result) -> dict[str, Any]:
    """All that must be the same when a run is the same."""
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in result.history]
    return {
        "weights": result.summary["weights_sha256"],
        "private": result.summary["private_sha256"],
        "history": lines,
    }


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Case]:
    row, model = request.param
    room = tmp_path_factory.mktemp("contract")
    yield Case(row, model, room)
    shutil.rmtree(room)


# The table


def test_every_method_has_a_row() -> None:
    missing = registry.RECIPES.keys() - {row.name for row in ROWS}
    assert not missing, f"add a row to tests/contract/settings.py for: {', '.join(sorted(missing))}"


# Whole runs


def test_trains(case: Case) -> None:
    """Three rounds teach it something: else equal bits would prove nothing."""
    assert case.result.summary["status"] == "finished"
    assert len({json.dumps(line["metrics"]) for line in case.result.history}) == ROUNDS
    assert all(line["steps"] for line in case.result.history)


def test_same_bits_on_workers(case: Case) -> None:
    """Two workers for one case, three for the next; `test_engines.py` tries other numbers."""
    workers = 2 + list(GRID.values()).index((case.row, case.model)) % 2
    assert bits(case.run("workers", engine="workers", workers=workers)) == case.bits


@once_per_method
def test_same_bits_over_flower(case: Case) -> None:
    """Mail and replies as Flower's messages, every client at a site of its own."""
    chosen = case.setup.config.model_dump(exclude_none=True, exclude={"engine", "workers", "timeout"})
    settings = {**chosen, "sites": "dealt", "run_folder": str(case.room / "flower"), "join_limit": 5.0}
    grid = Loopback(settings, case.room / "state", [{}] * FED.clients)
    result = serve(grid, settings)
    private = Vault(case.room / "state" / (result.folder / "run-id").read_text()).fingerprint()
    assert bits(result) | {"private": private} == case.bits


def test_private_state_is_as_the_row_says(case: Case) -> None:
    assert (case.result.summary["private_sha256"] is not None) == case.row.private


@pytest.mark.parametrize("after", [1, *(pytest.param(n, marks=once_per_method) for n in range(2, ROUNDS))])
def test_resume_gives_the_same_bits(case: Case, after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    path = case.stopped(f"stopped{after}", after)
    lossy = case.copy(path, f"lossy{after}")
    assert bits(resume(path)) == case.bits
    shutil.rmtree(lossy / "checkpoint" / "clients", ignore_errors=True)
    if case.row.private:
        with pytest.raises(FedAlloyError, match="is damaged: it is missing"):
            resume(lossy)
    monkeypatch.setattr(Vault, "verify", lambda *_: None)  # what would come of it, if nobody looked
    if case.row.indispensable:
        with pytest.raises(FedAlloyError, match="has lost"):
            resume(lossy)
        return
    forgotten = bits(resume(lossy))
    if case.row.private:  # else a resume that loses it would pass unnoticed
        assert forgotten["private"] != case.bits["private"]
        assert (forgotten["history"] == case.bits["history"]) == case.row.silent
    else:
        assert forgotten == case.bits


@once_per_method
def test_resume_on_other_engines(case: Case) -> None:
    path = case.stopped("moved", 1, engine="workers", workers=2)
    config = RunFolder(path).config
    assert bits(resume(path, config.model_copy(update={"engine": "inline"}))) == case.bits


@once_per_method
@pytest.mark.parametrize(("after", "every"), [(1, 2), (2, ROUNDS)])
def test_resume_between_rare_checkpoints(case: Case, after: int, every: int) -> None:
    """Rounds after the last checkpoint are played again, from the private state as it was then."""
    path = case.stopped(f"rare{after}", after, checkpoint_every=every)
    assert bits(resume(path)) == case.bits


@once_per_method
def test_evaluation_changes_nothing(case: Case) -> None:
    rarely = case.run("rarely", eval_every=ROUNDS)
    assert [line["metrics"] is None for line in rarely.history] == [True] * (ROUNDS - 1) + [False]
    assert rarely.history[-1]["metrics"] == case.result.history[-1]["metrics"]
    assert bits(rarely)["weights"] == case.bits["weights"]
    assert bits(rarely)["private"] == case.bits["private"]


@pytest.mark.parametrize(("row", "model"), [found for found in GRID.values() if found[0].zero])
def test_zero_is_the_simpler_method(row: Row, model: str, tmp_path: Path) -> None:
    case = Case(row, model, tmp_path)
    assert row.zero is not None
    zero, simpler = (case.run(f"zero{i}", method) for i, method in enumerate(row.zero))
    for one, other in zip(models(zero), models(simpler), strict=True):
        assert torch.equal(one, other)
    assert [line["metrics"] for line in zero.history] == [line["metrics"] for line in simpler.history]
    assert bits(zero)["history"] != case.bits["history"]  # the row's own setting does something


def models(result: Result) -> tuple[Tensor, Tensor]:
    state, _ = restore((result.folder / "checkpoint" / "server.safetensors").read_bytes())
    return state["server.weights"], state["server.buffers"]


# The wire


class Overheard:
    """An engine that keeps all that crosses it."""

    def __init__(self, inner: Inline) -> None:
        self.inner = inner
        self.down: list[Mail] = []
        self.up: list[Reply] = []
        self.asked: list[Mail] = []  # about the new global model
        self.told: list[Reply] = []

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        errand = mails[0].errand if mails else ""
        heard = {"train": self.up, "tell": self.told}.get(errand, [])
        for reply in self.inner.carry(mails):
            heard.append(reply)
            yield reply
        {"train": self.down, "tell": self.asked}.get(errand, []).extend(mails)

    def close(self) -> None:
        """Nothing to close."""


@pytest.fixture(scope="module")
def played(case: Case) -> tuple[Server, Overheard, list[Record]]:
    """The same run once more, with everything at hand."""
    setup = case.setup
    engine = Overheard(Inline(setup.runtime(RunFolder(case.room / "overheard"))))
    server = setup.server()
    with one_thread():
        records = [one_round(setup, server, engine, number) for number in range(1, ROUNDS + 1)]
    return server, engine, records


Played = tuple[Server, Overheard, list[Record]]


def assert_declared(items: Items, specs: dict[str, Spec]) -> None:
    assert items.keys() == specs.keys()
    for key, spec in specs.items():
        assert spec.fits(tuple(items[key].shape)), key
        assert items[key].dtype == spec.slot.dtype, key
        assert items[key].layout == torch.strided


def test_what_is_declared_is_what_is_sent(case: Case, played: Played) -> None:
    _, engine, _ = played
    assert engine.down
    for mail in engine.down:
        assert_declared(mail.items, case.setup.replicas.of(mail.client).specs("down"))
    for reply in engine.up:
        assert_declared(reply.items, case.setup.replicas.of(reply.client).specs("up"))
    for reply in engine.told:  # to one of those that asked
        asker = next(iter(reply.items)).partition(".")[0]
        specs = case.setup.replicas.of(reply.client).specs("query")
        assert_declared(
            reply.items, {key: spec for key, spec in specs.items() if key.startswith(f"{asker}.")}
        )
    assert bool(engine.told) == bool(case.setup.method.asking(last=True))


def test_bytes_are_those_of_the_tensors(case: Case, played: Played) -> None:
    server, engine, records = played
    for record, line in zip(records, case.result.history, strict=True):
        mails = [mail for mail in engine.down if mail.round == record["round"]]
        replies = [reply for reply in engine.up if reply.round == record["round"]]
        assert len(mails) == len(replies) == len(record["participants"])
        weighed = {"samples": 8 * len(replies)} if server.weighed else {}
        mails += [mail for mail in engine.asked if mail.round == record["round"]]
        replies += [reply for reply in engine.told if reply.round == record["round"]]
        assert record["bytes_down"] == line["bytes_down"] == total(mail.items for mail in mails)
        assert record["bytes_up"] == line["bytes_up"] == total(reply.items for reply in replies) | weighed


def total(messages: Iterator[Items]) -> dict[str, int]:
    sums: dict[str, int] = {}
    for items in messages:
        for key, count in bytes_of(items).items():
            assert count == items[key].nelement() * items[key].dtype.itemsize
            sums[key] = sums.get(key, 0) + count
    return sums


def test_nothing_but_the_wire_reaches_the_server(case: Case, played: Played) -> None:
    """Facts for the log (steps, loss, seconds) must not steer aggregation; nor the sample count where none weighs."""
    _, engine, _ = played
    first = [reply for reply in engine.up if reply.round == 1]
    asked = [reply.client for reply in first]
    told, guessed = case.setup.server(), case.setup.server()
    bare = [replace(reply, steps=0, seen=0, loss=0.0, seconds=0.0) for reply in first]
    if not told.weighed:
        bare = [replace(reply, samples=1) for reply in bare]
    answers = [replace(reply, seconds=0.0) for reply in engine.told if reply.round == 1]
    for server, replies in ((told, first), (guessed, bare)):
        server.round = 1
        server.receive(asked, replies)
        for asker in case.setup.method.asking(last=False):
            server.hear(asker, asked, answers)
    assert_same(told.state(), guessed.state())


def test_memos_last_one_round(played: Played) -> None:
    server, _, _ = played
    assert all(not box.scratch for box in server.states.values())


# The client's round as a function


def assert_same(found: Items, expected: Items) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


def copied(items: Items) -> Items:
    return {key: value.clone() for key, value in items.items()}


@pytest.fixture(scope="module")
def second(case: Case, played: Played) -> tuple[Mail, Items, Mail]:
    """A client's second participation, its private state after the first, and somebody else's mail."""
    _, engine, _ = played
    mine, again = next(
        (first, later)
        for first in engine.down
        for later in engine.down
        if first.client == later.client and first.round < later.round
    )
    other = next(mail for mail in engine.down if mail.client != mine.client)
    _, keep = case.client(mine, {})
    return again, keep, other


Second = tuple[Mail, Items, Mail]


def test_inputs_are_left_alone(case: Case, second: Second) -> None:
    mail, keep, _ = second
    data = FED.client(mail.client)
    before = copied(mail.items), copied(keep), [t.clone() for t in (data.x, data.y, data.x_test, data.y_test)]
    case.client(mail, keep, data)
    assert_same(mail.items, before[0])
    assert_same(keep, before[1])
    for now, then in zip((data.x, data.y, data.x_test, data.y_test), before[2], strict=True):
        assert torch.equal(now, then)


def test_a_round_is_a_function_of_its_inputs(case: Case, second: Second) -> None:
    """Also after somebody else used the site, and whatever the global generator says."""
    mail, keep, other = second
    reply, kept = case.client(mail, keep)
    reply_items, kept = copied(reply.items), copied(kept)
    case.client(other, {})
    torch.manual_seed(12345)
    state = torch.get_rng_state()
    again, kept_again = case.client(mail, keep)
    assert torch.equal(torch.get_rng_state(), state)
    assert_same(again.items, reply_items)
    assert_same(kept_again, kept)
    assert (again.loss, again.steps, again.seen) == (reply.loss, reply.steps, reply.seen)


@once_per_method
def test_nothing_is_left_of_a_client(case: Case, second: Second) -> None:
    """Its vectors go at once: in a large net the collector would come too late for what holds itself."""
    mail, keep, _ = second
    gc.collect()
    gc.disable()
    try:
        case.client(mail, keep)
        assert not [one for one in gc.get_objects() if type(one) is Client]
    finally:
        gc.enable()


def test_what_a_client_returns_stays_as_it_is(case: Case, second: Second) -> None:
    """The next client on the site must not write into the last one's reply."""
    mail, keep, other = second
    reply, kept = case.client(mail, keep)
    before = copied(reply.items), copied(kept)
    case.client(other, {})
    assert_same(reply.items, before[0])
    assert_same(kept, before[1])


@once_per_method
def test_a_client_does_not_depend_on_the_others(case: Case, tmp_path: Path) -> None:
    """The first round in two orders, and a client all alone: the same replies, the same private state."""
    setup = case.setup
    chosen = sample(FED, 0.6, 0, 1, everyone=setup.method.full_participation)
    found: list[dict[int, Items]] = []
    for i, order in enumerate([chosen, chosen[::-1], chosen[-1:]]):
        folder = RunFolder(tmp_path / str(i))
        server = setup.server()
        server.round = 1
        with one_thread():
            replies = list(Inline(setup.runtime(folder)).carry([server.send(client) for client in order]))
        found.append({r.client: copied(r.items) | folder.vault.load(r.client, before=2) for r in replies})
    for others in found[1:]:
        for client, items in others.items():
            assert_same(items, found[0][client])

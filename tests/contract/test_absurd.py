"""One client sends finite but absurd numbers in every round: it is refused by name, and is as if it were not there."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from settings import NORMED, ROWS, VARIANTS, Row

from fedalloy.core.wire import Items, Mail, Reply, Slot
from fedalloy.data.federation import federate
from fedalloy.engines.inline import Inline
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Record, Setup, one_round, one_thread
from fedalloy.round.lengths import too_long
from fedalloy.round.server import Server

FED = federate("digits", clients=4, skew="pathological:3", seed=0)
LIAR = 2
ROUNDS = 2
CASES = [pytest.param(row, id=row.method) for row in (*ROWS, *VARIANTS[:3], VARIANTS[-2])]

Change = Callable[[Reply], Reply]


class Changed:
    """An engine on which one client answers otherwise."""

    def __init__(self, inner: Inline, change: Change) -> None:
        self.inner, self.change = inner, change

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        training = bool(mails) and mails[0].errand in ("train", "tell")
        for reply in self.inner.carry(mails):
            yield self.change(reply) if training and reply.client == LIAR else reply

    def close(self) -> None: ...


def shouting(reply: Reply) -> Reply:
    """Every number 1e20 times as large."""
    loud = {k: (v + 1) * 1e20 if v.is_floating_point() else v for k, v in reply.items.items()}
    return replace(reply, items=loud)


def absent(reply: Reply) -> Reply:
    return Reply(reply.round, reply.client, error="is not connected")


def played(
    row: Row, room: Path, change: Change = lambda reply: reply, most: float | None = 100.0
) -> tuple[Server, list[Record]]:
    values = {
        **FED.origin,
        "method": row.method,
        "model": row.models[-1],
        "rounds": ROUNDS,
        "batch": 128,
        "lr": 0.1,
        "eval_every": 10,
        "engine": "inline",
    }
    setup = Setup(Config.of(values), FED)
    setup.most_norm = most
    server = setup.server()
    engine = Changed(Inline(setup.runtime(RunFolder(room))), change)
    with one_thread():
        lines = [one_round(setup, server, engine, number) for number in range(1, ROUNDS + 1)]
    return server, lines


def same(one: Items, other: Items) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


@pytest.mark.filterwarnings("ignore:no client that was asked holds")
@pytest.mark.parametrize("row", CASES)
def test_one_client_cannot_end_a_run(row: Row, tmp_path: Path) -> None:
    server, lines = played(row, tmp_path / "loud", shouting)
    without, _ = played(row, tmp_path / "without", absent)
    slots = [slot for piece in server.method for way in (piece.up, piece.query) for slot in way.values()]
    if not any(slot.dtype.is_floating_point for slot in slots):
        return  # nothing is sent in which anybody could shout
    assert [[one["client"] for one in line["refused"]] for line in lines] == [[LIAR]] * ROUNDS
    assert not any(line.get("diverged") for line in lines)
    assert same(server.state(), without.state())


@pytest.mark.parametrize(
    "row", [row for row in ROWS if row.name in ("fedavg", "scaffold", "fednova", "fedpac", "feddw")]
)
def test_honest_replies_are_folded_to_the_same_bits(row: Row, tmp_path: Path) -> None:
    bound, lines = played(row, tmp_path / "bound")
    free, _ = played(row, tmp_path / "free", most=None)
    assert all(line["refused"] == [] for line in lines)
    assert same(bound.state(), free.state())


def test_the_refusal_says_how_much_too_long(tmp_path: Path) -> None:
    _, lines = played(Row("fedavg"), tmp_path, shouting)
    (refused,) = lines[0]["refused"]
    assert refused["why"].startswith("share.weights is ")
    assert refused["why"].endswith(" times as long as is usual; at most 100 is allowed")


@pytest.mark.parametrize("value", [-1.0, -1e-30, 1e30, 3e38])
def test_statistics_of_batchnorm_count_too(tmp_path: Path, value: float) -> None:
    """A negative variance would be the root of a negative number at every client."""

    def change(reply: Reply) -> Reply:
        buffers = reply.items["share.buffers"].clone()
        buffers[-1] = value  # the running variance of the last unit
        return replace(reply, items=reply.items | {"share.buffers": buffers})

    row = Row("fedavg", models=(NORMED,))
    server, lines = played(row, tmp_path, change)
    assert [one["client"] for line in lines for one in line["refused"]] == [LIAR] * ROUNDS
    assert bool(torch.isfinite(server.buffers).all())


def reply(client: int, *values: float) -> Reply:
    return Reply(1, client, {"a.w": torch.tensor(values)}, 1)


@pytest.mark.parametrize(
    ("values", "refused"),
    [
        ([1.0, 1.0, 1e6], {2}),
        ([1.0, 2.0, 99.0], set()),
        ([0.0, 0.0, 5.0], set()),  # very short lengths are all alike
        ([0.0, 0.0, 1e6], {2}),
        ([1e3, 1e3, 1e3], set()),  # nobody is longer than the others
        ([1.0, 3e38], {1}),  # too few for a median
        ([3e38], {0}),
        ([50.0], set()),
        ([], set()),
    ],
)
def test_what_is_too_long(values: list[float], refused: set[int]) -> None:
    replies = [reply(client, value) for client, value in enumerate(values)]
    shared = torch.ones(1)
    for slot in (Slot(increment=True), Slot()):
        assert too_long(replies, {"a.w": slot}, shared, 100.0).keys() == refused
    moved = [reply(client, 1 + value) for client, value in enumerate(values)]
    assert too_long(moved, {"a.w": Slot(relative=True)}, shared, 100.0).keys() == refused

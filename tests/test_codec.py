"""Codecs: what is declared additive travels compressed, all else as it is; and rows that only holders send."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, AlloyConflict, Mechanism, Slots, alloy
from fedalloy.core.imports import Imports
from fedalloy.core.net import Inputs, Net
from fedalloy.core.random import generator
from fedalloy.core.reduce import Fold
from fedalloy.core.registry import make
from fedalloy.core.state import State
from fedalloy.core.training import Local
from fedalloy.core.views import Info, ReplicaView, ServerView
from fedalloy.core.wire import MOST_SAMPLES, Items, Reply, Slot, bytes_of, refusal
from fedalloy.data.federation import federate
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.run import Setup
from fedalloy.mechanisms.class_means import ClassMeans, held_means
from fedalloy.mechanisms.share import Share
from fedalloy.mechanisms.stream import Stream
from fedalloy.mechanisms.subspace import Draw, Side, Subspace, projector
from fedalloy.round.client import client_round
from fedalloy.round.replica import Replica
from fedalloy.round.server import Server
from fuzzing import examples

DIGITS = Inputs("image", (1, 8, 8), classes=10)
MLP = "mlp(hidden=16)"


@dataclass(frozen=True)
class _Halves(Mechanism):
    """A codec that anybody could write: every second number, as a stretch of zeros in between."""

    def encode(self, replica: ReplicaView, value: Tensor, round: int) -> Tensor:
        return value[round % 2 :: 2]

    def decode(self, replica: ReplicaView, coded: Tensor, round: int) -> Tensor:
        full = torch.zeros(len(replica.initial))
        full[round % 2 :: 2] = coded
        return full

    def coded_size(self, replica: ReplicaView) -> int:
        return len(replica.initial) // 2


@dataclass(frozen=True)
class _Kinds(Mechanism):
    """One slot of every kind, both ways."""

    @property
    def down(self) -> Slots:
        return self.up

    @property
    def up(self) -> Slots:
        return {
            "plain": Slot("uniform"),
            "increment": Slot("uniform", increment=True),
            "relative": Slot("uniform", relative=True),
            "other": Slot("sum", (2,), torch.int64),
        }


def site_of(*pieces: Mechanism | Alloy, model: str = MLP) -> Replica:
    return Replica(alloy("test", *pieces), model, DIGITS, seed=0, imports=Imports())


def kinds(replica: Replica) -> Items:
    dice = generator(1)
    values = {
        name: torch.randn(len(replica.initial), generator=dice) for name in ("plain", "increment", "relative")
    }
    return {f"_kinds.{name}": value for name, value in values.items()} | {
        "_kinds.other": torch.tensor([3, 4])
    }


@pytest.mark.parametrize("direction", ["down", "up"])
def test_only_what_is_additive_is_compressed(direction: str) -> None:
    replica = site_of(Share(), _Kinds(), _Halves())
    assert (len(replica.initial), replica.coded_size) == (1210, 605)
    items, shared = kinds(replica), replica.initial
    items |= {"share.weights": torch.zeros(1210)} if direction == "up" else {}
    packed = replica.pack(direction, items, shared, 3)
    assert torch.equal(packed["_kinds.plain"], items["_kinds.plain"])
    assert torch.equal(packed["_kinds.other"], items["_kinds.other"])
    assert torch.equal(packed["_kinds.increment"], items["_kinds.increment"][1::2])
    assert torch.equal(packed["_kinds.relative"], (items["_kinds.relative"] - shared)[1::2])
    opened = replica.unpack(direction, packed, shared, 3)
    assert torch.equal(opened["_kinds.plain"], items["_kinds.plain"])
    assert torch.equal(opened["_kinds.increment"][1::2], items["_kinds.increment"][1::2])
    assert not opened["_kinds.increment"][::2].any()
    assert torch.equal(opened["_kinds.relative"][::2], shared[::2])  # what the codec loses stays where it was
    assert torch.allclose(opened["_kinds.relative"][1::2], items["_kinds.relative"][1::2], atol=1e-6)
    assert items.keys() == packed.keys() == opened.keys()
    assert len(items["_kinds.increment"]) == 1210  # what was handed over is not touched


def test_specs_tell_the_compressed_sizes() -> None:
    replica = site_of(Share(), _Kinds(), _Halves())
    for direction in ("down", "up"):
        shapes = {key: spec.shape for key, spec in replica.specs(direction).items()}
        assert shapes["_kinds.plain"] == (1210,)
        assert shapes["_kinds.increment"] == shapes["_kinds.relative"] == (605,)
        assert shapes["_kinds.other"] == (2,)
    assert replica.specs("up")["share.weights"].shape == (605,)
    assert replica.specs("down")["share.weights"].shape == (1210,)


def test_without_a_codec_nothing_changes() -> None:
    replica = site_of(Share(), _Kinds())
    items = kinds(replica)
    value = items["_kinds.plain"]
    assert replica.coded_size == 1210
    for direction in ("down", "up"):
        for travelled in (replica.pack, replica.unpack):
            found = travelled(direction, items, replica.initial, 1)
            assert found.keys() == items.keys()
            assert all(found[key] is items[key] for key in items)
    assert replica.as_sent(value, 1) is replica.encoded(value, 1) is replica.decoded(value, 1) is value


def test_as_sent_is_what_the_other_end_sees() -> None:
    replica = site_of(Share(), _Kinds(), _Halves())
    value = kinds(replica)["_kinds.increment"]
    seen = replica.unpack(
        "down", replica.pack("down", kinds(replica), replica.initial, 2), replica.initial, 2
    )
    assert torch.equal(replica.as_sent(value, 2), seen["_kinds.increment"])
    assert not torch.equal(replica.as_sent(value, 3), seen["_kinds.increment"])


def test_two_codecs_are_refused() -> None:
    with pytest.raises(AlloyConflict, match="both claim the compression"):
        site_of(Share(), _Halves(), Subspace())


def server_of(method: Alloy) -> Server:
    server = Server(method, Replica(method, MLP, DIGITS, 0), Info(4, 100), Local(), seed=0)
    server.round = 1
    return server


@pytest.mark.parametrize("wrong", [1210, 604, 606, 1, 0])
def test_replies_of_another_compressed_size_are_refused(wrong: int) -> None:
    method = alloy("halves", Share(), _Halves())
    server = server_of(method)
    good = Reply(1, 0, {"share.weights": torch.ones(605), "share.buffers": torch.empty(0)}, samples=5)
    bad = Reply(1, 1, good.items | {"share.weights": torch.ones(wrong)}, samples=5)
    outcome = server.receive([0, 1], [good, bad])
    assert outcome.refused == {1: f"share.weights has shape ({wrong},), declared (605,)"}
    assert outcome.bytes_up["share.weights"] == 4 * (605 + wrong)
    start = server.replica.initial
    assert torch.equal(server.weights[::2], start[::2])
    assert torch.allclose(server.weights[1::2], start[1::2] + 1)


def test_explained_bytes_are_those_that_travel() -> None:
    for text in ("ssf", "fedsub", "fedprox+subspace", "scaffold+subspace(side=longer)", "fednova+subspace"):
        server = server_of(make(text))
        specs = server.replica.specs("down")
        for key, size in bytes_of(server.send(0).items).items():
            if key not in ("share.dense", "share.updates"):  # first contact differs
                assert size == specs[key].bytes, (text, key)


# Codecs on a part of the model, and codecs whose length depends on the values


@dataclass(frozen=True)
class _Trim(Mechanism):
    """How many numbers there are up to the last that is not small, then these numbers."""

    @property
    def elastic(self) -> bool:
        return True

    def encode(self, replica: ReplicaView, value: Tensor, round: int) -> Tensor:
        large = (value.abs() > 0.5).nonzero().flatten()
        n = int(large[-1]) + 1 if len(large) else 0
        return torch.cat([torch.tensor([float(n)]), value[:n]])

    def decode(self, replica: ReplicaView, coded: Tensor, round: int) -> Tensor:
        if not len(coded) or len(coded) != 1 + int(coded[0]):
            raise FedAlloyError("is no trimmed vector")
        full = torch.zeros(len(replica.initial[replica.shared]))
        full[: len(coded) - 1] = coded[1:]
        return full

    def coded_size(self, replica: ReplicaView) -> int:
        return 1 + len(replica.initial[replica.shared])

    def split(self, replica: ReplicaView, coded: Tensor) -> list[Tensor]:
        found = []
        while len(coded):
            found.append(coded[: 1 + int(coded[0])])
            coded = coded[1 + int(coded[0]) :]
        return found


@pytest.mark.parametrize(("part", "size"), [("", 1210), ("body", 1040), ("head", 170)])
def test_a_codec_sees_the_shared_part(part: str, size: int) -> None:
    """What travels is the move of the shared part, wherever it lies in the model."""
    lab_fed = federate("digits", clients=3, skew="iid")
    method = alloy("part", Share(part=part), _Trim())
    replica = Replica(method, MLP, DIGITS, 0)
    server = Server(method, replica, lab_fed.info, Local(lr=0.5), seed=0)
    assert replica.coded_size == size + 1
    server.round = 1
    start = server.weights.clone()
    assert len(start) == size
    replies = [
        client_round(method, replica, lab_fed.client(k), lab_fed.info, server.local, {}, server.send(k), 0)[0]
        for k in range(3)
    ]
    lengths = [len(reply.items["share.weights"]) for reply in replies]
    outcome = server.receive([0, 1, 2], replies)
    assert not outcome.refused
    assert outcome.bytes_up["share.weights"] == 4 * sum(lengths)
    assert max(lengths) <= size + 1
    moves = torch.stack([_Trim().decode(replica, reply.items["share.weights"], 1) for reply in replies])
    weights = torch.tensor([float(reply.samples) for reply in replies])
    assert torch.allclose(server.weights, start + weights @ moves / weights.sum(), atol=1e-6)


@pytest.mark.parametrize("sent", [[], [3.0, 1.0], [1.0, 2.0, 3.0]])
def test_what_cannot_be_decoded_is_refused(sent: list[float]) -> None:
    """Any length may be right; a vector that the codec cannot have made is refused, and the round goes on."""
    server = server_of(alloy("trim", Share(), _Trim()))
    start = server.weights.clone()
    good = Reply(
        1, 0, {"share.weights": torch.tensor([1.0, 7.0]), "share.buffers": torch.empty(0)}, samples=5
    )
    bad = Reply(1, 1, good.items | {"share.weights": torch.tensor(sent)}, samples=5)
    outcome = server.receive([0, 1], [good, bad])
    assert outcome.refused == {1: "is no trimmed vector"}
    assert [reply.client for reply in outcome.accepted] == [0]
    assert float(server.weights[0] - start[0]) == pytest.approx(7)
    assert torch.equal(server.weights[1:], start[1:])


def test_a_stream_of_updates_of_all_lengths() -> None:
    """Updates of several rounds travel as one vector and come apart; no more of them than the model weighs."""
    method = alloy("stream", Stream(), _Trim())
    fed = federate("digits", clients=3, skew="iid")
    replica = Replica(method, MLP, DIGITS, 0)
    server = Server(method, replica, fed.info, Local(lr=0.5), seed=0)
    keeps: dict[int, Items] = {}
    chosen = [[0, 1, 2], [1], [1, 2], [2], [0, 2], [1]]
    for server.round, clients in enumerate(chosen, 1):
        replies = []
        for k in clients:
            mail = server.send(k)
            reply, keeps[k] = client_round(
                method, replica, fed.client(k), fed.info, server.local, keeps.get(k, {}), mail, 0
            )
            assert torch.equal(keeps[k]["share.x"], server.weights)
            replies.append(reply)
        assert not server.receive(clients, replies).refused
        kept = server.states["share"].persistent
        assert int(kept["lengths"].sum()) == len(kept["updates"])
        assert len(kept["lengths"]) == 1 or len(kept["updates"]) < 1210


def test_sites_know_the_rounds_of_a_run() -> None:
    """For codecs with a schedule; a site without a run has none."""
    assert site_of(Share()).rounds is None
    fed = federate("digits", clients=3, skew="iid")
    setup = Setup(Config.of({**fed.origin, "method": "fedavg", "rounds": 7}), fed)
    assert setup.replicas.of(0).rounds == 7


# Subspaces tensor by tensor


class _Odd(Net):
    """Tensors of many shapes."""

    def __init__(self) -> None:
        body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Conv2d(6, 5, (2, 3), bias=False), nn.BatchNorm2d(5))
        super().__init__(body, nn.Linear(9, 3))


def odd() -> Net:
    return _Odd()


def as_matrices(name: str, w: Tensor, side: Side) -> Tensor:
    """The tensor with the projected axis in front, by hand; empty where it travels whole."""
    if w.dim() < 2:
        return w[:0]
    if side == "input":
        return w.transpose(0, 1).flatten(1)
    matrix = w.flatten(1)
    return matrix.T if side == "longer" and matrix.shape[1] > matrix.shape[0] else matrix


@pytest.mark.parametrize("side", ["left", "longer", "input"])
@pytest.mark.parametrize("draw", ["haar", "coordinate", "gaussian"])
def test_every_tensor_has_its_own_projector(side: Side, draw: Draw) -> None:
    """A weight of shape out x rest is an m x n matrix with P from the left: coordinates P M, rank round(ratio m)."""
    replica = site_of(Share(), Subspace(0.4, side=side, min_rows=4, draw=draw), model="test_codec:odd")
    value = torch.randn(len(replica.initial), generator=generator(2))
    pieces, restored = [], []
    for name, w in replica.weights.views(value).items():
        matrix = as_matrices(name, w, side)
        if len(matrix) < 4:
            pieces.append(w.flatten())
            restored.append(w.flatten())
            continue
        rank = max(1, round(0.4 * len(matrix)))
        p = projector(len(matrix), rank, generator(0, 6, name, "subspace"), draw).float()
        b = torch.linalg.lstsq(p.T, matrix).solution if draw == "gaussian" else p @ matrix
        pieces.append(b.flatten())
        back = p.T @ b
        if side == "input":
            back = back.view(w.transpose(0, 1).shape).transpose(0, 1)
        elif matrix.shape != w.flatten(1).shape or not torch.equal(matrix, w.flatten(1)):
            back = back.T
        restored.append(back.flatten())
    coded = replica.encoded(value, 7)
    assert len(coded) == replica.coded_size == sum(map(len, pieces)) < len(value)
    assert torch.allclose(coded, torch.cat(pieces), atol=1e-4)
    assert torch.allclose(replica.decoded(coded, 7), torch.cat(restored), atol=1e-4)
    assert torch.allclose(replica.as_sent(replica.as_sent(value, 7), 7), replica.as_sent(value, 7), atol=1e-4)


@pytest.mark.parametrize(
    ("settings", "sizes"),
    [
        ({}, [2 * 9, 6, 1 * 36, 5, 5, 3 * 9, 3]),  # 6 x 9, 5 x 36, 3 x 9; the last one has too few rows
        ({"min_rows": 3}, [2 * 9, 6, 1 * 36, 5, 5, 1 * 9, 3]),
        ({"min_rows": 6}, [2 * 9, 6, 5 * 36, 5, 5, 3 * 9, 3]),
        ({"side": "longer"}, [6 * 2, 6, 5 * 9, 5, 5, 3 * 2, 3]),
        ({"side": "input"}, [6 * 9, 6, 5 * 2 * 6, 5, 5, 3 * 2, 3]),
        ({"scope": "whole"}, [70]),
    ],
)
def test_ranks(settings: dict[str, Any], sizes: list[int]) -> None:
    """Sides below min_rows, and vectors, travel whole; the rank is max(1, round(ratio m))."""
    coder = Subspace(0.25, **settings)
    replica = site_of(Share(), coder, model="test_codec:odd")
    assert [cut.coded_size for cut in coder.cuts(replica)] == sizes
    assert replica.coded_size == sum(sizes)


def test_min_rows_of_one_leaves_vectors_whole() -> None:
    coder = Subspace(0.25, min_rows=1, draw="gaussian")
    replica = site_of(Share(), coder, model="test_codec:odd")
    assert [cut.rank for cut in coder.cuts(replica) if "bias" in cut.name] == [0, 0, 0]


# Class means whose absent rows do not travel


HELD = alloy("held", Share(), ClassMeans())


def held_reply(client: int, counts: Sequence[int], rows: int | None = None) -> Reply:
    """Row j of client k is full of 10 k + class."""
    filled = torch.tensor(counts, dtype=torch.int64)
    classes = (filled > 0).nonzero().flatten()
    means = (10.0 * client + classes.float())[:, None].repeat(1, 16)
    if rows is not None:
        means = torch.zeros(rows, 16)
    items = {
        "share.weights": torch.zeros(1210),
        "share.buffers": torch.empty(0),
        "features-means.means": means,
        "features-means.counts": filled,
    }
    return Reply(1, client, items, samples=max(int(filled.sum()), 1))


def counts(**held: int) -> list[int]:
    return [held.get(f"c{c}", 0) for c in range(10)]


def test_only_held_rows_travel() -> None:
    server = server_of(HELD)
    outcome = server.receive([0, 1], [held_reply(0, counts(c2=3)), held_reply(1, counts(c2=1, c7=2))])
    assert not outcome.refused
    assert outcome.bytes_up["features-means.means"] == 4 * 16 * (1 + 2)
    box = server.states["features-means"].persistent
    assert box["seen"].nonzero().flatten().tolist() == [2, 7]
    assert float(box["means"][2, 0]) == pytest.approx((3 * 2 + 1 * 12) / 4)
    assert float(box["means"][7, 0]) == 17
    assert server.replica.specs("up")["features-means.means"].shape == (10, 16)  # the largest


@pytest.mark.parametrize("rows", [0, 1, 3, 10])
def test_rows_must_match_the_counts(rows: int) -> None:
    """Two classes are held: any other number of rows is refused, and nothing of that reply is used."""
    alone, both = server_of(HELD), server_of(HELD)
    good = held_reply(0, counts(c1=2))
    alone.receive([0], [good])
    outcome = both.receive([0, 1], [good, held_reply(1, counts(c2=1, c7=2), rows)])
    assert outcome.refused == {1: f"features-means.means has {rows} rows for 2 classes"}
    assert torch.equal(
        both.states["features-means"].persistent["means"], alone.states["features-means"].persistent["means"]
    )


@pytest.mark.parametrize("shape", [(11, 16), (2, 15), (2, 17), (2,), (2, 16, 1), ()])
def test_rows_of_another_shape_are_refused(shape: tuple[int, ...]) -> None:
    declared = server_of(HELD).replica.specs("up")
    reply = held_reply(1, counts(c2=1, c7=2))
    bad = dataclasses.replace(reply, items=reply.items | {"features-means.means": torch.zeros(shape)})
    why = refusal(bad, declared, weighed=True)
    assert why == f"features-means.means has shape {shape}, declared (10, 16)"


@pytest.mark.parametrize("value", [-1, MOST_SAMPLES + 1])
def test_impossible_counts_are_refused(value: int) -> None:
    declared = server_of(HELD).replica.specs("up")
    reply = dataclasses.replace(held_reply(1, counts(c2=value)), samples=5)
    assert refusal(reply, declared, weighed=True) == "claims impossible counts for features-means.means"
    nan = held_reply(1, counts(c2=1))
    nan.items["features-means.means"][0, 3] = math.nan
    assert refusal(nan, declared, weighed=True) == "features-means.means is not finite"


def test_a_client_without_any_class_sends_no_row() -> None:
    declared = server_of(HELD).replica.specs("up")
    assert refusal(held_reply(1, counts()), declared, weighed=True) is None
    assert refusal(held_reply(1, counts(), rows=1), declared, weighed=True)


@examples(50)
@given(st.lists(st.lists(st.integers(0, 4), min_size=10, max_size=10), min_size=1, max_size=4))
def test_held_rows_fold_like_full_ones(held: list[list[int]]) -> None:
    """class_mean of ("held", ...) rows equals that of rows for every class."""

    def folded(dim: str, rows: Mapping[int, Tensor]) -> Tensor:
        slots: Slots = {
            "rows": Slot("class_mean", (dim, 3), counts="counts"),
            "counts": Slot("sum", ("classes",), torch.int64),
        }
        fold = Fold(slots)
        for client, values in rows.items():
            own = torch.tensor(held[client])
            fold.add(Reply(1, client, {"rows": values, "counts": own}))
        found = fold.got()["rows"]
        assert isinstance(found, Tensor)
        return found

    full = {k: torch.randn(10, 3, generator=generator(k)) for k in range(len(held))}
    thin = {k: rows[torch.tensor(held[k]) > 0] for k, rows in full.items()}
    assert torch.equal(folded("classes", full), folded("held", thin))


@pytest.mark.parametrize("rows", [0, 1, 2, 3])
def test_rows_that_are_handed_over_must_match_too(rows: int) -> None:
    """Of slots that the server gets one by one; which classes are held may be told without counts."""
    piece = _Slots(
        (
            ("rows", Slot("all", ("held", 3), counts="held")),
            ("held", Slot("all", ("classes",), torch.bool)),
        )
    )
    declared = Replica(alloy("rows", piece), MLP, DIGITS, 0).specs("up")
    held = torch.tensor(counts(c1=1, c4=1)) > 0
    why = refusal(
        Reply(1, 0, {"_slots.rows": torch.zeros(rows, 3), "_slots.held": held}), declared, weighed=False
    )
    assert why == (None if rows == 2 else f"_slots.rows has {rows} rows for 2 classes")


@dataclass(frozen=True)
class _Slots(Mechanism):
    slots: tuple[tuple[str, Slot], ...] = ()

    @property
    def up(self) -> Slots:
        return dict(self.slots)

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        raise AssertionError("only folded here")


def test_held_means_are_in_ascending_order_of_class() -> None:
    values = torch.tensor([[1.0, 0.0], [3.0, 2.0], [10.0, 10.0], [5.0, 1.0]])
    found = held_means(values, torch.tensor([7, 7, 2, 9]))
    assert torch.equal(found, torch.tensor([[10.0, 10.0], [2.0, 1.0], [5.0, 1.0]]))
    assert held_means(values[:0], torch.empty(0, dtype=torch.long)).shape == (0, 2)

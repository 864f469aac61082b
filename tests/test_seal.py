"""The last word on what leaves a client and on what was folded; what parts learn of it; what the history says."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedalloy.core.alloy import AlloyConflict, Folded, Mechanism, alloy
from fedalloy.core.state import State
from fedalloy.core.training import Local
from fedalloy.core.views import ClientView, Info, ReplicaView, ServerView
from fedalloy.core.wire import Items, Reply
from fedalloy.data.federation import federate
from fedalloy.experiment.run import resume, train
from fedalloy.mechanisms.share import Share
from fedalloy.mechanisms.subspace import Subspace
from fedalloy.methods import feddyn, fedsub, scaffold, ssf
from fedalloy.round.client import client_round
from fedalloy.round.replica import Replica
from fedalloy.round.server import Server

FED = federate("digits", clients=3, skew="iid")
MLP = "mlp(hidden=8)"


@dataclass(frozen=True)
class _Half(Mechanism):
    """Half of every change leaves, the mean comes out one larger; samples do not count."""

    spoils = frozenset({"size weights"})
    gives = frozenset({"uniform weights"})
    means: list[Folded] = field(default_factory=list, compare=False)

    def seal(self, client: ClientView, my: State, items: Items) -> Items:
        shared = client.received[client.replica.shared]
        return items | {
            key: shared + (items[key] - shared) / 2 if slot.relative else items[key] / 2
            for key, slot in client.replica.additive("up").items()
        }

    def folded(self, server: ServerView, my: State, got: Folded) -> Folded:
        self.means.append(got)
        shared = got["share"]
        return {**got, "share": {**shared, "weights": shared["weights"] + 1}}

    def account(self, sampled: Sequence[float]) -> Mapping[str, float]:
        return {"asked": sum(sampled)}


@dataclass(frozen=True)
class _Witness(Mechanism):
    """Remembers what it was told had left."""

    seen: list[Items] = field(default_factory=list, compare=False)

    def after_upload(self, client: ClientView, my: State, items: Items) -> None:
        self.seen.append(items)


class Rounds:
    """Rounds of all clients, by hand."""

    def __init__(self, *pieces: Any) -> None:
        self.method = alloy("test", *pieces)
        self.replica = Replica(self.method, MLP, FED.dataset.inputs, 0)
        self.server = Server(self.method, self.replica, FED.info, Local(lr=0.1, batch=64), 0)
        self.keeps: dict[int, Items] = {k: {} for k in range(3)}
        self.replies: list[Reply] = []

    def play(self, rounds: int = 1) -> "Rounds":
        for _ in range(rounds):
            self.server.round += 1
            self.replies = []
            for k, keep in self.keeps.items():
                mail, data = self.server.send(k), FED.client(k)
                reply, self.keeps[k] = client_round(
                    self.method, self.replica, data, FED.info, self.server.local, keep, mail, 0
                )
                self.replies.append(reply)
            assert not self.server.receive([0, 1, 2], self.replies).refused
        return self

    def mean(self, key: str) -> torch.Tensor:
        return torch.stack([self.keeps[k][key] for k in range(3)]).mean(0)


def test_the_sealed_change_leaves_and_the_changed_mean_is_received() -> None:
    plain, half = Rounds(Share(agg_weights="uniform")).play(), _Half()
    sealed = Rounds(Share(agg_weights="uniform"), half).play()
    start = plain.replica.initial
    for whole, cut in zip(plain.replies, sealed.replies, strict=True):
        moved, left = whole.items["share.weights"] - start, cut.items["share.weights"] - start
        assert torch.allclose(left, moved / 2, atol=1e-6)
        assert float(moved.norm()) > 0.1
    mean = torch.stack([reply.items["share.weights"] for reply in sealed.replies]).double().mean(0)
    assert torch.allclose(half.means[0]["share"]["weights"].double(), mean, atol=1e-7)
    assert torch.equal(sealed.server.weights, half.means[0]["share"]["weights"] + 1)


def test_without_a_seal_parts_are_told_of_what_they_made() -> None:
    witness = _Witness()
    plain = Rounds(Share(), witness).play()
    for reply, seen in zip(plain.replies, witness.seen, strict=True):
        assert seen.keys() == reply.items.keys()
        assert all(torch.equal(seen[key], reply.items[key]) for key in seen)


def test_parts_are_told_of_what_the_server_will_see() -> None:
    """Sealed, then compressed."""
    witness = _Witness()
    sealed = Rounds(Share(), _Half(), Subspace(0.5), witness).play()
    start = sealed.replica.initial
    for reply, seen in zip(sealed.replies, witness.seen, strict=True):
        opened = sealed.replica.unpack("up", reply.items, start, 1)
        assert torch.equal(opened["share.weights"], seen["share.weights"])


@pytest.mark.parametrize("method", [scaffold(), ssf(ratio=0.5)], ids=["scaffold", "ssf"])
def test_control_variates_stay_the_mean_of_what_was_sent(method: Any) -> None:
    """c = (1/N) sum of all c_k, which steps count on: a client's own variate moves by what the server saw."""
    found = Rounds(method, _Half()).play(3)
    c = found.server.states["control"].persistent["c"]
    assert float(c.norm()) > 0.1
    assert torch.allclose(c, found.mean("control.c_k"), atol=1e-5)


def test_linear_terms_stay_the_mean_of_what_was_sent() -> None:
    """FedDyn's h is the mean of all g_k."""

    class _Cut(_Half):
        def folded(self, server: ServerView, my: State, got: Folded) -> Folded:
            return got

    found = Rounds(feddyn(alpha=0.1), _Cut()).play(3)
    h = found.server.states["dynamic"].persistent["h"]
    assert float(h.norm()) > 0.01
    assert torch.allclose(h, found.mean("dynamic.g"), atol=1e-5)


def test_duals_are_about_what_was_sent() -> None:
    """FedSub compares the mean with what the server saw of this client."""
    found = Rounds(fedsub(ratio=0.5), _Half()).play()
    for k, reply in enumerate(found.replies):
        assert torch.allclose(found.keeps[k]["subspace.B"], reply.items["share.weights"], atol=1e-6)


@pytest.mark.parametrize("samples", [0, 7, 10**9])
def test_where_size_weights_are_spoilt_samples_neither_count_nor_travel(samples: int) -> None:
    """Whatever a reply says of its samples: it is not read."""
    found = Rounds(Share(), _Half())
    assert not found.server.weighed
    found.play()
    weights = found.server.weights
    again = Rounds(Share(), _Half())
    again.server.round = 1
    odd = [replace(reply, samples=samples) if reply.client == 1 else reply for reply in found.replies]
    outcome = again.server.receive([0, 1, 2], odd)
    assert not outcome.refused
    assert "samples" not in outcome.bytes_up
    assert torch.equal(again.server.weights, weights)
    assert Server(alloy("plain", Share()), found.replica, Info(3, 9), Local(), 0).weighed


def test_one_last_word_only() -> None:
    @dataclass(frozen=True)
    class _Other(Mechanism):
        def seal(self, client: ClientView, my: State, items: Items) -> Items:
            return items

    with pytest.raises(AlloyConflict, match="_other both claim the last word on what leaves"):
        alloy("both", Share(), _Half(), _Other())


@dataclass(frozen=True)
class _Picky(Mechanism):
    """Works with nothing that shares weights, or on no net of more than a few weights."""

    most: int = 10**9

    def refuses(self, other: Mechanism) -> str | None:
        return "it shares" if self.most == 0 and other.shares is not None else None

    def fits(self, replica: ReplicaView) -> None:
        if len(replica.initial) > self.most:
            raise AlloyConflict(f"{self} refuses {replica.model}")


def test_a_part_may_refuse_another_or_a_net() -> None:
    for pieces in ([Share(), _Picky(0)], [_Picky(0), Share()]):
        with pytest.raises(
            AlloyConflict, match=r"^_picky\(most=0\) refuses share: it shares; keep one of them$"
        ):
            alloy("picky", *pieces)
    Replica(alloy("picky", Share(), _Picky(10**6)), MLP, FED.dataset.inputs, 0)
    with pytest.raises(AlloyConflict, match=r"_picky\(most=5\) refuses mlp"):
        Replica(alloy("picky", Share(), _Picky(5)), MLP, FED.dataset.inputs, 0)


def test_accounts_are_in_every_line_and_in_the_summary(tmp_path: Path) -> None:
    method = alloy("FedAvg", Share(agg_weights="uniform"), _Half())
    object.__setattr__(method, "expression", "fedavg")
    settings: dict[str, Any] = {"rounds": 4, "participation": 0.67, "engine": "inline", "eval_every": 4}
    done = train(FED, MLP, method, out=tmp_path / "run", **settings)
    assert [line["sampled"] for line in done.history] == [2 / 3] * 4
    assert [line["asked"] for line in done.history] == pytest.approx([2 / 3, 4 / 3, 2, 8 / 3])
    assert done.summary["asked"] == pytest.approx(8 / 3)
    assert resume(tmp_path / "run").summary == done.summary
    plain = train(FED, MLP, "fedavg", rounds=1, engine="inline")
    assert not {"sampled", "asked"} & (plain.history[0].keys() | plain.summary.keys())

"""Questions about the new global model: who is asked, when, of which model, and what becomes of the answers."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedalloy.core import registry
from fedalloy.core.alloy import Mechanism, Slots, alloy
from fedalloy.core.state import State
from fedalloy.core.training import Local
from fedalloy.core.views import ClientData, ReplicaView, ServerView
from fedalloy.core.wire import Items, Mail, Reply, Slot
from fedalloy.data.federation import federate
from fedalloy.engines.inline import Inline
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Record, Result, Setup, one_round, one_thread, train
from fedalloy.mechanisms.share import Share
from fedalloy.round.replica import Replica
from fedalloy.round.server import Server

FED = federate("digits", clients=5, skew="iid", seed=0)
MODEL = "mlp(hidden=4)"
NORMED = "mlp(hidden=4, norm=batch)"


@dataclass(frozen=True)
class _Census(Mechanism):
    """How many samples of each class there are, and the first weight of the model that clients were asked about."""

    everybody: bool = True
    at_end: bool = True
    heard: int = 99

    needs = frozenset({"global model"})

    @property
    def label(self) -> str:
        return "census"

    @property
    def query(self) -> Slots:
        return {"counts": Slot("sum", ("classes",), torch.int64), "weight": Slot("all", ())}

    @property
    def asks_everyone(self) -> bool:
        return self.everybody

    @property
    def asks_at_end(self) -> bool:
        return self.at_end

    def answer(self, replica: ReplicaView, data: ClientData) -> Items:
        assert not replica.net.training
        return {"counts": data.counts, "weight": replica.weights.flat[0].clone()}

    def on_answers(self, server: ServerView, my: State, answers: Iterator[Reply]) -> None:
        found = [one.items for _, one in zip(range(self.heard), answers, strict=False)]
        my.scratch["nothing"] = "to be cleared"
        my.persistent["round"] = torch.tensor(server.round)
        my.persistent["counts"] = torch.stack([one["counts"] for one in found])
        my.persistent["weights"] = torch.stack([one["weight"] for one in found])

    def eval_models(self, server: ServerView, my: State) -> dict[str, Tensor]:
        return {"global": torch.zeros_like(server.weights)} if "counts" in my.persistent else {}


def asked(folder: Path, census: Mechanism, host: Any = None, **settings: Any) -> tuple[Result, Items]:
    method = alloy("census", census, host or Share())  # the question comes first; it is asked last
    values = {"rounds": 3, "lr": 0.1, "participation": 0.4, "engine": "inline", **settings}
    result = train(FED, MODEL, method, out=folder, **values)
    return result, RunFolder(folder).restore()[1]


@pytest.mark.parametrize("settings", [{}, {"engine": "workers", "workers": 2}, {"eval_every": 2}])
def test_everybody_is_asked_once_about_the_final_model(tmp_path: Path, settings: dict[str, Any]) -> None:
    result, state = asked(tmp_path / "run", _Census(), **settings)
    assert int(state["census.round"]) == 3
    expected = torch.stack([FED.client(k).counts for k in range(5)])  # in ascending id
    assert torch.equal(state["census.counts"], expected)
    assert torch.equal(state["census.weights"], state["server.weights"][0].expand(5))
    assert all("census.counts" not in line["bytes_up"] for line in result.history[:2])
    last, size = result.history[2], len(state["server.weights"])
    assert last["bytes_down"]["census.weights"] == 5 * 4 * size
    assert last["bytes_down"]["census.buffers"] == 0
    assert (last["bytes_up"]["census.counts"], last["bytes_up"]["census.weight"]) == (5 * 80, 5 * 4)
    assert result.summary["bytes_up"] == sum(sum(line["bytes_up"].values()) for line in result.history)


def test_or_only_the_last_participants(tmp_path: Path) -> None:
    result, state = asked(tmp_path / "run", _Census(everybody=False))
    chosen = result.history[-1]["participants"]
    assert len(chosen) == 2
    assert torch.equal(state["census.counts"], torch.stack([FED.client(k).counts for k in chosen]))


def test_the_conclusion_has_the_last_word_on_what_is_evaluated(tmp_path: Path) -> None:
    """A model of zeros knows nothing; before the question, evaluations are those of the host."""
    result, state = asked(tmp_path / "run", _Census(), registry.make("feddyn"))
    accuracies = [line["metrics"]["global_acc"] for line in result.history]
    assert accuracies[2] < 0.2 < accuracies[1]
    assert result.history[2]["metrics"]["mean_acc"] > 0.2
    assert torch.equal(
        state["census.weights"], state["dynamic.mean"][0].expand(5)
    )  # what FedDyn is judged by


def test_answers_nobody_listened_to_are_let_in(tmp_path: Path) -> None:
    """Else a worker would wait for ever with its answer."""
    result, state = asked(tmp_path / "run", _Census(heard=2), engine="workers", workers=2)
    assert len(state["census.counts"]) == 2
    assert result.history[-1]["bytes_up"]["census.counts"] == 5 * 80


@pytest.mark.parametrize(
    ("spoilt", "why"),
    [
        ({"census.counts": torch.ones(3, dtype=torch.int64)}, "census.counts has shape (3,), declared (10,)"),
        ({"census.weight": torch.tensor(torch.nan)}, "census.weight is not finite"),
        ({"census.more": torch.ones(3)}, "sent undeclared census.more"),
    ],
)
def test_an_answer_that_cannot_be_used_is_refused(spoilt: Items, why: str) -> None:
    method = alloy("census", Share(), _Census())
    replica = Replica(method, MODEL, FED.dataset.inputs, seed=0)
    server = Server(method, replica, FED.info, Local(), seed=0)
    server.round = 1
    told = {"census.counts": torch.ones(10, dtype=torch.int64), "census.weight": torch.tensor(1.0)}
    replies = [Reply(1, k, dict(told), samples=4) for k in range(3)]
    replies[1] = replace(replies[1], items=told | spoilt)
    outcome = server.hear(method.asking(last=True)[0], [0, 1, 2], replies)
    assert outcome.refused == {1: why}
    assert [reply.client for reply in outcome.accepted] == [0, 2]
    assert len(server.states["census"].persistent["counts"]) == 2


def test_what_is_told_is_declared(tmp_path: Path) -> None:
    class _Chatty(_Census):
        def answer(self, replica: ReplicaView, data: ClientData) -> Items:
            return super().answer(replica, data) | {"more": torch.ones(3)}

    with pytest.raises(AssertionError, match="but told"):
        asked(tmp_path / "run", _Chatty())


def test_two_may_ask(tmp_path: Path) -> None:
    """Each has its own mail and its own answers."""

    class _Second(_Census):
        label = "second"

    result, state = asked(tmp_path / "run", _Census(), alloy("both", Share(), _Second(everybody=False)))
    assert (len(state["census.counts"]), len(state["second.counts"])) == (5, 2)
    last = result.history[-1]["bytes_up"]
    assert (last["census.counts"], last["second.counts"]) == (5 * 80, 2 * 80)


class _Quiet(_Census):
    """Asks, and shows nothing of its own."""

    def eval_models(self, server: ServerView, my: State) -> dict[str, Tensor]:
        return {}


@pytest.mark.parametrize("host", ["fedavg", "scaffold", "ssf(ratio=0.5)", "fedavg(buffers=local)"])
def test_every_round_and_training_is_left_alone(host: str, tmp_path: Path) -> None:
    """Same bits as without the question, metrics included."""
    settings = {"rounds": 3, "lr": 0.1, "participation": 0.4, "engine": "inline"}
    census = alloy("census", registry.make(host), _Quiet(everybody=False, at_end=False))
    plain, both = (
        train(FED, NORMED, method, out=tmp_path / name, **settings)
        for name, method in (("plain", host), ("both", census))
    )
    a, b = (RunFolder(tmp_path / name).restore()[1] for name in ("plain", "both"))
    assert all(torch.equal(b[key], value) for key, value in a.items())
    assert both.summary["private_sha256"] == plain.summary["private_sha256"]
    assert [line["metrics"] for line in both.history] == [line["metrics"] for line in plain.history]
    for line in both.history:
        assert line["bytes_up"]["census.counts"] == 80 * len(line["participants"]) == 160
    assert int(b["census.round"]) == 3


class Wire:
    """An engine that spoils some answers."""

    def __init__(self, inner: Inline, spoil: set[tuple[str, int]]) -> None:
        self.inner, self.spoil = inner, spoil
        self.mails: list[Mail] = []

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        self.mails += mails
        for mail in mails:
            spoilt = (mail.errand, mail.client) in self.spoil
            yield Reply(1, mail.client, samples=5) if spoilt else next(iter(self.inner.carry([mail])))

    def close(self) -> None:
        """Nothing to close."""


def one(folder: Path, spoil: set[tuple[str, int]]) -> tuple[Server, Record, Wire]:
    """One round of all clients on a wire that spoils answers."""
    method = alloy("census", Share(), _Quiet(everybody=False, at_end=False))
    config = Config.of({**FED.origin, "method": "fedavg", "model": MODEL, "lr": 0.1, "rounds": 2})
    setup = Setup(config, FED, method)
    wire = Wire(Inline(setup.runtime(RunFolder(folder))), spoil)
    server = setup.server()
    with one_thread():
        return server, one_round(setup, server, wire, 1), wire


def test_who_was_refused_is_not_asked(tmp_path: Path) -> None:
    server, record, wire = one(tmp_path, {("train", 2), ("tell", 3)})
    assert [mail.client for mail in wire.mails if mail.errand == "tell"] == [0, 1, 3, 4]
    assert len(server.states["census"].persistent["counts"]) == 3
    assert not server.states["census"].scratch
    assert [entry["client"] for entry in record["refused"]] == [2, 3]
    assert record["metrics"] is not None  # the round goes on


def test_a_round_that_blew_up_is_not_asked(tmp_path: Path) -> None:
    method = alloy("census", Share(), _Quiet(everybody=False, at_end=False))
    result = train(
        FED, MODEL, method, out=tmp_path / "run", rounds=1, lr=1e6, weight_decay=1e6, engine="inline"
    )
    assert result.summary["status"] == "diverged"
    assert "census.counts" not in result.history[0]["bytes_up"]

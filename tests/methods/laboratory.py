"""A federation driven by hand: the round loop in a few lines, without engine, folder and evaluation."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.imports import Imports
from fedalloy.core.net import Net
from fedalloy.core.random import generator
from fedalloy.core.state import State
from fedalloy.core.training import Local
from fedalloy.core.views import ClientData, Oracle, StepView
from fedalloy.core.wire import Items, Mail, Reply
from fedalloy.data import Dataset, Prepare, Split, load
from fedalloy.data.federation import Federation, federate
from fedalloy.experiment.run import Result, train
from fedalloy.methods import local
from fedalloy.round.client import Client, client_round, client_told
from fedalloy.round.replica import Replica
from fedalloy.round.replies import Outcome
from fedalloy.round.server import Server

MLP = "mlp(hidden=16)"
BATCHNORM = "mlp(hidden=16, norm=batch)"


class Lab:
    """One server, one site, every client's keep: look at anything between two rounds."""

    def __init__(
        self, method: Alloy, federation: Federation, model: str = MLP, *, seed: int = 0, **local: Any
    ) -> None:
        self.method, self.federation, self.seed = method, federation, seed
        self.local = Local(**local)
        self.replica = Replica(method, model, federation.dataset.inputs, seed, imports=Imports())
        self.server = Server(method, self.replica, federation.info, self.local, seed)
        self.keeps: dict[int, Items] = {}
        self.replies: dict[int, Reply] = {}  # of the latest round
        self.told: dict[int, Reply] = {}  # what clients said when they were asked, lately

    def round(
        self, clients: Sequence[int] | None = None, *, answer_in: Sequence[int] | None = None
    ) -> Outcome:
        """One round with these clients (default: all that hold data), trained and answered in a given order."""
        chosen = sorted(self.federation.eligible if clients is None else clients)
        self.server.round += 1
        mails = {client: self.server.send(client) for client in chosen}
        self.replies = {client: self.answer(mails[client]) for client in answer_in or chosen}
        outcome = self.server.receive(chosen, self.replies.values())
        assert not outcome.refused
        for asker in self.method.asking(last=False):
            assert not self.ask(asker, answer_in or chosen).refused
        return outcome

    def ask(self, asker: Mechanism, clients: Sequence[int]) -> Outcome:
        """A mechanism's question about the global model as it stands."""
        self.told = {
            mail.client: client_told(self.method, self.replica, self.federation.client(mail.client), mail)
            for mail in self.server.ask(asker, clients)
        }
        return self.server.hear(asker, clients, self.told.values())

    def rounds(self, *participants: Sequence[int]) -> "Lab":
        for clients in participants:
            self.round(clients)
        return self

    def answer(self, mail: Mail) -> Reply:
        data, keep = self.federation.client(mail.client), self.keeps.get(mail.client, {})
        info = self.federation.info
        reply, self.keeps[mail.client] = client_round(
            self.method, self.replica, data, info, self.local, keep, mail, self.seed
        )
        return reply

    def trained(self, client: int) -> Client:
        """A client after local training in the coming round, before it answers."""
        self.server.round += 1
        data, keep = self.federation.client(client), self.keeps.get(client, {})
        mail = self.server.send(client)
        made = Client(
            self.method, self.replica, data, self.federation.info, self.local, keep, mail, self.seed
        )
        made.train()
        return made

    def tested(self, client: int) -> Client:
        """A client with the model that an evaluation would test now."""
        data, keep = self.federation.client(client), self.keeps.get(client, {})
        mail = self.server.send(client, "evaluate")
        made = Client(
            self.method, self.replica, data, self.federation.info, self.local, keep, mail, self.seed
        )
        made._each("adapt")
        return made

    def sent(self, client: int, key: str) -> Tensor:
        """What a client uploaded in the latest round."""
        return self.replies[client].items[key]

    @property
    def weights(self) -> Tensor:
        return self.server.weights

    @property
    def sizes(self) -> list[int]:
        found: list[int] = self.federation.sizes.tolist()
        return found


@dataclass(frozen=True)
class _Probe(Mechanism):
    """Records the gradient as the wrappers before it leave it, and the weights it belongs to."""

    place: str = "inner"
    gradients: list[Tensor] = field(default_factory=list, compare=False)
    points: list[Tensor] = field(default_factory=list, compare=False)

    @property
    def label(self) -> str:
        return f"{self.place} probe"

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        g = oracle(step)
        self.gradients.append(g.clone())
        self.points.append(step.weights.clone())
        return g


def probed(method: Alloy) -> tuple[Alloy, _Probe, _Probe]:
    """The method between two probes: one sees what the loss alone says, one what the optimiser gets."""
    inner, outer = _Probe("inner"), _Probe("outer")
    return alloy(method.title, inner, method, outer), inner, outer


@cache
def digits(clients: int = 6, skew: str = "dirichlet:0.5", test_share: float = 0.0) -> Federation:
    return federate("digits", clients, skew, test_share=test_share)


def dealt(shards: Sequence[Sequence[int]], tests: Sequence[Sequence[int]] | None = None) -> Federation:
    """Digits dealt exactly so: the positions of every client's training (and test) samples."""
    dataset = load("digits", None)
    return handed_out(dataset, shards, tests or [[] for _ in shards])


def by_class(*held: list[int], each: int = 20) -> Federation:
    """Clients that hold so many samples of exactly these classes."""
    y = load("digits", None).y
    places = {c: torch.where(y == c)[0].tolist() for c in range(10)}
    return dealt([[places[c].pop(0) for c in classes for _ in range(each)] for classes in held])


def shards(*sizes: int) -> Federation:
    """Digits dealt in the order of the data set, to clients of these sizes."""
    return dealt(consecutive(sizes))


def consecutive(sizes: Sequence[int]) -> list[range]:
    return [range(a, b) for a, b in pairwise(accumulate(sizes, initial=0))]


def handed_out(dataset: Dataset, train: Sequence[Sequence[int]], test: Sequence[Sequence[int]]) -> Federation:
    def index(parts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
        offsets = torch.tensor([0, *map(len, parts)]).cumsum(0)
        return torch.tensor([i for part in parts for i in part], dtype=torch.long), offsets

    everything = torch.arange(dataset.train, len(dataset.y))
    return Federation(dataset, Split(*index(train), *index(test), everything), Prepare.of(dataset))


def batches(lab: Lab, client: int, round: int, stream: int = 0) -> Iterator[tuple[Tensor, Tensor]]:
    """The batches of a client's round, cut by hand in the library's order; one-sample batches included."""
    data: ClientData = lab.federation.client(client)
    for epoch in range(lab.local.epochs):
        draw = generator(lab.seed, round, client, stream, epoch, "batches")
        order = torch.randperm(data.samples, generator=draw)
        for index in torch.split(order, lab.local.batch):
            yield data.prepare(data.x[index], None), data.y[index]


def full_gradient(net: Net, data: ClientData) -> Tensor:
    """The gradient of the mean cross-entropy over all of a client's samples, in train mode."""
    net.train()
    net.zero_grad(set_to_none=False)
    F.cross_entropy(net(data.prepare(data.x, None)).logits, data.y).backward()  # type: ignore[no-untyped-call]
    return torch.cat([p.grad.flatten() for p in net.parameters() if p.grad is not None])


def accuracy(client: Client, x: Tensor, y: Tensor) -> float:
    """The share of right answers of a client's model as it stands."""
    right = [out.logits.argmax(1) for out in client.outputs(x)]
    return float((torch.cat(right) == y).double().mean())


def far(a: Tensor, b: Tensor) -> float:
    """The largest difference."""
    return float((a - b).abs().max())


def run(folder: Path, federation: Federation, method: str, model: str = MLP, **settings: Any) -> Result:
    """A whole run through the public door, in this process."""
    return train(federation, model, method, out=folder / "run", **{"engine": "inline", **settings})


@contextmanager
def double() -> Iterator[None]:
    """Float64 throughout, for checks that ask for more than float32 holds; usable as a decorator."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def assert_personal_accuracies(metrics: dict[str, Any], lab: Lab) -> list[float]:
    """C.Avg, D.Avg and the mean on the global test set, by hand; each client's share on its own test samples."""
    federation = lab.federation
    index = federation.split.global_test
    shares, sizes, everywhere = [], [], []
    for k in range(federation.clients):
        client = lab.tested(k)
        shares.append(accuracy(client, client.data.x_test, client.data.y_test))
        sizes.append(len(client.data.y_test))
        everywhere.append(accuracy(client, federation.dataset.x[index], federation.dataset.y[index]))
    pooled = sum(a * n for a, n in zip(shares, sizes, strict=True)) / sum(sizes)
    assert metrics["personal_local_acc"] == pytest.approx(pooled)
    assert metrics["personal_local_acc_clients"] == pytest.approx(sum(shares) / len(shares))
    assert metrics["personal_on_global_acc"] == pytest.approx(sum(everywhere) / len(everywhere))
    return shares


def assert_trains_alone(method: Alloy, model: str) -> None:
    """Clients end as those of local training, bit for bit."""
    alone, lab = (Lab(each, digits(), model, lr=0.05, epochs=2, momentum=0.5) for each in (local(), method))
    for chosen in ([0, 1, 5], [0, 1], [1, 5]):
        alone.round(chosen)
        lab.round(chosen)
    for k in (0, 1, 5):
        for name in ("own.weights", "own.buffers"):
            assert torch.equal(lab.keeps[k][name], alone.keeps[k][name])

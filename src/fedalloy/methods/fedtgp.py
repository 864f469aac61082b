"""FedTGP: FedProto with global prototypes that the server trains, by a contrastive loss with an adaptive margin.

Zhang, Liu, Hua, Cao. AAAI 2024, arXiv 2401.03230.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, Mechanism, Slots, alloy
from fedalloy.core.parameters import AtLeastOne, AtLeastZero, NonNegative, Width
from fedalloy.core.random import seeded
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, ServerView
from fedalloy.core.wire import Items, Slot
from fedalloy.mechanisms.class_means import each_mean, held_means, labelled, mean_features
from fedalloy.mechanisms.common_width import CommonWidth
from fedalloy.methods.fedproto import NearestPrototype, PrototypePull

CLOSEST = 1e-12  # squared: the root of 0 has no gradient


class Prototypes(nn.Module):
    """P[c] = F(V[c])."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.V = nn.Parameter(torch.randn(classes, width))
        self.F = nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width))

    def forward(self) -> Tensor:
        rows: Tensor = self.F(self.V)
        return rows


def distances(a: Tensor, b: Tensor) -> Tensor:
    """||a_i - b_j||."""
    return (a[:, None] - b[None]).square().sum(2).clamp(min=CLOSEST).sqrt()


def margin(means: Tensor, y: Tensor, tau: float) -> float:
    """delta = min(max_c min_c' ||Q_c - Q_c'||, tau), Q_c the mean over clients; 0 for a single class."""
    Q = held_means(means, y)
    apart = distances(Q, Q).fill_diagonal_(torch.inf)
    return min(float(apart.min(1).values.max()), tau) if len(Q) > 1 else 0.0


def contrast(means: Tensor, y: Tensor, P: Tensor, delta: float) -> Tensor:
    """Cross-entropy over -||p - P[c]||; the true class stands delta further away."""
    D = distances(means, P) + delta * F.one_hot(y, len(P))
    return F.cross_entropy(-D, y)


@dataclass(frozen=True)
class TrainedPrototypes(Mechanism):
    """V and F persist; every round they are trained on all class means that came in, by a fresh optimiser.

    `lr` and `batch`: those of the clients by default. Classes that nobody holds have a prototype too.
    """

    epochs: AtLeastZero = 100
    tau: NonNegative = 100.0
    lr: NonNegative | None = None
    batch: AtLeastOne | None = None

    claims = gives = frozenset({"class means of features"})

    @property
    def down(self) -> Slots:
        rows = Slot(shape=("classes", "features"))
        return {"means": rows, "seen": Slot(shape=("classes",), dtype=torch.bool)}

    @property
    def up(self) -> Slots:
        return each_mean()

    def init_server(self, server: ServerView, my: State) -> None:
        self._store(my, self._net(server))
        my.persistent["seen"] = torch.zeros(server.replica.inputs.classes, dtype=torch.bool)

    def download(self, server: ServerView, my: State, client: int) -> Items:
        return {"means": my.persistent["P"], "seen": my.persistent["seen"]}

    def upload(self, client: ClientView, my: State) -> Items:
        return mean_features(client)

    @torch.enable_grad()
    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        means, y = labelled(got)
        net = self._net(server)
        net.load_state_dict({name: my.persistent[f"net.{name}"] for name in net.state_dict()})
        lr = server.local.rate(server.round) if self.lr is None else self.lr
        optimiser, delta = torch.optim.SGD(net.parameters(), lr=lr), margin(means, y, self.tau)
        for epoch in range(self.epochs):
            order = torch.randperm(len(y), generator=server.rng("prototypes", epoch))
            for index in torch.split(order, self.batch or server.local.batch):
                optimiser.zero_grad()
                contrast(means[index], y[index], net(), delta).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        self._store(my, net)
        my.persistent["seen"] = torch.ones_like(my.persistent["seen"])

    def _net(self, server: ServerView) -> Prototypes:
        with seeded(server.seed, "init", "prototypes"):
            return Prototypes(server.replica.inputs.classes, server.replica.net.width)

    def _store(self, my: State, net: Prototypes) -> None:
        my.persistent |= {f"net.{name}": value.detach() for name, value in net.state_dict().items()}
        my.persistent["P"] = net().detach()


@recipe("FedTGP", family="different models", paper="Zhang, Liu, Hua, Cao, AAAI 2024, arXiv 2401.03230")
def fedtgp(
    lam: NonNegative = 10.0,
    server_epochs: AtLeastZero = 100,
    tau: NonNegative = 100.0,
    server_lr: NonNegative | None = None,
    server_batch: AtLeastOne | None = None,
    evaluate: Literal["proto", "head"] = "proto",
    feature_dim: Width | None = None,
) -> Alloy:
    trained = TrainedPrototypes(server_epochs, tau, server_lr, server_batch)
    by = [NearestPrototype()] if evaluate == "proto" else []
    return alloy("FedTGP", CommonWidth(feature_dim), trained, PrototypePull(lam), *by)

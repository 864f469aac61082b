"""FedNova: client updates are divided by their effective number of local steps before averaging.

Wang, Liu, Liang, Joshi, Poor. NeurIPS 2020.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from fedalloy.core.alloy import Alloy, Names, Slots, alloy
from fedalloy.core.parameters import Momentum, NonNegative
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.training import Local
from fedalloy.core.views import ClientView, ServerView
from fedalloy.core.wire import Items, Reply, Slot
from fedalloy.mechanisms.share import Share
from fedalloy.methods.fedprox import Prox


def normaliser(local: Local, lr: float, steps: int, mu: float = 0.0) -> float:
    """||a_k||_1: how far the optimiser moves, in units of the learning rate, under a constant unit gradient.

    Weight decay counts as part of the gradient and does not enter. Adam moves by one unit a step.
    """
    if local.optimizer != "sgd":
        return float(steps)
    a = velocity = 0.0
    for _ in range(steps):
        velocity = local.momentum * velocity + 1 - lr * mu * a
        a += velocity
    return a


@dataclass(frozen=True)
class Normalised(Share):
    """x <- x + tau_eff sum_k p_k Delta_k / a_k; running statistics are averaged, never extrapolated."""

    server_momentum: Momentum = 0.0

    @property
    def label(self) -> str:
        return "share"  # it is the aggregation of weights

    @property
    def gives(self) -> Names:
        return super().gives - {"the clients' weights"}

    @property
    def up(self) -> Slots:
        return {
            "update": Slot(increment=True),
            "buffers": Slot(shape=("buffers",)),
            "tau": Slot(shape=(), least=0),
        }

    def init_server(self, server: ServerView, my: State) -> None:
        super().init_server(server, my)
        if self.server_momentum:
            my.persistent["u"] = torch.zeros_like(server.weights)

    def upload(self, client: ClientView, my: State) -> Items:
        prox = client.method.find(Prox)
        a = normaliser(client.local, client.lr, client.steps, prox.mu if prox else 0.0)
        span, buffers = client.weights.span(self.part), client.weights.buffer_span(self.part)
        moved = client.weights.flat[span] - client.received[span]
        return {
            "update": moved / a if a else moved,
            "buffers": self._sent(client.weights.buffers[buffers]),
            "tau": torch.tensor(
                float(client.steps) if prox and prox.mu else a
            ),  # the authors' tau_eff with a prox term
        }

    def weigh(self, server: ServerView, my: State, replies: Sequence[Reply]) -> Sequence[float]:
        sizes = [reply.samples if self.agg_weights == "size" else 1 for reply in replies]
        weights = [  # tau_k = 0 is left out
            size * float(reply.items["share.tau"] > 0) for size, reply in zip(sizes, replies, strict=True)
        ]
        return weights if any(weights) else [1.0] * len(replies)

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        update = got["tau"] * got["update"]
        if self.server_momentum:
            update = my.persistent["u"] = self.server_momentum * my.persistent["u"] + update
        self.step(server, server.weights + update, got["buffers"])


@recipe("FedNova", family="classic", paper="Wang et al., NeurIPS 2020")
def fednova(mu: NonNegative = 0.0, server_momentum: Momentum = 0.0) -> Alloy:
    return alloy("FedNova", Normalised(server_momentum=server_momentum), *([Prox(mu)] if mu else []))

"""A method of your own: one mechanism, one recipe.

Client-level momentum, after FedCM (Xu, Wang, Wang, Yao, 2021): every local step leans towards the direction in
which the server's model moved in the round before. From the root of the repository it also runs as

    fedalloy run --method "examples.own_method:fedcm(alpha=0.3)"
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

import fedalloy as fa
from fedalloy.core.alloy import Slots
from fedalloy.core.parameters import Fraction
from fedalloy.core.views import Oracle, ServerView, StepView
from fedalloy.core.wire import Items
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class Direction(fa.Mechanism):
    """alpha g + (1 - alpha) d, where d is the server's last move per local step."""

    alpha: Fraction = 0.1

    needs = frozenset({"global model"})

    @property
    def down(self) -> Slots:
        return {"d": fa.Slot(increment=True)}

    def init_server(self, server: ServerView, my: fa.State) -> None:
        my.persistent["d"] = torch.zeros_like(server.weights)

    def download(self, server: ServerView, my: fa.State, client: int) -> Items:
        return {"d": my.persistent["d"]}

    def gradient(self, step: StepView, my: fa.State, oracle: Oracle) -> Tensor:
        return self.alpha * oracle(step) + (1 - self.alpha) * my.received["d"]

    def aggregate(self, server: ServerView, my: fa.State, got: Mapping[str, Any]) -> None:
        steps = sum(reply.steps for reply in server.participants) / len(server.participants)
        moved = server.previous - server.weights
        my.persistent["d"] = moved / max(steps * server.local.rate(server.round), 1e-12)


@fa.recipe("FedCM", family="optimisation", paper="Xu, Wang, Wang, Yao, 2021")
def fedcm(alpha: Fraction = 0.1) -> fa.Alloy:
    return fa.alloy("FedCM", Share(), Direction(alpha))


if __name__ == "__main__":
    fed = fa.federate("digits", clients=10, skew="dirichlet:0.1", seed=0)
    for method in ("fedavg", "fedcm(alpha=0.3)", "fedcm(alpha=0.3)+prox(mu=0.1)"):
        result = fa.train(fed, model="mlp", method=method, rounds=6, epochs=2, lr=0.1, engine="inline")
        print(f"{result.summary['title']:16} {result.accuracy:.1%}")

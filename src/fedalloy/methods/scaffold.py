"""SCAFFOLD: local steps corrected by the difference of a server and a client control variate.

Karimireddy, Kale, Mohri, Reddi, Stich, Suresh. ICML 2020.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, Names, Slots, alloy
from fedalloy.core.parameters import Positive
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, Oracle, ServerView, StepView
from fedalloy.core.wire import Items, Reply, Slot
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class Control(Mechanism):
    """g + c - c_k on every step; c_k never leaves the client, only its change does.

    `c_update`: the new variate is "option1" (full gradient at the received model), "option2" (from the distance
    moved; plain SGD only) or "mean_grad" (mean of the uncorrected gradients); "auto" takes option2 where it is exact.
    """

    c_update: Literal["auto", "option1", "option2", "mean_grad"] = "auto"
    lean_upload: bool = False
    agg_weights: Literal["size", "uniform"] = "uniform"

    @property
    def needs(self) -> Names:
        lean = {"the clients' weights"} if self.lean_upload else set()
        return frozenset({"global model", f"{self.agg_weights} weights", "repeatable compression"} | lean)

    @property
    def down(self) -> Slots:
        return {"c": Slot(increment=True)}

    @property
    def up(self) -> Slots:
        fold: Literal["mean", "uniform"] = "mean" if self.agg_weights == "size" else "uniform"
        return (
            {"steps": Slot(fold, shape=(), least=0)}
            if self.lean_upload
            else {"dc": Slot(fold, increment=True)}
        )

    def init_server(self, server: ServerView, my: State) -> None:
        my.persistent["c"] = torch.zeros_like(server.weights)

    def download(self, server: ServerView, my: State, client: int) -> Items:
        return {"c": my.persistent["c"]}

    def init_client(self, client: ClientView, my: State) -> None:
        my.persistent["c_k"] = client.weights.zeros()

    def before_training(self, client: ClientView, my: State) -> None:
        my.scratch["correction"] = my.received["c"] - my.persistent["c_k"]
        rule = self._rule(client)
        if self.lean_upload and rule != "option2":
            raise FedAlloyError(
                f"lean_upload rebuilds c_k by option II, which {rule} does not follow; "
                "use plain SGD (--optimizer sgd --momentum 0) or lean_upload=False"
            )
        my.scratch["sum"] = client.weights.zeros() if rule == "mean_grad" else None

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        g = oracle(step)
        if my.scratch["sum"] is not None:
            my.scratch["sum"] += g + _decay(step.client) * step.weights
        corrected: Tensor = g + my.scratch["correction"]
        return corrected

    def upload(self, client: ClientView, my: State) -> Items:
        dc = self._renewed(client, my) - my.persistent["c_k"] if client.steps else client.weights.zeros()
        dc = client.as_sent(dc)  # both ends apply the same change, also where a codec loses a part of it
        if self.lean_upload:
            my.persistent["c_k"] += dc
            return {"steps": torch.tensor(float(client.steps))}
        return {"dc": dc}

    def after_upload(self, client: ClientView, my: State, items: Items) -> None:
        if not self.lean_upload:
            my.persistent["c_k"] += items[f"{self.label}.dc"]

    def implements(self, hook: str) -> bool:
        return super().implements(hook) and (hook != "on_reply" or self.lean_upload)

    def on_reply(self, server: ServerView, my: State, reply: Reply) -> None:
        steps = float(reply.items["control.steps"]) if self.lean_upload else 0.0
        if steps:  # dc_k = -c - (y_k - x) / (K_k eta), rebuilt from the weights
            moved = reply.items["share.weights"] - server.weights
            c = server.replica.as_sent(my.persistent["c"], server.round)
            dc = -c - moved / (steps * server.local.rate(server.round))
            share = (
                reply.samples / server.info.samples if self.agg_weights == "size" else 1 / server.info.clients
            )
            my.scratch["change"] = my.scratch.get("change", 0) + share * dc

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        share = server.participation_by_size if self.agg_weights == "size" else server.participation
        change = my.scratch.get("change", 0) if self.lean_upload else share * got["dc"]
        my.persistent["c"] = my.persistent["c"] + change  # (1/N) sum over S of dc_k: N counts all clients

    def _rule(self, client: ClientView) -> str:
        if self.c_update == "auto":
            return "option2" if client.local.plain_sgd else "mean_grad"
        return self.c_update

    def _renewed(self, client: ClientView, my: State) -> Tensor:
        rule = self._rule(client)
        if rule == "mean_grad":
            mean: Tensor = my.scratch["sum"] / client.steps
            return mean
        if rule == "option1":
            return client.full_gradient(client.received) + _decay(client) * client.received
        moved = client.received - client.weights.flat
        return my.persistent["c_k"] - my.received["c"] + moved / (client.steps * client.lr)


def _decay(client: ClientView) -> float:
    """Weight decay is part of the gradient unless the optimiser decouples it."""
    return 0.0 if client.local.optimizer == "adamw" else client.local.weight_decay


@recipe("SCAFFOLD", family="classic", paper="Karimireddy et al., ICML 2020")
def scaffold(
    server_lr: Positive = 1.0,
    c_update: Literal["auto", "option1", "option2", "mean_grad"] = "auto",
    lean_upload: bool = False,
    agg_weights: Literal["size", "uniform"] = "uniform",
) -> Alloy:
    share = Share(agg_weights=agg_weights, server_lr=server_lr)
    return alloy("SCAFFOLD", share, Control(c_update, lean_upload, agg_weights))

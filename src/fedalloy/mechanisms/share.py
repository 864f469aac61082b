"""Share: the server averages a part of the model; the rest stays with each client (FedAvg's rule)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.core.alloy import Mechanism, Names, Slots
from fedalloy.core.parameters import Positive
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, ServerView
from fedalloy.core.weights import BASE
from fedalloy.core.wire import Items, Slot


@dataclass(frozen=True)
class Share(Mechanism):
    """w <- w + server_lr (sum_k p_k w_k - w), over the participants.

    `agg_weights`: p_k by "size" (n_k over the participants' total) or "uniform".
    `buffers` (BatchNorm statistics): "average" like the weights, "local" (each client keeps its own, nothing is
    sent) or "drop" (back to their initial values in every round); without an average the global model is evaluated
    with the initial statistics.
    """

    part: str = ""
    agg_weights: Literal["size", "uniform"] = "size"
    server_lr: Positive = 1.0
    buffers: Literal["average", "local", "drop"] = "average"

    claims = frozenset({"the aggregation of weights"})

    @property
    def gives(self) -> Names:
        whole = {"global model"} if self.part == "" else set()
        whole |= {"one architecture"} if self.part not in ("aux", "head") else set()
        whole |= {"a shared body"} if self.part in ("body", BASE) else set()
        by_size = {"size weights"} if self.agg_weights == "size" else {"uniform weights"}
        averaged = {"averaged statistics"} if self.buffers == "average" else set()
        also = {"the clients' weights", "repeatable compression"}  # the latter unless a codec spoils it
        return frozenset({"shared weights"} | also | whole | by_size | averaged)

    @property
    def shares(self) -> str | None:
        return self.part

    @property
    def down(self) -> Slots:
        return {"weights": Slot(), "buffers": Slot(shape=("buffers",))}

    @property
    def up(self) -> Slots:
        fold: Literal["mean", "uniform"] = "mean" if self.agg_weights == "size" else "uniform"
        return {"weights": Slot(fold, relative=True), "buffers": Slot(fold, ("buffers",))}

    def init_server(self, server: ServerView, my: State) -> None:
        replica = server.replica
        server.weights = replica.initial[replica.weights.span(self.part)].clone()
        server.buffers = self._sent(replica.initial_buffers[replica.weights.buffer_span(self.part)])

    def download(self, server: ServerView, my: State, client: int) -> Items:
        return {"weights": server.weights, "buffers": server.buffers}

    def install(self, client: ClientView, my: State) -> None:
        client.weights.flat[client.weights.span(self.part)] = my.received["weights"]
        if self.buffers == "average":
            client.weights.buffers[client.weights.buffer_span(self.part)] = my.received["buffers"]

    def upload(self, client: ClientView, my: State) -> Items:
        return {
            "weights": client.weights.flat[client.weights.span(self.part)].clone(),
            "buffers": self._sent(client.weights.buffers[client.weights.buffer_span(self.part)]),
        }

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        self.step(server, got["weights"], got["buffers"])

    def step(self, server: ServerView, average: Tensor, buffers: Tensor) -> None:
        """Move the shared weights towards (for server_lr 1: onto) an average."""
        server.previous = server.weights
        server.weights = (
            average if self.server_lr == 1 else torch.lerp(server.previous, average, self.server_lr)
        )
        server.buffers = buffers

    def _sent(self, buffers: Tensor) -> Tensor:
        return buffers.clone() if self.buffers == "average" else buffers[:0].clone()

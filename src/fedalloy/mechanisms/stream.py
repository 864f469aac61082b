"""Stream: clients keep a copy of the shared weights and receive only the updates they missed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedalloy.core.alloy import Names, Slots
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, ServerView
from fedalloy.core.wire import Items, Slot
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class Stream(Share):
    """Share, with a downlink of encoded mean updates: one for each round since the client was last there.

    First contact, or so many updates that they weigh as much as the model, brings the dense weights.
    """

    def __post_init__(self) -> None:
        if self.buffers != "average":
            raise FedAlloyError("stream averages buffers; use share to change that")

    @property
    def label(self) -> str:
        return "share"

    @property
    def gives(self) -> Names:
        return super().gives | {"mean updates"}

    @property
    def down(self) -> Slots:
        return {
            "dense": Slot(shape=("missing",)),
            "updates": Slot(shape=("coded",)),
            "since": Slot(shape=(), dtype=torch.int64),
            "buffers": Slot(shape=("buffers",)),
        }

    def init_server(self, server: ServerView, my: State) -> None:
        super().init_server(server, my)
        my.persistent["updates"] = torch.empty(0)  # one behind the other
        my.persistent["lengths"] = torch.empty(0, dtype=torch.int64)
        my.persistent["latest"] = torch.tensor(
            0
        )  # the round of the last update; before it, round by round, the others
        my.persistent["last"] = torch.zeros(
            server.info.clients, dtype=torch.int64
        )  # when each client was last there

    def download(self, server: ServerView, my: State, client: int) -> Items:
        updates, lengths, since = (
            my.persistent["updates"],
            my.persistent["lengths"],
            int(my.persistent["last"][client]),
        )
        oldest = int(my.persistent["latest"]) - len(lengths) + 1
        nothing = torch.empty(0)
        if since == 0 or since < oldest:
            dense, missed, since = server.weights, nothing, server.round
        else:
            dense, missed = nothing, updates[int(lengths[: since - oldest].sum()) :]
        return {"dense": dense, "updates": missed, "since": torch.tensor(since), "buffers": server.buffers}

    def install(self, client: ClientView, my: State) -> None:
        if len(my.received["dense"]):
            my.persistent["x"] = my.received["dense"].clone()
        elif "x" not in my.persistent:
            raise FedAlloyError(
                f"client {client.id} has lost its copy of the shared weights, which {client.method.title} "
                "sends only once; restore its private state, or start a new run"
            )
        else:
            for round, update in enumerate(
                client.replica.split(my.received["updates"]), int(my.received["since"])
            ):
                if round >= int(my.persistent["round"]):  # known already where the last reply was refused
                    my.persistent["x"] += client.replica.decoded(update, round)
        my.persistent["round"] = torch.tensor(client.round)
        client.weights.flat[client.weights.span(self.part)] = my.persistent["x"]
        client.weights.buffers[client.weights.buffer_span(self.part)] = my.received["buffers"]

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        before = server.weights
        update = server.replica.encoded(self.server_lr * (got["weights"] - before), server.round)
        server.previous, server.buffers = before, got["buffers"]
        server.weights = before + server.replica.decoded(update, server.round)  # exactly what clients will do
        gapless = (
            int(my.persistent["latest"]) == server.round - 1
        )  # not so after a round without a usable reply
        past = torch.split(my.persistent["updates"], my.persistent["lengths"].tolist()) if gapless else ()
        kept = [*past, update]
        while len(kept) > 1 and sum(map(len, kept)) >= len(before):
            kept.pop(0)  # updates travel while they weigh less than the model, the last one always
        my.persistent["updates"], my.persistent["lengths"] = (
            torch.cat(kept),
            torch.tensor([len(one) for one in kept]),
        )
        my.persistent["latest"] = torch.tensor(server.round)
        for reply in server.participants:
            my.persistent["last"][reply.client] = server.round

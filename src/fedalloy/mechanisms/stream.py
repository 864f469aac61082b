"""Stream: clients keep a copy of the shared weights and receive only the updates they missed."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedalloy.core.alloy import Names, Slots
from fedalloy.core.state import Box
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

    def init_server(self, server: ServerView, my: Box) -> None:
        super().init_server(server, my)
        my.keep["updates"] = torch.empty(0)  # one behind the other
        my.keep["lengths"] = torch.empty(0, dtype=torch.int64)
        my.keep["latest"] = torch.tensor(
            0
        )  # the round of the last update; before it, round by round, the others
        my.keep["last"] = torch.zeros(
            server.info.clients, dtype=torch.int64
        )  # when each client was last there

    def download(self, server: ServerView, my: Box, client: int) -> Items:
        updates, lengths, since = my.keep["updates"], my.keep["lengths"], int(my.keep["last"][client])
        oldest = int(my.keep["latest"]) - len(lengths) + 1
        nothing = torch.empty(0)
        if since == 0 or since < oldest:
            dense, missed, since = server.weights, nothing, server.round
        else:
            dense, missed = nothing, updates[int(lengths[: since - oldest].sum()) :]
        return {"dense": dense, "updates": missed, "since": torch.tensor(since), "buffers": server.buffers}

    def install(self, client: ClientView, my: Box) -> None:
        if len(my.got["dense"]):
            my.keep["x"] = my.got["dense"].clone()
        elif "x" not in my.keep:
            raise FedAlloyError(
                f"client {client.id} has lost its copy of the shared weights, which {client.method.title} "
                "sends only once; restore its private state, or start a new run"
            )
        else:
            for round, update in enumerate(client.site.split(my.got["updates"]), int(my.got["since"])):
                if round >= int(my.keep["round"]):  # known already where the last reply was refused
                    my.keep["x"] += client.site.decoded(update, round)
        my.keep["round"] = torch.tensor(client.round)
        client.weights.flat[client.weights.span(self.part)] = my.keep["x"]
        client.weights.buffers[client.weights.buffer_span(self.part)] = my.got["buffers"]

    def aggregate(self, server: ServerView, my: Box, got: Mapping[str, Any]) -> None:
        before = server.weights
        update = server.site.encoded(self.server_lr * (got["weights"] - before), server.round)
        server.previous, server.buffers = before, got["buffers"]
        server.weights = before + server.site.decoded(update, server.round)  # exactly what clients will do
        gapless = int(my.keep["latest"]) == server.round - 1  # not so after a round without a usable reply
        past = torch.split(my.keep["updates"], my.keep["lengths"].tolist()) if gapless else ()
        kept = [*past, update]
        while len(kept) > 1 and sum(map(len, kept)) >= len(before):
            kept.pop(0)  # updates travel while they weigh less than the model, the last one always
        my.keep["updates"], my.keep["lengths"] = torch.cat(kept), torch.tensor([len(one) for one in kept])
        my.keep["latest"] = torch.tensor(server.round)
        for reply in server.participants:
            my.keep["last"][reply.client] = server.round

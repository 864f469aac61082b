"""Stream: clients keep a copy of the shared weights and receive only the updates they missed."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from fedalloy.alloy import Box, Slots
from fedalloy.client import Client
from fedalloy.mechanisms.share import Share
from fedalloy.server import Server
from fedalloy.wire import Items, Slot


@dataclass(frozen=True)
class Stream(Share):
    """Share, with a downlink of encoded mean updates: one for each round since the client was last there.

    First contact, or a gap so long that the updates outweigh the model, brings the dense weights.
    """

    @property
    def label(self) -> str:
        return "share"

    @property
    def down(self) -> Slots:
        return {
            "dense": Slot(shape=("missing",)),
            "updates": Slot(shape=("coded",)),
            "since": Slot(shape=(), dtype=torch.int64),
            "buffers": Slot(shape=("buffers",)),
        }

    def open(self, server: Server, my: Box) -> None:
        super().open(server, my)
        my.keep["updates"] = torch.empty(0, server.site.coded_size)
        my.keep["last"] = torch.zeros(
            server.info.clients, dtype=torch.int64
        )  # the round each client was last there

    def send(self, server: Server, my: Box, client: int) -> Items:
        updates, now = my.keep["updates"], server.round
        since = int(my.keep["last"][client])
        missed = now - since
        first = len(updates) - missed  # updates end with that of round now - 1
        nothing = torch.empty(0)
        if since == 0 or first < 0:
            dense, steps, since = server.weights, nothing, now
        else:
            dense, steps = nothing, updates[first:].flatten()
        return {"dense": dense, "updates": steps, "since": torch.tensor(since), "buffers": server.buffers}

    def load(self, client: Client, my: Box) -> None:
        if len(my.got["dense"]):
            my.keep["x"] = my.got["dense"].clone()
        else:
            at = int(my.got["since"])
            for update in my.got["updates"].view(-1, client.site.coded_size):
                if at >= int(my.keep["round"]):  # what the client has already is not added again
                    my.keep["x"] += client.site.decoded(update, at)
                at += 1
        my.keep["round"] = torch.tensor(client.round)
        client.weights.flat.copy_(my.keep["x"])
        client.weights.buffers[client.weights.buffer_span(self.part)] = my.got["buffers"]

    def receive(self, server: Server, my: Box, got: Mapping[str, Any]) -> None:
        before = server.weights
        update = server.site.encoded(self.server_lr * (got["weights"] - before), server.round)
        server.previous, server.buffers = before, got["buffers"]
        server.weights = before + server.site.decoded(update, server.round)  # exactly what clients will do
        most = math.ceil(server.site.weights.layout.size / len(update))
        my.keep["updates"] = torch.cat([my.keep["updates"], update[None]])[-most:]
        for reply in server.participants:
            my.keep["last"][reply.client] = server.round

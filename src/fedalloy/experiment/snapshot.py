"""Features of some clients during a run, for pictures over rounds."""

import torch
from torch import Tensor

from fedalloy.core.files import write_whole
from fedalloy.core.random import generator
from fedalloy.core.wire import Items, dump
from fedalloy.data.federation import Federation
from fedalloy.experiment.folder import RunFolder
from fedalloy.round.client import Client
from fedalloy.round.replica import Replicas
from fedalloy.round.server import Server

PANEL_CLIENTS = 5
PANEL_POINTS = 250


@torch.no_grad()
def snapshot(server: Server, replicas: Replicas, federation: Federation, folder: RunFolder) -> None:
    """Features of some samples of the first clients, by their own models as they are now, for pictures over rounds."""
    items: Items = {}
    for k in federation.eligible[:PANEL_CLIENTS]:
        data, keep = federation.client(k), folder.vault.load(k, server.round + 1)
        mail = server.send(k, "evaluate")
        client = Client(
            server.method, replicas.of(k), data, federation.info, server.local, keep, mail, server.seed
        )
        some = some_samples(server, k, data.samples, PANEL_POINTS)
        items[f"{k}.features"] = torch.cat([out.features for out in client.outputs(data.x[some])])
        items[f"{k}.class"] = data.y[some]
    folder.features(server.round).parent.mkdir(exist_ok=True)
    write_whole(folder.features(server.round), dump(items, {"round": server.round}))


def some_samples(server: Server, client: int, samples: int, most: int) -> Tensor:
    """The same samples of a client every time."""
    return torch.randperm(samples, generator=generator(server.seed, client, "diagnose"))[:most]

"""A look inside a run: during it (numbers per round) and after it (figures from its last checkpoint)."""

import json
import statistics
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedalloy.alloy import Findings
from fedalloy.client import EVAL_BATCH, Client
from fedalloy.diagnostics import Seen, generic
from fedalloy.federation import Federation
from fedalloy.folder import RunFolder
from fedalloy.random import generator
from fedalloy.server import Server
from fedalloy.site import Sites
from fedalloy.storage import write_whole
from fedalloy.wire import Reply

MOST_POINTS = 1500  # in a t-SNE picture


def examine(server: Server, federation: Federation) -> Findings:
    """Everything the global model and the mechanisms at the server show; without a global model, nothing."""
    seen = look(server, federation)
    if seen is None:
        return {}
    found = generic(seen)
    for piece in server.method.with_hook("examine"):
        found |= piece.examine(server, server.box(piece), seen)
    return found


@torch.no_grad()
def look(server: Server, federation: Federation) -> Seen | None:
    """The global model over the global test set, or an auxiliary one where that is what clients share."""
    shown = server.shown()
    if "global" not in shown:
        return None
    site, index = server.site, federation.split.global_test
    site.weights.load(*shown["global"])
    site.net.eval()
    x = federation.dataset.x
    outs = [site.net(federation.prepare(x[batch], None)) for batch in torch.split(index, EVAL_BATCH)]
    features, embedding, logits = (torch.cat(column) for column in zip(*outs, strict=True))
    same = outs[0].embedding is outs[0].features
    return Seen(site.net, features, features if same else embedding, logits, federation.dataset.y[index])


def numbers(found: Findings) -> dict[str, float]:
    """The findings that are plain numbers."""
    return {name: value for name, value in found.items() if isinstance(value, float)}


def mean_notes(replies: Sequence[Reply]) -> dict[str, float]:
    """What clients noted, averaged over those that did."""
    names = dict.fromkeys(name for reply in replies for name in reply.notes)
    return {name: statistics.fmean(r.notes[name] for r in replies if name in r.notes) for name in names}


def study(
    server: Server, sites: Sites, federation: Federation, folder: RunFolder, most_clients: int = 10
) -> dict[str, Any]:
    """Diagnostics of a finished run, with one more round of local training rehearsed and thrown away.

    Writes diagnostics.json, from which the report draws.
    """
    found = examine(server, federation)
    keeps = {k: folder.vault.load(k, server.round + 1) for k in federation.eligible[:most_clients]}
    clients: dict[int, Findings] = {}
    points, owners, labels = [], [], []
    server.round += 1
    for k, keep in keeps.items():
        data = federation.client(k)
        site = sites.of(k)
        client = Client(
            server.method, site, data, federation.info, server.local, keep, server.send(k), server.seed
        )
        client.train()
        clients[k] = client.examine()
        order = torch.randperm(data.samples, generator=generator(server.seed, k, "diagnose"))
        some = order[: max(1, MOST_POINTS // len(keeps))]
        points.append(torch.cat([out.features for out in client.outputs(data.x[some])]))
        owners += [k] * len(some)
        labels += data.y[some].tolist()
    server.round -= 1
    result = {
        "numbers": numbers(found),
        "matrices": {name: value.tolist() for name, value in found.items() if isinstance(value, Tensor)},
        "clients": {
            str(k): {name: v if isinstance(v, float) else v.tolist() for name, v in said.items()}
            for k, said in clients.items()
        },
        "map": _map(points, owners, labels),
    }
    write_whole(folder.path / "diagnostics.json", json.dumps(result).encode())
    return result


def _map(points: list[Tensor], owners: list[int], labels: list[int]) -> dict[str, Any] | None:
    """Two dimensions for many (t-SNE), with whose samples they are and of which class; of one space of features."""
    if len({z.shape[1] for z in points}) != 1:
        return None
    from sklearn.manifold import TSNE

    features = torch.cat(points)
    perplexity = min(30.0, (len(features) - 1) / 3)
    flat = TSNE(perplexity=perplexity, random_state=0, init="pca").fit_transform(features.numpy())
    return {"x": flat[:, 0].tolist(), "y": flat[:, 1].tolist(), "client": owners, "class": labels}

"""A look inside a run: during it (numbers per round) and after it (figures from its last checkpoint)."""

import json
import warnings
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.files import write_whole
from fedalloy.core.views import Findings
from fedalloy.core.wire import restore
from fedalloy.data.federation import Federation
from fedalloy.errors import FedAlloyWarning
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.snapshot import some_samples
from fedalloy.round.client import Client
from fedalloy.round.examine import examine, numbers
from fedalloy.round.replica import Replicas
from fedalloy.round.server import Server

MOST_POINTS = 1500  # in a t-SNE picture
MOST_PANELS = 4  # rounds in the pictures over rounds


def study(
    server: Server, replicas: Replicas, federation: Federation, folder: RunFolder, most_clients: int = 10
) -> dict[str, Any]:
    """Diagnostics of a finished run, with one more round of local training rehearsed and thrown away.

    Writes diagnostics.json, from which the report draws.
    """
    drawable = _has_maps()
    found = examine(server, federation)
    keeps = {k: folder.vault.load(k, server.round + 1) for k in federation.eligible[:most_clients]}
    clients: dict[int, Findings] = {}
    points, owners, labels = [], [], []
    server.round += 1
    for k, keep in keeps.items():
        data = federation.client(k)
        replica = replicas.of(k)
        client = Client(
            server.method, replica, data, federation.info, server.local, keep, server.send(k), server.seed
        )
        client.train()
        clients[k] = client.examine()
        some = some_samples(server, k, data.samples, max(1, MOST_POINTS // len(keeps)))
        points.append(torch.cat([out.features for out in client.outputs(data.x[some])]))
        owners += [k] * len(some)
        labels += data.y[some].tolist()
    server.round -= 1
    result = {
        "numbers": numbers(found) | _apart(points, owners, labels),
        "matrices": {name: value.tolist() for name, value in found.items() if isinstance(value, Tensor)},
        "clients": {
            str(k): {name: v if isinstance(v, float) else v.tolist() for name, v in said.items()}
            for k, said in clients.items()
        },
        "map": _map(points, owners, labels) if drawable else None,
        "panels": _panels(folder) if drawable else [],
    }
    write_whole(folder.path / "diagnostics.json", json.dumps(result).encode())
    return result


def _has_maps() -> bool:
    """Whether features can be drawn in two dimensions; if not, say so."""
    if find_spec("sklearn") is None:
        warnings.warn(
            "maps of features are left out: they need scikit-learn; type: pip install 'fedalloy[maps]'",
            FedAlloyWarning,
            stacklevel=3,
        )
        return False
    return True


def _apart(points: list[Tensor], owners: list[int], labels: list[int]) -> dict[str, float]:
    """How far clients put the same class: the mean distance between their class centroids (FedRDA, Fig. 9)."""
    if len({z.shape[1] for z in points}) != 1:
        return {}
    features, owner, label = torch.cat(points).double(), torch.tensor(owners), torch.tensor(labels)
    distances = []
    for c in sorted(set(labels)):
        held = [
            features[(label == c) & (owner == k)].mean(0) for k in sorted(set(owner[label == c].tolist()))
        ]
        if len(held) > 1:
            distances.append(torch.nn.functional.pdist(torch.stack(held)))
    return {"distance of clients' class centroids": float(torch.cat(distances).mean())} if distances else {}


def _map(points: list[Tensor], owners: list[int], labels: list[int]) -> dict[str, Any] | None:
    """Features in two dimensions, with whose samples they are and of which class; of one space of features."""
    if len({z.shape[1] for z in points}) != 1:
        return None
    return _flat(torch.cat(points)) | {"client": owners, "class": labels}


def _panels(folder: RunFolder) -> list[dict[str, Any]]:
    """Each client's own features after some of the rounds that were recorded, from the first to the last."""
    files = sorted(folder.features(0).parent.glob("*.safetensors"))
    chosen = {round(i * (len(files) - 1) / (MOST_PANELS - 1)) for i in range(MOST_PANELS)} if files else set()
    panels = []
    for i in sorted(chosen):
        items, facts = restore(files[i].read_bytes())
        for k in sorted(int(key.partition(".")[0]) for key in items if key.endswith(".class")):
            drawn, labels = _flat(items[f"{k}.features"]), items[f"{k}.class"].tolist()
            panels.append({"round": facts["round"], **drawn, "client": [k] * len(labels), "class": labels})
    return panels


def _flat(features: Tensor) -> dict[str, Any]:
    """Two dimensions for many (t-SNE); a handful of points has no neighbourhoods, and lies on a line."""
    if len(features) < 4:
        return {"x": list(range(len(features))), "y": [0] * len(features)}
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(features) - 1) / 3)
    flat = TSNE(perplexity=perplexity, random_state=0, init="pca").fit_transform(features.numpy())
    return {"x": flat[:, 0].tolist(), "y": flat[:, 1].tolist()}

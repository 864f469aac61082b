"""How good are the models? The server's on the global test set, the clients' own on their own test splits."""

import math
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fedalloy.core.random import generator
from fedalloy.core.wire import MOST_SAMPLES, Mail, Reply, Slot, Spec
from fedalloy.data.federation import Federation
from fedalloy.round.engine import Engine
from fedalloy.round.replies import Outcome, usable
from fedalloy.round.runtime import CHUNK
from fedalloy.round.server import Server

MOST_LISTED = 1000  # beyond this many clients, accuracies per client are not listed

Metrics = dict[str, Any]


def evaluate(
    server: Server,
    federation: Federation,
    engine: Engine,
    most_clients: int | None = None,
    *,
    on_global: bool = True,
) -> tuple[Metrics, Outcome]:
    """All metrics of a round, and what clients answered. Without a global model `global_acc` is absent, not zero."""
    metrics: Metrics = {}
    outcome = Outcome()
    scored: dict[int, tuple[Tensor, Tensor]] = {}
    shown = server.shown() if len(federation.scored) else {}
    for name, (flat, buffers) in shown.items():
        if id(flat) not in scored:
            scored[id(flat)] = _score(server, federation, engine, name, flat, buffers)
        predictions, losses = scored[id(flat)]
        metrics |= _model_metrics(name, federation, predictions, losses)
    if federation.judged_locally(server.method):
        tested = len(federation.split.global_test) if on_global and federation.common_test else None
        metrics |= _personal_metrics(server, federation, engine, most_clients, tested, outcome)
    return metrics, outcome


def _score(
    server: Server, federation: Federation, engine: Engine, name: str, flat: Tensor, buffers: Tensor
) -> tuple[Tensor, Tensor]:
    """Predictions and losses on all scored samples, in their order."""
    chunks = range(math.ceil(len(federation.scored) / CHUNK))
    items = {f"{name}.weights": flat, f"{name}.buffers": buffers}
    replies = {
        r.client: r for r in engine.carry([Mail("score", server.round, chunk, items) for chunk in chunks])
    }
    ordered = [replies[chunk].items for chunk in chunks]
    return torch.cat([i["predictions"] for i in ordered]), torch.cat([i["losses"] for i in ordered])


def _model_metrics(name: str, federation: Federation, predictions: Tensor, losses: Tensor) -> Metrics:
    tested = len(federation.split.global_test)
    everywhere = predictions == federation.dataset.y[federation.scored]
    right, y = everywhere[:tested], federation.dataset.y[federation.split.global_test]
    metrics: Metrics = {
        f"{name}_acc": float(right.double().mean()),
        f"{name}_loss": _finite(losses[:tested].double().mean()),
    }
    if name == "global":
        metrics["per_class"] = _shares(right, y, federation.dataset.classes)
        owner = federation.test_owner
        if federation.clients <= MOST_LISTED:
            metrics["per_client"] = _shares(everywhere[owner >= 0], owner[owner >= 0], federation.clients)
    return metrics


def _personal_metrics(
    server: Server,
    federation: Federation,
    engine: Engine,
    most_clients: int | None,
    tested: int | None,
    outcome: Outcome,
) -> Metrics:
    """C.Avg is the mean over clients, D.Avg pools samples; clients without test samples count in neither."""
    clients = federation.eligible
    if most_clients is not None and most_clients < len(clients):
        order = torch.randperm(len(clients), generator=generator(server.seed, "eval clients"))
        clients = sorted(clients[i] for i in order[:most_clients].tolist())
    mails = [server.send(client, "evaluate") for client in clients]
    declared, doubt = declared_tests(federation.dataset.classes, tested), partial(impossible, tested=tested)
    answers = engine.carry(mails)
    replies = list(usable(server.round, clients, answers, declared, outcome, doubt=doubt))
    stands_for = {"personal_clients": len(replies), "personal_asked": len(clients)}
    if not replies:
        return {"personal_local_acc": None, "personal_local_acc_clients": None, **stands_for}
    accuracies = {r.client: _ratio(r.items["right"].sum(), r.items["count"].sum()) for r in replies}
    known = [accuracy for accuracy in accuracies.values() if accuracy is not None]
    right, count = _total(replies, "right"), _total(replies, "count")
    metrics: Metrics = {
        "personal_local_acc": _ratio(right.sum(), count.sum()),
        "personal_local_acc_clients": sum(known) / len(known) if known else None,
        "per_class": [_ratio(r, n) for r, n in zip(right, count, strict=True)],
        **stands_for,
    }
    if federation.clients <= MOST_LISTED:
        metrics["per_client"] = [accuracies.get(client) for client in range(federation.clients)]
    if tested:
        hits = sum(int(reply.items["global"]) for reply in replies)
        metrics["personal_on_global_acc"] = hits / (tested * len(replies))
    return metrics


def declared_tests(classes: int, tested: int | None) -> dict[str, Spec]:
    """What a client tells of its own model: right answers and test samples by class, and how the global test went."""
    by_class = Spec(Slot("sum", ("classes",), torch.int64, least=0), (classes,))
    common = {} if tested is None else {"global": Spec(Slot("sum", (), torch.int64, least=0), ())}
    return {"right": by_class, "count": by_class, **common}


def impossible(reply: Reply, tested: int | None) -> str | None:
    """Why numbers of the right kind cannot be true, or None."""
    if bool((reply.items["right"] > reply.items["count"]).any()):
        return "claims more right answers than test samples"
    if int(reply.items["count"].sum()) > MOST_SAMPLES:
        return f"claims {int(reply.items['count'].sum())} test samples"
    if tested is not None and int(reply.items["global"]) > tested:
        return f"claims {int(reply.items['global'])} right answers of {tested}"
    return None


def _shares(right: Tensor, group: Tensor, groups: int) -> list[float | None]:
    """The share of right answers in each group; None for an empty group."""
    hits, count = torch.bincount(group[right], minlength=groups), torch.bincount(group, minlength=groups)
    return [_ratio(h, n) for h, n in zip(hits, count, strict=True)]


def _total(replies: list[Reply], key: str) -> Tensor:
    return torch.stack([reply.items[key] for reply in replies]).sum(0)


def _ratio(part: Tensor, whole: Tensor) -> float | None:
    return int(part) / int(whole) if int(whole) else None


def _finite(value: Tensor) -> float | None:
    return float(value) if math.isfinite(float(value)) else None

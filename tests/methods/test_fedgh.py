"""FedGH: extractors of any kind, and one head that the server trains on class-mean features."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, by_class, digits, far, run
from torch import Tensor

from fedalloy import models
from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.net import Inputs
from fedalloy.core.random import generator
from fedalloy.core.registry import make
from fedalloy.experiment.folder import RunFolder
from fedalloy.methods import fedgh, local
from fedalloy.methods.fedgh import logits
from fedalloy.round.client import client_model

QUICK: dict[str, Any] = {"server_epochs": 5, "server_lr": 0.1, "server_batch": 16}
HEAD = "globalhead"
DIGITS = Inputs("image", (1, 8, 8), 10)
MIXED = ("mlp(hidden=16)", "cnn-bn", "lenet", "resnet18(width=0.25)", "vit-tiny")


def sent(lab: Lab) -> tuple[Tensor, Tensor]:
    """All class means of the latest round, and their classes."""
    rows = [lab.sent(k, f"{HEAD}.means") for k in sorted(lab.replies)]
    classes = [lab.sent(k, f"{HEAD}.held").nonzero().flatten() for k in sorted(lab.replies)]
    return torch.cat(rows), torch.cat(classes)


def said(flat: Tensor, rows: Tensor) -> Tensor:
    """The logits of a linear head of ten classes, by hand."""
    width = rows.shape[1]
    return rows @ flat[: 10 * width].view(10, width).T + flat[10 * width :]


# Clients


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_all_heads_are_equal_after_the_downlink(model: str) -> None:
    """Check: after the downlink all heads are equal; extractors stay each client's own."""
    lab = Lab(fedgh(**QUICK), digits(), model, lr=0.1).rounds([0, 1, 2], [0, 1])
    clients = []
    for k in (0, 1, 2, 5):
        client = lab.trained(k)
        lab.server.round -= 1
        span = client.weights.span("head")
        assert torch.equal(client.received[span], lab.weights)
        clients.append(client.received[: span.start].clone())
        if k < 3:
            assert torch.equal(clients[-1], lab.keeps[k]["own.weights"])
    assert far(clients[0], clients[1]) > 1e-3
    assert len(lab.weights) == 16 * 10 + 10


def test_the_head_of_the_first_round_is_that_of_the_model() -> None:
    lab, alone = Lab(fedgh(**QUICK), digits(), lr=0.1), Lab(local(), digits(), lr=0.1)
    lab.round([0])
    alone.round([0])
    kept = alone.keeps[0]["own.weights"]
    assert torch.equal(lab.keeps[0]["own.weights"], kept[: len(lab.keeps[0]["own.weights"])])


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_a_round_is_local_training_from_the_received_head(model: str) -> None:
    """Head <- h; then the whole model trains with cross-entropy, and the head's changes are thrown away."""
    lab = Lab(fedgh(**QUICK), digits(), model, lr=0.1, epochs=2).rounds([0, 1])
    alone = Lab(local(), digits(), model, lr=0.1, epochs=2)
    kept = lab.keeps[0]
    alone.keeps[0] = {
        "own.weights": torch.cat([kept["own.weights"], lab.weights]),
        "own.buffers": kept["own.buffers"].clone(),
    }
    alone.server.round = 1
    alone.round([0])
    head = lab.weights.clone()
    lab.round([0])
    end = alone.keeps[0]["own.weights"]
    assert torch.equal(lab.keeps[0]["own.weights"], end[: -len(head)])
    assert far(end[-len(head) :], head) > 1e-3


# The server


def test_training_by_hand() -> None:
    """S epochs of SGD over shuffled batches of all (mean feature, class); every mean counts once."""
    lab = Lab(fedgh(server_epochs=3, server_lr=0.3), digits(), lr=0.1, batch=7).rounds([0, 1, 2])
    flat = lab.weights.clone().requires_grad_()
    lab.round([0, 3])
    rows, y = sent(lab)
    optimiser = torch.optim.SGD([flat], lr=0.3)
    for epoch in range(3):
        order = torch.randperm(len(y), generator=generator(0, 2, "server", "head", epoch))
        for index in torch.split(order, 7):
            optimiser.zero_grad()
            F.cross_entropy(said(flat, rows[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    assert far(lab.weights, flat.detach()) < 1e-6
    assert far(logits(lab.server, lab.weights, rows), said(lab.weights, rows)) < 1e-5


@pytest.mark.parametrize("settings", [{"server_epochs": 0}, {"server_lr": 0.0}], ids=str)
def test_without_epochs_or_rate_the_head_stays(settings: dict[str, Any]) -> None:
    """Check: S = 0 or eta_s = 0 leaves h unchanged."""
    lab = Lab(fedgh(**{**QUICK, **settings}), digits(), lr=0.1)
    before = lab.weights.clone()
    lab.rounds([0, 1], [1, 2])
    assert torch.equal(lab.weights, before)
    moved = Lab(fedgh(**QUICK), digits(), lr=0.1).rounds([0, 1])
    assert far(moved.weights, before) > 1e-3


def test_the_server_learns() -> None:
    """Check, behaviour: the server's cross-entropy on the uploaded means falls over the S epochs."""
    losses = []
    for epochs in (0, 5, 20, 80):
        lab = Lab(fedgh(server_epochs=epochs, server_lr=0.5), digits(), lr=0.1).rounds([0, 1, 2])
        rows, y = sent(lab)
        losses.append(F.cross_entropy(said(lab.weights, rows), y).item())
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_means_come_from_a_pass_after_training(model: str) -> None:
    lab = Lab(fedgh(**QUICK), by_class([0, 3, 8], [3]), model, lr=0.05)
    start = lab.weights.clone()
    lab.round()
    data = lab.federation.client(0)
    whole = torch.cat([lab.keeps[0]["own.weights"], start])  # the features do not depend on the head
    z = lab.replica.frozen(whole, lab.keeps[0]["own.buffers"])(data.prepare(data.x, None)).features
    expected = torch.stack([z[data.y == c].mean(0) for c in (0, 3, 8)])
    assert far(lab.sent(0, f"{HEAD}.means"), expected) < 1e-6


# Wire, evaluation, architectures


@pytest.mark.parametrize("model", ["mlp(hidden=32)", "mlp(hidden=32, depth=3)"])
def test_bytes_do_not_depend_on_the_model(model: str) -> None:
    """Check: upload is C_m k floats (and which classes); down the head, k C + C floats."""
    lab = Lab(fedgh(**QUICK), by_class([0, 1, 5], [2]), model, lr=0.05)
    mail = lab.server.send(0).items
    assert {key: tuple(v.shape) for key, v in mail.items()} == {f"{HEAD}.weights": (32 * 10 + 10,)}
    outcome = lab.round()
    assert outcome.bytes_up == {f"{HEAD}.means": 4 * (3 + 1) * 32, f"{HEAD}.held": 2 * 10}
    size = models.size_of(model, DIGITS).parameters
    assert len(lab.keeps[0]["own.weights"]) == size - 330  # the extractor stays, the head is not kept


@pytest.mark.parametrize("evaluate", ["received", "trained"])
def test_which_head_is_tried(evaluate: str) -> None:
    """After local training: the own extractor with the head just received, or the one it trained last."""
    lab = Lab(fedgh(evaluate=evaluate, **QUICK), digits(), lr=0.1).rounds([0, 1])
    data, mail = lab.federation.client(0), lab.server.send(0, "evaluate")
    model = client_model(
        lab.method, lab.replica, data, lab.federation.info, lab.local, lab.keeps[0], mail, lab.seed
    )
    heads = {"received": lab.weights, "trained": lab.keeps[0].get(f"{HEAD}.head", lab.weights)}
    found = model(data.x)
    whole = torch.cat([lab.keeps[0]["own.weights"], heads[evaluate]])
    out = lab.replica.frozen(whole, lab.keeps[0]["own.buffers"])(data.prepare(data.x, None))
    assert far(found, out.logits) < 1e-6
    assert (f"{HEAD}.head" in lab.keeps[0]) == (evaluate == "trained")
    if evaluate == "trained":
        assert far(heads["trained"], heads["received"]) > 1e-3
        stranger = lab.server.send(5, "evaluate")  # never asked: it has trained no head of its own
        info = lab.federation.info
        fresh = client_model(lab.method, lab.replica, data, info, lab.local, {}, stranger, lab.seed)(data.x)
        begun = torch.cat([lab.replica.initial[: -len(lab.weights)], lab.weights])
        plain = lab.replica.frozen(begun, lab.replica.initial_buffers)(data.prepare(data.x, None))
        assert far(fresh, plain.logits) < 1e-6


def test_architectures_may_differ(tmp_path: Path) -> None:
    federation = digits(5, "dirichlet:0.5", 0.25)
    method = "fedgh(server_epochs=5)"
    result = run(tmp_path, federation, method, models=",".join(MIXED), rounds=2, lr=0.05)
    assert not any(line["refused"] for line in result.history)
    assert result.history[-1]["bytes_down"] == {f"{HEAD}.weights": 5 * 4 * 170}
    assert result.summary["metric"] == "personal_local_acc"
    assert len(RunFolder(tmp_path / "run").restore()[1]["server.weights"]) == 170


def test_it_learns(tmp_path: Path) -> None:
    federation = digits(6, "dirichlet:0.5", 0.25)
    result = run(tmp_path, federation, "fedgh(server_epochs=50)", rounds=8, epochs=3, lr=0.1)
    metrics = result.history[-1]["metrics"]
    assert min(metrics["personal_local_acc"], metrics["personal_local_acc_clients"]) > 0.85


def test_one_head_for_all() -> None:
    with pytest.raises(AlloyConflict, match="both claim the aggregation of weights"):
        make("fedgh+fedavg")
    with pytest.raises(AlloyConflict, match="both claim the neck"):
        make("fedgh+projector")
    bare = Lab(make("fedgh(server_epochs=2)+headwithoutbias"), digits(), lr=0.1).rounds([0, 1])
    assert len(bare.weights) == 160

"""FedTGP: prototypes trained at the server with an adaptive margin, and FedProto's clients."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, assert_trains_alone, by_class, digits, far, run
from torch import Tensor

from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.random import generator
from fedalloy.core.registry import make
from fedalloy.methods import fedproto, fedtgp
from fedalloy.methods.fedtgp import Prototypes, contrast, distances, margin
from fedalloy.round.client import Step, client_model

QUICK: dict[str, Any] = {"server_epochs": 5, "server_batch": 16}
MEANS = "trainedprototypes"
MIXED = ("mlp(hidden=16)", "cnn-bn", "lenet", "resnet18(width=0.25)", "vit-tiny")


def prototypes(lab: Lab) -> Tensor:
    return lab.server.states[MEANS].persistent["P"]


def sent(lab: Lab) -> tuple[Tensor, Tensor]:
    """All class means of the latest round, and their classes."""
    rows = [lab.sent(k, f"{MEANS}.means") for k in sorted(lab.replies)]
    classes = [lab.sent(k, f"{MEANS}.held").nonzero().flatten() for k in sorted(lab.replies)]
    return torch.cat(rows), torch.cat(classes)


def scattered(classes: int = 5, clients: int = 4, width: int = 6) -> tuple[Tensor, Tensor]:
    """Made-up class means: clients disagree about as much as classes differ."""
    dice = generator(0, "means")
    centres = torch.randn(classes, width, generator=dice)
    rows = centres.repeat(clients, 1) + 0.5 * torch.randn(clients * classes, width, generator=dice)
    return rows, torch.arange(classes).repeat(clients)


# Clients


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_without_the_pull_clients_train_alone(model: str) -> None:
    """Check: lam = 0: clients equal local training bit for bit."""
    assert_trains_alone(fedtgp(lam=0.0, **QUICK), model)


def test_the_first_round_has_no_pull() -> None:
    ends = []
    for lam in (0.0, 10.0):
        lab = Lab(fedtgp(lam=lam, **QUICK), digits(), lr=0.05).rounds([0, 1])
        first = lab.keeps[0]["own.weights"].clone()
        ends.append((first, lab.rounds([0, 1]).keeps[0]["own.weights"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert far(ends[0][1], ends[1][1]) > 1e-4


def test_the_pull_by_hand() -> None:
    """lam MSE(z, P[y]), for every class: those that nobody holds have a prototype too."""
    lab = Lab(fedtgp(lam=3.0, **QUICK), by_class([0, 1], [1, 2]), lr=0.05).rounds([0, 1])
    client = lab.trained(0)
    x, y = client.data.prepare(client.data.x[:4], None), torch.tensor([0, 1, 7, 9])
    step = Step(client, x, y, torch.arange(4), 0)
    step.out = client.net(x)
    piece = next(p for p in lab.method if p.label == "prototypepull")
    loss = piece.loss(step, client.state_of(piece))
    assert loss is not None
    expected = 3 * F.mse_loss(step.out.features, client.states[MEANS].received["means"][y])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_means_come_from_a_pass_after_training(model: str) -> None:
    lab = Lab(fedtgp(**QUICK), by_class([0, 3, 8], [3]), model, lr=0.05).rounds([0, 1])
    data = lab.federation.client(0)
    net = lab.replica.frozen(lab.keeps[0]["own.weights"], lab.keeps[0]["own.buffers"])
    z = net(data.prepare(data.x, None)).features
    expected = torch.stack([z[data.y == c].mean(0) for c in (0, 3, 8)])
    assert far(lab.sent(0, f"{MEANS}.means"), expected) < 1e-6


# The server


def test_the_margin_by_hand() -> None:
    """delta: the largest of the classes' distances to their nearest neighbour, of means over the clients."""
    rows, y = scattered()
    Q = [rows[y == c].mean(0) for c in range(5)]
    g = [min(float((Q[c] - Q[d]).norm()) for d in range(5) if d != c) for c in range(5)]
    assert margin(rows, y, 100.0) == pytest.approx(max(g), rel=1e-5)
    assert max(g) > min(g)


@pytest.mark.parametrize("tau", [0.0, 0.1, 1.0, 100.0])
def test_the_margin_is_bounded_and_does_not_move_with_the_prototypes(tau: float) -> None:
    """Check: delta <= tau, and delta is unchanged by a common translation of the prototypes."""
    rows, y = scattered()
    delta = margin(rows, y, tau)
    assert 0 <= delta <= tau
    assert margin(rows + 3.0, y, tau) == pytest.approx(delta, rel=1e-4)


def test_a_single_class_has_no_margin() -> None:
    """Pitfall: the code's placeholder 1e9 would make delta = tau."""
    rows, y = scattered(classes=1)
    assert margin(rows, y, 100.0) == 0
    two, labels = scattered(classes=2)
    two[labels == 1] = two[labels == 0]
    assert margin(two, labels, 100.0) == pytest.approx(0, abs=1e-5)


def test_distances_have_a_gradient_everywhere() -> None:
    """Pitfall: the root of a difference of squares may be NaN, and at 0 it has no gradient."""
    a = torch.randn(4, 3, generator=generator(0), requires_grad=True)
    found = distances(a, a.detach().clone())
    assert far(found.detach(), torch.cdist(a, a).detach()) < 1e-3
    found.sum().backward()  # type: ignore[no-untyped-call]
    assert a.grad is not None
    assert bool(torch.isfinite(a.grad).all())


def test_the_loss_by_hand() -> None:
    """The margin enters the true class only, as an added distance."""
    rows, y = scattered()
    P = torch.randn(7, 6, generator=generator(1))
    terms = []
    for row, c in zip(rows, y.tolist(), strict=True):
        scores = torch.stack([-(row - P[j]).norm() - (0.7 if j == c else 0.0) for j in range(7)])
        terms.append(-scores.log_softmax(0)[c])
    assert contrast(rows, y, P, 0.7).item() == pytest.approx(torch.stack(terms).mean().item(), rel=1e-5)


def rebuilt(lab: Lab) -> Prototypes:
    net = Prototypes(10, lab.replica.net.width)
    keep = lab.server.states[MEANS].persistent
    net.load_state_dict({name.removeprefix("net."): v for name, v in keep.items() if name.startswith("net.")})
    return net


def test_training_by_hand() -> None:
    """V and F persist, the optimiser is new: S epochs of SGD over shuffled batches at the clients' rate."""
    lab = Lab(fedtgp(server_epochs=3), digits(), lr=0.1, batch=7, lr_decay=0.5).rounds([0, 1, 2])
    net = rebuilt(lab)
    lab.round([0, 3])
    rows, y = sent(lab)
    optimiser = torch.optim.SGD(net.parameters(), lr=0.05)
    delta = margin(rows, y, 100.0)
    for epoch in range(3):
        order = torch.randperm(len(y), generator=generator(0, 2, "server", "prototypes", epoch))
        for index in torch.split(order, 7):
            loss = F.cross_entropy(
                -(torch.cdist(rows[index], net()) + delta * F.one_hot(y[index], 10)), y[index]
            )
            optimiser.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    assert far(prototypes(lab), net().detach()) < 1e-5
    assert far(prototypes(lab), rebuilt(lab)().detach()) < 1e-6


@pytest.mark.parametrize("settings", [{"server_epochs": 0}, {"server_lr": 0.0}], ids=str)
def test_without_epochs_or_rate_prototypes_stay(settings: dict[str, Any]) -> None:
    """Check: S = 0 leaves P unchanged."""
    lab = Lab(fedtgp(**{**QUICK, **settings}), digits(), lr=0.05)
    before = prototypes(lab).clone()
    lab.rounds([0, 1], [1, 2])
    assert torch.equal(prototypes(lab), before)
    moved = Lab(fedtgp(**QUICK), digits(), lr=0.05).rounds([0, 1])
    assert far(prototypes(moved), before) > 1e-3


def test_the_server_learns() -> None:
    """Check: the server's loss after S epochs is lower than before on the same prototypes."""
    method = fedtgp(server_epochs=30, server_lr=0.2)
    lab = Lab(method, digits(), lr=0.05).rounds([0, 1, 2])
    before = prototypes(lab).clone()
    lab.round([0, 1, 2])
    rows, y = sent(lab)
    delta = margin(rows, y, 100.0)
    losses = [contrast(rows, y, P, delta).item() for P in (before, prototypes(lab))]
    assert losses[1] < losses[0]
    first = Lab(method, digits(), lr=0.05)
    untrained = prototypes(first).clone()
    first.round([0, 1, 2])
    rows, y = sent(first)
    delta = margin(rows, y, 100.0)
    assert contrast(rows, y, prototypes(first), delta) < 0.9 * contrast(rows, y, untrained, delta)


def smallest_gap(P: Tensor) -> float:
    return float(distances(P, P).fill_diagonal_(torch.inf).min())


def test_trained_prototypes_stand_apart() -> None:
    """Check, behaviour: the smallest distance between rows of P exceeds that of the averaged prototypes."""
    federation = digits(4, "dirichlet:0.5")
    lab = Lab(fedtgp(server_epochs=100, server_batch=10), federation, lr=0.05).rounds([0, 1, 2, 3])
    plain = Lab(fedproto(), federation, lr=0.05).rounds([0, 1, 2, 3])
    averaged = plain.server.states["features-means"].persistent
    held = averaged["seen"]
    assert int(held.sum()) == 10
    assert smallest_gap(prototypes(lab)[held]) > 1.5 * smallest_gap(averaged["means"][held])


# Wire, predictions, architectures


@pytest.mark.parametrize("model", ["mlp(hidden=32)", "mlp(hidden=32, depth=3)"])
def test_bytes_do_not_depend_on_the_model(model: str) -> None:
    """Down P, C k floats, and whether there are any yet; up C_m k floats and which classes."""
    lab = Lab(fedtgp(**QUICK), by_class([0, 1, 5], [2]), model, lr=0.05)
    mail = lab.server.send(0).items
    assert {key: tuple(v.shape) for key, v in mail.items()} == {
        f"{MEANS}.means": (10, 32),
        f"{MEANS}.seen": (10,),
    }
    outcome = lab.round()
    assert outcome.bytes_up == {f"{MEANS}.means": 4 * (3 + 1) * 32, f"{MEANS}.held": 2 * 10}
    assert lab.sent(0, f"{MEANS}.held").nonzero().flatten().tolist() == [0, 1, 5]


@pytest.mark.parametrize("rows", [0, 1, 3])
def test_rows_must_match_the_classes(rows: int) -> None:
    """Two classes are said to be held: any other number of rows is refused, and the round goes on."""
    lab = Lab(fedtgp(**QUICK), by_class([0, 1], [1, 2]), lr=0.05)
    lab.server.round = 1
    replies = [lab.answer(lab.server.send(k)) for k in (0, 1)]
    replies[1].items[f"{MEANS}.means"] = torch.zeros(rows, 16)
    outcome = lab.server.receive([0, 1], replies)
    assert outcome.refused == {1: f"{MEANS}.means has {rows} rows for 2 classes"}
    assert len(outcome.accepted) == 1


def scores(lab: Lab) -> Tensor:
    data, mail = lab.federation.client(0), lab.server.send(0, "evaluate")
    keep = lab.keeps.get(0, {})
    return client_model(lab.method, lab.replica, data, lab.federation.info, lab.local, keep, mail, lab.seed)(
        data.x
    )


def test_the_nearest_prototype_decides() -> None:
    """Official: nearest global prototype, of all classes; own head as an option, and before the first round."""
    for evaluate in ("proto", "head"):
        lab = Lab(fedtgp(evaluate=evaluate, **QUICK), by_class([0, 1, 2], [2, 3]), lr=0.05)
        data = lab.federation.client(0)
        first = lab.replica.frozen(lab.replica.initial, lab.replica.initial_buffers)
        assert far(scores(lab), first(data.prepare(data.x, None)).logits) < 1e-6
        lab.rounds([0, 1])
        out = lab.replica.frozen(lab.keeps[0]["own.weights"], lab.keeps[0]["own.buffers"])(
            data.prepare(data.x, None)
        )
        expected = -torch.cdist(out.features, prototypes(lab)) if evaluate == "proto" else out.logits
        assert far(scores(lab), expected) < 1e-4


def test_architectures_may_differ(tmp_path: Path) -> None:
    federation = digits(5, "dirichlet:0.5", 0.25)
    method = "fedtgp(server_epochs=5)"
    result = run(tmp_path, federation, method, models=",".join(MIXED), rounds=2, lr=0.05)
    assert not any(line["refused"] for line in result.history)
    assert result.history[-1]["bytes_down"][f"{MEANS}.means"] == 5 * 4 * 10 * 16
    assert result.summary["metric"] == "personal_local_acc"


def test_it_learns(tmp_path: Path) -> None:
    federation = digits(6, "dirichlet:0.5", 0.25)
    result = run(tmp_path, federation, "fedtgp(server_batch=10)", "mlp", rounds=3, epochs=3, lr=0.05)
    metrics = result.history[-1]["metrics"]
    assert min(metrics["personal_local_acc"], metrics["personal_local_acc_clients"]) > 0.85


def test_one_kind_of_prototypes() -> None:
    with pytest.raises(AlloyConflict, match="both claim class means of features"):
        make("fedtgp+fedproto(lam=10)")

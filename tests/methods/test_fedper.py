"""FedPer: a common base, personal layers on top of it, trained together."""

from pathlib import Path
from typing import Any

import pytest
import torch
from laboratory import (
    BATCHNORM,
    MLP,
    Lab,
    assert_personal_accuracies,
    dealt,
    digits,
    far,
    full_gradient,
    run,
    shards,
)
from torch import Tensor

from fedalloy.core.registry import make
from fedalloy.core.wire import Items
from fedalloy.data import load
from fedalloy.experiment.folder import RunFolder
from fedalloy.methods import fedavg, fedper, local
from fedalloy.round.replica import Replica

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
LAYERS = {MLP: 2, BATCHNORM: 3}
OPTIMISERS: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    {"lr": 0.01, "optimizer": "adam"},
]


def whole(lab: Lab, client: int) -> tuple[Tensor, Tensor]:
    """The weights and statistics of a client's personal model: the server's base, its own layers."""
    found = lab.tested(client)
    return found.weights.flat.clone(), found.weights.buffers.clone()


@pytest.mark.parametrize("personal", [1, 2])
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_personal_layers_never_cross_the_wire(model: str, personal: int) -> None:
    """Check: no personal tensor in uploads or downloads; bytes are |S| 4 (d_theta + b) each way, and the counts."""
    lab = Lab(fedper(num_personal_layers=personal), digits(), model, lr=0.1)
    head, linear, norm = 16 * 10 + 10, 64 * 16 + 16, 32
    theta = {(MLP, 1): linear, (MLP, 2): 0, (BATCHNORM, 1): linear + norm, (BATCHNORM, 2): linear}
    d, b = theta[model, personal], 32 if (model, personal) == (BATCHNORM, 1) else 0
    for chosen in PARTICIPANTS:
        down = lab.server.send(0).items
        outcome = lab.round(chosen)
        assert {key: value.numel() for key, value in down.items()} == {"share.weights": d, "share.buffers": b}
        up = lab.replies[chosen[0]].items
        assert {key: value.numel() for key, value in up.items()} == {"share.weights": d, "share.buffers": b}
        assert sum(outcome.bytes_up.values()) == len(chosen) * (4 * (d + b) + 8)
    own = lab.keeps[1]
    assert own["own.weights"].numel() == len(lab.replica.initial) - d
    assert own["own.buffers"].numel() == len(lab.replica.initial_buffers) - b
    assert own["own.weights"].numel() >= head


@pytest.mark.parametrize("settings", OPTIMISERS)
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_without_personal_layers_it_is_fedavg(model: str, settings: dict[str, Any]) -> None:
    """Check: K_P = 0 equals FedAvg bit for bit."""
    labs = [
        Lab(method, digits(), model, epochs=2, **settings)
        for method in (fedavg(), fedper(num_personal_layers=0))
    ]
    for lab in labs:
        lab.rounds(*PARTICIPANTS)
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)
    assert labs[1].keeps[0] == {}


@pytest.mark.parametrize("settings", OPTIMISERS)
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("more", [0, 10])
def test_with_personal_layers_only_it_is_local(model: str, settings: dict[str, Any], more: int) -> None:
    """Check: K_P = all layers (or more) equals Local with participation applied."""
    alone = Lab(local(participation_applies=True), digits(), model, epochs=2, **settings)
    lab = Lab(fedper(num_personal_layers=LAYERS[model] + more), digits(), model, epochs=2, **settings)
    for each in (alone, lab):
        each.rounds(*PARTICIPANTS)
    assert alone.keeps.keys() == lab.keeps.keys() == {0, 1, 5}
    for client, kept in alone.keeps.items():
        for name in ("own.weights", "own.buffers"):
            assert torch.equal(lab.keeps[client][name], kept[name])


@pytest.mark.parametrize("settings", OPTIMISERS)
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_one_client_is_plain_local_training(model: str, settings: dict[str, Any]) -> None:
    """Check: one client, participation 1: equals plain local training bit for bit."""
    labs = [Lab(method, shards(100), model, epochs=2, **settings) for method in (fedper(), local())]
    for lab in labs:
        lab.rounds([0], [0], [0])
    for found, expected in zip(whole(labs[0], 0), whole(labs[1], 0), strict=True):
        assert torch.equal(found, expected)


def test_one_full_batch_step_by_hand() -> None:
    """Check: theta - lr sum p_k grad_theta l_k(theta, phi_k) to 1e-6; each phi_k steps along its own gradient."""
    lr, clients = 0.3, (0, 2, 5)
    lab = Lab(fedper(), digits(), lr=lr, batch=10_000)
    lab.rounds([0, 2], [5])  # so that every head is another
    base = lab.replica.weights.span(":-1").stop
    before = {k: whole(lab, k)[0] for k in clients}
    heads = [before[k][base:] for k in clients]
    assert min(far(heads[0], heads[1]), far(heads[1], heads[2])) > 1e-3
    gradients = {}
    for k in clients:
        lab.replica.weights.load(before[k], lab.replica.initial_buffers)
        gradients[k] = full_gradient(lab.replica.net, lab.federation.client(k)).clone()
    total = sum(lab.sizes[k] for k in clients)
    mean = sum((lab.sizes[k] / total * gradients[k][:base] for k in clients), torch.zeros(base))
    lab.round(clients)
    assert far(lab.weights, before[0][:base] - lr * mean) < 1e-6
    for k in clients:
        assert far(lab.keeps[k]["own.weights"], before[k][base:] - lr * gradients[k][base:]) < 1e-6


def test_heads_part_where_labels_do() -> None:
    """Check, behaviour: heads of clients with disjoint labels move apart, the base stays common."""
    y = load("digits", None).y[:1000]
    low, high = (torch.where(mask)[0].tolist() for mask in (y < 5, y >= 5))
    lab = Lab(fedper(), dealt([low[:200], high[:200], low[200:400]]), lr=0.1, epochs=2)
    for _ in range(3):
        lab.round()
    base = lab.replica.weights.span(":-1").stop
    moved = [lab.keeps[k]["own.weights"] - lab.replica.initial[base:] for k in range(3)]
    assert torch.cosine_similarity(moved[0], moved[1], dim=0) < 0.1
    assert torch.cosine_similarity(moved[0], moved[2], dim=0) > 0.8  # it is the labels that tell them apart
    assert all(torch.equal(whole(lab, k)[0][:base], lab.weights) for k in range(3))


def test_who_joins_late_starts_from_the_common_head() -> None:
    """Pitfall: a late client takes the trained base and the initial head, nobody else's."""
    lab = Lab(fedper(num_personal_layers=2), digits(), BATCHNORM, lr=0.1)
    lab.rounds([0, 1], [0, 1])
    base, statistics = lab.replica.weights.span(":-2").stop, lab.replica.weights.buffer_span(":-2").stop
    client = lab.trained(4)
    assert torch.equal(client.received[:base], lab.weights)
    assert far(lab.weights, lab.replica.initial[:base]) > 1e-3
    assert torch.equal(client.received[base:], lab.replica.initial[base:])
    assert torch.equal(client.received_buffers[statistics:], lab.replica.initial_buffers[statistics:])


@pytest.mark.parametrize("personal", [1, 2])
def test_batchnorm_goes_with_its_layer(personal: int) -> None:
    """Pitfall: statistics inside the base are averaged, statistics inside personal layers stay local."""
    lab = Lab(fedper(num_personal_layers=personal), digits(), BATCHNORM, lr=0.1)
    lab.rounds([0, 1])
    seen = [whole(lab, k)[1] for k in (0, 1, 2)]
    assert (far(seen[0], seen[1]) == 0) == (personal == 1)
    assert (far(seen[2], lab.replica.initial_buffers) == 0) == (personal == 2)


def test_nothing_is_frozen() -> None:
    """Pitfall: freeze flags of a method that alternates must not leak into one that does not."""
    lab = Lab(fedper(), digits(), lr=0.1)
    lab.replica.net.requires_grad_(False)
    client = lab.trained(0)
    for part in (":-1", "-1:"):
        span = client.weights.span(part)
        assert far(client.weights.flat[span], client.received[span]) > 1e-3


# Evaluation


def test_the_body_that_is_tested() -> None:
    """`eval_body`: the latest average, or the body as the client's own training left it, however long ago."""
    labs = {
        body: Lab(fedper(eval_body=body), digits(), BATCHNORM, lr=0.1, epochs=2)
        for body in ("averaged", "own")
    }
    ends: dict[int, tuple[Tensor, Tensor]] = {}
    for chosen in ([0, 1], [1, 2]):
        for lab in labs.values():
            lab.round(chosen)
        for k in chosen:
            kept = labs["own"].keeps[k]
            ends[k] = kept["astrained.weights"].clone(), kept["astrained.buffers"].clone()
            base = labs["own"].replica.weights.span(":-1")
            assert torch.equal(ends[k][0][base], labs["own"].sent(k, "share.weights"))
            assert torch.equal(ends[k][0][base.stop :], kept["own.weights"])
            assert torch.equal(ends[k][1], labs["own"].sent(k, "share.buffers"))
    assert torch.equal(labs["own"].weights, labs["averaged"].weights)  # training is the same
    ends[4] = labs["own"].replica.initial, labs["own"].replica.initial_buffers  # never asked
    for k, (weights, buffers) in ends.items():
        own, averaged = whole(labs["own"], k), whole(labs["averaged"], k)
        assert torch.equal(own[0], weights)
        assert torch.equal(own[1], buffers)
        assert torch.equal(averaged[0][: len(labs["own"].weights)], labs["averaged"].weights)
        assert torch.equal(averaged[1], labs["averaged"].server.buffers)
        assert far(own[0], averaged[0]) > 1e-4


@pytest.mark.parametrize("body", ["averaged", "own"])
def test_accuracies_are_those_of_the_personal_models(body: str, tmp_path: Path) -> None:
    """C.Avg, D.Avg and the mean on the global test set by hand; there is no global model."""
    federation = digits(6, "dirichlet:0.1")
    settings: dict[str, Any] = {"epochs": 2, "lr": 0.1}
    method = f"fedper(eval_body={body})"
    result = run(tmp_path, federation, method, BATCHNORM, rounds=3, participation=0.5, **settings)
    metrics = result.history[-1]["metrics"]
    lab = Lab(make(method), federation, BATCHNORM, **settings)
    for line in result.history:
        lab.round(line["participants"])
    shares = assert_personal_accuracies(metrics, lab)
    assert metrics["per_client"] == pytest.approx(shares)
    assert not any(name.startswith("global") for name in metrics)
    assert result.summary["metric"] == "personal_local_acc"


def test_the_vault_holds_what_is_personal(tmp_path: Path) -> None:
    run(tmp_path, digits(), "fedper", BATCHNORM, rounds=2)
    kept: Items = RunFolder(tmp_path / "run").vault.load(0, before=99)
    assert {name: value.numel() for name, value in kept.items()} == {"own.weights": 170, "own.buffers": 0}


def test_a_model_without_a_base_shares_nothing() -> None:
    """Logistic regression is all head."""
    lab = Lab(fedper(), digits(), "mlp(depth=0)", lr=0.1).rounds([0, 1])
    assert lab.weights.numel() == 0
    assert far(lab.keeps[0]["own.weights"], lab.replica.initial) > 1e-3


def test_convolutional_nets_are_cut_at_their_layers() -> None:
    """From the output: linear, BatchNorm, convolution; names play no part."""
    replica = Replica(fedper(num_personal_layers=3), "cnn-bn", digits().dataset.inputs, seed=0)
    personal = [name for name in replica.weights.layout.spans if name not in names(replica, ":-3")]
    assert {name.rpartition(".")[0] for name in personal} == {"body.6", "body.7", "head"}


def names(replica: Replica, part: str) -> list[str]:
    span = replica.weights.span(part)
    return [
        name for name, (a, b) in replica.weights.layout.spans.items() if span.start <= a and b <= span.stop
    ]

"""FedBABU: a head that never moves, a body that is averaged, and fine-tuning that leaves no trace."""

from pathlib import Path
from typing import Any

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, assert_personal_accuracies, digits, far, run
from torch import nn

from fedalloy.core.alloy import AlloyConflict, alloy
from fedalloy.core.registry import make
from fedalloy.core.state import Phase
from fedalloy.core.weights import BASE, HEAD
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.run import reopen
from fedalloy.methods import fedavg, fedbabu, fedrep
from fedalloy.methods.fedbabu import FixedHead
from fedalloy.round.replica import Replica

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
MOVING: list[dict[str, Any]] = [
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.01, "optimizer": "adam", "weight_decay": 0.1},
    {"lr": 0.01, "optimizer": "adamw", "weight_decay": 0.1},
]


@pytest.mark.parametrize("settings", MOVING)
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_the_head_never_moves(model: str, settings: dict[str, Any]) -> None:
    """Check: phi is phi_0, bit for bit, on the server and on every client, with momentum and weight decay on."""
    lab = Lab(fedbabu(), digits(), model, epochs=2, **settings)
    head = lab.replica.weights.span(HEAD)
    start = lab.replica.initial[head].clone()
    assert start.numel() == 170
    for chosen in PARTICIPANTS:
        lab.round(chosen)
        assert torch.equal(lab.server.shown()["global"][0][head], start)
    for k in range(6):
        client = lab.trained(k)
        assert torch.equal(client.received[head], start)
        assert torch.equal(client.weights.flat[head], start)
        base = client.weights.span(BASE)
        assert far(client.weights.flat[base], client.received[base]) > 1e-3


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_no_head_crosses_the_wire(model: str) -> None:
    """Check: no head in any download or upload, not even the first; bytes are |S| 4 (d_theta + b) each way."""
    lab = Lab(fedbabu(), digits(), model, lr=0.1)
    d, b = (64 * 16 + 16, 0) if model == MLP else (64 * 16 + 16 + 32, 32)
    for chosen in PARTICIPANTS:
        down = lab.server.send(0).items
        outcome = lab.round(chosen)
        for items in (down, lab.replies[chosen[0]].items):
            assert {key: v.numel() for key, v in items.items()} == {"share.weights": d, "share.buffers": b}
        assert sum(outcome.bytes_up.values()) == len(chosen) * (4 * (d + b) + 8)
    assert all(kept == {} for kept in lab.keeps.values())  # phi_0 comes from the seed


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_with_an_empty_body_nothing_is_trained(model: str) -> None:
    """Check: all layers in the head: training is a no-op."""
    lab = Lab(alloy("fixed", FixedHead(part=":-99")), digits(), model, lr=0.1)
    lab.rounds(*PARTICIPANTS)
    assert lab.weights.numel() == 0
    assert torch.equal(lab.server.shown()["global"][0], lab.replica.initial)
    assert torch.equal(lab.server.shown()["global"][1], lab.replica.initial_buffers)
    client = lab.trained(0)
    assert torch.equal(client.weights.flat, lab.replica.initial)
    assert torch.equal(client.weights.buffers, lab.replica.initial_buffers)


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_with_an_empty_head_it_is_fedavg(model: str) -> None:
    """Check: an empty head equals FedAvg bit for bit."""
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "epochs": 2}
    labs = [
        Lab(method, digits(), model, **settings) for method in (fedavg(), alloy("free", FixedHead(part="")))
    ]
    for lab in labs:
        lab.rounds(*PARTICIPANTS)
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)
    assert torch.equal(labs[1].server.shown()["global"][0], labs[0].weights)


@pytest.mark.parametrize("settings", [{"lr": 0.1, "momentum": 0.9}, *MOVING])
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_fedrep_without_epochs_for_the_head(model: str, settings: dict[str, Any]) -> None:
    """Check of FedRep: head_epochs = 0, so that all heads are the initial one, equals FedBABU bit for bit."""
    labs = [
        Lab(method, digits(), model, epochs=2, **settings) for method in (fedbabu(), fedrep(head_epochs=0))
    ]
    for lab in labs:
        lab.rounds(*PARTICIPANTS)
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)
    head = labs[0].replica.weights.span(HEAD)
    assert torch.equal(labs[1].keeps[0]["own.weights"], labs[0].replica.initial[head])


def test_a_personal_evaluation_leaves_no_trace(tmp_path: Path) -> None:
    """Check: the server's state is the same bits whether clients fine-tune at every round, at the end, or never."""
    results = [
        run(tmp_path / str(i), digits(), text, BATCHNORM, rounds=4, lr=0.1, eval_every=every)
        for i, (text, every) in enumerate([("fedbabu", 1), ("fedbabu", 4), ("fedbabu(ft_epochs=0)", 4)])
    ]
    assert len({result.summary["weights_sha256"] for result in results}) == 1
    assert {result.summary["private_sha256"] for result in results} == {None}
    lab = Lab(fedbabu(), digits(), BATCHNORM, lr=0.1).rounds([0, 1])
    before = {key: value.clone() for key, value in lab.server.state().items()}
    lab.tested(0)
    assert all(torch.equal(value, before[key]) for key, value in lab.server.state().items())


def test_fine_tuning_pays_under_skew(tmp_path: Path) -> None:
    """Check, behaviour: full fine-tuning raises the mean accuracy on own splits well above the global model's."""
    federation = digits(6, "dirichlet:0.1")
    settings: dict[str, Any] = {"rounds": 5, "epochs": 2, "lr": 0.1, "eval_every": 5}
    before, after = (
        run(tmp_path / str(n), federation, f"fedbabu(ft_epochs={n})", "mlp", **settings) for n in (0, 5)
    )
    mine = before.history[-1]["metrics"]["per_client"]  # the global model on clients' own splits
    tuned = after.history[-1]["metrics"]["personal_local_acc_clients"]
    assert tuned > sum(mine) / len(mine) + 0.1


def test_the_global_model_is_tested_as_it_is(tmp_path: Path) -> None:
    """`global_acc` is that of (theta, phi_0) without fine-tuning, FedDW's number; the paper's is the headline."""
    federation = digits(6, "dirichlet:0.1")
    settings: dict[str, Any] = {"rounds": 3, "lr": 0.1}
    plain, tuned = (
        run(tmp_path / str(n), federation, f"fedbabu(ft_epochs={n})", BATCHNORM, **settings) for n in (0, 5)
    )
    assert plain.summary["metric"] == "global_acc"
    assert not any(name.startswith("personal") for name in plain.history[-1]["metrics"])
    assert tuned.summary["metric"] == "personal_local_acc"
    for first, second in zip(plain.history, tuned.history, strict=True):
        assert first["metrics"]["global_acc"] == second["metrics"]["global_acc"]
    server, replicas, _ = reopen(tuned.folder)
    replica, index = replicas.of(0), federation.split.global_test
    net = replica.frozen(
        torch.cat([server.weights, replica.initial[replica.weights.span(HEAD)]]), server.buffers
    )
    right = net(federation.prepare(federation.dataset.x[index], None)).logits.argmax(1)
    share = (right == federation.dataset.y[index]).double().mean().item()
    assert tuned.history[-1]["metrics"]["global_acc"] == pytest.approx(share)


@pytest.mark.parametrize("settings", ["", "ft_part=head, ft_epochs=2", "ft_part=body, ft_lr=0.01"])
def test_accuracies_are_those_of_tuned_copies(settings: str, tmp_path: Path) -> None:
    """C.Avg, D.Avg and the mean on the global test set by hand; clients never sampled are tuned as well."""
    federation = digits(6, "dirichlet:0.1")
    local: dict[str, Any] = {"epochs": 2, "lr": 0.1, "momentum": 0.5}
    method = f"fedbabu({settings})"
    result = run(tmp_path, federation, method, rounds=2, participation=0.34, **local)
    metrics = result.history[-1]["metrics"]
    lab = Lab(make(method), federation, **local)
    for line in result.history:
        lab.round(line["participants"])
    assert_personal_accuracies(metrics, lab)


@pytest.mark.parametrize(("ft_part", "part"), [("full", ""), ("head", HEAD), ("body", BASE)])
@pytest.mark.parametrize("ft_lr", [None, 0.07])
def test_what_is_tuned(ft_part: str, part: str, ft_lr: float | None) -> None:
    """`ft_part` moves, from the averaged body and phi_0, at `ft_lr` or the latest rate; the rest does not."""
    settings: dict[str, Any] = {"lr": 0.1, "lr_decay": 0.5, "momentum": 0.9}
    plain, lab = (
        Lab(method, digits(), BATCHNORM, **settings).rounds(*PARTICIPANTS)
        for method in (fedbabu(ft_epochs=0), fedbabu(ft_part=ft_part, ft_lr=ft_lr))
    )
    by_hand = plain.tested(3)
    by_hand.fit("finetune", Phase(5, part, lr=ft_lr or 0.1 * 0.5**2))
    expected = by_hand.weights.flat.clone(), by_hand.weights.buffers.clone()
    client = lab.tested(3)
    assert torch.equal(client.weights.flat, expected[0])
    assert torch.equal(client.weights.buffers, expected[1])
    moved = client.weights.flat != client.received
    span = client.weights.span(part)
    assert bool(moved[span].any())
    assert not moved[: span.start].any()
    assert not moved[span.stop :].any()


def test_the_body_is_that_of_fedavg_and_the_head_may_be_orthogonal() -> None:
    inputs = digits().dataset.inputs
    plain, default, square = (
        Replica(method, MLP, inputs, seed=0)
        for method in (fedavg(), fedbabu(), fedbabu(head_init="orthogonal"))
    )
    assert torch.equal(plain.initial, default.initial)
    body = plain.weights.span(BASE)
    assert torch.equal(plain.initial[body], square.initial[body])
    assert isinstance(square.net.head, nn.Linear)
    rows = square.net.head.weight.detach()
    assert far(rows @ rows.T, torch.eye(10)) < 1e-5
    other = Replica(fedbabu(head_init="orthogonal"), MLP, inputs, seed=1).net.head
    assert isinstance(other, nn.Linear)
    assert far(other.weight.detach(), rows) > 0.1
    lab = Lab(fedbabu(head_init="orthogonal"), digits(), lr=0.1).rounds(*PARTICIPANTS)
    span = lab.replica.weights.span("head.weight")
    assert torch.equal(lab.server.shown()["global"][0][span], rows.flatten())


@pytest.mark.parametrize("agg_weights", ["size", "uniform"])
def test_the_average(agg_weights: str) -> None:
    lab = Lab(fedbabu(agg_weights=agg_weights), digits(), BATCHNORM, lr=0.1)
    lab.round([0, 3])
    a, b = (lab.sizes[0], lab.sizes[3]) if agg_weights == "size" else (1, 1)
    for key, found in (("share.weights", lab.weights), ("share.buffers", lab.server.buffers)):
        assert far(found, (a * lab.sent(0, key) + b * lab.sent(3, key)) / (a + b)) < 1e-6


def test_work_may_be_counted_in_steps() -> None:
    lab = Lab(fedbabu(), digits(), lr=0.1, steps=3)
    assert lab.trained(0).steps == 3


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fedbabu+dw", "fixedhead spoils class weights, which dw needs"),
        ("fedbabu+fedavg", "fixedhead and share both claim the aggregation of weights"),
        ("fedbabu+alternate", "fixedhead and alternate both claim the phases of local training"),
        ("fedbabu+control", "control needs global model"),
        ("fedbabu(head_init=orthogonal)+projector", "orthogonalhead and projector both claim the neck"),
        ("fedbabu+auxiliary+mutual", "fixedhead spoils an auxiliary model, which mutual needs"),
    ],
)
def test_what_does_not_go_with_a_fixed_head(text: str, sentence: str) -> None:
    with pytest.raises(AlloyConflict, match=sentence):
        make(text)


def test_statistics_cannot_be_fixed() -> None:
    with pytest.raises(FedAlloyError, match="would fix layers with running statistics"):
        Lab(make("fixedhead(part=':-3')"), digits(), "cnn-bn")


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_beside_an_auxiliary_model(model: str) -> None:
    """What is beside the model stays as it was, and the model is shown whole."""
    lab = Lab(make("fedbabu+auxiliary"), digits(), model, lr=0.1).rounds([0, 1])
    flat, buffers = lab.server.shown()["global"]
    base, statistics = lab.replica.weights.span(BASE), lab.replica.weights.buffer_span(BASE)
    assert torch.equal(flat[base], lab.weights)
    assert torch.equal(flat[base.stop :], lab.replica.initial[base.stop :])
    assert torch.equal(buffers[statistics], lab.server.buffers)
    assert torch.equal(buffers[statistics.stop :], lab.replica.initial_buffers[statistics.stop :])
    assert len(flat) == len(lab.replica.initial)


def test_a_new_neck_belongs_to_the_body() -> None:
    """The head is the last layer alone; layers before it are averaged."""
    lab = Lab(make("fedbabu+projector(width=12)"), digits(), lr=0.1).rounds([0, 1])
    assert lab.weights.numel() == (64 * 16 + 16) + (16 * 16 + 16) + (16 * 12 + 12)
    neck = lab.replica.weights.span("neck")
    assert far(lab.weights[neck], lab.replica.initial[neck]) > 1e-4

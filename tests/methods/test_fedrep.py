"""FedRep: the head first, then the body, and neither moves while the other does."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from laboratory import (
    BATCHNORM,
    MLP,
    Lab,
    assert_personal_accuracies,
    batches,
    dealt,
    digits,
    far,
    handed_out,
    probed,
    run,
)
from torch import Tensor

from fedalloy.core.registry import make
from fedalloy.core.state import Phase
from fedalloy.core.weights import BASE, HEAD
from fedalloy.data import load
from fedalloy.errors import FedAlloyError
from fedalloy.methods import fedper, fedrep
from fedalloy.methods.fedrep import Alternate

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
MOVING: list[dict[str, Any]] = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.1, "weight_decay": 0.1},
    {"lr": 0.01, "optimizer": "adam", "weight_decay": 0.1},
]


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_no_head_crosses_the_wire(model: str) -> None:
    """Check: no head in uploads or downloads; bytes are |S| 4 (d_theta + b) each way, and the counts."""
    lab = Lab(fedrep(), digits(), model, lr=0.1)
    d, b = (64 * 16 + 16, 0) if model == MLP else (64 * 16 + 16 + 32, 32)
    for chosen in PARTICIPANTS:
        down = lab.server.send(0).items
        outcome = lab.round(chosen)
        for items in (down, lab.replies[chosen[0]].items):
            assert {key: v.numel() for key, v in items.items()} == {"share.weights": d, "share.buffers": b}
        assert sum(outcome.bytes_up.values()) == len(chosen) * (4 * (d + b) + 8)
    assert {name: v.numel() for name, v in lab.keeps[1].items()} == {"own.weights": 170, "own.buffers": 0}


@pytest.mark.parametrize("settings", MOVING)
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_one_moves_while_the_other_rests(model: str, settings: dict[str, Any]) -> None:
    """Check: theta is the same bits throughout phase A, phi_k throughout phase B, whatever the optimiser."""
    method, probe, _ = probed(fedrep(head_epochs=2, body_epochs=2))
    lab = Lab(method, digits(), model, **settings)
    lab.round([0, 1])
    probe.points.clear()
    client = lab.trained(0)
    base, head = client.weights.span(BASE), client.weights.span(HEAD)
    steps = len(probe.points) // 2
    first, second = probe.points[:steps], [*probe.points[steps:], client.weights.flat]
    assert all(torch.equal(point[base], client.received[base]) for point in [*first, second[0]])
    assert all(torch.equal(point[head], second[0][head]) for point in second)
    assert far(second[0][head], client.received[head]) > 1e-3
    assert far(client.weights.flat[base], client.received[base]) > 1e-3


@pytest.mark.parametrize(("head_lr", "rate"), [(None, 0.05), (0.4, 0.2)])
def test_one_round_by_hand(head_lr: float | None, rate: float) -> None:
    """Two optimisers with momentum, one after the other, each from rest; the head's rate follows the schedule."""
    settings: dict[str, Any] = {"lr": 0.1, "lr_decay": 0.5, "momentum": 0.9, "epochs": 2, "batch": 16}
    lab = Lab(fedrep(head_epochs=2, body_epochs=2, head_lr=head_lr), digits(), **settings)
    lab.round([0, 3])
    client = lab.tested(0)
    w = {name: value.clone() for name, value in client.weights.views(client.weights.flat).items()}
    for stream, part, lr in ((0, "head", rate), (1, "body", 0.05)):
        names = [name for name in w if name.startswith(part)]
        velocity = {name: torch.zeros_like(w[name]) for name in names}
        for x, y in batches(lab, 0, 2, stream):
            live = {name: value.clone().requires_grad_(name in names) for name, value in w.items()}
            z = (x.flatten(1) @ live["body.1.weight"].T + live["body.1.bias"]).relu()
            logits = z @ live["head.weight"].T + live["head.bias"]
            loss = -logits.log_softmax(1)[torch.arange(len(y)), y].mean()
            for name, g in zip(names, torch.autograd.grad(loss, [live[n] for n in names]), strict=True):
                velocity[name] = 0.9 * velocity[name] + g
                w[name] = w[name] - lr * velocity[name]
    lab.round([0, 3])
    body, head = ([v.flatten() for n, v in w.items() if n.startswith(part)] for part in ("body", "head"))
    assert far(lab.sent(0, "share.weights"), torch.cat(body)) < 1e-5
    assert far(lab.keeps[0]["own.weights"], torch.cat(head)) < 1e-5


def test_heads_do_not_depend_on_others_in_the_same_round() -> None:
    """Check: changing client j's labels does not change phi_k, k != j, within the same round."""
    dataset = load("digits", None)
    shards = [range(100), range(100, 260), range(260, 400)]
    y = dataset.y.clone()
    y[100:260] = (y[100:260] + 1) % 10
    other = replace(dataset, y=y)
    labs = [Lab(fedrep(), handed_out(data, shards, [[]] * 3), lr=0.1, epochs=2) for data in (dataset, other)]
    for lab in labs:
        lab.round()
    for k in range(3):
        heads = [lab.keeps[k]["own.weights"] for lab in labs]
        assert torch.equal(*heads) == (k != 1)
    assert far(labs[0].weights, labs[1].weights) > 1e-4
    for lab in labs:
        lab.round()
    assert (
        far(*(lab.keeps[0]["own.weights"] for lab in labs)) > 1e-5
    )  # through the body, from the next round on


def test_own_data_are_easier_than_everyones_under_skew(tmp_path: Path) -> None:
    """Check, behaviour: own splits beat the global test set by a wide margin; alike as labels become even."""
    gaps = []
    for skew in ("dirichlet:0.1", "dirichlet:1", "dirichlet:1000"):
        result = run(
            tmp_path / skew, digits(6, skew), "fedrep", "mlp", rounds=4, epochs=3, lr=0.1, eval_every=4
        )
        metrics = result.history[-1]["metrics"]
        gaps.append(metrics["personal_local_acc_clients"] - metrics["personal_on_global_acc"])
    assert gaps[0] > 0.3
    assert gaps[0] > gaps[1] > gaps[2]
    assert abs(gaps[2]) < 0.05


@pytest.mark.parametrize("held", [False, True])
def test_statistics_of_the_body_while_the_head_is_fitted(held: bool) -> None:
    """They move in phase A, as in public code; `freeze_bn` uses them as they are."""
    lab = Lab(fedrep(head_epochs=2, body_epochs=0, freeze_bn=held), digits(), BATCHNORM, lr=0.1)
    lab.round([0, 1])
    assert torch.equal(lab.server.buffers, lab.replica.initial_buffers) == held
    ends = [
        Lab(fedrep(freeze_bn=frozen), digits(), BATCHNORM, lr=0.1).rounds([0, 1]).keeps[0]["own.weights"]
        for frozen in (False, held)
    ]
    assert (far(*ends) > 1e-4) == held


@pytest.mark.parametrize(
    ("head", "body", "epochs", "expected"),
    [
        (1, None, 5, (1, 4)),
        (1, None, 1, (1, 1)),
        (10, None, 5, (10, 1)),
        (10, 1, 5, (10, 1)),
        (0, None, 3, (0, 3)),
        (2, 0, 3, (2, 0)),
    ],
)
def test_epochs_of_head_and_body(head: int, body: int | None, epochs: int, expected: tuple[int, int]) -> None:
    """By default one epoch for the head and the rest for the body, as in FedDW; a phase of none is left out."""
    lab = Lab(fedrep(), digits(), lr=0.1, epochs=epochs)
    client = lab.trained(0)
    parts = Alternate(head, body)
    phases = parts.phases(client, client.states["alternate"], epochs)
    assert [(phase.part, phase.epochs) for phase in phases] == [
        (part, count) for part, count in zip((HEAD, BASE), expected, strict=True) if count
    ]


def test_local_work_in_steps_is_refused() -> None:
    with pytest.raises(FedAlloyError, match=r"alternate counts epochs of head and body.*leave --steps out"):
        Lab(fedrep(), digits(), steps=3).round([0])


def test_who_joins_late_starts_from_the_common_head() -> None:
    """Pitfall: nobody else's head."""
    lab = Lab(fedrep(), digits(), lr=0.1).rounds([0, 1], [0, 1])
    client = lab.trained(4)
    base = client.weights.span(BASE).stop
    assert torch.equal(client.received[:base], lab.weights)
    assert torch.equal(client.received[base:], lab.replica.initial[base:])


def test_joint_training_is_another_method() -> None:
    """FedPer has the same split; freezing does not leak into it."""
    lab = Lab(fedrep(), digits(), lr=0.1, epochs=2)
    plain, after = Lab(fedper(), digits(), lr=0.1, epochs=2), Lab(fedper(), digits(), lr=0.1, epochs=2)
    plain.round([0, 1])
    lab.round([0, 1])
    after.replica = lab.replica  # a net that has just been alternated
    after.round([0, 1])
    assert torch.equal(plain.weights, after.weights)
    assert far(plain.weights, lab.weights) > 1e-4


@pytest.mark.parametrize("agg_weights", ["size", "uniform"])
def test_the_average(agg_weights: str) -> None:
    """By size, or the paper's plain mean; statistics alike."""
    lab = Lab(fedrep(agg_weights=agg_weights), dealt([range(50), range(50, 250)]), BATCHNORM, lr=0.1)
    lab.round()
    p = (0.2, 0.8) if agg_weights == "size" else (0.5, 0.5)
    for key, found in (("share.weights", lab.weights), ("share.buffers", lab.server.buffers)):
        assert far(found, p[0] * lab.sent(0, key) + p[1] * lab.sent(1, key)) < 1e-6


# Evaluation


def personal(lab: Lab, client: int) -> tuple[Tensor, Tensor]:
    found = lab.tested(client)
    return found.weights.flat.clone(), found.weights.buffers.clone()


def test_the_body_that_is_tested() -> None:
    """The latest average under the own head; or (FedDW) the model as training left it, however long ago."""
    averaged, own = (
        Lab(fedrep(eval_body=body), digits(), BATCHNORM, lr=0.1).rounds([0, 1], [1, 2])
        for body in ("averaged", "own")
    )
    assert torch.equal(averaged.weights, own.weights)
    base = averaged.replica.weights.span(BASE).stop
    for k in (0, 1, 2, 4):
        head = averaged.keeps[k]["own.weights"] if k != 4 else averaged.replica.initial[base:]
        assert torch.equal(personal(averaged, k)[0], torch.cat([averaged.weights, head]))
        assert torch.equal(personal(averaged, k)[1], averaged.server.buffers)
    for k in (1, 2):
        mine = torch.cat([own.sent(k, "share.weights"), own.keeps[k]["own.weights"]])
        assert torch.equal(personal(own, k)[0], mine)
        assert torch.equal(personal(own, k)[1], own.sent(k, "share.buffers"))
    earlier = Lab(fedrep(eval_body="own"), digits(), BATCHNORM, lr=0.1).rounds([0, 1])
    assert torch.equal(personal(own, 0)[0], personal(earlier, 0)[0])  # not asked since: stale
    assert torch.equal(personal(own, 4)[0], own.replica.initial)


def test_more_epochs_for_the_head_before_the_test() -> None:
    """The paper's last step: `ft_epochs` of the head alone, from the averaged body and the own head."""
    plain, tuned = (Lab(fedrep(ft_epochs=n), digits(), lr=0.1).rounds([0, 1], [1, 2]) for n in (0, 10))
    by_hand = plain.tested(0)
    by_hand.fit("finetune", Phase(10, HEAD))
    expected = by_hand.weights.flat.clone()
    found = personal(tuned, 0)[0]
    assert torch.equal(found, expected)
    assert torch.equal(found[: len(tuned.weights)], tuned.weights)
    assert far(found, personal(plain, 0)[0]) > 1e-3


@pytest.mark.parametrize("settings", ["", "eval_body=own", "ft_epochs=2"])
def test_accuracies_are_those_of_the_personal_models(settings: str, tmp_path: Path) -> None:
    """D.Avg (the paper's, weighted by samples), C.Avg and the mean on the global test set (FedDW's) by hand."""
    federation = digits(6, "dirichlet:0.1")
    local: dict[str, Any] = {"epochs": 2, "lr": 0.1}
    method = f"fedrep({settings})"
    result = run(tmp_path, federation, method, rounds=3, participation=0.5, **local)
    metrics = result.history[-1]["metrics"]
    lab = Lab(make(method), federation, **local)
    for line in result.history:
        lab.round(line["participants"])
    assert_personal_accuracies(metrics, lab)
    assert not any(name.startswith("global") for name in metrics)

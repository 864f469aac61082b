"""Ditto: FedAvg undisturbed, and beside it personal models on a leash."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, accuracy, batches, digits, far, run, shards
from torch import Tensor, nn

from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.net import Inputs, Net
from fedalloy.core.registry import make
from fedalloy.core.views import StepView
from fedalloy.errors import FedAlloyError
from fedalloy.methods import ditto, fedavg, local
from fedalloy.methods.ditto import PersonalModel

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
DROPPING = "test_ditto:dropping"


def dropping(inputs: Inputs) -> Net:
    """A net that draws random numbers in every step."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.5))
    return Net(body, nn.Linear(8, inputs.classes))


@pytest.mark.parametrize("model", [MLP, BATCHNORM, DROPPING])
@pytest.mark.parametrize(
    "settings",
    [
        {"lam": 0.0},
        {"lam": 0.1, "personal_epochs": 1},
        {"lam": 10.0, "personal_epochs": 3, "personal_lr": 0.05},
        {"lam_candidates": (0.1, 1.0, 2.0)},
    ],
)
def test_the_global_model_is_that_of_fedavg(model: str, settings: dict[str, Any]) -> None:
    """Check: the trajectory of w equals FedAvg's bit for bit, for every lam and personal_epochs."""
    labs = [
        Lab(method, digits(), model, lr=0.1, momentum=0.9, epochs=2)
        for method in (fedavg(), ditto(**settings))
    ]
    for chosen in PARTICIPANTS:
        for lab in labs:
            lab.round(chosen)
        assert torch.equal(labs[0].weights, labs[1].weights)
        assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)
        for k in chosen:
            first, second = (lab.replies[k] for lab in labs)
            assert (first.loss, first.steps, first.seen) == (second.loss, second.steps, second.seen)


@pytest.mark.parametrize("model", [MLP, BATCHNORM, DROPPING])
@pytest.mark.parametrize("optimiser", [{}, {"momentum": 0.9, "weight_decay": 0.01}, {"optimizer": "adam"}])
def test_without_a_leash_everybody_is_alone(model: str, optimiser: dict[str, Any]) -> None:
    """Check: lam = 0: v_k equals Local with participation applied, bit for bit, statistics included."""
    settings: dict[str, Any] = {"lr": 0.05, "epochs": 2, "lr_decay": 0.9, **optimiser}
    alone = Lab(local(participation_applies=True), digits(), model, **settings)
    lab = Lab(ditto(lam=0.0), digits(), model, **settings)
    for each in (alone, lab):
        each.rounds(*PARTICIPANTS)
    for k, kept in alone.keeps.items():
        assert torch.equal(lab.keeps[k]["personalmodel.v"], kept["own.weights"])
        assert torch.equal(lab.keeps[k]["personalmodel.statistics"], kept["own.buffers"])


def test_where_the_old_v_drops_out() -> None:
    """Check: lam eta_p = 1: after each personal step v = w_t - eta_p grad l(v; batch), up to rounding."""
    lab = Lab(ditto(lam=4.0, personal_lr=0.25), digits(), lr=0.05, batch=32)
    lab.round([0, 1])
    w, v = lab.weights.clone(), lab.keeps[0]["personalmodel.v"].clone()
    net = lab.replica.net
    for x, y in batches(lab, 0, 2):
        lab.replica.weights.load(v, lab.replica.initial_buffers)
        net.train().zero_grad(set_to_none=False)
        F.cross_entropy(net(x).logits, y).backward()  # type: ignore[no-untyped-call]
        v = w - 0.25 * lab.replica.weights.grad
    lab.round([0, 1])
    assert far(lab.keeps[0]["personalmodel.v"], v) < 2e-6


@pytest.mark.parametrize(("personal_lr", "rate"), [(None, 0.05), (0.2, 0.1)])
def test_one_round_by_hand(personal_lr: float | None, rate: float) -> None:
    """v - eta_p (grad + lam (v - w_t)), with momentum after the pull; the anchor is what was received, not w_k."""
    lab = Lab(ditto(lam=3.0, personal_lr=personal_lr), digits(), lr=0.1, lr_decay=0.5, momentum=0.9, epochs=2)
    lab.round([0, 1])
    w, v = lab.weights.clone(), lab.keeps[0]["personalmodel.v"].clone()
    velocity = torch.zeros_like(v)
    for x, y in batches(lab, 0, 2):
        lab.replica.weights.load(v, lab.replica.initial_buffers)
        lab.replica.net.train().zero_grad(set_to_none=False)
        F.cross_entropy(lab.replica.net(x).logits, y).backward()  # type: ignore[no-untyped-call]
        velocity = 0.9 * velocity + lab.replica.weights.grad + 3.0 * (v - w)
        v = v - rate * velocity
    lab.round([0, 1])
    assert far(lab.keeps[0]["personalmodel.v"], v) < 1e-5
    assert far(lab.sent(0, "share.weights"), w) > 1e-3


def test_personal_models_stay_at_home() -> None:
    """Check: no tensor of v_k in any upload, bytes are FedAvg's; who was not sampled keeps v_k byte for byte."""
    lab, plain = (Lab(method, digits(), BATCHNORM, lr=0.1) for method in (ditto(), fedavg()))
    for chosen in PARTICIPANTS:
        before = {k: {name: v.clone() for name, v in kept.items()} for k, kept in lab.keeps.items()}
        outcome, expected = lab.round(chosen), plain.round(chosen)
        assert outcome.bytes_up == expected.bytes_up
        assert lab.server.send(0).items.keys() == plain.server.send(0).items.keys()
        for k, kept in before.items():
            for name, value in kept.items():
                assert torch.equal(lab.keeps[k][name], value) == (k not in chosen)
        for k in chosen:
            up = lab.replies[k].items
            assert up.keys() == {"share.weights", "share.buffers"}
            assert far(up["share.weights"], lab.keeps[k]["personalmodel.v"]) > 1e-4
            assert all(torch.equal(up[name], plain.replies[k].items[name]) for name in up)


def test_the_leash_shortens_as_lam_grows() -> None:
    """Check, behaviour: the mean of ||v_k - w|| decreases through lam = 0, 0.1, 1, 10 on a skewed problem."""
    distances = []
    for lam in (0.0, 0.1, 1.0, 10.0):
        lab = Lab(ditto(lam=lam), digits(6, "dirichlet:0.1"), lr=0.05, epochs=2)
        for _ in range(4):
            lab.round()
        kept = [lab.keeps[k]["personalmodel.v"] for k in range(6)]
        distances.append(sum(float((v - lab.weights).norm()) for v in kept) / 6)
    assert distances[0] > distances[1] > distances[2] > distances[3]
    assert distances[3] < 0.7 * distances[0]


def test_a_personal_model_has_statistics_of_its_own() -> None:
    """Pitfall: v_k keeps its BatchNorm statistics; they start at the initial ones and are never averaged."""
    lab = Lab(ditto(), digits(), BATCHNORM, lr=0.1).rounds([0, 1], [0, 1])
    first, second = (lab.keeps[k]["personalmodel.statistics"] for k in (0, 1))
    assert far(first, second) > 1e-3
    assert far(first, lab.server.buffers) > 1e-3
    assert far(first, lab.sent(0, "share.buffers")) > 1e-5


@pytest.mark.parametrize(
    ("settings", "local_work", "passes", "steps"),
    [
        ({}, {"epochs": 2}, 2, None),
        ({"personal_epochs": 3}, {"epochs": 1}, 3, None),
        ({}, {"steps": 4}, None, 4),
        ({"personal_epochs": 2}, {"steps": 4}, 2, None),
    ],
)
def test_how_much_personal_work(
    settings: dict[str, Any], local_work: dict[str, Any], passes: int | None, steps: int | None
) -> None:
    """As much as for the global model, unless `personal_epochs` says otherwise."""
    lab = Lab(ditto(**settings), shards(100), lr=0.1, batch=32, **local_work)
    client = lab.trained(0)
    seen: list[int] = []
    plain = client.plain_gradient

    def counted(step: StepView) -> Tensor:
        seen.append(len(step.y))
        return plain(step)

    client.plain_gradient = counted  # type: ignore[method-assign]
    with torch.no_grad():
        client.finish()
    assert len(seen) == (steps if passes is None else 4 * passes)


def test_a_pull_that_overshoots_is_refused() -> None:
    """Pitfall: lam eta_p must stay below 2; with momentum or Adam the bound is another."""
    with pytest.raises(
        FedAlloyError, match="overshoots: lam times the learning rate is 2 and must stay below 2"
    ):
        Lab(ditto(lam=20.0), digits(), lr=0.1).round([0])
    with pytest.raises(FedAlloyError, match="overshoots"):
        Lab(ditto(lam_candidates=(0.1, 30.0)), digits(), lr=0.1).round([0])
    Lab(ditto(lam=19.0), digits(), lr=0.1).round([0])
    Lab(ditto(lam=20.0), digits(), lr=0.1, optimizer="adam").round([0])


# Choosing lam by held-out data


def test_the_best_candidate_is_taken_at_every_step() -> None:
    """One full batch: of the three steps the one with the least loss on the held-out samples."""
    candidates = (0.0, 1.0, 8.0)
    lab = Lab(ditto(lam_candidates=candidates, validation=0.25), shards(80), lr=0.1, batch=100)
    lab.rounds([0], [0])
    part = PersonalModel(candidates=candidates, validation=0.25)
    client = lab.tested(0)
    rest, held = part._split(client)
    assert (rest.samples, held.samples) == (60, 20)
    w, v = lab.weights.clone(), lab.keeps[0]["personalmodel.v"].clone()
    net, losses, ends = lab.replica.net, [], []
    lab.replica.weights.load(v, lab.replica.initial_buffers)
    net.train().zero_grad(set_to_none=False)
    F.cross_entropy(net(rest.prepare(rest.x, None)).logits, rest.y).backward()  # type: ignore[no-untyped-call]
    g = lab.replica.weights.grad.clone()
    for lam in candidates:
        ends.append(v - 0.1 * (g + lam * (v - w)))
        lab.replica.weights.load(ends[-1], lab.replica.initial_buffers)
        losses.append(F.cross_entropy(net(held.prepare(held.x, None)).logits, held.y).item())
    lab.round([0])
    best = losses.index(min(losses))
    assert far(lab.keeps[0]["personalmodel.v"], ends[best]) < 1e-6
    assert min(far(ends[best], end) for i, end in enumerate(ends) if i != best) > 1e-4


def test_one_candidate_is_that_lam_on_the_other_samples() -> None:
    labs = [
        Lab(ditto(**settings), shards(90), BATCHNORM, lr=0.1, epochs=2)
        for settings in ({"lam_candidates": (0.5,)}, {"lam": 0.5})
    ]
    ends = [lab.rounds([0], [0]).keeps[0]["personalmodel.v"] for lab in labs]
    assert far(*ends) > 1e-4  # a tenth of the samples is held out
    assert torch.equal(labs[0].weights, labs[1].weights)


def test_held_out_samples_are_the_same_in_every_round() -> None:
    lab = Lab(ditto(lam_candidates=(0.1, 1.0)), digits(), lr=0.1)
    part = PersonalModel(candidates=(0.1, 1.0))
    splits = [part._split(lab.trained(k)) for k in (0, 0, 1)]
    assert torch.equal(splits[0][1].x, splits[1][1].x)
    for rest, held in splits:
        assert held.samples == max(1, round(0.1 * (rest.samples + held.samples)))
    everything = torch.cat([splits[0][0].x, splits[0][1].x])
    assert sorted(everything.flatten(1).tolist()) == sorted(lab.federation.client(0).x.flatten(1).tolist())


@pytest.mark.parametrize(("size", "rest", "held"), [(1, 1, 1), (2, 1, 1), (3, 2, 1), (25, 23, 2)])
def test_small_clients_can_choose_too(size: int, rest: int, held: int) -> None:
    lab = Lab(ditto(lam_candidates=(0.1, 1.0)), shards(size), lr=0.1)
    split = PersonalModel(candidates=(0.1, 1.0))._split(lab.trained(0))
    assert (split[0].samples, split[1].samples) == (rest, held)
    lab.round([0])


# Evaluation


def test_accuracies_of_both_kinds_of_model(tmp_path: Path) -> None:
    """Personal: v_k as it is, also of clients long absent. Global: w, which is FedAvg's."""
    federation = digits(6, "dirichlet:0.1")
    settings: dict[str, Any] = {"epochs": 2, "lr": 0.1}
    result, plain = (
        run(tmp_path / method, federation, method, BATCHNORM, rounds=3, participation=0.5, **settings)
        for method in ("ditto", "fedavg")
    )
    for ours, theirs in zip(result.history, plain.history, strict=True):
        for name in ("global_acc", "global_loss"):
            assert ours["metrics"][name] == theirs["metrics"][name]
    assert result.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert result.summary["metric"] == "personal_local_acc"
    metrics = result.history[-1]["metrics"]
    lab = Lab(ditto(), federation, BATCHNORM, **settings)
    for line in result.history:
        lab.round(line["participants"])
    index = federation.split.global_test
    shares, sizes, everywhere = [], [], []
    for k in range(6):
        client = lab.tested(k)
        expected = lab.keeps[k]["personalmodel.v"] if k in lab.keeps else lab.replica.initial
        assert torch.equal(client.weights.flat, expected)
        shares.append(accuracy(client, client.data.x_test, client.data.y_test))
        sizes.append(len(client.data.y_test))
        everywhere.append(accuracy(client, federation.dataset.x[index], federation.dataset.y[index]))
    pooled = sum(a * n for a, n in zip(shares, sizes, strict=True)) / sum(sizes)
    assert metrics["personal_local_acc"] == pytest.approx(pooled)
    assert metrics["personal_local_acc_clients"] == pytest.approx(sum(shares) / 6)
    assert metrics["personal_on_global_acc"] == pytest.approx(sum(everywhere) / 6)


@pytest.mark.parametrize(
    "text",
    ["scaffold+personalmodel(lam=0.5)", "fedavg(agg_weights=uniform)+personalmodel(lam=0.5)+control"],
)
def test_a_personal_model_goes_with_other_methods(text: str) -> None:
    """In either order: whoever ends the round after it finds the global copy as training left it."""
    labs = [Lab(make(one), digits(), lr=0.05) for one in ("scaffold", text)]
    for lab in labs:
        lab.rounds(*PARTICIPANTS)
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(labs[0].keeps[1]["control.c_k"], labs[1].keeps[1]["control.c_k"])
    assert "personalmodel.v" in labs[1].keeps[0]


def test_one_personal_model_is_enough() -> None:
    with pytest.raises(AlloyConflict, match="personalmodel and astrained both claim the personal model"):
        make("ditto+astrained")
    with pytest.raises(AlloyConflict, match="personalmodel needs global model"):
        make("fedper+personalmodel")

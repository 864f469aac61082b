"""FedDyn: linear terms that persist, their mean at the server, and the joint optimum."""

from pathlib import Path
from typing import Any

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, digits, double, far, probed, run, shards
from quadratics import different, halves, solve
from torch import Tensor

from fedalloy.methods import fedavg, feddyn, fedprox

PARTICIPANTS = ([0, 1, 5], [2], [0, 1, 2, 3, 4, 5], [4, 5], [1, 3])


def h_of(lab: Lab) -> Tensor:
    return lab.server.states["dynamic"].persistent["h"]


def mean_of(lab: Lab) -> Tensor:
    """The mean of the participants' models."""
    return lab.server.states["dynamic"].persistent["mean"]


def linear_terms(lab: Lab) -> Tensor:
    """Every client's g_k, zero for those never seen."""
    zero = torch.zeros_like(lab.weights)
    return torch.stack([lab.keeps.get(k, {}).get("dynamic.g", zero) for k in range(lab.federation.clients)])


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("settings", [{}, {"alpha": 1.0}, {"max_grad_norm": 0.1}, {"max_grad_norm": None}])
def test_h_is_the_mean_of_all_linear_terms(model: str, settings: dict[str, Any]) -> None:
    """Check: after every round h = (1/m) sum_k g_k over all clients, to 1e-6."""
    lab = Lab(feddyn(**settings), digits(), model, lr=0.05, momentum=0.5)
    for chosen in PARTICIPANTS:
        lab.round(chosen)
        assert far(h_of(lab), linear_terms(lab).mean(0)) < 1e-6
        assert float(h_of(lab).norm()) > 1e-4


@double()
def test_an_exact_solution_makes_g_the_gradient() -> None:
    """Check: quadratic L_k solved exactly: the new g_k equals grad L_k(theta_k), in every round."""
    quadratic = different(clients=3, size=2)
    lab = solve(feddyn(alpha=0.3, max_grad_norm=None), quadratic, sizes=(60,) * 3, lr=0.5, batch=1)
    for chosen in ([0, 1], [1, 2], [0, 2]):
        lab.round(chosen)
        for k in chosen:
            gradient = quadratic.gradient_at(k, lab.sent(k, "share.weights"))
            assert far(lab.keeps[k]["dynamic.g"], gradient) < 1e-8


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("optimiser", [{}, {"momentum": 0.9, "weight_decay": 1e-3}, {"optimizer": "adam"}])
def test_the_first_round_is_fedprox(model: str, optimiser: dict[str, Any]) -> None:
    """Check: all g_k = 0, h = 0, clipping off: client training equals FedProx with mu = alpha bit for bit."""
    labs = [
        Lab(method, digits(), model, lr=0.02, epochs=2, **optimiser)
        for method in (feddyn(alpha=0.3, max_grad_norm=None), fedprox(mu=0.3))
    ]
    for lab in labs:
        lab.round([0, 1, 4])
    for k in (0, 1, 4):
        for name in ("share.weights", "share.buffers"):
            assert torch.equal(labs[0].sent(k, name), labs[1].sent(k, name))


def test_a_client_that_rests_keeps_its_linear_term_to_itself() -> None:
    """Check: g_k of a client that is not sampled stays byte-identical; no upload contains g_k."""
    lab, plain = Lab(feddyn(), digits(), lr=0.05), Lab(fedavg(), digits(), lr=0.05)
    lab.round([0, 1])
    kept = lab.keeps[0]["dynamic.g"].clone()
    assert float(kept.norm()) > 0
    lab.rounds([1, 2], [3])
    assert torch.equal(lab.keeps[0]["dynamic.g"], kept)
    lab.round([0, 1])
    plain.round([0, 1])
    assert lab.replies[0].items.keys() == plain.replies[0].items.keys() == {"share.weights", "share.buffers"}
    assert lab.server.send(0).items.keys() == plain.server.send(0).items.keys()
    weights = lab.sent(0, "share.weights")
    assert far(weights, lab.keeps[0]["dynamic.g"]) > 1e-3


def test_bytes_are_fedavgs() -> None:
    """Same bytes as FedAvg, less the sample count: means are plain."""
    lab, plain = (
        Lab(method, digits(), BATCHNORM, lr=0.1) for method in (feddyn(), fedavg(agg_weights="uniform"))
    )
    assert lab.round([0, 2]).bytes_up == plain.round([0, 2]).bytes_up


@double()
def test_quadratics_reach_the_joint_optimum() -> None:
    """Check, behaviour: half sampled, alpha 0.3: server model and mean reach the optimum to 1e-8, h goes to 0."""
    quadratic = different()
    lab = solve(feddyn(alpha=0.3), quadratic, sizes=(3,) * 6, lr=0.5, batch=1)
    for chosen in halves(300):
        lab.round(chosen)
    assert far(lab.weights, quadratic.optimum) < 1e-8
    assert far(mean_of(lab), quadratic.optimum) < 1e-8
    assert float(h_of(lab).norm()) < 1e-8
    assert float(linear_terms(lab).norm()) > 0.1  # the clients' own gradients do not vanish, only their mean
    plain = solve(fedavg(), quadratic, sizes=(3,) * 6, lr=0.5, batch=1)
    for _ in range(20):
        plain.round()
    assert far(plain.weights, quadratic.optimum) > 1e-2


def test_the_client_gradient_by_hand() -> None:
    """grad - g_k + alpha (theta - theta_t) with theta_t the received server model, not the client's last."""
    method, inner, outer = probed(feddyn(alpha=0.7, max_grad_norm=None))
    lab = Lab(method, digits(), lr=0.05)
    lab.rounds([0, 1], [1, 2])
    for record in (inner.gradients, inner.points, outer.gradients):
        record.clear()
    start, g_k = lab.weights.clone(), lab.keeps[0]["dynamic.g"].clone()
    lab.round([0])
    for g, point, total in zip(inner.gradients, inner.points, outer.gradients, strict=True):
        assert far(total, g - g_k + 0.7 * (point - start)) < 1e-6
    assert far(lab.keeps[0]["dynamic.g"], g_k - 0.7 * (lab.sent(0, "share.weights") - start)) < 1e-6


def test_the_server_step_by_hand() -> None:
    """h - (alpha/m) sum_P (theta_k - theta), theta inside the sum; theta = mean - h / alpha; m is all clients."""
    lab = Lab(feddyn(alpha=0.2), digits(), lr=0.05)
    for chosen in PARTICIPANTS:
        start, h = lab.weights.clone(), h_of(lab).clone()
        lab.round(chosen)
        sent = torch.stack([lab.sent(k, "share.weights") for k in chosen])
        expected = h - 0.2 / 6 * (sent - start).sum(0)
        assert far(h_of(lab), expected) < 1e-6
        assert far(mean_of(lab), sent.mean(0)) < 1e-6
        assert far(lab.weights, sent.mean(0) - expected / 0.2) < 1e-5


def test_statistics_take_the_plain_mean() -> None:
    """Pitfall: h / alpha added to running statistics corrupts the model."""
    lab = Lab(feddyn(), shards(20, 90, 40), BATCHNORM, lr=0.05)
    for chosen in ([0, 1], [1, 2], [0, 1, 2]):
        lab.round(chosen)
        sent = torch.stack([lab.sent(k, "share.buffers") for k in chosen])
        assert far(lab.server.buffers, sent.mean(0)) < 1e-6
        assert lab.keeps[1]["dynamic.g"].numel() == h_of(lab).numel() == lab.weights.numel()


@pytest.mark.parametrize("limit", [0.05, 1.0])
def test_the_total_gradient_is_clipped(limit: float) -> None:
    method, inner, outer = probed(feddyn(alpha=1.0, max_grad_norm=limit))
    lab = Lab(method, digits(), lr=0.05)
    lab.rounds([0], [1], [0])
    norms = [float(g.norm()) for g in outer.gradients]
    assert max(norms) <= limit * (1 + 1e-5)
    assert max(float(g.norm()) for g in inner.gradients) > limit
    assert max(norms) > 0.99 * limit  # a long gradient is shortened to the limit, not further


@double()
def test_size_scaled_equals_the_authors_code() -> None:
    """alpha_k = alpha / (m n_k / n), l_k = -g_k / alpha_k, theta = mean of theta_k + (1/m) sum_all l_k."""
    quadratic, sizes = different(clients=4, size=2), [2, 4, 6, 12]
    lab = solve(feddyn(alpha=0.3, size_scaled=True), quadratic, sizes=sizes, lr=0.2, epochs=3)
    m, n = 4, 24
    alpha = [0.3 / (m * n_k / n) for n_k in sizes]
    memory = torch.zeros(4, 2)
    theta = lab.weights.clone()
    for chosen in ([0, 1], [2, 3], [0, 3], [1], [0, 1, 2, 3]):
        lab.round(chosen)
        ends = []
        for k in chosen:
            x = theta.clone()
            for _ in range(3):
                x -= 0.2 * (quadratic.gradient_at(k, x) + alpha[k] * memory[k] + alpha[k] * (x - theta))
            memory[k] += x - theta
            ends.append(x)
            assert far(lab.keeps[k]["dynamic.g"], -alpha[k] * memory[k]) < 1e-10
        theta = torch.stack(ends).mean(0) + memory.mean(0)
        assert far(lab.weights, theta) < 1e-10


def test_size_scaled_changes_nothing_for_equal_sizes() -> None:
    labs = [Lab(feddyn(size_scaled=scaled), shards(40, 40, 40), lr=0.05) for scaled in (False, True)]
    for chosen in ([0, 1], [1, 2], [0, 2]):
        for lab in labs:
            lab.round(chosen)
    assert far(labs[0].weights, labs[1].weights) < 1e-6


@pytest.mark.parametrize("eval_model", ["mean", "server"])
def test_both_models_are_logged_and_one_is_the_global(tmp_path: Path, eval_model: str) -> None:
    result = run(
        tmp_path, digits(), f"feddyn(eval_model={eval_model},alpha=0.1)", rounds=2, participation=0.5
    )
    for line in result.history:
        metrics = line["metrics"]
        assert metrics["mean_loss"] != metrics["server_loss"]
        assert metrics["global_loss"] == metrics[f"{eval_model}_loss"]
        assert metrics["global_acc"] == metrics[f"{eval_model}_acc"]


def test_the_server_model_is_what_is_sent() -> None:
    lab = Lab(feddyn(alpha=0.1), digits(), lr=0.05)
    lab.round([0, 1])
    assert torch.equal(lab.server.send(2).items["share.weights"], mean_of(lab) - h_of(lab) / 0.1)


def test_a_first_round_that_blows_up_ends_the_run_by_name(tmp_path: Path) -> None:
    """Server model and mean are one tensor until a reply was used; the checkpoint must hold them all the same."""
    result = run(tmp_path, digits(), "feddyn(max_grad_norm=None)", rounds=3, lr=1e6, weight_decay=1e6)
    assert result.summary["status"] == "diverged"

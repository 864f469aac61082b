"""SCAFFOLD: control variates that persist, agree with each other, and remove the drift."""

from typing import Any

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, digits, double, far, full_gradient, probed, shards
from quadratics import different, halves, solve
from torch import Tensor

from fedalloy.core.alloy import AlloyConflict, alloy
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.share import Share
from fedalloy.mechanisms.subspace import Subspace
from fedalloy.methods import fedavg, scaffold
from fedalloy.methods.scaffold import Control

PARTICIPANTS = ([0, 1, 5], [2], [0, 1, 2, 3, 4, 5], [4, 5], [1, 3])
SETTINGS: list[dict[str, Any]] = [
    {},
    {"lean_upload": True},
    {"server_lr": 0.5},
    {"c_update": "option1"},
    {"c_update": "option2"},
    {"c_update": "mean_grad"},
]


def c_of(lab: Lab) -> Tensor:
    return lab.server.states["control"].persistent["c"]


def variates(lab: Lab) -> list[Tensor]:
    """Every client's c_k, zero for those never seen."""
    zero = torch.zeros_like(lab.weights)
    return [lab.keeps.get(k, {}).get("control.c_k", zero) for k in range(lab.federation.clients)]


@pytest.mark.parametrize("settings", SETTINGS)
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_server_variate_is_the_mean_of_all(settings: dict[str, Any], model: str) -> None:
    """Check: after every round, any participation, uniform weights: c = (1/N) sum_k c_k to 1e-6."""
    lab = Lab(scaffold(**settings), digits(), model, lr=0.05)
    for chosen in PARTICIPANTS:
        lab.round(chosen)
        assert far(c_of(lab), torch.stack(variates(lab)).mean(0)) < 1e-6
        assert float(c_of(lab).norm()) > 1e-3


@pytest.mark.parametrize("optimiser", [{"momentum": 0.9}, {"optimizer": "adam"}, {"weight_decay": 0.01}])
def test_server_variate_is_the_mean_under_any_optimiser(optimiser: dict[str, Any]) -> None:
    lab = Lab(scaffold(), digits(), lr=0.01, **optimiser)
    for chosen in PARTICIPANTS:
        lab.round(chosen)
        assert far(c_of(lab), torch.stack(variates(lab)).mean(0)) < 1e-6


@pytest.mark.parametrize("lean", [False, True])
def test_by_size_both_lines_change_together(lean: bool) -> None:
    """agg_weights="size": q_k = n_k / n; x moves by the q-weighted mean over S, c = sum_k q_k c_k."""
    lab = Lab(scaffold(agg_weights="size", lean_upload=lean), digits(), lr=0.05)
    q = torch.tensor(lab.sizes).double() / sum(lab.sizes)
    for chosen in PARTICIPANTS:
        lab.round(chosen)
        assert far(c_of(lab).double(), q @ torch.stack(variates(lab)).double()) < 1e-6
        sent = torch.stack([lab.sent(k, "share.weights").double() for k in chosen])
        assert far(lab.weights, ((q[chosen] / q[chosen].sum()) @ sent).float()) < 1e-6


@pytest.mark.parametrize("epochs", [1, 3])
def test_option_two_is_the_mean_uncorrected_gradient(epochs: int) -> None:
    """Check: plain SGD: c_k+ equals the mean of the uncorrected local gradients; dc_k = -c - dy_k / (K lr)."""
    method, probe, _ = probed(scaffold())
    lab = Lab(method, digits(), lr=0.05, lr_decay=0.8, epochs=epochs)
    for round, client in enumerate([0, 1, 0, 2, 0], 1):
        x, c = lab.weights.clone(), c_of(lab).clone()
        probe.gradients.clear()
        lab.round([client])
        steps = lab.replies[client].steps
        assert steps == len(probe.gradients) == epochs * -(-lab.sizes[client] // 32)
        assert far(lab.keeps[client]["control.c_k"], torch.stack(probe.gradients).mean(0)) < 1e-5
        moved = lab.sent(client, "share.weights") - x
        expected = -c - moved / (steps * 0.05 * 0.8 ** (round - 1))
        assert far(lab.sent(client, "control.dc"), expected) < 1e-6


@double()
def test_option_two_to_the_last_digits() -> None:
    """The same in float64, where 1e-6 leaves no doubt: quadratics, five steps, several rounds."""
    method, probe, _ = probed(scaffold(c_update="option2"))
    lab = solve(method, different(), lr=0.1, epochs=5)
    for chosen in ([0], [1], [0], [2], [1]):
        probe.gradients.clear()
        lab.round(chosen)
        assert far(lab.keeps[chosen[0]]["control.c_k"], torch.stack(probe.gradients).mean(0)) < 1e-12


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_round_one_is_fedavg(model: str) -> None:
    """Check: round 1 equals FedAvg with uniform weights, to 1e-6."""
    labs = [
        Lab(method, digits(), model, lr=0.1, epochs=2)
        for method in (scaffold(), fedavg(agg_weights="uniform"))
    ]
    for lab in labs:
        lab.round([0, 1, 4])
    assert far(labs[0].weights, labs[1].weights) < 1e-6
    for lab in labs:
        lab.round([0, 1, 4])
    assert far(labs[0].weights, labs[1].weights) > 1e-4  # and from then on the correction works


@pytest.mark.parametrize("lean", [False, True])
def test_no_statistics_in_the_variates(lean: bool) -> None:
    """Check: no buffer in c, c_k or dc_k: they are exactly as long as the trainable weights."""
    lab = Lab(scaffold(lean_upload=lean), digits(), BATCHNORM, lr=0.1)
    lab.round([0, 1])
    d, b = lab.weights.numel(), lab.server.buffers.numel()
    assert (d, b) == (1242, 32)
    assert c_of(lab).numel() == lab.keeps[0]["control.c_k"].numel() == d
    mean = (lab.sent(0, "share.buffers").double() + lab.sent(1, "share.buffers").double()) / 2
    assert far(lab.server.buffers, mean.float()) < 1e-7


def test_bytes() -> None:
    """4 (2d + b) each way; with lean_upload d + b + 1 up."""
    for lean in (False, True):
        lab = Lab(scaffold(lean_upload=lean), digits(), BATCHNORM, lr=0.1)
        d, b = lab.weights.numel(), lab.server.buffers.numel()
        down = sum(4 * value.numel() for value in lab.server.send(0).items.values())
        up = sum(lab.round([0, 3]).bytes_up.values())
        assert down == 4 * (2 * d + b)
        assert up == 2 * 4 * (d + b + 1 if lean else 2 * d + b)


@double()
def test_quadratics_reach_the_joint_optimum() -> None:
    """Check, behaviour: K > 1, half sampled: below 1e-8, while FedAvg with everyone stays at a visible bias."""
    quadratic = different()
    corrected = solve(scaffold(), quadratic, sizes=(5,) * 6, lr=0.2, batch=1)
    for chosen in halves(120):
        corrected.round(chosen)
    assert far(corrected.weights, quadratic.optimum) < 1e-8
    plain = solve(fedavg(), quadratic, sizes=(5,) * 6, lr=0.2, batch=1)
    for _ in range(30):
        plain.round()
    assert far(plain.weights, quadratic.optimum) > 1e-2


@double()
@pytest.mark.parametrize(
    ("settings", "local"),
    [
        ({"c_update": "option1"}, {}),
        ({"lean_upload": True}, {}),
        ({"c_update": "mean_grad"}, {}),
        ({}, {"momentum": 0.5}),
        ({"server_lr": 0.7}, {}),
    ],
)
def test_every_variant_reaches_the_joint_optimum(settings: dict[str, Any], local: dict[str, Any]) -> None:
    quadratic = different()
    lab = solve(scaffold(**settings), quadratic, sizes=(3,) * 6, lr=0.3, batch=1, **local)
    for chosen in halves(150):
        lab.round(chosen)
    assert far(lab.weights, quadratic.optimum) < 1e-8


@double()
def test_sizes_move_the_optimum_consistently() -> None:
    """agg_weights="size" solves the size-weighted problem, also under partial participation."""
    quadratic = different(clients=4, size=2)
    lab = solve(scaffold(agg_weights="size"), quadratic, sizes=(1, 2, 3, 6), lr=0.3, epochs=3)
    for chosen in halves(100, clients=4):
        lab.round(chosen)
    n = torch.tensor([[1.0], [2.0], [3.0], [6.0]])
    a, b = torch.tensor(quadratic.a), torch.tensor(quadratic.b)
    assert far(lab.weights, (n * a * b).sum(0) / (n * a).sum(0)) < 1e-6


def test_a_client_that_is_not_sampled_keeps_its_variate() -> None:
    lab = Lab(scaffold(), digits(), lr=0.1)
    lab.round([0, 1])
    kept = lab.keeps[0]["control.c_k"].clone()
    assert float(kept.norm()) > 0
    lab.rounds([1, 2], [3])
    assert torch.equal(lab.keeps[0]["control.c_k"], kept)
    lab.round([0])  # asked again, it goes on from there: dc = c_k+ - c_k
    assert far(lab.keeps[0]["control.c_k"] - lab.sent(0, "control.dc"), kept) < 1e-6


def test_the_correction_is_constant_and_added_before_the_optimiser() -> None:
    """g + c - c_k on every step, with momentum too."""
    method, inner, outer = probed(scaffold())
    lab = Lab(method, digits(), lr=0.05, momentum=0.9)
    lab.rounds([0, 1], [1, 2])
    correction = c_of(lab) - lab.keeps[0]["control.c_k"]
    inner.gradients.clear()
    outer.gradients.clear()
    lab.round([0])
    assert len(inner.gradients) == lab.replies[0].steps > 3
    for g, corrected in zip(inner.gradients, outer.gradients, strict=True):
        assert torch.equal(corrected, g + correction)


@pytest.mark.parametrize(
    ("optimiser", "decay"),
    [
        ({"momentum": 0.9}, 0.0),
        ({"weight_decay": 0.1}, 0.1),
        ({"optimizer": "adamw", "weight_decay": 0.1}, 0.0),
    ],
)
def test_other_optimisers_take_the_mean_gradient(optimiser: dict[str, Any], decay: float) -> None:
    """ "auto" is mean_grad unless SGD is plain; weight decay is part of the gradient unless it is decoupled."""
    method, probe, _ = probed(scaffold())
    lab = Lab(method, digits(), lr=0.05, **optimiser)
    for _ in range(2):
        probe.gradients.clear()
        probe.points.clear()
        lab.round([0])
        terms = [g + decay * w for g, w in zip(probe.gradients, probe.points, strict=True)]
        assert far(lab.keeps[0]["control.c_k"], torch.stack(terms).mean(0)) < 1e-6


def test_momentum_does_not_inflate_the_variate() -> None:
    """Pitfall: with rho = 0.9 and K = 20 option II records a unit gradient as 6.05."""
    norms = {}
    for rule in ("mean_grad", "option2"):
        lab = Lab(scaffold(c_update=rule), shards(64), lr=1e-5, momentum=0.9, steps=20)
        lab.round()
        norms[rule] = float(lab.keeps[0]["control.c_k"].norm())
    assert norms["option2"] / norms["mean_grad"] == pytest.approx(6.05, abs=0.15)


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_option_one_is_the_full_gradient_at_the_received_model(model: str) -> None:
    lab = Lab(scaffold(c_update="option1"), digits(), model, lr=0.1)
    lab.round([0, 1])
    client = lab.trained(0)
    after, statistics = client.weights.flat.clone(), client.weights.buffers.clone()
    got = client.full_gradient(client.received)
    assert torch.equal(client.weights.flat, after)  # the pass leaves no trace
    assert torch.equal(client.weights.buffers, statistics)
    if model == MLP:
        net = client.net
        client.weights.load(client.received, client.received_buffers)
        assert far(got, full_gradient(net, client.data)) < 1e-6
        client.weights.load(after, statistics)
    client.finish()
    assert far(client.keep()["control.c_k"], got) < 1e-6


def test_lean_upload_is_the_same_method() -> None:
    labs = [Lab(scaffold(lean_upload=lean), digits(), lr=0.1, lr_decay=0.9) for lean in (False, True)]
    for chosen in PARTICIPANTS:
        for lab in labs:
            lab.round(chosen)
        assert far(c_of(labs[0]), c_of(labs[1])) < 1e-5
        assert far(labs[0].weights, labs[1].weights) < 1e-5


@pytest.mark.parametrize("bad", [{"momentum": 0.9}, {"optimizer": "adam"}])
def test_lean_upload_refuses_what_it_cannot_rebuild(bad: dict[str, Any]) -> None:
    lab = Lab(scaffold(lean_upload=True), digits(), lr=0.1, **bad)
    with pytest.raises(FedAlloyError, match="lean_upload"):
        lab.round([0])


def test_a_client_without_a_step_changes_nothing() -> None:
    """One sample and BatchNorm: K_k = 0 must not divide, and the invariant holds."""
    for lean in (False, True):
        lab = Lab(scaffold(lean_upload=lean), shards(40, 1), BATCHNORM, lr=0.1)
        lab.rounds([0, 1], [0, 1])
        assert float(lab.keeps[1]["control.c_k"].norm()) == 0
        assert far(c_of(lab), torch.stack(variates(lab)).mean(0)) < 1e-6


def test_server_lr_scales_the_model_and_not_the_variate() -> None:
    labs = [Lab(scaffold(server_lr=rate), digits(), lr=0.1) for rate in (1.0, 0.25)]
    start = labs[0].weights.clone()
    for lab in labs:
        lab.round([0, 1])
    assert far(labs[1].weights - start, 0.25 * (labs[0].weights - start)) < 1e-6
    assert torch.equal(c_of(labs[0]), c_of(labs[1]))


def test_weights_of_both_lines_must_agree() -> None:
    """Pitfall: a model averaged by size with a variate averaged uniformly."""
    with pytest.raises(AlloyConflict, match="uniform weights"):
        alloy("mixed", Share(agg_weights="size"), Control())


def test_lean_upload_works_inside_a_subspace() -> None:
    """The server rebuilds the change of a variate from what the codec lets through: c stays the mean of the c_k."""
    lab = Lab(scaffold(lean_upload=True) + Subspace(ratio=0.5), digits(), lr=0.05)
    for chosen in PARTICIPANTS:
        lab.round(chosen)
        assert far(c_of(lab), torch.stack(variates(lab)).mean(0)) < 1e-5

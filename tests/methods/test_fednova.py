"""FedNova: updates are normalised by what the optimiser really did; statistics are averaged, not extrapolated."""

from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from laboratory import BATCHNORM, Lab, digits, double, far, shards
from quadratics import _Quadratic, _Slope, solve

from fedalloy.core.alloy import Alloy
from fedalloy.core.training import Local
from fedalloy.methods import fedavg, fednova
from fedalloy.methods.fednova import normaliser
from fedalloy.methods.fedprox import Stragglers


@pytest.mark.parametrize("optimiser", [{}, {"momentum": 0.5}, {"momentum": 0.9}, {"optimizer": "adam"}])
def test_equal_work_is_fedavg(optimiser: dict[str, Any]) -> None:
    """Check: equal a_k for all participants: x equals FedAvg's to 1e-6 relative."""
    federation = digits()
    assert len(set(federation.sizes.tolist())) > 1
    labs = [Lab(method, federation, lr=0.02, steps=5, **optimiser) for method in (fedavg(), fednova())]
    for chosen in ([0, 1, 2, 3, 4, 5], [1, 4], [0, 3, 5]):
        for lab in labs:
            lab.round(chosen)
        assert far(labs[0].weights, labs[1].weights) < 1e-6 * float(labs[0].weights.abs().max())


@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("tau", [1, 3, 10, 57])
def test_recursion_and_closed_form_of_momentum(rho: float, tau: int) -> None:
    """Check: recursion and closed form of a_k agree to 1e-9."""
    closed = (tau - rho * (1 - rho**tau) / (1 - rho)) / (1 - rho)
    assert normaliser(Local(momentum=rho), 0.1, tau) == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize("tau", [1, 3, 10, 57])
def test_recursion_and_closed_form_of_the_proximal_term(tau: int) -> None:
    closed = (1 - (1 - 0.05 * 2.0) ** tau) / (0.05 * 2.0)
    assert normaliser(Local(), 0.05, tau, mu=2.0) == pytest.approx(closed, rel=1e-9)


@pytest.mark.parametrize(
    ("local", "steps"),
    [
        (Local(), 7),
        (Local(momentum=0.9), 10),
        (Local(momentum=0.5, weight_decay=0.1), 10),  # decay counts as part of the gradient
        (Local(optimizer="adam", momentum=0.9), 10),
    ],
)
def test_normaliser_by_hand(local: Local, steps: int) -> None:
    """Pitfall: with momentum 0.9 and 10 steps the normaliser is about 41, not 10; Adam's is 10."""
    known = {0.0: float(steps), 0.5: 18.001953125, 0.9: 41.38105960900000}
    expected = float(steps) if local.optimizer == "adam" else known[local.momentum]
    assert normaliser(local, 0.1, steps) == pytest.approx(expected, rel=1e-9)


@double()
@pytest.mark.parametrize("mu", [0.0, 2.0])
@pytest.mark.parametrize("rho", [0.0, 0.5, 0.9])
@pytest.mark.parametrize("tau", [1, 4, 13])
def test_the_real_optimiser_moves_by_the_normaliser(mu: float, rho: float, tau: int) -> None:
    """Check: a parameter with constant unit gradient moves by exactly -lr a_k (momentum, prox, both)."""
    lab = solve(fednova(mu=mu), _Slope((1.0,)), sizes=(3,), lr=0.05, momentum=rho, epochs=tau)
    client = lab.trained(0)
    a = normaliser(lab.local, 0.05, tau, mu)
    assert far(client.weights.flat - client.received, torch.tensor([-0.05 * a])) < 1e-12
    items = client.finish()
    assert far(items["share.update"], torch.tensor([-0.05])) < 1e-12
    assert float(items["share.tau"]) == pytest.approx(tau if mu else a)


def uneven(method: Alloy, **local: Any) -> Lab:
    """The example of the pitfall: 1 against 50 steps, so that coefficients reach 12 and -11.5."""
    settings = {"lr": 0.05, "batch": 40, **local}
    return Lab(method + Stragglers(epochs=(1, 50, 50)), shards(40, 30, 30), BATCHNORM, **settings)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_statistics_stay_among_the_clients(momentum: float) -> None:
    """Check: all buffers after a round lie between the minimum and maximum of the clients' buffers."""
    lab = uneven(fednova(), momentum=momentum)
    for _ in range(2):
        lab.round()
        sent = torch.stack([lab.sent(k, "share.buffers") for k in range(3)])
        assert bool((sent.amin(0) <= lab.server.buffers).all())
        assert bool((lab.server.buffers <= sent.amax(0)).all())
        weights = torch.tensor([40.0, 30.0, 30.0]).double() / 100
        assert far(lab.server.buffers, (weights @ sent.double()).float()) < 1e-6


@pytest.mark.parametrize("momentum", [0.0, 0.5, 0.9])
def test_the_server_step_by_hand(momentum: float) -> None:
    """x + tau_eff sum_k p_k Delta_k / a_k, from FedAvg's uploads of the same round."""
    plain, nova = (uneven(method, momentum=momentum) for method in (fedavg(), fednova()))
    x = plain.weights.clone().double()
    plain.round()
    nova.round()
    p = torch.tensor([0.4, 0.3, 0.3]).double()
    a = torch.tensor([normaliser(plain.local, 0.05, steps) for steps in (1, 50, 50)]).double()
    moved = torch.stack([plain.sent(k, "share.weights").double() - x for k in range(3)])
    expected = x + (p @ a) * ((p / a) @ moved)
    assert far(nova.weights, expected.float()) < 1e-5
    assert far(nova.weights, plain.weights) > 1e-3


def test_tau_eff_counts_steps_with_a_proximal_term() -> None:
    """The authors' tau_eff is sum_k p_k tau_k once there is a proximal term."""
    lab = solve(fednova(mu=4.0) + Stragglers(epochs=(2, 8)), _Slope((1.0,)), sizes=(3, 1), lr=0.1)
    start = lab.weights.clone()
    lab.round()
    assert far(lab.weights - start, torch.tensor([-0.1 * (0.75 * 2 + 0.25 * 8)])) < 1e-6


@double()
def test_two_quadratics_with_unequal_work() -> None:
    """Check, behaviour: tau = (1, 10), lr 0.01: FedAvg settles at -0.811, FedNova at +0.022 (optimum 0)."""
    opposite = _Quadratic(a=((1.0,), (1.0,)), b=((1.0,), (-1.0,)))
    settled = []
    for method in (fedavg(), fednova()):
        lab = solve(method + Stragglers(epochs=(1, 10)), opposite, sizes=(1, 1), lr=0.01)
        for _ in range(160):
            lab.round()
        settled.append(float(lab.weights))
    assert settled == pytest.approx([-0.811, 0.022], abs=1e-3)


def test_server_momentum() -> None:
    """u <- gamma u + G, x <- x + u: under a constant update the second step is 1 + gamma times the first."""
    lab = solve(fednova(server_momentum=0.5), _Slope((1.0, 3.0)), sizes=(2, 2), lr=0.1)
    points = [lab.weights.clone()]
    for _ in range(3):
        lab.round()
        points.append(lab.weights.clone())
    first, second, third = (b - a for a, b in pairwise(points))
    assert far(second, 1.5 * first) < 1e-6
    assert far(third, 1.75 * first) < 1e-6


def test_a_client_without_a_step_is_left_out() -> None:
    """tau_k = 0: one sample and BatchNorm. The others' model is the same as if it were not there."""
    three, two = (Lab(fednova(), shards(40, 60, 1), BATCHNORM, lr=0.05) for _ in range(2))
    three.round([0, 1, 2])
    two.round([0, 1])
    assert three.replies[2].steps == 0
    assert torch.equal(three.weights, two.weights)
    assert torch.equal(three.server.buffers, two.server.buffers)


def test_nobody_steps_nobody_moves() -> None:
    lab = Lab(fednova(), shards(1, 1), BATCHNORM, lr=0.05)
    start = lab.weights.clone()
    lab.round()
    assert torch.equal(lab.weights, start)


def test_momentum_is_read_from_the_optimiser() -> None:
    """rho is not set twice: the recipe has no such parameter, the normaliser follows the local settings."""
    ends = []
    for momentum in (0.0, 0.9):
        lab = Lab(fednova(), shards(64), batch=32, lr=0.01, momentum=momentum, epochs=3)
        lab.round()
        ends.append(float(lab.sent(0, "share.tau")))
    assert ends == pytest.approx([6.0, normaliser(replace(Local(), momentum=0.9), 0.01, 6)])


def test_bytes_are_fedavgs_plus_one_float() -> None:
    nova, plain = (Lab(method, digits(), BATCHNORM, lr=0.1) for method in (fednova(), fedavg()))
    up, plain_up = nova.round([0, 2]).bytes_up, plain.round([0, 2]).bytes_up
    assert sum(up.values()) == sum(plain_up.values()) + 2 * 4
    assert nova.server.send(0).items.keys() == plain.server.send(0).items.keys()
    assert nova.keeps == {0: {}, 2: {}}

"""FedProx: the pull is there, is of the right strength, and points to the received model."""

from typing import Any

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, digits, double, far, probed, shards
from quadratics import _Quadratic, _Slope, solve
from torch import Tensor

from fedalloy.core.alloy import Mechanism, alloy
from fedalloy.core.state import State
from fedalloy.core.views import StepView
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.share import Share
from fedalloy.methods import fedavg, fedprox
from fedalloy.methods.fedprox import Prox, Stragglers

OPTIMISERS: list[dict[str, Any]] = [
    {},
    {"momentum": 0.9, "weight_decay": 1e-3},
    {"optimizer": "adam"},
]


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_without_mu_it_is_fedavg(model: str, optimiser: dict[str, Any]) -> None:
    """Check: mu = 0: weights after every round equal FedAvg's bit for bit."""
    labs = [
        Lab(method, digits(), model, lr=0.02, epochs=2, **optimiser) for method in (fedavg(), fedprox(mu=0))
    ]
    for chosen in ([0, 1, 5], [1, 2], [0, 5]):
        for lab in labs:
            lab.round(chosen)
        assert torch.equal(labs[0].weights, labs[1].weights)
        assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)


@pytest.mark.parametrize("mu", [0.01, 1.0, 100.0])
def test_one_local_step_is_fedavg(mu: float) -> None:
    """Check: E = 1, B >= n_k: equals FedAvg bit for bit for any mu, because w = w_t at the only gradient."""
    labs = [Lab(method, digits(), lr=0.1, batch=10_000) for method in (fedavg(), fedprox(mu=mu))]
    for _ in range(3):
        for lab in labs:
            lab.round()
        assert torch.equal(labs[0].weights, labs[1].weights)


@double()
@pytest.mark.parametrize(("mu", "steps"), [(0.1, 1), (0.1, 7), (1.0, 20), (9.0, 20)])
def test_constant_gradient(mu: float, steps: int) -> None:
    """Check: constant gradient c, plain SGD, tau steps: w_k - w_t = -c (1 - (1 - lr mu)^tau) / mu."""
    lab = solve(fedprox(mu=mu), _Slope((1.0, -2.0, 0.5)), sizes=(3,), lr=0.1, epochs=steps)
    start = lab.weights.clone()
    lab.round()
    expected = -torch.tensor([1.0, -2.0, 0.5]) * (1 - (1 - 0.1 * mu) ** steps) / mu
    assert far(lab.weights - start, expected) < 1e-6


def test_drift_shrinks_as_mu_grows() -> None:
    """Check: ||w_k - w_t|| does not increase when mu grows through 0, 0.1, 1, 10 (with lr mu < 1)."""
    drift = []
    for mu in (0, 0.1, 1, 10):
        lab = Lab(fedprox(mu=mu), digits(), lr=0.05, epochs=3)
        lab.round([0])
        drift.append(float((lab.sent(0, "share.weights") - lab.replica.initial).norm()))
    assert drift == sorted(drift, reverse=True)
    assert drift[-1] < 0.5 * drift[0]


@double()
def test_opposite_quadratics_stay_together() -> None:
    """Check, behaviour: E = 20, opposite quadratics: a smaller spread for mu = 1, the same server optimum."""
    opposite = _Quadratic(a=((1.0,), (1.0,)), b=((1.0,), (-1.0,)))
    spread: dict[int, float] = {}
    for mu in (0, 1):
        lab = solve(fedprox(mu=mu), opposite, sizes=(20, 20), lr=0.1, batch=1)
        for _ in range(30):
            lab.round()
        assert far(lab.weights, opposite.optimum) < 1e-8
        spread[mu] = far(lab.sent(0, "share.weights"), lab.sent(1, "share.weights"))
    assert spread[1] < 0.6 * spread[0]


@pytest.mark.parametrize("optimiser", OPTIMISERS)
def test_the_term_joins_the_gradient_before_the_optimiser(optimiser: dict[str, Any]) -> None:
    """mu/2 ||w - w_t||^2 in the loss and mu (w - w_t) in the gradient are the same under any optimiser."""

    class _InTheLoss(Prox):
        gradient = Mechanism.gradient

        def loss(self, step: StepView, my: State) -> Tensor:
            weights = torch.cat([p.flatten() for p in step.client.net.parameters()])
            return 0.5 * self.mu * ((weights - step.client.received) ** 2).sum()

    labs = [
        Lab(method, digits(), lr=0.01, epochs=3, **optimiser)
        for method in (fedprox(mu=2.0), alloy("FedProx", Share(), _InTheLoss(2.0)))
    ]
    for _ in range(2):
        for lab in labs:
            lab.round([0, 3])
    assert far(labs[0].weights, labs[1].weights) < (1e-3 if optimiser.get("optimizer") else 1e-5)


def test_the_anchor_is_the_model_received_this_round() -> None:
    """Pitfall: an anchor re-taken every epoch or kept from an earlier round."""
    method, inner, outer = probed(fedprox(mu=3.0))
    lab = Lab(method, shards(40), lr=0.05, epochs=3, batch=20)
    for _ in range(2):
        start = lab.weights.clone()
        lab.round()
        for g, total, point in zip(
            inner.gradients[-6:], outer.gradients[-6:], inner.points[-6:], strict=True
        ):
            assert far(total - g, 3.0 * (point - start)) < 1e-6
    assert len(inner.gradients) == 12


def test_statistics_are_free() -> None:
    """Buffers are not penalised: a strong pull holds the weights, not the running statistics."""
    lab = Lab(fedprox(mu=50.0), shards(64), BATCHNORM, lr=0.01, epochs=10)
    lab.round()
    assert far(lab.server.buffers, lab.replica.initial_buffers) > 0.1


def test_no_extra_bytes_and_nothing_kept() -> None:
    lab, plain = Lab(fedprox(), digits(), lr=0.1), Lab(fedavg(), digits(), lr=0.1)
    assert lab.round().bytes_up == plain.round().bytes_up
    assert lab.server.send(0).items.keys() == plain.server.send(0).items.keys()
    assert all(keep == {} for keep in lab.keeps.values())


def test_uniform_weights_take_the_plain_mean() -> None:
    lab = Lab(fedprox(agg_weights="uniform"), shards(20, 90), lr=0.1)
    lab.round()
    expected = (lab.sent(0, "share.weights").double() + lab.sent(1, "share.weights").double()) / 2
    assert torch.equal(lab.weights, expected.float())


def test_epochs_per_client() -> None:
    lab = Lab(fedprox(local_epochs=(1, 4, 2)), shards(32, 32, 32, 32), epochs=9, lr=0.1)
    for _ in range(2):
        lab.round()
        assert [lab.replies[k].steps for k in range(4)] == [1, 4, 2, 1]


def test_stragglers_do_less_but_never_nothing() -> None:
    """A straggler runs a random number of epochs in [1, E), drawn anew in every round."""
    lab = Lab(fedprox(straggler_fraction=0.5), shards(*[4] * 40), epochs=5, batch=4, lr=0.01)
    rounds = []
    for _ in range(3):
        lab.round()
        rounds.append([lab.replies[k].steps for k in range(40)])
    assert rounds[0] != rounds[1]
    done = [steps for one in rounds for steps in one]
    assert set(done) == {1, 2, 3, 4, 5}
    assert 0.35 < sum(steps < 5 for steps in done) / 120 < 0.65


@pytest.mark.parametrize(("fraction", "epochs", "done"), [(0.0, 3, {3}), (1.0, 3, {1, 2}), (1.0, 1, {1})])
def test_straggler_extremes(fraction: float, epochs: int, done: set[int]) -> None:
    lab = Lab(fedprox(straggler_fraction=fraction), shards(*[4] * 12), epochs=epochs, batch=4, lr=0.01)
    lab.round()
    assert {reply.steps for reply in lab.replies.values()} == done


def test_stragglers_are_off_by_default() -> None:
    assert fedprox().find(Stragglers) is None


@pytest.mark.parametrize("settings", [{"straggler_fraction": 0.5}, {"local_epochs": (1, 2)}])
def test_inexact_work_is_counted_in_epochs(settings: dict[str, Any]) -> None:
    """A fixed number of steps would quietly overrule the stragglers."""
    with pytest.raises(FedAlloyError, match="steps"):
        Lab(fedprox(**settings), shards(32, 32), steps=3, lr=0.1).round()

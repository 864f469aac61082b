"""Balanced softmax: the prior in the loss, its absence in the prediction."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from laboratory import MLP, Lab, digits, double, far, handed_out
from torch import Tensor

from fedalloy.core.registry import make
from fedalloy.core.state import State
from fedalloy.data import Dataset
from fedalloy.methods import balancedsoftmax, fedavg
from fedalloy.methods.balancedsoftmax import BalancedSoftmax, log_prior
from fedalloy.round.client import Client, Step, client_model

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])


def batch(counts: list[int], rows: int = 12) -> tuple[Tensor, Tensor]:
    """Logits and labels of classes that occur."""
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, len(counts), generator=draw)
    present = torch.tensor(counts).nonzero().flatten()
    return logits, present[torch.randint(len(present), (rows,), generator=draw)]


def loss_of(counts: list[int], logits: Tensor, y: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """The task loss of a client with these class counts, and its gradient with respect to the logits."""
    piece, my = BalancedSoftmax(**settings), State()
    piece.before_training(
        cast(Client, SimpleNamespace(data=SimpleNamespace(counts=torch.tensor(counts)))), my
    )
    leaf = logits.clone().requires_grad_()
    loss = piece.task(cast(Step, SimpleNamespace(out=SimpleNamespace(logits=leaf), y=y)), my)
    assert loss is not None
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


def test_uniform_counts_are_cross_entropy() -> None:
    """Check 1: with uniform counts it equals CE to 1e-6."""
    logits, y = batch([7] * 5)
    loss, gradient = loss_of([7] * 5, logits, y)
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, y)), abs=1e-6)
    plain = (logits.softmax(1) - F.one_hot(y, 5)) / len(y)
    assert far(gradient, plain) < 1e-6


def test_without_the_prior_it_is_fedavg() -> None:
    """Check 1: tau_prior = 0 is bit-identical to CE, absent classes masked or not."""
    methods = (fedavg(), balancedsoftmax(tau_prior=0.0), balancedsoftmax(tau_prior=0.0, absent_count=0))
    labs = [Lab(method, digits(skew="dirichlet:0.1"), lr=0.05, momentum=0.9) for method in methods]
    for lab in labs:
        lab.rounds(*PARTICIPANTS)
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(labs[0].weights, labs[2].weights)


@double()
@pytest.mark.parametrize("absent_count", [0, 1])
@pytest.mark.parametrize("tau_prior", [0.5, 1.0])
def test_loss_and_gradient_by_hand(absent_count: int, tau_prior: float) -> None:
    """L = -mean log(m_y e^o_y / sum_c m_c e^o_c), dL/do = (q - onehot)/B, m clamped at absent_count."""
    counts = [5, 0, 1, 30]
    logits, y = batch(counts)
    m = torch.tensor([5.0, absent_count, 1, 30]) ** tau_prior
    q = m * logits.exp() / (m * logits.exp()).sum(1, keepdim=True)
    loss, gradient = loss_of(counts, logits, y, absent_count=absent_count, tau_prior=tau_prior)
    assert float(loss) == pytest.approx(float(-q[torch.arange(len(y)), y].log().mean()), rel=1e-12)
    assert far(gradient, (q - F.one_hot(y, 4)) / len(y)) < 1e-12


def test_only_ratios_of_counts_matter() -> None:
    """Check 2: multiplying all counts by a constant leaves loss and gradient unchanged (1e-6)."""
    counts = [5, 2, 1, 30]
    logits, y = batch(counts)
    once, often = (loss_of([k * n for n in counts], logits, y) for k in (1, 1000))
    assert float(once[0]) == pytest.approx(float(often[0]), abs=1e-6)
    assert far(once[1], often[1]) < 1e-6


def test_absent_classes() -> None:
    """Check 3: absent_count = 0 leaves the gradient on absent-class logits exactly 0, everything finite."""
    counts = [5, 0, 1, 0]
    logits, y = batch(counts)
    loss, gradient = loss_of(counts, logits, y, absent_count=0)
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient[:, [1, 3]] == 0).all())
    assert bool((gradient[:, [0, 2]] != 0).any(0).all())
    _, kept = loss_of(counts, logits, y, absent_count=1)
    assert bool((kept[:, [1, 3]] > 0).all())  # a count of one: pushed down a little
    assert log_prior(torch.tensor(counts), 0)[1] == -torch.inf
    assert log_prior(torch.tensor(counts), 1)[1] == 0


def test_absent_classes_keep_their_class_weights() -> None:
    """Masked classes: a client moves no row of the head that it holds no sample of."""
    for absent_count, still in ((0, True), (1, False)):
        lab = Lab(balancedsoftmax(absent_count=absent_count), digits(skew="dirichlet:0.1"), lr=0.1)
        missing = lab.federation.client(0).counts == 0
        assert bool(missing.any())
        before = lab.replica.weights.views(lab.weights.clone())["head.weight"][missing]
        lab.round([0])
        assert torch.equal(lab.replica.weights.views(lab.weights)["head.weight"][missing], before) == still


def test_it_helps_the_rare_class() -> None:
    """Check 4, behaviour: 95/5 two Gaussians, one linear layer: higher balanced accuracy than CE after equal steps."""
    draw = torch.Generator().manual_seed(0)

    def gaussians(*sizes: int) -> tuple[Tensor, Tensor]:
        y = torch.repeat_interleave(torch.arange(2), torch.tensor(sizes))
        return torch.randn(len(y), 4, generator=draw) + y[:, None].float(), y

    (x, y), (x_test, y_test) = gaussians(950, 50), gaussians(1000, 1000)
    dataset = Dataset("95/5", torch.cat([x, x_test]), torch.cat([y, y_test]), len(y), "vector", 2)
    federation = handed_out(dataset, [range(len(y))], [[]])
    accuracy = []
    for method in (fedavg(), balancedsoftmax()):
        lab = Lab(method, federation, "mlp(depth=0)", lr=0.1, steps=200).rounds([0])
        net = lab.replica.frozen(lab.weights, lab.server.buffers)
        right = net(federation.prepare(x_test, None)).logits.argmax(1) == y_test
        accuracy.append(float(right.float().mean()))  # as many of both: the mean is the balanced accuracy
    assert accuracy[1] > accuracy[0] + 0.1


def test_the_prior_counts_the_training_split_alone() -> None:
    """Pitfall: the split that is trained on, after any hold-out, and the client's own."""
    lab = Lab(balancedsoftmax(), digits(test_share=0.4), MLP, steps=1)
    for k in (0, 1):
        client = lab.trained(k)
        assert len(client.data.y_test) > 0
        expected = torch.bincount(client.data.y, minlength=10).clamp(min=1).log()
        assert torch.equal(client.states["balancedsoftmax"].scratch["prior"], expected)


def test_prediction_leaves_the_prior_out() -> None:
    """Pitfall: no log m at evaluation: scores are the raw logits."""
    lab = Lab(balancedsoftmax(), digits(skew="dirichlet:0.1"), lr=0.1).rounds([0])
    data = lab.federation.client(0)
    scores = client_model(
        lab.method,
        lab.replica,
        data,
        lab.federation.info,
        lab.local,
        lab.keeps[0],
        lab.server.send(0),
        lab.seed,
    )(data.x)
    net = lab.replica.frozen(lab.weights, lab.server.buffers)
    assert torch.equal(scores, net(data.prepare(data.x, None)).logits)


def test_counts_stay_at_home() -> None:
    lab = Lab(balancedsoftmax(), digits()).rounds([0, 1])
    assert lab.replies[0].items.keys() == {"share.weights", "share.buffers"}
    assert lab.keeps == {0: {}, 1: {}}


@pytest.mark.parametrize("method", ["balancedsoftmax(tau_prior=0.5)", "balancedsoftmax(absent_count=0)"])
def test_settings_reach_the_loss(method: str) -> None:
    ends = [
        Lab(make(text), digits(skew="dirichlet:0.1"), lr=0.05).rounds([0, 1]).weights
        for text in (method, "balancedsoftmax", "fedavg")
    ]
    assert far(ends[0], ends[1]) > 1e-4
    assert far(ends[0], ends[2]) > 1e-4

"""FedDecorr: the two forms of the penalty, what they ignore, and what they do to a collapsed batch."""

from types import SimpleNamespace
from typing import Literal, cast

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, digits, double, far
from torch import Tensor

from fedalloy.core.diagnostics import effective_rank, spectrum
from fedalloy.core.registry import make
from fedalloy.core.state import State
from fedalloy.methods import fedavg, feddecorr
from fedalloy.methods.feddecorr import Decorr, decorrelation, z_scores
from fedalloy.round.client import Step

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
SHAPES = [(6, 20), (20, 6), (9, 9), (2, 5)]
Form = Literal["official", "paper"]
FORMS: list[Form] = ["official", "paper"]


def features(batch: int, width: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    mixed = torch.randn(batch, width, generator=draw) @ torch.randn(width, width, generator=draw)
    return mixed * torch.rand(width, generator=draw) + torch.randn(width, generator=draw)


def correlation(z: Tensor) -> Tensor:
    """K = X^T X / (B - 1), d x d."""
    x = (z - z.mean(0)) / (z.var(0, unbiased=True) + 1e-8).sqrt()
    return x.T @ x / (len(z) - 1)


@pytest.mark.parametrize("host", ["fedavg", "fedprox(mu=0.1)", "moon(proj_dim=12)"])
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_without_beta_it_is_the_base_method(host: str, model: str) -> None:
    """Check 1: beta = 0 equals the base method bit for bit; a plug-in for any host."""
    methods = [make(host), make(f"{host}+decorr(beta=0)"), make(f"{host}+decorr(beta=1)")]
    labs = [Lab(method, digits(), model, lr=0.05, momentum=0.9).rounds(*PARTICIPANTS) for method in methods]
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert far(labs[0].weights, labs[2].weights) > 1e-4
    assert labs[2].replies[1].items.keys() == labs[0].replies[1].items.keys()  # no extra tensors


def test_the_recipe() -> None:
    ends = [
        Lab(method, digits(), lr=0.05).rounds([0, 1]).weights
        for method in (
            feddecorr(),
            make("fedavg+decorr"),
            feddecorr(norm="paper"),
            feddecorr(var_eps=0.1),
            fedavg(),
        )
    ]
    assert torch.equal(ends[0], ends[1])
    assert all(far(ends[0], other) > 1e-5 for other in ends[2:])


def test_a_single_sample() -> None:
    """Check 1: B = 1 gives exactly 0."""
    alone = cast(Step, SimpleNamespace(out=SimpleNamespace(features=torch.randn(1, 4)), y=torch.zeros(1)))
    assert Decorr().loss(alone, State()) is None
    ends = [
        Lab(method, digits(), lr=0.01, batch=1).rounds([0]).weights
        for method in (fedavg(), feddecorr(beta=9.0))
    ]
    assert torch.equal(*ends)


@double()
@pytest.mark.parametrize(("batch", "width"), SHAPES)
def test_both_forms_by_hand(batch: int, width: int) -> None:
    """Check 2: Gram form equals d x d form (1e-10); official = ((B-1)^2/B) off-diagonal mean square of K."""
    z = features(batch, width)
    k = correlation(z)
    paper = k.square().sum() / width**2
    off_diagonal = k[~torch.eye(width, dtype=torch.bool)]
    official = (batch - 1) ** 2 / batch * off_diagonal.square().mean()
    assert float(decorrelation(z, "paper")) == pytest.approx(float(paper), rel=1e-10)
    assert float(decorrelation(z, "official")) == pytest.approx(float(official), rel=1e-10)


@double()
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("batch", "width"), SHAPES[:2])
def test_both_gradients_by_hand(form: Form, batch: int, width: int) -> None:
    """Check 2: the Gram form has the gradient of the d x d form, whose diagonal is a constant."""
    z = features(batch, width).requires_grad_()
    squares = correlation(z).square().sum()
    scale = {"paper": 1 / width**2, "official": (batch - 1) ** 2 / (batch * width * (width - 1))}[form]
    (expected,) = torch.autograd.grad(scale * squares, z)
    (gradient,) = torch.autograd.grad(decorrelation(z, form), z)
    # the jitter in the variance leaves the diagonal a trace of gradient
    assert far(gradient, expected) < 1e-6 * float(expected.abs().max())


@double()
@pytest.mark.parametrize("form", FORMS)
def test_scale_and_shift_do_not_matter(form: Form) -> None:
    """Check 3: invariant under per-feature scaling and shifting of z (1e-5)."""
    z = features(12, 8)
    draw = torch.Generator().manual_seed(1)
    moved = z * (0.5 + 4 * torch.rand(8, generator=draw)) + 10 * torch.randn(8, generator=draw)
    assert float(decorrelation(moved, form)) == pytest.approx(float(decorrelation(z, form)), rel=1e-5)


@double()
def test_decorrelated_features() -> None:
    """Check 4: orthogonal centred columns, B > d: official loss 0 and paper loss 1/d."""
    centred = torch.cat([torch.ones(16, 1), features(16, 5)], dim=1)
    z = torch.linalg.qr(centred).Q[:, 1:] * torch.arange(1, 6) + 3
    assert float(decorrelation(z, "official")) == pytest.approx(0, abs=1e-10)
    assert float(decorrelation(z, "paper")) == pytest.approx(1 / 5, abs=1e-6)


def test_dead_features_are_left_alone() -> None:
    """Pitfall: a feature without variance has z-score 0 and diagonal 0: finite, and no gradient."""
    z = torch.cat([features(6, 3), torch.zeros(6, 2)], dim=1).requires_grad_()
    assert torch.equal(z_scores(z)[:, 3:], torch.zeros(6, 2))
    for form in FORMS:
        loss = decorrelation(z, form)
        (gradient,) = torch.autograd.grad(loss, z)
        assert bool(torch.isfinite(gradient).all())
        assert bool((gradient[:, 3:] == 0).all())
        assert bool((gradient[:, :3] != 0).any())
    assert decorrelation(features(6, 1)).item() == pytest.approx(
        0, abs=1e-5
    )  # a single feature has nothing to be correlated with


def test_features_not_projections_are_decorrelated() -> None:
    """Pitfall: apply to raw features, not to logits or to projected features."""
    z = features(6, 4)
    step = SimpleNamespace(
        out=SimpleNamespace(features=z, embedding=z[:, :2], logits=z[:, :3]), y=torch.zeros(6)
    )
    loss = Decorr(beta=0.5).loss(cast(Step, step), State())
    assert loss is not None
    assert torch.equal(loss, 0.5 * decorrelation(z))


@pytest.mark.parametrize("form", FORMS)
def test_the_effective_rank_rises(form: Form) -> None:
    """Check 5, behaviour: from rank-2 features, 100 steps on L_D alone raise the effective rank."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(32, 2, generator=draw) @ torch.randn(2, 10, generator=draw)
    z = (z + 1e-3 * torch.randn(32, 10, generator=draw)).requires_grad_()
    before = effective_rank(spectrum(z.detach()))
    assert before < 2.1
    optimiser = torch.optim.SGD([z], lr={"official": 1.0, "paper": 30.0}[form])
    for _ in range(100):
        optimiser.zero_grad()
        decorrelation(z, form).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    assert effective_rank(spectrum(z.detach())) > 2 * before

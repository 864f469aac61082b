"""FedBlade: the log-determinant and its bound, prototypes, the two alignments, and the way back to FedETF."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, dealt, digits, double, far, handed_out
from torch import Tensor

from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.diagnostics import effective_rank, spectrum
from fedalloy.core.registry import make
from fedalloy.core.state import State
from fedalloy.core.wire import Items
from fedalloy.data import Dataset, load
from fedalloy.data.federation import Federation
from fedalloy.errors import FedAlloyWarning
from fedalloy.methods import fedblade, fedetf
from fedalloy.methods.fedblade import PBA, LDDecorr, log_det
from fedalloy.methods.feddecorr import z_scores
from fedalloy.methods.fedetf import ETF
from fedalloy.round.client import Client, Step

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
EPS = 1e-4
SHAPES = [(8, 30), (30, 8), (12, 12), (2, 5)]


def features(batch: int, width: int, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    return (torch.randn(batch, width, generator=draw) + 0.3).relu()


def by_class(*held: list[int], each: int = 20) -> Federation:
    """Clients that hold so many samples of exactly these classes."""
    y = load("digits", None).y
    places = {c: torch.where(y == c)[0].tolist() for c in range(10)}
    return dealt([[places[c].pop(0) for c in classes for _ in range(each)] for classes in held])


def prototypes(lab: Lab) -> Items:
    return lab.server.states["features-means"].persistent


def step_of(client: Client) -> Step:
    x, y = client.data.prepare(client.data.x, None), client.data.y
    step = Step(client, x, y, torch.arange(len(y)), 0)
    step.out = client.net(x)
    return step


def pba_loss(client: Client, step: Step | None = None) -> Tensor:
    piece = client.method.find(PBA)
    assert piece is not None
    loss = piece.loss(step or step_of(client), client.state_of(piece))
    assert loss is not None
    return loss


def touched(client: Client, loss: Tensor) -> set[str]:
    """The parts of the net that a loss sends a gradient to."""
    parameters = dict(client.net.named_parameters())
    gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
    return {
        name.partition(".")[0]
        for name, g in zip(parameters, gradients, strict=True)
        if g is not None and bool((g != 0).any())
    }


def as_step(z: Tensor) -> Step:
    return cast(Step, SimpleNamespace(out=SimpleNamespace(features=z), y=torch.zeros(len(z))))


def push(z: Tensor, **settings: Any) -> Tensor:
    """beta dL/dZ: what the term sends back into the features of a batch."""
    leaf = z.clone().requires_grad_()
    loss = LDDecorr(**settings).loss(as_step(leaf), State())
    assert loss is not None
    return torch.autograd.grad(loss, leaf)[0]


# The ETF classifier


def test_the_classifier_never_changes() -> None:
    """Check 1: V has unit columns, pairwise cosine -1/(C-1) and sum 0 (1e-6), unchanged after any number of rounds."""
    lab = Lab(fedblade(), digits(), BATCHNORM, lr=0.1, momentum=0.9)
    head = lab.replica.net.head
    assert isinstance(head, ETF)
    before = head.V.clone()
    assert far(before.T @ before, torch.full((10, 10), -1 / 9).fill_diagonal_(1)) < 1e-6
    assert float(before.sum(1).abs().max()) < 1e-6
    lab.rounds(*PARTICIPANTS)
    assert torch.equal(head.V, before)


# LDDecorr


@double()
@pytest.mark.parametrize(("batch", "width"), SHAPES)
def test_log_det_is_that_of_the_whole_matrix(batch: int, width: int) -> None:
    """Check 2: Gram form plus its constant equals d x d slogdet and the eigenvalue formula: value and gradient.

    L_LD = log_det - (d - r) log eps, r = min(B, d).
    """
    z = features(batch, width).requires_grad_()
    x = (z - z.mean(0)) / (z.var(0) + 1e-8).sqrt()
    k = x.T @ x / (batch - 1)
    full = -torch.linalg.slogdet(k + EPS * torch.eye(width)).logabsdet
    eigenvalues = torch.linalg.eigvalsh(k).clamp(min=0)
    constant = -(width - min(batch, width)) * math.log(EPS)
    ours = log_det(z, EPS)
    assert ours.item() + constant == pytest.approx(full.item(), rel=1e-8)
    assert ours.item() + constant == pytest.approx(-(eigenvalues + EPS).log().sum().item(), rel=1e-8)
    (expected,) = torch.autograd.grad(full, z, retain_graph=True)
    (gradient,) = torch.autograd.grad(ours, z)
    if batch > 2:  # two samples: z-scores are signs, and both gradients are rounding and the jitter
        assert far(gradient, expected) < 1e-8 * float(expected.abs().max())


@double()
@pytest.mark.parametrize(("batch", "width"), SHAPES)
def test_gradient_with_respect_to_z_scores(batch: int, width: int) -> None:
    """Check 2: dL/dX = -(2/(B-1)) X (K + eps I)^-1, pulled back through the z-score."""
    z = features(batch, width).requires_grad_()
    x = z_scores(z)
    k = x.T @ x / (batch - 1)
    by_hand = -2 / (batch - 1) * x @ torch.linalg.inv(k + EPS * torch.eye(width))
    (expected,) = torch.autograd.grad(x, z, by_hand.detach())
    (gradient,) = torch.autograd.grad(log_det(z, EPS), z)
    assert far(gradient, expected) < 1e-8 * max(1.0, float(expected.abs().max()))


def test_float32_features_keep_their_precision() -> None:
    """The determinant is taken in float64: a float32 batch loses nothing but the rounding of its features."""
    z = features(32, 200)
    exact = push(z.double(), beta=1.0, grad_limit=None)
    assert z.dtype == push(z, beta=1.0, grad_limit=None).dtype
    assert far(push(z, beta=1.0, grad_limit=None).double(), exact) < 1e-5 * float(exact.abs().max())


def test_eps_caps_the_push() -> None:
    """A larger jitter weakens the push on collapsed directions; a larger var_eps that on quiet features."""
    z = features(16, 6)
    z[:, 1] = z[:, 0] + 1e-3 * z[:, 1]
    healthy, capped = (float(push(z, eps=eps, grad_limit=None).norm()) for eps in (1e-8, 1e-1))
    assert capped < 0.1 * healthy
    quiet = features(16, 6) * 1e-3
    strong, weak = (float(push(quiet, var_eps=v, grad_limit=None).norm()) for v in (1e-8, 1.0))
    assert weak < 0.1 * strong


def test_a_single_sample_is_skipped() -> None:
    assert LDDecorr().loss(as_step(features(1, 4)), State()) is None
    assert LDDecorr(beta=0).loss(as_step(features(4, 4)), State()) is None


def test_it_raises_the_effective_rank() -> None:
    """Check 5, behaviour: MLP with BatchNorm, 10 clusters, 300 steps: beta = 0.005 at least doubles the rank of z."""
    draw = torch.Generator().manual_seed(0)
    y = torch.arange(640) % 10
    x = 2 * torch.randn(10, 64, generator=draw)[y] + 0.5 * torch.randn(640, 64, generator=draw)
    federation = handed_out(Dataset("clusters", x, y, 640, "vector", 10), [range(640)], [[]])
    ranks = []
    for beta in (0.0, 0.005):
        method = fedblade(beta=beta, pba=False)
        lab = Lab(
            method, federation, "mlp(hidden=256, depth=2, norm=batch)", batch=64, momentum=0.9, steps=300
        )
        lab.round()  # a loss that is not finite is refused
        net = lab.replica.frozen(lab.weights, lab.server.buffers)
        ranks.append(effective_rank(spectrum(net(federation.prepare(x, None)).features)))
    assert ranks[1] >= 2 * ranks[0]


def almost_dead(sigma: float) -> Tensor:
    """A healthy batch but for one unit that hardly ever fires."""
    z = features(32, 64)
    z[:, 0] = 0
    z[:3, 0] = sigma * torch.tensor([1.0, 2.0, 4.0])
    return z


def test_almost_dead_units_are_the_cause_of_explosions() -> None:
    """The z-score divides by sigma: as a unit dies, the push on it grows like 1/sigma, until sigma^2 is var_eps."""
    healthy = float(push(features(32, 64), grad_limit=None).norm())
    assert 1e-3 < healthy < 0.3
    norms = [float(push(almost_dead(sigma), grad_limit=None).norm()) for sigma in (1e-2, 1e-3, 1e-4)]
    assert norms[1] / norms[0] == pytest.approx(10, rel=0.1)
    assert norms[2] / norms[1] > 5
    assert norms[2] > 5 > 100 * healthy


def test_the_bound_keeps_the_direction() -> None:
    """grad_limit shortens beta dL/dZ to its norm and leaves what is shorter alone, bit for bit."""
    free, bound = (push(almost_dead(1e-4), grad_limit=limit) for limit in (None, 1.0))
    assert float(bound.norm()) == pytest.approx(1, rel=1e-5)
    assert far(bound, free / free.norm()) < 1e-6
    healthy = [push(features(32, 64), grad_limit=limit) for limit in (None, 1.0)]
    assert torch.equal(*healthy)


def test_the_bound_holds_back_nothing_but_its_own_term() -> None:
    """The task's gradient into the features passes unbounded, also in float64, where no copy is made on the way."""
    for z in (almost_dead(1e-4), almost_dead(1e-4).double()):
        leaf = z.requires_grad_()
        term = LDDecorr().loss(as_step(leaf), State())
        assert term is not None
        (both,) = torch.autograd.grad(term + 100 * leaf.sum(), leaf)
        assert float((both - 100).norm()) == pytest.approx(1, rel=1e-3)


def test_frozen_features_have_no_gradient_to_bound() -> None:
    loss = LDDecorr().loss(as_step(features(4, 6)), State())
    assert loss is not None
    assert not loss.requires_grad


@pytest.mark.parametrize("held", [range(10), range(1)])
def test_healthy_training_never_meets_the_bound(held: range) -> None:
    """With BatchNorm, B < d, one-class batches and a last batch of two: the same bits with and without the bound."""
    federation = by_class(*([c] if len(held) > 1 else [0, 1, 2] for c in held), each=34)
    model = "mlp(hidden=64, norm=batch)"
    labs = [
        Lab(fedblade(grad_limit=limit), federation, model, momentum=0.9, epochs=2).rounds(*[list(held)] * 3)
        for limit in (None, 1.0)
    ]
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(prototypes(labs[0])["means"], prototypes(labs[1])["means"])


def test_the_bound_keeps_prototypes_in_reach() -> None:
    """One-class clients, no normalisation, B < d, the largest beta of the paper: without the bound features explode."""
    federation = by_class(*([c] for c in range(10)), each=64)
    reach = []
    for beta, limit in ((0.0, None), (0.05, None), (0.05, 1.0)):
        method = make(f"fedblade(beta={beta}, grad_limit={limit})")
        if beta:
            with pytest.warns(FedAlloyWarning, match="no normalisation layer"):
                lab = Lab(method, federation, "mlp(hidden=64)", lr=0.1, momentum=0.9, epochs=3)
        else:
            lab = Lab(method, federation, "mlp(hidden=64)", lr=0.1, momentum=0.9, epochs=3)
        norms = []
        for _ in range(5):
            lab.round()
            norms.append(float(prototypes(lab)["means"].norm(dim=1).max()))
        assert math.isfinite(sum(norms))
        reach.append(max(norms))
    calm, free, bound = reach
    assert free > 100 * calm
    assert bound < 10 * calm


def test_a_model_without_normalisation_is_warned_of() -> None:
    with pytest.warns(FedAlloyWarning, match=r"mlp\(hidden=16\) has no normalisation layer"):
        Lab(fedblade(), digits(), MLP)
    Lab(fedblade(beta=0.0), digits(), MLP)  # warnings are errors: these say nothing
    Lab(fedblade(decorr="feddecorr"), digits(), MLP)
    Lab(fedblade(), digits(), BATCHNORM)


# Prototype-guided bilateral alignment


@pytest.mark.parametrize(
    "settings",
    [
        {"decorr": "none", "pba": False},
        {"beta": 0.0, "gamma": 0.0},
        {"beta": 0.0, "no_pa": True, "no_fa": True},
    ],
)
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_everything_off_is_fedetf(settings: dict[str, Any], model: str) -> None:
    """Check 3: ldd = off and pba = off gives bit-identical weights to FedETF."""
    labs = [
        Lab(method, digits(), model, lr=0.05, momentum=0.9).rounds(*PARTICIPANTS)
        for method in (fedetf(), fedblade(**settings))
    ]
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)


def test_the_first_round_has_no_prototypes() -> None:
    """Check 3: round 0 with pba = on equals pba = off bit for bit; the next does not."""
    labs = [Lab(fedblade(pba=pba), digits(), BATCHNORM, lr=0.05) for pba in (True, False)]
    for lab in labs:
        lab.round([0, 1])
    assert torch.equal(labs[0].weights, labs[1].weights)
    for lab in labs:
        lab.round([0, 1])
    assert far(labs[0].weights, labs[1].weights) > 1e-4


def test_gradients_go_one_way() -> None:
    """Check 4: dL_PA/dtheta = 0 and dL_FA/dPsi = 0; neither moves the scale."""
    for settings, part in (({"no_fa": True}, "neck"), ({"no_pa": True}, "body")):
        client = Lab(fedblade(**settings), digits(), BATCHNORM, lr=0.05).rounds([0, 1]).trained(0)
        client.net.train()
        assert touched(client, pba_loss(client)) == {part}


@pytest.mark.parametrize("absent_count", [0, 1])
@pytest.mark.parametrize("no_df", [False, True])
def test_both_alignments_by_hand(absent_count: int, no_df: bool) -> None:
    """Eqs 15 and 16, class by class and sample by sample, over classes with a prototype only."""
    federation = by_class([0, 2, 3], [3, 7], [2, 4, 5])
    method = fedblade(gamma=0.7, tau=0.2, no_df=no_df, absent_count=absent_count)
    client = Lab(method, federation, BATCHNORM, lr=0.1).rounds([0, 1]).trained(2)  # 4 and 5 are new
    got = client.states["features-means"].received
    seen, p, counts = got["seen"].nonzero().flatten().tolist(), got["means"], client.data.counts
    assert seen == [0, 2, 3, 7]
    head = client.net.head
    assert isinstance(head, ETF)
    mu = client.net.neck(p)
    l_pa = sum(0.5 * (1 - mu[c] @ head.V[:, c]) ** 2 for c in seen)
    step = step_of(client)
    m = {c: 1.0 if no_df else max(int(counts[c]), absent_count) for c in seen}
    losses = []
    for z, label in zip(step.out.features, step.y.tolist(), strict=True):
        if label in seen:
            terms = {c: m[c] * (F.cosine_similarity(z, p[c], dim=0) / 0.2).exp() for c in seen}
            losses.append(-(terms[label] / sum(terms.values())).log())
    assert len(losses) == 20
    expected = 0.7 * (l_pa + torch.stack(losses).mean())
    assert pba_loss(client, step).item() == pytest.approx(expected.item(), rel=1e-4)


def test_masked_classes_without_the_distribution_factor_stay_finite() -> None:
    """Pitfall: no_df with absent_count = 0: an absent class has log prior minus infinity, not to be scaled by 0."""
    lab = Lab(fedblade(no_df=True, absent_count=0), by_class([0, 1], [1, 2]), BATCHNORM, lr=0.05)
    lab.rounds([0, 1], [0, 1])  # refused if not finite
    assert math.isfinite(lab.replies[0].loss)


def test_a_class_missing_from_a_round_keeps_its_prototype() -> None:
    """Check 4: bit for bit, and it stays marked as seen; the others are replaced, without momentum."""
    lab = Lab(fedblade(), by_class([0, 1], [1, 2]), BATCHNORM, lr=0.05).rounds([0, 1])
    before = {name: value.clone() for name, value in prototypes(lab).items()}
    assert before["seen"].tolist() == [True] * 3 + [False] * 7
    lab.round([1])
    after = prototypes(lab)
    assert torch.equal(after["means"][0], before["means"][0])
    assert torch.equal(after["seen"], before["seen"])
    assert torch.equal(after["means"][1:3], lab.sent(1, "features-means.means"))
    assert far(after["means"][1], before["means"][1]) > 1e-3


def test_a_class_never_seen_is_in_no_loss() -> None:
    """Check 4: whatever stands in the row of a class without prototype changes no bit; L_PA counts seen classes."""
    federation = by_class([0, 1], [5])
    labs = [Lab(fedblade(), federation, BATCHNORM, lr=0.05).rounds([0]) for _ in range(2)]
    prototypes(labs[1])["means"][2:] = 1e6
    for lab in labs:
        lab.rounds([0], [1])
    assert torch.equal(labs[0].weights, labs[1].weights)


def test_a_client_with_none_of_the_seen_classes() -> None:
    """Its L_FA is a mean over no sample: zero, not NaN; L_PA remains."""
    client = Lab(fedblade(), by_class([0, 1], [5]), BATCHNORM, lr=0.05).rounds([0]).trained(1)
    loss = pba_loss(client)
    assert bool(torch.isfinite(loss))
    assert touched(client, loss) == {"neck"}


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_prototypes_are_mean_features_of_the_trained_models(model: str) -> None:
    """Eqs 13 and 14: eval mode, all local samples, trained local model; weighted by class counts."""
    lab = Lab(fedblade(decorr="none"), digits(), model, lr=0.1).rounds([0, 3])
    sums, counts = torch.zeros(10, 16), torch.zeros(10)
    for k in (0, 3):
        data = lab.federation.client(k)
        net = lab.replica.frozen(lab.sent(k, "share.weights"), lab.sent(k, "share.buffers"))
        z = net(data.prepare(data.x, None)).features
        sums.index_add_(0, data.y, z)
        counts += data.counts
    held = counts > 0
    assert torch.equal(prototypes(lab)["seen"], held)
    assert far(prototypes(lab)["means"][held], sums[held] / counts[held, None]) < 1e-4


def test_the_wire() -> None:
    """Down: P and a mask; up: a row for each class that is held, and counts. Clients keep nothing."""
    lab = Lab(fedblade(), by_class([0, 1, 5], [2]), BATCHNORM, lr=0.05)
    mail = lab.server.send(0).items
    assert mail["features-means.means"].shape == (10, 16)
    assert not bool(mail["features-means.seen"].any())
    outcome = lab.round()
    assert outcome.bytes_up["features-means.means"] == 4 * 16 * (3 + 1)
    assert lab.sent(1, "features-means.counts").tolist() == [0, 0, 20] + [0] * 7
    assert lab.keeps == {0: {}, 1: {}}


def test_pa_is_a_sum_unless_asked() -> None:
    """Pitfall: L_PA is a sum over seen classes; pa_reduction = mean divides by their number."""
    losses = []
    for reduction in ("sum", "mean"):
        method = fedblade(no_fa=True, pa_reduction=reduction)
        lab = Lab(method, by_class([0, 1, 2, 7], [3]), BATCHNORM, lr=0.05).rounds([0])
        client = lab.trained(1)
        client.weights.load(client.received, client.received_buffers)
        losses.append(pba_loss(client).item())
    assert losses[0] == pytest.approx(4 * losses[1], rel=1e-6)


@pytest.mark.parametrize(
    "setting",
    [
        *(
            "no_pa=true",
            "no_fa=true",
            "no_df=true",
            "pa_reduction=mean",
            "gamma=2",
            "tau=0.5",
            "absent_count=0",
        ),
        *("beta=0.05", "decorr=none", "decorr=feddecorr", "eps=0.1", "var_eps=0.1", "grad_limit=1e-3"),
        *("etf_dim=12", "scale_init=5.0", "pba=false"),
    ],
)
def test_every_switch_does_something(setting: str) -> None:
    labs = [
        Lab(make(text), digits(skew="dirichlet:0.1"), BATCHNORM, lr=0.05)
        for text in ("fedblade", f"fedblade({setting})")
    ]
    ends = [lab.rounds([0, 1], [0, 1]).weights[lab.replica.weights.span("body")] for lab in labs]
    assert far(*ends) > 1e-6


def test_combinations() -> None:
    """The parts by themselves, and what they refuse."""
    whole, pieces = (
        Lab(fedblade(), digits(), BATCHNORM),
        Lab(make("fedetf+lddecorr+pba"), digits(), BATCHNORM),
    )
    for lab in (whole, pieces):
        lab.rounds([0, 1], [0, 1])
    assert torch.equal(whole.weights, pieces.weights)
    make("fedavg+lddecorr")
    with pytest.raises(AlloyConflict, match="pba needs an ETF head"):
        make("fedavg+pba")
    with pytest.raises(AlloyConflict, match="both claim the decorrelation of features"):
        make("fedblade+decorr")

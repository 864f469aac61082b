"""FedRCL: hard pairs, the penalty on pairs that are too close, several depths, and the clipped gradient."""

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, dealt, digits, double, far, probed
from torch import Tensor

from fedalloy.core.registry import make
from fedalloy.core.state import State
from fedalloy.data import load
from fedalloy.errors import FedAlloyError
from fedalloy.methods import fedavg, fedrcl
from fedalloy.methods.fedrcl import Relaxed
from fedalloy.round.client import Step

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
CNN = "cnn-bn"


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def loss_of(*levels: Tensor, y: list[int], **settings: Any) -> Tensor:
    """The term of a batch whose levels are given."""
    client = SimpleNamespace(replica=SimpleNamespace(memo={"levels": SimpleNamespace(pooled=list(levels))}))
    step = SimpleNamespace(client=client, y=torch.tensor(y), out=SimpleNamespace(features=levels[0]))
    loss = Relaxed(**settings).loss(cast(Step, step), State())
    assert loss is not None
    return loss


def by_hand(z: Tensor, y: list[int], tau: float, kappa: float, pos: int, neg: int) -> tuple[float, float]:
    """Mean L_S and L_P over anchors, pair by pair."""
    size = len(y)
    s = [[float(F.cosine_similarity(z[i], z[j], dim=0)) for j in range(size)] for i in range(size)]
    total_s = total_p = 0.0
    for i in range(size):
        partners = sorted(s[i][j] for j in range(size) if j != i and y[j] == y[i])[:pos]
        others = sorted((s[i][j] for j in range(size) if y[j] != y[i]), reverse=True)[:neg]
        below = sum(math.exp(n / tau) for n in others)
        each = [-math.log(math.exp(p / tau) / (math.exp(p / tau) + below)) for p in partners or [1.0]]
        total_s += sum(each) / len(each)
        close = sum(math.exp(r / tau) for r in partners if r >= kappa)
        total_p += -math.log(math.exp(1 / tau) / (math.exp(1 / tau) + close))
    return total_s / size, total_p / size


@pytest.mark.parametrize("model", [MLP, BATCHNORM, CNN])
def test_without_weights_and_clip_it_is_fedavg(model: str) -> None:
    """Check 1: w_s = w_p = 0 and no clip is FedAvg bit for bit; both weights change something."""
    methods = (
        fedavg(),
        fedrcl(w_s=0.0, w_p=0.0, grad_clip=None),
        fedrcl(w_s=0.0, kappa=0.1),
        fedrcl(w_p=0.0),
        fedrcl(kappa=0.1),
    )
    labs = [Lab(method, digits(), model, lr=0.02, momentum=0.9).rounds(*PARTICIPANTS) for method in methods]
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)
    for one, other in [(0, 2), (0, 3), (2, 4), (3, 4)]:
        assert far(labs[one].weights, labs[other].weights) > 1e-5
    assert labs[4].replies[1].items.keys() == labs[0].replies[1].items.keys()  # no extra tensors
    assert labs[4].keeps == {0: {}, 1: {}, 5: {}}


@double()
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"tau": 0.5, "kappa": 0.0},
        {"tau": 0.3, "kappa": 0.2, "topk_pos": 2, "topk_neg": 1},
        {"tau": 0.3, "kappa": 0.2, "form": "full"},
    ],
)
@pytest.mark.parametrize("y", [[0, 0, 0, 1, 1, 2], [0, 1, 2, 3, 4, 5], [0, 1, 1, 1, 1, 1]])
def test_both_terms_by_hand(settings: dict[str, Any], y: list[int]) -> None:
    """Lone anchors and few negatives included; two levels count as their mean."""
    levels = [draws(6, 4) + 0.8, draws(6, 3, seed=1) + 0.8]
    full = settings.get("form") == "full"
    pos, neg = (9, 9) if full else (settings.get("topk_pos", 1), settings.get("topk_neg", 2))
    tau, kappa = settings.get("tau", 0.05), settings.get("kappa", 0.7)
    terms = [by_hand(z, y, tau, kappa, pos, neg) for z in levels]
    for w_s, w_p in ((1.0, 0.0), (0.0, 1.0), (2.0, 3.0)):
        expected = sum(w_s * l_s + w_p * l_p for l_s, l_p in terms) / 2
        found = loss_of(*levels, y=y, w_s=w_s, w_p=w_p, **settings)
        assert float(found) == pytest.approx(expected, rel=1e-7, abs=1e-9)


def test_one_class() -> None:
    """Check 2: L_S = 0 exactly; the penalty is positive only if the least similar pair is at least kappa."""
    z = draws(5, 8)
    assert float(loss_of(z, y=[3] * 5, w_p=0.0)) == 0
    assert float(loss_of(z, y=[3] * 5)) == 0  # random directions are far below 0.7
    close = z[0] + 0.1 * z
    unit = F.normalize(close, dim=1)
    least = (unit @ unit.T).min().item()
    assert least > 0.7
    assert float(loss_of(close, y=[3] * 5)) > 0
    assert float(loss_of(close, y=[3] * 5, kappa=(least + 1) / 2)) == 0  # every anchor has a pair below it
    turned = torch.cat([close, -close[:1]])
    assert float(loss_of(turned, y=[3] * 6)) == 0  # one far partner, and the mined form does not act
    assert float(loss_of(turned, y=[3] * 6, form="full")) > 0  # the full form does


def test_only_the_least_similar_partner_counts() -> None:
    """Check 2, per anchor: kappa between the pair's cosine and 1 switches the penalty off, below it on."""
    z = torch.tensor([[1.0, 0.0], [0.8, 0.6]])
    assert float(loss_of(z, y=[0, 0], kappa=0.81)) == 0
    assert float(loss_of(z, y=[0, 0], kappa=0.79)) == pytest.approx(
        math.log1p(math.exp(-0.2 / 0.05)), rel=1e-5
    )


@double()
def test_identical_features() -> None:
    """Check 3: L_P = log 2 per anchor; no gradient along the norm, and the scale does not matter."""
    same = draws(1, 6).repeat(4, 1)
    assert float(loss_of(same, y=[1] * 4)) == pytest.approx(math.log(2), abs=1e-12)
    z = (draws(6, 4) + 1.5).requires_grad_()
    y = [0, 0, 0, 1, 1, 2]
    for form in ("mined", "full"):
        settings: dict[str, Any] = {"y": y, "form": form, "kappa": 0.2, "tau": 0.3}
        loss = loss_of(z, **settings)
        (gradient,) = torch.autograd.grad(loss, z)
        assert (z * gradient).sum(1).tolist() == pytest.approx([0.0] * 6, abs=1e-12)
        assert float(gradient.norm()) > 1e-3
        for a in (0.01, 3.0, 1e4):
            assert loss_of(a * z, **settings).item() == pytest.approx(loss.item(), abs=1e-12)


@pytest.mark.parametrize("y", [[0, 0, 1, 1], [0, 0, 1]])
def test_mined_and_full_agree_where_there_is_nothing_to_mine(y: list[int]) -> None:
    """Check 4: at most one same-class partner and at most two negatives: the forms of L_S agree (1e-6)."""
    z = draws(len(y), 5)
    mined, full = (loss_of(z, y=y, w_p=0.0, form=form).item() for form in ("mined", "full"))
    assert mined == pytest.approx(full, abs=1e-6)
    more = draws(6, 5)
    apart = [loss_of(more, y=[0, 0, 0, 1, 1, 1], w_p=0.0, form=form).item() for form in ("mined", "full")]
    assert abs(apart[0] - apart[1]) > 0.1


def test_extreme_temperatures_stay_finite() -> None:
    """Pitfall: e^(1/tau) overflows; masks, not infinities, stand for what is missing."""
    for y in ([0, 0, 1, 2], [0, 0, 0, 0], [0, 1, 2, 3]):
        z = draws(4, 3).requires_grad_()
        for form in ("mined", "full"):
            with torch.autograd.set_detect_anomaly(True):  # no NaN on the way, either
                loss = loss_of(z, y=y, tau=1e-3, form=form, kappa=0.0)
                (gradient,) = torch.autograd.grad(loss, z)
            assert bool(torch.isfinite(loss))
            assert bool(torch.isfinite(gradient).all())
    dead = torch.zeros(3, 4).requires_grad_()
    (gradient,) = torch.autograd.grad(loss_of(dead, y=[0, 0, 1]), dead)
    assert bool(torch.isfinite(gradient).all())
    assert float(loss_of(draws(1, 4), y=[0])) == 0


def test_the_penalty_keeps_classes_from_collapsing() -> None:
    """Check 5: from identical starts, L_S alone drives the mean same-class cosine higher than with w_p = 1."""
    federation = digits()
    index = federation.split.global_test
    x, y = federation.prepare(federation.dataset.x[index], None), federation.dataset.y[index]
    same = (y[:, None] == y) & ~torch.eye(len(y), dtype=torch.bool)
    cosines = []
    for w_p in (0.0, 1.0):
        lab = Lab(fedrcl(w_p=w_p, tau=0.1), federation, lr=0.02, epochs=5).rounds(range(6), range(6))
        net = lab.replica.frozen(lab.weights, lab.server.buffers).net
        assert isinstance(net.body, torch.nn.Sequential)
        unit = F.normalize(net.body[:-1](x), dim=1)
        cosines.append(float((unit @ unit.T)[same].mean()))
    assert cosines[0] > cosines[1] + 0.02


def test_levels_reach_as_deep_as_they_should() -> None:
    """Each level sends its gradient into the layers before it, and no further."""
    reached = []
    for levels in ((0,), (1,), (2,), ()):
        method = make("fedavg") + Relaxed(levels=levels)
        client = Lab(method, digits(), CNN, lr=0.0, steps=1).trained(0)
        step = Step(
            client, client.data.prepare(client.data.x[:8], None), client.data.y[:8], torch.arange(8), 0
        )
        step.out = client.net(step.x)
        piece = client.method.find(Relaxed)
        assert piece is not None
        loss = piece.loss(step, client.state_of(piece))
        assert loss is not None
        gradients = torch.autograd.grad(loss, list(client.net.parameters()), allow_unused=True)
        names = [name for name, _ in client.net.named_parameters()]
        reached.append([n for n, g in zip(names, gradients, strict=True) if g is not None and bool(g.any())])
    assert reached[0] == ["body.0.weight", "body.1.weight", "body.1.bias"]
    assert reached[2] == reached[3] == [f"body.{n}.{p}" for n in (0, 1, 3, 4, 6, 7) for p in parts(n)]
    assert len(reached[1]) == 6


def parts(layer: int) -> list[str]:
    return ["weight"] if layer % 3 == 0 else ["weight", "bias"]


def test_a_level_that_is_not_there() -> None:
    with pytest.raises(FedAlloyError, match=r"relaxed\(levels=\(3,\)\): cnn-bn has the levels 0 to 2; pick"):
        Lab(fedrcl(levels=(3,)), digits(), CNN)
    with pytest.raises(FedAlloyError, match="levels 0 to 0"):
        Lab(fedrcl(levels=(1,)), digits())


def test_a_net_without_activations_is_seen_at_its_features() -> None:
    lab = Lab(fedrcl(), digits(), "mlp(depth=0)", lr=0.05).rounds([0, 1])
    plain = Lab(fedrcl(w_s=0.0, w_p=0.0), digits(), "mlp(depth=0)", lr=0.05).rounds([0, 1])
    assert torch.equal(lab.weights, plain.weights)  # its features are the pixels: nothing to train
    assert lab.replies[0].loss > plain.replies[0].loss + 0.1


def test_the_gradient_is_clipped_last() -> None:
    """The optimiser gets min(1, limit / norm) of the whole gradient, other parts' pulls included."""
    method, inner, outer = probed(fedrcl(grad_clip=0.5))
    Lab(method, digits(), lr=0.05).round([0, 1])
    norms = [float(g.norm()) for g in inner.gradients]
    assert max(norms) > 1
    pulled = make("fedrcl(grad_clip=0.5)+prox(mu=100)")
    assert [type(p).__name__ for p in pulled.with_hook("gradient")] == ["Prox", "Clip"]
    for g, clipped in zip(inner.gradients, clips(inner.gradients, 0.5), strict=True):
        assert float(clipped.norm()) <= 0.5 + 1e-6
        assert F.cosine_similarity(g, clipped, dim=0).item() == pytest.approx(1, abs=1e-5)
    # each plain SGD step is lr times the clipped gradient
    moved = outer.points[0] - outer.points[1]
    assert far(moved, 0.05 * clips(inner.gradients, 0.5)[0]) < 1e-7
    free = Lab(fedrcl(grad_clip=1e6), digits(), lr=0.05).rounds([0, 1]).weights
    none = Lab(fedrcl(grad_clip=None), digits(), lr=0.05).rounds([0, 1]).weights
    assert torch.equal(free, none)  # a limit that is never reached changes no bit


def clips(gradients: list[Tensor], limit: float) -> list[Tensor]:
    return [g * min(1.0, limit / (float(g.norm()) + 1e-6)) for g in gradients]


def test_uniform_averaging() -> None:
    """The authors average without weights."""
    ends = {}
    for agg_weights in ("size", "uniform"):
        lab = Lab(make(f"fedrcl(agg_weights={agg_weights})"), digits(), lr=0.05).rounds([0, 1])
        models = torch.stack([lab.sent(k, "share.weights") for k in (0, 1)])
        p = torch.tensor(lab.sizes[:2]).float() if agg_weights == "size" else torch.ones(2)
        assert far(lab.weights, (p / p.sum()) @ models) < 1e-6
        ends[agg_weights] = lab.weights
    assert far(*ends.values()) > 1e-4


def test_one_class_clients_train() -> None:
    y = load("digits", None).y
    federation = dealt([torch.where(y[:300] == c)[0].tolist() for c in (0, 1)])
    for model in (MLP, CNN):
        lab = Lab(fedrcl(), federation, model, lr=0.05).rounds([0, 1], [0], [1])
        assert bool(torch.isfinite(lab.weights).all())


@pytest.mark.parametrize(
    "text", ["moon(proj_dim=12)+relaxed", "scaffold(c_update=option1)+relaxed", "fedrcl+prox(mu=0.1)"]
)
def test_other_parts_do_not_disturb_what_is_heard(text: str) -> None:
    """Frozen copies of the net run inside a step, and full gradients outside of one."""
    lab = Lab(make(text), digits(), CNN, lr=0.02).rounds(*PARTICIPANTS)
    host = Lab(make(text.replace("+relaxed", "").replace("fedrcl", "fedavg")), digits(), CNN, lr=0.02)
    assert far(lab.weights, host.rounds(*PARTICIPANTS).weights) > 1e-4

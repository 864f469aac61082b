"""FedSOL: where the gradient is taken, how far away that is, and that nothing of the perturbation stays."""

from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, _Probe, digits, double, far, probed, shards
from torch import Tensor, nn

from fedalloy.core.alloy import AlloyConflict, alloy
from fedalloy.core.net import Inputs, Net
from fedalloy.core.registry import make
from fedalloy.mechanisms.share import Share
from fedalloy.methods import fedavg, fedsol
from fedalloy.methods.fedsol import Perturbed, proximal, strength

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
Variant = Literal["adaptive", "fixed"]
VARIANTS: list[Variant] = ["adaptive", "fixed"]


def dropping(inputs: Inputs) -> Net:
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.Dropout(0.5))
    return Net(body, nn.Linear(16, inputs.classes))


def cumulative(inputs: Inputs) -> Net:
    """Its running statistics are plain means over the batches, so that every batch counts."""
    norm = nn.BatchNorm1d(16, momentum=None)
    return Net(nn.Sequential(nn.Flatten(), nn.Linear(64, 16), norm, nn.ReLU()), nn.Linear(16, inputs.classes))


OWN = [f"test_fedsol:{factory.__name__}" for factory in (dropping, cumulative)]


def perturbations(inner: _Probe, outer: _Probe) -> list[Tensor]:
    """eps of every step: where the gradient was taken, less where the step starts from."""
    return [there - here for there, here in zip(inner.points, outer.points, strict=True)]


@pytest.mark.parametrize("model", [MLP, BATCHNORM, *OWN])
@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("rho", [0.0, 1e-30])
def test_without_rho_it_is_fedavg(model: str, variant: Variant, rho: float) -> None:
    """Check 1: bit for bit, with BatchNorm too. A rho below rounding does all passes: they leave no trace."""
    labs = [
        Lab(method, digits(), model, lr=0.05, epochs=2, momentum=0.9)
        for method in (fedavg(), fedsol(rho=rho, variant=variant))
    ]
    for chosen in PARTICIPANTS:
        for lab in labs:
            lab.round(chosen)
        assert torch.equal(labs[0].weights, labs[1].weights)
        assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)


@pytest.mark.parametrize("model", [MLP, BATCHNORM, *OWN])
def test_the_first_step_of_a_round_is_that_of_fedavg(model: str) -> None:
    """Check 2: w = w_g, so Lambda = 0; the running statistics see the batch once."""
    labs = [Lab(method, digits(), model, lr=0.1, batch=10_000) for method in (fedavg(), fedsol(rho=2.0))]
    for chosen in PARTICIPANTS:
        for lab in labs:
            lab.round(chosen)
        assert torch.equal(labs[0].weights, labs[1].weights)
        assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)


@pytest.mark.parametrize("variant", VARIANTS)
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_nothing_of_the_perturbation_stays(model: str, variant: Variant) -> None:
    """Check 3: every step moves w by lr times the momentum of g, weight decay taken at w, not at w + eps."""
    lr, momentum, decay = 0.02, 0.9, 1e-2
    method, inner, outer = probed(fedsol(variant=variant))
    lab = Lab(method, shards(90), model, lr=lr, momentum=momentum, weight_decay=decay, epochs=3)
    w = lab.weights.clone()
    lab.round()
    assert max(float(epsilon.norm()) for epsilon in perturbations(inner, outer)) > 0.01
    velocity = torch.zeros_like(w)
    for g, point in zip(inner.gradients, outer.points, strict=True):
        assert far(point, w) < 1e-6
        velocity = momentum * velocity + g + decay * w
        w = w - lr * velocity
    assert far(lab.weights, w) < 1e-6


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("rho", [0.3, 1.0, 2.0])
def test_how_far_the_gradient_is_taken(model: str, rho: float) -> None:
    """Check 4: ||eps|| <= rho; of the fixed variant = rho, once there is something to forget."""
    found: dict[str, list[float]] = {}
    for variant in VARIANTS:
        method, inner, outer = probed(fedsol(rho=rho, variant=variant))
        Lab(method, digits(), model, lr=0.05, epochs=2).round([0, 1])
        found[variant] = [float(epsilon.norm()) for epsilon in perturbations(inner, outer)]
        assert max(found[variant]) <= rho * (1 + 1e-6)
    steps = len(found["fixed"])
    assert found["adaptive"].count(0.0) == 2  # the first step of each client
    lengths = [length for length in found["fixed"] if length]
    assert lengths == pytest.approx([rho] * len(lengths), rel=1e-5)
    # without BatchNorm the two models agree at a client's first step: what is left is noise, and is not followed
    assert len(lengths) == (steps if model == BATCHNORM else steps - 2)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_perturbation_by_hand(variant: Variant) -> None:
    """eps = rho Lambda g_p / (||g_p|| + 1e-12), with g_p by autograd from the definition of the divergence."""
    method, inner, outer = probed(fedsol(rho=0.7, variant=variant, temperature=2.0))
    lab = Lab(method, shards(40), lr=0.1, epochs=3, batch=10_000)
    start = lab.weights.clone()
    lab.round()
    data = lab.federation.client(0)
    x = data.prepare(data.x, None)  # a batch is all of the data; its order does not matter
    net, last = lab.replica.net, outer.points[-1]
    lab.replica.weights.load(start, lab.replica.initial_buffers)
    p = (net(x).logits / 2.0).softmax(1).detach()
    lab.replica.weights.load(last, lab.replica.initial_buffers)
    q = (net(x).logits / 2.0).softmax(1)
    loss = (p * (p / q).log()).sum()  # a sum, without T^2: only the direction counts
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    length = torch.cat([g.flatten() for g in gradients]).norm()
    moved = [
        a - b for a, b in zip(*(lab.replica.weights.views(w).values() for w in (last, start)), strict=True)
    ]
    expected = []
    for g, m in zip(gradients, moved, strict=True):
        columns = m.abs() / m.square().sum(0, keepdim=True).sqrt().clamp(min=1e-30)
        expected.append((0.7 * g / length * (columns if variant == "adaptive" else 1)).flatten())
    assert float(perturbations(inner, outer)[-1].norm()) > 0.01
    assert far(perturbations(inner, outer)[-1], torch.cat(expected)) < 1e-5


def test_the_gradient_is_that_of_the_task_loss_there() -> None:
    """Pitfall, not SAM: the ascent is on the proximal loss, the descent on cross-entropy."""
    method, inner, outer = probed(fedsol())
    lab = Lab(method, shards(40), lr=0.1, epochs=3, batch=10_000)
    lab.round()
    data = lab.federation.client(0)
    net = lab.replica.net
    lab.replica.weights.load(inner.points[-1], lab.replica.initial_buffers)
    loss = F.cross_entropy(net(data.prepare(data.x, None)).logits, data.y)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    assert far(outer.gradients[-1], torch.cat([g.flatten() for g in gradients])) < 1e-6


def test_strength_is_scaled_along_the_first_axis() -> None:
    """Pitfall: per (input, position) over the outputs, a bias vector as one group, a scalar alone; nothing global."""
    replica = Lab(make("fedetf"), digits(), "cnn-fedrda").replica
    draw = torch.Generator().manual_seed(0)
    moved = torch.randn(len(replica.initial), generator=draw)
    views = replica.weights.views(moved)
    views["body.0.weight"][:, 0, 2, 3] = 0
    scaled = replica.weights.views(strength(replica.weights, moved))
    for name, tensor in scaled.items():
        lengths = tensor.square().sum(0).sqrt() if tensor.dim() else tensor
        expected = torch.ones_like(lengths)
        if name == "body.0.weight":
            expected[0, 2, 3] = 0  # a group that has not moved stays where it is
        assert far(lengths, expected) < 1e-5
        assert bool((tensor >= 0).all())
        assert float(tensor.max()) <= 1 + 1e-6


@double()
def test_the_divergence() -> None:
    scores, known = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(0))
    p, q = (known / 3).softmax(1), (scores / 3).softmax(1)
    assert float(proximal(scores, known, 3.0)) == pytest.approx(float((p * (p / q).log()).sum() / 5))


@pytest.mark.parametrize(("head", "body"), [(True, False), (False, True), (False, False)])
def test_a_part_may_stay_where_it_is(head: bool, body: bool) -> None:
    flags = Perturbed(perturb_head=head, perturb_body=body)
    inner, outer = _Probe("inner"), _Probe("outer")
    moon = make("moon(mu=0, proj_dim=12)")  # its projector is a part of the body
    lab = Lab(alloy("part", inner, moon, flags, outer), digits(), lr=0.05, epochs=2)
    lab.round([0])
    span = lab.replica.weights.span("head")
    longest = max(perturbations(inner, outer), key=torch.Tensor.norm)
    rest = torch.cat([longest[: span.start], longest[span.stop :]])
    assert bool((longest[span] != 0).any()) == head
    assert bool((rest != 0).any()) == body
    projector = lab.replica.weights.span("neck")
    assert bool((longest[projector] != 0).any()) == body


def test_all_weights_come_back() -> None:
    """Pitfall: no tensor may stay perturbed; with a learning rate of 0 nothing moves, bit for bit."""
    for variant in VARIANTS:
        lab = Lab(fedsol(variant=variant), digits(), lr=0.0, momentum=0.9, epochs=2)
        start = lab.weights.clone()
        lab.round([0, 1])
        assert torch.equal(lab.weights, start)


@pytest.mark.parametrize("settings", [{"rho": 0.3}, {"variant": "fixed"}, {"temperature": 0.5}])
def test_settings_reach_the_gradient(settings: dict[str, Any]) -> None:
    labs = [Lab(fedsol(**chosen), digits(), lr=0.05, epochs=2).rounds([0, 1]) for chosen in ({}, settings)]
    assert far(labs[0].weights, labs[1].weights) > 1e-5


def test_the_global_model_looks_in_eval_mode() -> None:
    lab = Lab(fedsol(), digits(), BATCHNORM, lr=0.05, epochs=2)
    lab.round([0, 1])
    weights, buffers = lab.weights.clone(), lab.server.buffers.clone()
    known = lab.trained(0).states["perturbed"].scratch["global"]
    assert not known.net.training
    assert torch.equal(known.weights.flat, weights)
    assert torch.equal(known.weights.buffers, buffers)


def test_no_extra_bytes_and_nothing_kept() -> None:
    lab, plain = Lab(fedsol(), digits(), lr=0.1), Lab(fedavg(), digits(), lr=0.1)
    assert lab.round().bytes_up == plain.round().bytes_up
    assert lab.server.send(0).items.keys() == plain.server.send(0).items.keys()
    assert all(keep == {} for keep in lab.keeps.values())
    with pytest.raises(AlloyConflict, match="global model"):
        alloy("body", Share(part="body"), Perturbed())


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("variant", VARIANTS)
def test_less_is_forgotten(model: str, variant: Variant) -> None:
    """Check 5, behaviour: after local training the KL to the global model on a mixed batch is below FedAvg's."""
    forgotten = []
    for method in (fedavg(), fedsol(variant=variant)):
        lost = 0.0
        for seed in range(3):
            lab = Lab(method, digits(), model, seed=seed, lr=0.05, epochs=3, momentum=0.9)
            lab.round()
            client = lab.trained(0)
            x = client.data.prepare(lab.federation.dataset.x[:300], None)
            known = client.frozen(client.received, client.received_buffers)(x).logits
            lost += proximal(client.net(x).logits, known, 1.0).item()
        forgotten.append(lost)
    assert forgotten[1] < 0.8 * forgotten[0]

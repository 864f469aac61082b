"""MOON: the contrast, its references, and the model that a client remembers."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, digits, double, far, shards

from fedalloy.core.alloy import Alloy, alloy
from fedalloy.core.wire import Items
from fedalloy.mechanisms.share import Share
from fedalloy.methods import fedavg, moon
from fedalloy.methods.moon import Projector, contrast

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])


def enlarged(width: int) -> Alloy:
    """FedAvg on the same enlarged network."""
    return alloy("FedAvg", Share(), Projector(width))


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("mu", [0.0, 1e-30])
def test_without_mu_it_is_fedavg(model: str, mu: float) -> None:
    """Check: mu = 0 is FedAvg on the enlarged network bit for bit; so is a mu below rounding.

    The second does all reference passes: they must not touch random streams or buffers.
    """
    labs = [
        Lab(method, digits(), model, lr=0.05, epochs=2, momentum=0.9)
        for method in (enlarged(12), moon(mu=mu, proj_dim=12))
    ]
    for chosen in PARTICIPANTS:
        for lab in labs:
            lab.round(chosen)
        assert torch.equal(labs[0].weights, labs[1].weights)
        assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)


def test_the_contrast_works_from_the_second_participation_on() -> None:
    """First participation: no previous model, the term is skipped; then it changes the training."""
    labs = [Lab(method, digits(), lr=0.05) for method in (enlarged(12), moon(mu=5.0, proj_dim=12))]
    for lab in labs:
        lab.round([0, 1])
    assert torch.equal(labs[0].weights, labs[1].weights)
    for lab in labs:
        lab.round([0, 2])
    assert far(labs[0].sent(0, "share.weights"), labs[1].sent(0, "share.weights")) > 1e-4
    assert torch.equal(labs[0].sent(2, "share.weights"), labs[1].sent(2, "share.weights"))


@double()
def test_equal_references_cancel() -> None:
    """Check: prev = global: the loss is log 2 and its gradient with respect to z is 0 (below 1e-12)."""
    draw = torch.Generator().manual_seed(0)
    z = torch.randn(16, 8, generator=draw).requires_grad_()
    reference = torch.randn(16, 8, generator=draw)
    loss = contrast(z, [reference, reference.clone()], temperature=0.5)
    (gradient,) = torch.autograd.grad(loss, z)
    assert loss.item() == pytest.approx(math.log(2), abs=1e-12)
    assert float(gradient.abs().max()) < 1e-12


@double()
@pytest.mark.parametrize("temperature", [0.1, 0.5, 1.0])
def test_bounds(temperature: float) -> None:
    """Check: log(1 + e^(-2/T)) <= loss <= log(1 + e^(2/T)), reached by opposite references."""
    low, high = math.log1p(math.exp(-2 / temperature)), math.log1p(math.exp(2 / temperature))
    if temperature == 0.5:
        assert (low, high) == pytest.approx((0.01815, 4.01815), abs=1e-5)
    draw = torch.Generator().manual_seed(1)
    for _ in range(50):
        z, near, distant = torch.randn(3, 4, 6, generator=draw)
        assert low <= float(contrast(z, [near, distant], temperature)) <= high
    assert float(contrast(z, [z, -z], temperature)) == pytest.approx(low, rel=1e-9)
    assert float(contrast(z, [-z, z], temperature)) == pytest.approx(high, rel=1e-9)


def test_a_small_temperature_does_not_overflow() -> None:
    """Pitfall: naive exp and log overflow; a batch of one keeps its axis."""
    z = torch.ones(1, 4, requires_grad=True)
    loss = contrast(z, [-torch.ones(1, 4), torch.ones(1, 4)], temperature=1e-3)
    loss.backward()  # type: ignore[no-untyped-call]
    assert loss.item() == pytest.approx(2000)
    assert z.grad is not None
    assert bool(torch.isfinite(z.grad).all())


@double()
def test_several_previous_models_share_the_denominator() -> None:
    """-log(exp(s_g/T) / (exp(s_g/T) + sum_p exp(s_p/T))), batch mean."""
    z, near, first, second = torch.randn(4, 5, 3, generator=torch.Generator().manual_seed(2))
    s = [F.cosine_similarity(z, other, dim=1) / 0.5 for other in (near, first, second)]
    expected = -(s[0].exp() / (s[0].exp() + s[1].exp() + s[2].exp())).log().mean()
    assert float(contrast(z, [near, first, second], 0.5)) == pytest.approx(float(expected), rel=1e-12)


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_the_references_are_left_as_they_were(model: str) -> None:
    """Check: global and previous reference models (weights and buffers) are the same bytes after training."""
    lab = Lab(moon(buffer_size=2, proj_dim=12), digits(), model, lr=0.05, epochs=2)
    lab.rounds([0, 1], [0, 2])
    kept = {name: value.clone() for name, value in lab.keeps[0].items()}
    weights, buffers = lab.weights.clone(), lab.server.buffers.clone()
    client = lab.trained(0)
    memo = client.states["contrast"].scratch
    assert len(memo["prev"]) == 2
    expected = [
        (weights, buffers),
        *((kept[f"contrast.prev{i}"], kept[f"contrast.stats{i}"]) for i in (0, 1)),
    ]
    for net, (flat, statistics) in zip((memo["global"], *memo["prev"]), expected, strict=True):
        assert not net.net.training
        assert torch.equal(net.weights.flat, flat)
        assert torch.equal(net.weights.buffers, statistics)
    assert torch.equal(lab.weights, weights)
    assert torch.equal(lab.server.buffers, buffers)
    assert far(client.weights.flat, weights) > 1e-3


def test_the_previous_model_is_the_upload_and_is_not_sent_again() -> None:
    """Check: uploads contain no tensor of the previous model; prev after a round equals the uploaded w_k."""
    lab = Lab(moon(proj_dim=12), digits(), BATCHNORM, lr=0.05)
    for chosen in PARTICIPANTS:
        before = {k: dict(lab.keeps.get(k, {})) for k in chosen}
        lab.round(chosen)
        for k in chosen:
            assert lab.replies[k].items.keys() == {"share.weights", "share.buffers"}
            assert torch.equal(lab.keeps[k]["contrast.prev0"], lab.sent(k, "share.weights"))
            assert torch.equal(lab.keeps[k]["contrast.stats0"], lab.sent(k, "share.buffers"))
            assert far(lab.keeps[k]["contrast.prev0"], lab.weights) > 1e-4  # before aggregation
            if before[k]:
                assert far(lab.sent(k, "share.weights"), before[k]["contrast.prev0"]) > 0


@pytest.mark.parametrize("size", [1, 2, 3])
def test_first_in_first_out(size: int) -> None:
    lab = Lab(moon(buffer_size=size, proj_dim=12), digits(), lr=0.05)
    ends: list[torch.Tensor] = []
    for _ in range(4):
        lab.round([0, 1])
        ends.insert(0, lab.sent(0, "share.weights").clone())
        kept: Items = lab.keeps[0]
        expected = ends[:size]
        assert [name for name in sorted(kept) if "prev" in name] == [
            f"contrast.prev{i}" for i in range(len(expected))
        ]
        assert all(torch.equal(kept[f"contrast.prev{i}"], end) for i, end in enumerate(expected))


def test_a_longer_memory_is_used() -> None:
    ends = []
    for size in (1, 2):
        lab = Lab(moon(buffer_size=size, proj_dim=12), digits(), lr=0.05)
        lab.rounds([0], [0], [0])
        ends.append(lab.weights)
    assert far(*ends) > 1e-5


def test_minimising_the_contrast_moves_towards_the_global_model() -> None:
    """Check, behaviour: 20 steps on the contrast alone raise mean s(z, z_g) and lower mean s(z, z_p)."""
    lab = Lab(moon(proj_dim=12), digits(), lr=0.1, epochs=3)
    lab.rounds([0, 1, 2], [0, 1, 2])
    client = lab.trained(0)
    memo = client.states["contrast"].scratch
    x = client.data.prepare(client.data.x[:32], None)
    near, distant = (net(x).embedding for net in (memo["global"], memo["prev"][0]))
    client.weights.load(client.replica.initial, client.replica.initial_buffers)

    def similarities() -> tuple[float, float]:
        z = client.net(x).embedding
        return F.cosine_similarity(z, near).mean().item(), F.cosine_similarity(z, distant).mean().item()

    before = similarities()
    optimiser = torch.optim.SGD(client.net.parameters(), lr=0.1)
    for _ in range(20):
        optimiser.zero_grad(set_to_none=False)
        contrast(client.net(x).embedding, [near, distant], 0.5).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    after = similarities()
    assert after[0] > before[0]
    assert after[1] < before[1]


def test_the_projection_head_is_part_of_the_model() -> None:
    """d grows by f f + f + f o + o, and the classifier is o C + C instead of f C + C."""
    f, o, classes = 16, 12, 10
    lab, plain = Lab(moon(proj_dim=o), digits(), lr=0.05), Lab(fedavg(), digits(), lr=0.05)
    extra = f * f + f + f * o + o + (o * classes + classes) - (f * classes + classes)
    assert lab.weights.numel() == plain.weights.numel() + extra
    d = lab.weights.numel()
    assert sum(lab.round([0, 1]).bytes_up.values()) == 2 * (4 * d + 8)
    body = plain.replica.weights.span("body")
    assert torch.equal(
        lab.replica.initial[body], plain.replica.initial[body]
    )  # surgery leaves the body's draw alone


def test_penultimate_adds_no_weights() -> None:
    """projection="penultimate": the existing last hidden layer is contrasted; mu = 0 is FedAvg on the plain net."""
    labs: list[Lab] = [
        Lab(method, digits(), lr=0.05)
        for method in (fedavg(), moon(mu=0, projection="penultimate"), moon(mu=5, projection="penultimate"))
    ]
    for lab in labs:
        lab.rounds([0, 1], [0, 1])
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert labs[2].weights.numel() == labs[0].weights.numel()
    assert far(labs[0].weights, labs[2].weights) > 1e-4


@pytest.mark.parametrize("settings", [{"mu": 1.0}, {"temperature": 2.0}])
def test_settings_reach_the_loss(settings: dict[str, Any]) -> None:
    labs = [Lab(moon(proj_dim=12, **chosen), digits(), lr=0.05) for chosen in ({}, settings)]
    for lab in labs:
        lab.rounds([0, 1], [0, 1])
    assert far(labs[0].weights, labs[1].weights) > 1e-5


def test_a_last_batch_of_one_keeps_its_axis() -> None:
    """Pitfall: squeeze() on the features of a single sample."""
    lab = Lab(moon(proj_dim=12), shards(33), lr=0.05, batch=32)
    lab.rounds([0], [0])
    assert lab.replies[0].steps == 2

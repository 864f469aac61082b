"""Flat weights: the same bits as the ordinary optimiser, parts as spans, buffers as views."""

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from fedalloy import models
from fedalloy.core.net import Inputs, Net
from fedalloy.core.random import generator
from fedalloy.core.training import Local
from fedalloy.core.weights import Layout, Weights
from fedalloy.errors import FedAlloyError

DIGITS = Inputs("image", (1, 8, 8), classes=10)
OPTIMISERS = {
    "sgd": Local(lr=0.1),
    "momentum": Local(lr=0.1, momentum=0.9),
    "momentum and decay": Local(lr=0.1, momentum=0.9, weight_decay=0.01),
    "adam": Local(lr=0.01, optimizer="adam"),
    "adam and decay": Local(lr=0.01, optimizer="adam", weight_decay=0.01),
    "adamw": Local(lr=0.01, optimizer="adamw", weight_decay=0.01),
}


def built(model: str) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.build(model, DIGITS)


def batches(count: int) -> Iterator[tuple[Tensor, Tensor]]:
    dice = generator("test batches")
    for _ in range(count):
        yield torch.randn(16, 1, 8, 8, generator=dice), torch.randint(10, (16,), generator=dice)


def ordinary(local: Local, net: nn.Module) -> torch.optim.Optimizer:
    """What a plain loop would use: one tensor per parameter, torch's default implementation."""
    if local.optimizer == "sgd":
        return torch.optim.SGD(net.parameters(), local.lr, local.momentum, weight_decay=local.weight_decay)
    kind = torch.optim.Adam if local.optimizer == "adam" else torch.optim.AdamW
    return kind(net.parameters(), lr=local.lr, weight_decay=local.weight_decay)


def backward(net: nn.Module, x: Tensor, y: Tensor) -> None:
    F.cross_entropy(net(x).logits, y).backward()  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("model", ["mlp(hidden=8, norm=batch)", "lenet", "cnn-bn"])
@pytest.mark.parametrize("local", OPTIMISERS.values(), ids=OPTIMISERS)
def test_flat_steps_are_bitwise_those_of_the_ordinary_optimiser(local: Local, model: str) -> None:
    plain = built(model).train()
    flat_net = copy.deepcopy(plain)
    weights = Weights(flat_net)
    optimiser, leaf = ordinary(local, plain), weights.flat.detach()
    flat_optimiser = local.optimiser(leaf, local.lr)
    start = weights.flat.clone()
    for x, y in batches(4):
        optimiser.zero_grad()
        backward(plain, x, y)
        optimiser.step()
        weights.grad.zero_()
        backward(flat_net, x, y)
        flat_optimiser(weights.grad)
    for (name, expected), (_, found) in zip(
        plain.state_dict().items(), flat_net.state_dict().items(), strict=True
    ):
        assert torch.equal(expected, found), name
    assert torch.equal(weights.flat, torch.cat([p.detach().flatten() for p in plain.parameters()]))
    assert not torch.equal(weights.flat, start)


def test_parameters_and_gradients_are_views() -> None:
    net = built("mlp(hidden=8)")
    weights = Weights(net)
    with torch.no_grad():
        weights.flat.zero_()
        weights.grad.fill_(2.0)
    for parameter in net.parameters():
        assert not parameter.any()
        assert parameter.grad is not None
        assert bool((parameter.grad == 2).all())
    backward(net, torch.ones(2, 1, 8, 8), torch.tensor([0, 1]))
    assert not bool(
        (weights.grad == 2).all()
    )  # backward adds into the flat vector, it never replaces the views


def test_construction_keeps_the_values() -> None:
    net = built("cnn-bn")
    before = {name: value.clone() for name, value in net.state_dict().items()}
    Weights(net)
    for name, value in net.state_dict().items():
        assert torch.equal(value, before[name]), name


class WithAuxiliary(nn.Module):
    """A main model and an auxiliary one, each body -> neck -> head."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        self.neck = nn.Linear(3, 3)
        self.head = nn.Linear(3, 2)
        self.aux = nn.Sequential(nn.Linear(4, 2), nn.BatchNorm1d(2))


def test_spans_of_parts() -> None:
    weights = Weights(WithAuxiliary())
    body, neck, head, aux = 4 * 3 + 3 + 6, 3 * 3 + 3, 3 * 2 + 2, 4 * 2 + 2 + 4
    assert weights.span("body") == slice(0, body)
    assert weights.span("neck") == slice(body, body + neck)
    assert weights.span("head") == slice(body + neck, body + neck + head)
    assert weights.span("main") == slice(0, body + neck + head)
    assert weights.span("aux") == slice(body + neck + head, body + neck + head + aux)
    assert weights.span("") == slice(0, len(weights.flat))
    assert weights.buffer_span("main") == slice(0, 6)
    assert weights.buffer_span("aux") == slice(6, 10)
    assert weights.buffer_span("head") == slice(0, 0)
    assert weights.span("nothing") == slice(0, 0)
    assert len(weights.zeros("neck")) == neck
    assert not weights.zeros().any()


def test_a_colon_cuts_the_layers_of_the_model() -> None:
    """Layers are modules with parameters, in order; neither the auxiliary model nor an addition counts."""
    net = WithAuxiliary()
    net.compact = nn.Linear(3, 2)
    weights = Weights(net)
    linear, norm, neck, head = 15, 6, 12, 8
    whole = linear + norm + neck + head
    for part, start, stop in (
        (":-1", 0, whole - head),
        ("-1:", whole - head, whole),
        (":-2", 0, linear + norm),
        ("-3:", linear, whole),
        ("1:-1", linear, linear + norm + neck),
        (":", 0, whole),
        (":-4", 0, 0),
        (":-99", 0, 0),
        ("-99:", 0, whole),
    ):
        assert weights.span(part) == slice(start, stop), part
    assert weights.buffer_span(":-2") == slice(0, 6)  # a BatchNorm layer takes its statistics along
    assert weights.buffer_span(":-3") == slice(0, 0)
    assert weights.buffer_span("-3:") == slice(0, 6)


def test_statistics_without_weights_go_with_the_layer_before() -> None:
    body = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3, affine=False), nn.Linear(3, 3))
    weights = Weights(Net(body, nn.Linear(3, 2)))
    assert weights.buffer_span(":-2") == slice(0, 6)
    assert weights.buffer_span(":-3") == slice(0, 0)
    assert weights.span(":-2") == slice(0, 15)


@pytest.mark.parametrize("part", ["a:", ":b", "1:2:3", "1.5:"])
def test_a_cut_that_cannot_be_read(part: str) -> None:
    with pytest.raises(FedAlloyError, match="cannot read the part"):
        Weights(WithAuxiliary()).span(part)


def test_a_part_is_a_name_not_a_prefix_of_one() -> None:
    layout = Layout.of([("body.weight", torch.zeros(2)), ("body2.weight", torch.zeros(3))])
    assert layout.span("body") == slice(0, 2)


def test_main_is_all_there_is_without_an_auxiliary_model() -> None:
    weights = Weights(built("mlp(hidden=8, norm=batch)"))
    assert weights.span("main") == weights.span("") == slice(0, len(weights.flat))


@given(st.dictionaries(st.sampled_from("abcdefgh"), st.lists(st.integers(0, 3), max_size=3), max_size=6))
def test_layout_tiles_the_vector(shapes: dict[str, list[int]]) -> None:
    tensors = {name: torch.randn(shape) for name, shape in shapes.items()}
    layout = Layout.of(tensors.items())
    flat = torch.cat([tensor.flatten() for tensor in tensors.values()] or [torch.empty(0)])
    assert layout.size == len(flat)
    views = layout.views(flat)
    assert list(views) == list(tensors)
    for name, tensor in tensors.items():
        assert torch.equal(views[name], tensor)
        assert views[name].shape == tensor.shape


class WithConstants(nn.Module):
    """One buffer of each kind: state, a constant, a counter."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("mean", torch.ones(2))
        self.register_buffer("simplex", torch.full((3,), 7.0), persistent=False)
        self.register_buffer("seen", torch.tensor(5))


def test_buffers_are_views_and_constants_are_not_state() -> None:
    net = WithConstants()
    weights = Weights(net)
    assert list(weights.buffer_layout.spans) == ["mean"]
    weights.buffers.fill_(3.0)
    assert net.get_buffer("mean").tolist() == [3.0, 3.0]
    assert net.get_buffer("simplex").tolist() == [7.0] * 3
    assert len(weights.counters) == 1


def test_batch_norm_updates_the_flat_buffers() -> None:
    net = built("mlp(hidden=8, norm=batch)").train()
    weights = Weights(net)
    before = weights.buffers.clone()
    net(torch.randn(4, 1, 8, 8))
    assert not torch.equal(weights.buffers, before)


def test_load_copies_and_resets_counters() -> None:
    net = WithConstants()
    weights = Weights(net)
    flat, buffers = torch.full((6,), 2.0), torch.full((2,), 4.0)
    weights.load(flat, buffers)
    assert int(net.get_buffer("seen")) == 0
    flat.zero_()
    buffers.zero_()
    assert weights.flat.tolist() == [2.0] * 6
    assert net.get_buffer("mean").tolist() == [4.0] * 2


def test_a_net_without_buffers_or_parameters_is_fine() -> None:
    weights = Weights(nn.Identity())
    assert len(weights.flat) == len(weights.buffers) == 0
    weights.load(torch.empty(0), torch.empty(0))

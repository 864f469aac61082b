"""Levels: where a net is listened to, and that listening changes nothing."""

import copy

import pytest
import torch
from torch import Tensor, nn

from fedalloy import models
from fedalloy.core.measure import samples
from fedalloy.core.net import Inputs, Net
from fedalloy.mechanisms.levels import Levels, depths, pooled

IMAGES = Inputs("image", (3, 32, 32), classes=5)
SMALL = Inputs("image", (1, 8, 8), classes=5)


def built(model: str, inputs: Inputs = SMALL) -> Net:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return models.build(model, inputs)


@pytest.mark.parametrize(
    ("model", "channels"),
    [
        ("resnet18(width=0.25)", [16, 16, 32, 64, 128]),  # the stem and four stages
        (
            "resnet50(width=0.25)",
            [16, 64, 128, 256, 512],
        ),  # a block's last activation, not the next one's first
        ("resnet110", [16, 16, 32, 64]),
        ("mlp(hidden=6)", [6]),
        ("mlp(hidden=6, depth=3)", [6, 6]),  # the first and the last
        ("mlp(depth=0)", []),
        ("cnn-bn", [32, 64, 128]),
        ("cnn-feddw", [16, 32, 128]),
        ("efficientnet-b0", [32, 96, 144, 240, 672, 1280]),  # without the gates
        ("densenet(growth=8)", [16, 64, 128, 256, 256]),
        ("vit-tiny", [768, 768]),
    ],
)
def test_levels_of_the_zoo(model: str, channels: list[int]) -> None:
    net = built(model, IMAGES)
    levels = Levels(net, IMAGES)
    net(samples(IMAGES, 2))
    assert [z.shape for z in levels.pooled] == [(2, width) for width in channels]


def test_levels_of_text() -> None:
    inputs = Inputs("tokens", (7,), classes=2, vocab=9)
    assert depths(built("bilstm(embed=4, hidden=4)", inputs), inputs) == [0, 1]


def test_resnet_stages_are_heard_before_their_last_relu() -> None:
    """By hand: stem, then pairs of blocks; the pooled sum of branch and shortcut, negative values included."""
    net = built("resnet18(width=0.25)").eval()
    levels, x = Levels(net, SMALL), samples(SMALL, 3)
    net(x)
    stem, *rest = list(net.body.children())[:-1]
    assert isinstance(stem, nn.Sequential)
    before = stem[:-1](x)
    found = [before.mean((2, 3))]
    for number, block in enumerate(rest, start=1):
        out = before.relu()
        before = block.get_submodule("branch")(out) + block.get_submodule("shortcut")(out)
        if number % 2 == 0:
            found.append(before.mean((2, 3)))
    assert len(levels.pooled) == 5
    for heard, by_hand in zip(levels.pooled, found, strict=True):
        assert torch.allclose(heard, by_hand, atol=1e-4)
        assert bool((heard < 0).any())


@pytest.mark.parametrize("model", ["resnet18(width=0.25)", "cnn-bn", "mlp(hidden=6, norm=batch)"])
def test_listening_changes_nothing(model: str) -> None:
    """Output, gradient, running statistics, training mode: all as without."""
    plain, heard = built(model), built(model)
    levels = Levels(heard, SMALL)
    assert heard.training
    x = samples(SMALL, 4)
    outs = [net(x).logits for net in (plain, heard)]
    assert torch.equal(*outs)
    for out in outs:
        out.square().sum().backward()
    for p, q in zip(plain.parameters(), heard.parameters(), strict=True):
        assert p.grad is not None
        assert q.grad is not None
        assert torch.equal(p.grad, q.grad)
    for a, b in zip(plain.buffers(), heard.buffers(), strict=True):
        assert torch.equal(a, b)
    assert levels.pooled


def test_gradient_flows_back_from_a_level() -> None:
    net = built("cnn-bn")
    levels = Levels(net, SMALL)
    net(samples(SMALL, 4))
    levels.pooled[0].square().sum().backward()  # type: ignore[no-untyped-call]
    moved = [name for name, p in net.named_parameters() if p.grad is not None and bool(p.grad.any())]
    assert moved == ["body.0.weight", "body.1.weight", "body.1.bias"]


def test_only_the_latest_pass_with_gradient_of_the_net_itself_is_heard() -> None:
    net = built("cnn-bn")
    levels = Levels(net, SMALL)
    twin = copy.deepcopy(net)
    net(samples(SMALL, 4))
    first = list(levels.pooled)
    assert len(first) == 3
    twin(samples(SMALL, 2))
    with torch.no_grad():
        net(samples(SMALL, 2))
    assert all(a is b for a, b in zip(first, levels.pooled, strict=True))
    copy.deepcopy(net)  # also with a graph at hand
    net(samples(SMALL, 5))
    assert [len(z) for z in levels.pooled] == [5, 5, 5]


class Reused(nn.Module):
    """One activation module, called twice; a layer without one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 4, 3), nn.Conv2d(4, 6, 3, stride=2)
        self.relu = nn.ReLU(inplace=True)
        self.head = nn.Linear(6, 5)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.head(self.relu(self.second(self.relu(self.first(x)))).mean((2, 3)))
        return out


def test_a_module_that_is_called_twice() -> None:
    net = models.adopt(Reused(), SMALL)
    levels = Levels(net, SMALL)
    net(samples(SMALL, 2))
    assert [tuple(z.shape) for z in levels.pooled] == [(2, 4), (2, 6)]


def test_pooling() -> None:
    maps, words, vectors = torch.randn(2, 3, 4, 5), torch.randn(2, 7, 3), torch.randn(2, 3)
    assert torch.allclose(pooled(maps), maps.mean((2, 3)))
    assert torch.equal(pooled(words), words.mean(1))
    assert torch.equal(pooled(vectors), vectors)


def test_vectors_are_heard_before_an_activation_in_place() -> None:
    net = built("mlp(hidden=6)")
    levels, x = Levels(net, SMALL), samples(SMALL, 4)
    out = net(x)
    assert torch.equal(levels.pooled[0].relu(), out.features)
    assert bool((levels.pooled[0] < 0).any())

"""A perceptron's gradient written out: the bits of autograd, and only where nothing else is asked for."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedalloy.core import registry
from fedalloy.core.net import Inputs, Net, Outputs
from fedalloy.data.federation import federate
from fedalloy.experiment.run import train
from fedalloy.models import build
from fedalloy.models.adopt import adopt
from fedalloy.models.chain import Layer, chain, descend
from fedalloy.round.replica import Replica

PIXELS = Inputs("image", (1, 8, 8), classes=10)


@pytest.mark.parametrize("batch", [1, 3, 32, 64])
@pytest.mark.parametrize(
    "model", ["mlp(depth=0)", "mlp", "mlp(hidden=200, depth=2)", "mlp(hidden=7, depth=4)"]
)
def test_the_bits_of_autograd(model: str, batch: int) -> None:
    draw = torch.Generator().manual_seed(batch)
    x, y = torch.randn(batch, 1, 8, 8, generator=draw), torch.randint(10, (batch,), generator=draw)
    net = build(model, PIXELS)
    out = net(x)
    loss = F.cross_entropy(out.logits, y)
    expected = torch.autograd.grad(loss, list(net.parameters()))
    ready(net)
    found, value = descend(chain(net), x, y)
    assert torch.equal(value, loss.detach())
    for mine, theirs in zip(found, out, strict=True):
        assert torch.equal(mine, theirs.detach())
    for parameter, gradient in zip(net.parameters(), expected, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, gradient)


def ready(net: Net) -> Net:
    for parameter in net.parameters():
        parameter.grad = torch.full_like(parameter, torch.nan)
    return net


def hooked() -> Net:
    net = build("mlp", PIXELS)
    net.body.register_forward_hook(lambda *_: None)
    return net


def necked() -> Net:
    net = build("mlp", PIXELS)
    net.neck = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    return net


def biasless() -> Net:
    net = build("mlp", PIXELS)
    net.head = nn.Linear(64, 10, bias=False)
    return net


class Doubled(nn.Sequential):
    """Made of the same parts, and yet another function of its input."""

    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x
        for part in self:
            x = part(x)
        return x


def other_body() -> Net:
    """A user's own class: its forward once was passed over in training, without a word."""
    return adopt(Doubled(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Linear(8, 10)), PIXELS)


def other_forward() -> Net:
    net = build("mlp", PIXELS)
    net.body.forward = lambda x: x.flatten(1)[:, :64]
    return net


@pytest.mark.parametrize("net", [hooked(), necked(), biasless(), other_body(), other_forward()])
def test_other_nets_are_left_to_autograd(net: Net) -> None:
    assert chain(ready(net)) == ()


@pytest.mark.parametrize("model", ["mlp(norm=batch)", "lenet", "cnn", "cnn-bn"])
def test_other_models_too(model: str) -> None:
    assert chain(ready(build(model, Inputs("image", (1, 28, 28), classes=10)))) == ()


def test_no_chain_for_other_precisions_or_methods_with_another_head() -> None:
    fedavg = registry.make("fedavg")
    assert len(Replica(fedavg, "mlp", PIXELS, seed=0).chain) == 2
    assert Replica(fedavg, "mlp", PIXELS, seed=0, precision="bf16").chain == ()
    assert Replica(registry.make("fedetf"), "mlp", PIXELS, seed=0).chain == ()
    assert Replica(registry.make("fml"), "mlp", PIXELS, seed=0).chain == ()


@pytest.mark.parametrize(
    "method", ["fedavg", "scaffold", "fedprox(mu=0.1)", "fedrep", "fedbabu", "ditto", "perfedavg"]
)
def test_runs_end_with_the_same_bits(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With and without it, frozen parts and second orders included."""
    fed = federate("digits", clients=5, skew="dirichlet:0.5", seed=0)
    settings: dict[str, Any] = {"rounds": 2, "lr": 0.1, "momentum": 0.9, "epochs": 2, "engine": "inline"}
    quick = train(fed, "mlp(hidden=16, depth=2)", method, **settings)
    monkeypatch.setattr("fedalloy.round.replica.chain", lambda net: ())
    slow = train(fed, "mlp(hidden=16, depth=2)", method, **settings)
    for key in ("weights_sha256", "private_sha256"):
        assert quick.summary[key] == slow.summary[key]
    assert [line["metrics"] for line in quick.history] == [line["metrics"] for line in slow.history]


def test_it_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the test above proves nothing: every step of FedAvg, no step of a frozen part."""
    fed = federate("digits", clients=2, skew="iid", seed=0)
    steps: list[int] = []

    def counted(layers: Sequence[Layer], x: Tensor, y: Tensor) -> tuple[Outputs, Tensor]:
        steps.append(len(y))
        return descend(layers, x, y)

    monkeypatch.setattr("fedalloy.round.client.descend", counted)
    result = train(fed, "mlp", "fedavg", rounds=2, engine="inline")
    assert len(steps) == sum(line["steps"] for line in result.history) > 50
    steps.clear()
    train(fed, "mlp", "fedrep", rounds=1, engine="inline")
    assert not steps

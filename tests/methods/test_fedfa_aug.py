"""FedFA-aug: the jitter by hand, where it sits, and the variances between clients."""

import pytest
import torch
from laboratory import MLP, Lab, digits, double, far, shards
from torch import Tensor, nn

from fedalloy import models
from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.imports import Imports
from fedalloy.core.net import Inputs, Net
from fedalloy.core.random import seeded
from fedalloy.core.registry import make
from fedalloy.errors import FedAlloyError, FedAlloyWarning
from fedalloy.methods import fedavg, fedfa_aug
from fedalloy.methods.fedfa_aug import EPS, Jitter, layers, stages
from fedalloy.round.replica import Replica

CNN = "cnn-fedrda"
PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
IMAGES = Inputs("image", (3, 32, 32), 10)


def dropping(inputs: Inputs) -> Net:
    maps = nn.Sequential(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Dropout(0.5))
    return Net(maps, nn.Linear(144, inputs.classes))


class Own(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.maps, self.out = nn.Conv2d(1, 2, 3), nn.Linear(72, 10)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.out(self.maps(x).flatten(1))
        return logits


class Doubled(nn.Sequential):
    def forward(self, x: Tensor) -> Tensor:
        x = 2 * x
        for part in self:
            x = part(x)
        return x


def doubled(inputs: Inputs) -> nn.Module:
    return Doubled(nn.Conv2d(1, 4, 3), nn.ReLU(), nn.Flatten(), nn.Linear(144, inputs.classes))


def maps(batch: int = 6, channels: int = 4, side: int = 5, seed: int = 0) -> Tensor:
    draw = torch.Generator().manual_seed(seed)
    shape = (batch, channels, side, side)
    scale = 1 + 3 * torch.rand(batch, channels, 1, 1, generator=draw)
    return torch.randn(shape, generator=draw) * scale + 5 * torch.randn(batch, channels, 1, 1, generator=draw)


def jittered(x: Tensor, layer: Jitter, seed: int = 1) -> Tensor:
    with seeded(seed):
        out: Tensor = layer(x)
    return out


@double()
def test_the_formula_by_hand() -> None:
    """x' = (sigma + e_s sqrt((1 + gamma_s) v_s)) (x - mu) / sigma + mu + e_m sqrt((1 + gamma_m) v_m)."""
    x = maps()
    layer = Jitter(4, prob=1.0, momentum=0.99)
    layer.variances.copy_(torch.tensor([[0.5, 2.0, 0.1, 1.0], [3.0, 0.2, 0.7, 0.0]]))
    found = jittered(x, layer)
    with seeded(1):
        torch.rand(())
        e_m, e_s = torch.randn(2, 6, 4)
    for c in range(4):
        mu = x[:, c].mean((1, 2))
        sigma = (x[:, c].var((1, 2), correction=0) + 1e-6).sqrt()
        spread = []
        for row, values in enumerate((mu, sigma)):
            w = [1 / (1 + 1 / (float(v) + 1e-6)) for v in layer.variances[row]]
            gamma = 4 * w[c] / sum(w)
            spread.append(((1 + gamma) * (values.var() + 1e-6)).sqrt())
        for i in range(6):
            normal = (x[i, c] - mu[i]) / sigma[i]
            expected = (sigma[i] + e_s[i, c] * spread[1]) * normal + mu[i] + e_m[i, c] * spread[0]
            assert far(found[i, c], expected) < 1e-10


def test_it_is_there_in_training_only() -> None:
    x, layer = maps(), Jitter(4, prob=1.0, momentum=0.9)
    before = layer.statistics.clone()
    assert layer.eval()(x) is x
    assert torch.equal(layer.statistics, before)
    assert torch.equal(layer.train()(x[:1]), x[:1])  # one sample has no variance over the batch
    assert torch.equal(layer.statistics, before)
    assert far(layer(x), x) > 0.1


def test_its_probability() -> None:
    x, layer = maps(), Jitter(4, prob=0.3, momentum=0.9)
    hits = sum(not torch.equal(jittered(x, layer, seed), x) for seed in range(300))
    assert 60 < hits < 120


def test_running_statistics() -> None:
    """momentum old + (1 - momentum) batch mean, of mu and sigma; from 0 and 1; only where the jitter is applied."""
    x, layer = maps(), Jitter(4, prob=1.0, momentum=0.9)
    assert torch.equal(layer.statistics, torch.stack([torch.zeros(4), torch.ones(4)]))
    assert torch.equal(layer.variances, torch.ones(2, 4))
    expected = layer.statistics.clone()
    for _ in range(3):
        layer(x)
        sigma = (x.var((2, 3), correction=0) + EPS).sqrt()
        expected = 0.9 * expected + 0.1 * torch.stack([x.mean((0, 2, 3)), sigma.mean(0)])
    assert far(layer.statistics, expected) < 1e-5
    assert torch.equal(layer.variances, torch.ones(2, 4))


@pytest.mark.parametrize("x", [maps(side=1), torch.zeros(6, 4, 5, 5)], ids=["one pixel", "dead"])
def test_maps_without_deviation(x: Tensor) -> None:
    layer = Jitter(4, prob=1.0, momentum=0.9)
    x = x.clone().requires_grad_()
    out = layer(x)
    out.square().sum().backward()
    assert bool(torch.isfinite(out).all())
    assert x.grad is not None
    assert bool(torch.isfinite(x.grad).all())


@pytest.mark.parametrize(
    ("model", "channels"),
    [
        ("cnn", [32, 64]),
        ("cnn-bn", [32, 64, 128]),
        ("lenet", [6, 16]),
        ("vgg11", [64, 128, 256, 512, 512]),
        ("resnet18", [64, 128, 256, 512]),
    ],
)
def test_one_for_every_stage(model: str, channels: list[int]) -> None:
    replica = Replica(fedfa_aug(), model, IMAGES, seed=0, imports=Imports())
    found = [replica.net.get_submodule(name) for name in layers(replica.net)]
    assert [module.variances.shape[1] for module in found if isinstance(module, Jitter)] == channels
    plain = Replica(fedavg(), model, IMAGES, seed=0, imports=Imports())
    assert torch.equal(replica.initial, plain.initial)
    assert len(replica.initial_buffers) == len(plain.initial_buffers) + 4 * sum(channels)
    body = models.build(model, IMAGES).body
    assert isinstance(body, nn.Sequential)
    for place in stages(body, IMAGES):  # pooling and activation belong to a stage, the global mean does not
        assert not isinstance(body[place], nn.AdaptiveAvgPool2d)
        if model != "resnet18":
            assert isinstance(body[place + 1], (nn.Conv2d, nn.Flatten, nn.AdaptiveAvgPool2d))
    assert body.training


@pytest.mark.parametrize("model", [CNN, "cnn-bn", "test_fedfa_aug:dropping"])
def test_without_probability_it_is_fedavg(model: str) -> None:
    labs = [Lab(method, digits(), model, lr=0.05) for method in (fedavg(), fedfa_aug(prob=0), fedfa_aug())]
    for lab in labs:
        lab.rounds(*PARTICIPANTS)
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)
    assert far(labs[0].weights, labs[2].weights) > 1e-4


def test_a_probability_below_any_draw_changes_no_weight() -> None:
    labs = [Lab(method, digits(), CNN, lr=0.05) for method in (fedavg(), fedfa_aug(prob=1e-30))]
    for lab in labs:
        lab.rounds(*PARTICIPANTS)
    assert torch.equal(labs[0].weights, labs[1].weights)


@pytest.mark.parametrize("per_channel", [True, False])
def test_variances_between_clients(per_channel: bool) -> None:
    """V: of the participants' running statistics, channel by channel; the authors' code takes one over all."""
    lab = Lab(fedfa_aug(per_channel=per_channel), digits(), CNN, lr=0.05)
    layout = lab.replica.weights.buffer_layout
    for chosen in PARTICIPANTS:
        lab.round(chosen)
        views = layout.views(lab.server.buffers)
        for name in layers(lab.replica.net):
            sent = torch.stack(
                [layout.views(lab.sent(k, "share.buffers"))[f"{name}.statistics"] for k in chosen]
            )
            for row in (0, 1):
                expected = sent[:, row].var(0) if per_channel else sent[:, row].var()
                assert far(views[f"{name}.variances"][row], expected) < 1e-7
            sizes = torch.tensor([lab.sizes[k] for k in chosen])[:, None, None]
            assert far(views[f"{name}.statistics"], (sizes * sent).sum(0) / sizes.sum()) < 1e-6


def test_clients_use_what_the_server_sent_and_do_not_change_it() -> None:
    lab = Lab(fedfa_aug(prob=1.0), digits(), CNN, lr=0.05)
    lab.round([0, 1])
    (name, *_), layout = layers(lab.replica.net), lab.replica.weights.buffer_layout
    shared = layout.views(lab.server.buffers)[f"{name}.variances"].clone()
    lab.round([2])
    assert torch.equal(layout.views(lab.sent(2, "share.buffers"))[f"{name}.variances"], shared)
    assert torch.equal(layout.views(lab.server.buffers)[f"{name}.variances"], shared)  # one client: it stays


def test_settings_reach_the_training() -> None:
    methods = (fedfa_aug(), fedfa_aug(prob=0.9), fedfa_aug(momentum=0.5), fedfa_aug(per_channel=False))
    labs = [Lab(method, digits(), CNN, lr=0.05).rounds([0, 1], [0, 1]) for method in methods]
    for lab in labs[1:]:
        assert far(labs[0].weights, lab.weights) > 1e-6


def test_nothing_but_buffers_travels() -> None:
    lab, plain = Lab(fedfa_aug(), shards(40, 30), CNN, lr=0.05), Lab(fedavg(), shards(40, 30), CNN, lr=0.05)
    extra = lab.round().bytes_up["share.buffers"] - plain.round().bytes_up["share.buffers"]
    assert extra == 2 * 4 * 4 * (6 + 16)  # clients, bytes, vectors, channels
    assert all(keep == {} for keep in lab.keeps.values())


def test_what_it_cannot_do() -> None:
    with pytest.warns(FedAlloyWarning, match="no feature maps"):
        Lab(fedfa_aug(), digits(), MLP, lr=0.05).rounds([0, 1])
    with pytest.raises(FedAlloyError, match=r"an nn\.Sequential; that of test_fedfa_aug:Own is a Own"):
        Lab(fedfa_aug(), digits(), "test_fedfa_aug:Own")
    with pytest.raises(
        FedAlloyError, match=r"an nn\.Sequential; that of test_fedfa_aug:doubled is a Doubled"
    ):
        Lab(fedfa_aug(), digits(), "test_fedfa_aug:doubled")  # its own forward would be lost
    with pytest.raises(AlloyConflict, match="averaged statistics"):
        make("fedavg(buffers=local)+augmented")

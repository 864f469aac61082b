"""FedFA-aug: means and deviations of feature maps are jittered, more so in channels where clients differ more.

Zhou, Konukoglu, "FedFA: Federated Feature Augmentation". ICLR 2023.
"""

import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.measure import samples
from fedalloy.core.net import Inputs, in_order
from fedalloy.core.parameters import Fraction, Momentum
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ReplicaView, ServerView
from fedalloy.core.wire import Reply
from fedalloy.errors import FedAlloyError, FedAlloyWarning
from fedalloy.mechanisms.share import Share

EPS = 1e-6


class Jitter(nn.Module):
    """x' = (sigma + e_s sqrt((1 + gamma_s) v_s)) (x - mu) / sigma + mu + e_m sqrt((1 + gamma_m) v_m), e ~ N(0, 1).

    mu and sigma of each map, over its pixels; v their variances over the batch; gamma = K w / sum w with
    w = 1 / (1 + 1/V), V their variances between clients, as the server sent them. Only while training, and then
    with probability `prob`. Rows of the buffers: mu, sigma.
    """

    statistics: Tensor  # running means over the batches
    variances: Tensor  # V

    def __init__(self, channels: int, prob: float, momentum: float) -> None:
        super().__init__()
        self.prob, self.momentum = prob, momentum
        self.register_buffer("statistics", torch.stack([torch.zeros(channels), torch.ones(channels)]))
        self.register_buffer("variances", torch.ones(2, channels))

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or len(x) < 2 or float(torch.rand(())) >= self.prob:
            return x
        mu, sigma = x.mean((2, 3)), (x.var((2, 3), correction=0) + EPS).sqrt()
        old = torch.stack([mu, sigma])  # 2 B K
        # .data: all buffers are one vector, and autograd would take this for a change of BatchNorm's
        self.statistics.data.lerp_(old.detach().mean(1), 1 - self.momentum)
        w = 1 / (1 + 1 / (self.variances + EPS))
        gamma = w.shape[1] * w / w.sum(1, keepdim=True)
        spread = ((1 + gamma) * (old.var(1) + EPS)).sqrt()
        new = old + torch.randn_like(old) * spread[:, None]
        normal: Tensor = (x - mu[..., None, None]) / sigma[..., None, None]
        return normal * new[1][..., None, None] + new[0][..., None, None]


def stages(body: nn.Sequential, inputs: Inputs) -> dict[int, int]:
    """Where convolutions of one resolution end, pooling and activation included: place in the body -> channels."""
    ends: dict[int, int] = {}
    x, side, last = samples(inputs, 2), None, (0, 0)
    with torch.no_grad():
        for place, layer in enumerate(body.eval()):
            x = layer(x)
            if x.dim() != 4 or isinstance(layer, nn.AdaptiveAvgPool2d):
                break  # maps end here
            if convolves(layer):
                if side and x.shape[2:] != side:
                    ends[last[0]] = last[1]
                side = x.shape[2:]
            last = place, x.shape[1]
    body.train()
    return ends | dict([last]) if side else {}


def convolves(module: nn.Module) -> bool:
    return any(isinstance(part, nn.Conv2d) for part in module.modules())


def layers(net: nn.Module) -> list[str]:
    return [name for name, module in net.named_modules() if isinstance(module, Jitter)]


@dataclass(frozen=True)
class Augmented(Mechanism):
    """A jitter after every stage of convolutions; V_c is the variance between the participants' running statistics.

    They travel as buffers. `per_channel=False`: one variance over clients and channels together, the authors' code.
    """

    prob: Fraction = 0.5
    momentum: Momentum = 0.99
    per_channel: bool = True

    needs = frozenset({"global model", "averaged statistics"})

    def build(self, replica: ReplicaView) -> None:
        body = replica.net.body
        if not self.prob:
            return
        if convolves(body) and not in_order(body):
            raise FedAlloyError(
                f"{self} looks for stages of convolutions in a body that is an nn.Sequential; "
                f"that of {replica.model} is a {type(body).__name__}"
            )
        ends = stages(body, replica.inputs) if in_order(body) else {}
        if not ends:
            advice = "so nothing is augmented; take a convolutional model"
            warnings.warn(f"{replica.model} has no feature maps, {advice}", FedAlloyWarning, stacklevel=2)
            return
        longer = nn.Sequential()
        for place, layer in enumerate(body.children()):
            longer.append(layer)
            if place in ends:
                longer.append(Jitter(ends[place], self.prob, self.momentum))
        replica.net.body = longer

    def on_reply(self, server: ServerView, my: State, reply: Reply) -> None:
        views = server.replica.weights.buffer_layout.views(reply.items["share.buffers"])
        for name in layers(server.replica.net):
            my.scratch.setdefault(name, []).append(views[f"{name}.statistics"].double())

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        if len(server.participants) < 2:
            return  # one client has no variance: the old one stays
        server.buffers = server.buffers.clone()
        views = server.replica.weights.buffer_layout.views(server.buffers)
        for name in layers(server.replica.net):
            statistics = torch.stack(my.scratch[name])  # clients 2 K
            between = statistics.var(0) if self.per_channel else statistics.var((0, 2))[:, None]
            views[f"{name}.variances"].copy_(between.expand_as(views[f"{name}.variances"]))


@recipe("FedFA-aug", family="representation", paper="Zhou, Konukoglu, ICLR 2023")
def fedfa_aug(prob: Fraction = 0.5, momentum: Momentum = 0.99, per_channel: bool = True) -> Alloy:
    return alloy("FedFA-aug", Share(), Augmented(prob, momentum, per_channel))

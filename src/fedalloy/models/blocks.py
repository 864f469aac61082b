"""Pieces that several convolutional families share."""

from collections.abc import Sequence
from math import gcd
from typing import Literal

import torch
from torch import Tensor, nn

from fedalloy.core.net import Inputs, Net

Norm = Literal["batch", "group"]


def is_small(inputs: Inputs) -> bool:
    """Whether an ImageNet stem, which shrinks a map fourfold, would throw away most of the image."""
    return max(inputs.shape[1:]) <= 64


def round_to(channels: float, step: int = 8) -> int:
    """The nearest multiple of `step` that is not more than a tenth below (MobileNetV2's rule for widths).

    >>> round_to(24 * 0.5), round_to(32 * 0.35)
    (16, 16)
    """
    rounded = max(step, int(channels + step / 2) // step * step)
    return rounded + step if rounded < 0.9 * channels else rounded


def normaliser(norm: Norm, channels: int) -> nn.Module:
    return nn.BatchNorm2d(channels) if norm == "batch" else nn.GroupNorm(gcd(32, channels), channels)


def conv_norm(
    inside: int,
    outside: int,
    kernel: int = 3,
    stride: int = 1,
    *,
    groups: int = 1,
    norm: Norm = "batch",
    activation: nn.Module | None = None,
) -> nn.Sequential:
    """Convolution, normalisation, activation; padded so that a stride never shrinks a map below 1x1."""
    conv = nn.Conv2d(inside, outside, kernel, stride, padding=kernel // 2, groups=groups, bias=False)
    layers = [conv, normaliser(norm, outside), activation]
    return nn.Sequential(*(layer for layer in layers if layer is not None))


def relu() -> nn.ReLU:
    """In place: what stands before it (convolution, normalisation, pooling, sum) does not need its output."""
    return nn.ReLU(inplace=True)


def global_pool() -> nn.Sequential:
    """The mean of each map: B F H W -> B F."""
    return nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten())


def classifier(body: nn.Sequential, width: int, classes: int, units: Sequence[int] = ()) -> Net:
    """Features of this width, then [linear, ReLU] for each number of units, then the head."""
    for outside in units:
        body.extend([nn.Linear(width, outside), relu()])
        width = outside
    return Net(body, nn.Linear(width, classes))


def he_init(module: nn.Sequential) -> nn.Sequential:
    """Convolutions that keep the scale of what they read (He et al., ICCV 2015)."""
    for layer in module.modules():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_in", nonlinearity="relu")
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module


class Skip(nn.Module):
    """x + inner(x)."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.inner(x)
        return out


class Concat(nn.Module):
    """[x, inner(x)] along the channels."""

    def __init__(self, *inner: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*inner)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, self.inner(x)], dim=1)

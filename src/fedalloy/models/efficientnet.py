"""EfficientNet: Tan and Le, "Rethinking Model Scaling for Convolutional Neural Networks", ICML 2019."""

import torch
from torch import Tensor, nn

from fedalloy.core.net import Inputs, Net
from fedalloy.core.parameters import Dropout
from fedalloy.models.blocks import Skip, conv_norm, global_pool, he_init, is_small

# the paper's table 1: expansion, kernel, maps, repeats, stride
STAGES = (
    (1, 3, 16, 1, 1),
    (6, 3, 24, 2, 2),
    (6, 5, 40, 2, 2),
    (6, 3, 80, 3, 2),
    (6, 5, 112, 3, 1),
    (6, 5, 192, 4, 2),
    (6, 3, 320, 1, 1),
)


def efficientnet_b0(inputs: Inputs, *, dropout: Dropout = 0.0) -> Net:
    """EfficientNet-B0 (Tan and Le, ICML 2019) without stochastic depth; stride 1 first for sides up to 64."""
    inside = 32
    first = 1 if is_small(inputs) else 2
    body = nn.Sequential(conv_norm(inputs.shape[0], inside, stride=first, activation=nn.SiLU()))
    for expansion, kernel, maps, repeats, stride in STAGES:
        for index in range(repeats):
            body.append(_mbconv(inside, maps, kernel, 1 if index > 0 else stride, expansion))
            inside = maps
    body.extend([conv_norm(inside, 1280, 1, activation=nn.SiLU()), global_pool(), nn.Dropout(dropout)])
    return Net(he_init(body), nn.Linear(1280, inputs.classes))


class Squeeze(nn.Module):
    """Each map scaled by a gate that sees the means of all maps (Hu et al., CVPR 2018)."""

    def __init__(self, maps: int, narrow: int) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(maps, narrow, 1), nn.SiLU(), nn.Conv2d(narrow, maps, 1)
        )

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x))


def _mbconv(inside: int, outside: int, kernel: int, stride: int, expansion: int) -> nn.Module:
    """MobileNetV2's inverted residual with a gate before it narrows."""
    wide = inside * expansion
    layers: list[nn.Module] = [
        conv_norm(wide, wide, kernel, stride, groups=wide, activation=nn.SiLU()),
        Squeeze(wide, inside // 4),
        conv_norm(wide, outside, 1),
    ]
    if expansion > 1:
        layers.insert(0, conv_norm(inside, wide, 1, activation=nn.SiLU()))
    return Skip(*layers) if stride == 1 and inside == outside else nn.Sequential(*layers)

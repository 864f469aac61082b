"""MobileNetV2: Sandler, Howard, Zhu, Zhmoginov, Chen, CVPR 2018."""

from torch import nn

from fedalloy.core.net import Inputs, Net
from fedalloy.core.parameters import Scale, Width
from fedalloy.models.blocks import Skip, classifier, conv_norm, global_pool, he_init, is_small, round_to

# the paper's table 2: expansion t, maps c, repeats n, stride s
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def mobilenetv2(inputs: Inputs, *, width: Scale = 1.0, units: tuple[Width, ...] = ()) -> Net:
    """MobileNetV2 (Sandler et al., CVPR 2018); the first two strides are 1 for sides up to 64."""
    small = is_small(inputs)
    inside = round_to(32 * width)
    body = nn.Sequential(conv_norm(inputs.shape[0], inside, stride=1 if small else 2, activation=_relu6()))
    for stage, (expansion, maps, repeats, stride) in enumerate(STAGES):
        outside = round_to(maps * width)
        for index in range(repeats):
            step = 1 if index > 0 or (small and stage == 1) else stride
            body.append(_inverted(inside, outside, step, expansion))
            inside = outside
    last = round_to(1280 * max(1.0, width))
    body.extend([conv_norm(inside, last, 1, activation=_relu6()), global_pool()])
    return classifier(he_init(body), last, inputs.classes, units)


def _inverted(inside: int, outside: int, stride: int, expansion: int) -> nn.Module:
    """The inverted residual: widen, filter each map by itself, narrow without an activation."""
    wide = inside * expansion
    layers = [
        conv_norm(wide, wide, 3, stride, groups=wide, activation=_relu6()),
        conv_norm(wide, outside, 1),
    ]
    if expansion > 1:
        layers.insert(0, conv_norm(inside, wide, 1, activation=_relu6()))
    return Skip(*layers) if stride == 1 and inside == outside else nn.Sequential(*layers)


def _relu6() -> nn.ReLU6:
    return nn.ReLU6(inplace=True)

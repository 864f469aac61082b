"""DenseNet: Huang, Liu, van der Maaten, Weinberger, "Densely Connected Convolutional Networks", CVPR 2017."""

from torch import nn

from fedalloy.core.net import Inputs, Net
from fedalloy.core.parameters import Width
from fedalloy.models.blocks import Concat, conv_norm, global_pool, he_init, is_small, relu

DEPTHS = (6, 12, 24, 16)


def densenet(inputs: Inputs, *, growth: Width = 32) -> Net:
    """DenseNet-121 (Huang et al., CVPR 2017), without the ImageNet stem for sides up to 64."""
    channels, side = inputs.shape[0], min(inputs.shape[1:])
    inside = 2 * growth
    if is_small(inputs):
        body = nn.Sequential(nn.Conv2d(channels, inside, 3, padding=1, bias=False))
    else:
        body = nn.Sequential(conv_norm(channels, inside, 7, stride=2), nn.MaxPool2d(3, 2, 1), relu())
        side = (side + 3) // 4
    for stage, depth in enumerate(DEPTHS):
        if stage > 0:  # the transition: half the maps, half the side
            body.append(_norm_conv(inside, inside // 2, 1))
            inside //= 2
            if side >= 2:
                body.append(nn.AvgPool2d(2))
                side //= 2
        for _ in range(depth):
            body.append(Concat(_norm_conv(inside, 4 * growth, 1), _norm_conv(4 * growth, growth, 3)))
            inside += growth
    body.extend([nn.BatchNorm2d(inside), relu(), global_pool()])
    return Net(he_init(body), nn.Linear(inside, inputs.classes))


def _norm_conv(inside: int, outside: int, kernel: int) -> nn.Sequential:
    conv = nn.Conv2d(inside, outside, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(nn.BatchNorm2d(inside), relu(), conv)

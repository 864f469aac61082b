"""ShuffleNetV2: Ma, Zhang, Zheng, Sun, ECCV 2018."""

import torch
from torch import Tensor, nn

from fedalloy.core.net import Inputs, Net
from fedalloy.core.parameters import Scale, Width
from fedalloy.errors import FedAlloyError
from fedalloy.models.blocks import classifier, conv_norm, global_pool, he_init, is_small, relu

# the paper's table 5: maps of the three stages and of the last convolution
MAPS = {
    0.5: (48, 96, 192, 1024),
    1.0: (116, 232, 464, 1024),
    1.5: (176, 352, 704, 1024),
    2.0: (244, 488, 976, 2048),
}
REPEATS = (4, 8, 4)


def shufflenet(inputs: Inputs, *, width: Scale = 1.0, units: tuple[Width, ...] = ()) -> Net:
    """ShuffleNetV2 (Ma et al., ECCV 2018), width 0.5, 1, 1.5 or 2; no ImageNet stem for sides up to 64."""
    if width not in MAPS:
        raise FedAlloyError(f"shufflenet: width must be one of the paper's 0.5, 1, 1.5 and 2, not {width:g}")
    *stages, last = MAPS[width]
    inside, channels = 24, inputs.shape[0]
    if is_small(inputs):
        body = nn.Sequential(conv_norm(channels, inside, activation=relu()))
    else:
        body = nn.Sequential(conv_norm(channels, inside, stride=2), nn.MaxPool2d(3, 2, 1), relu())
    for outside, repeats in zip(stages, REPEATS, strict=True):
        body.append(Halve(inside, outside))
        body.extend([Unit(outside) for _ in range(repeats - 1)])
        inside = outside
    body.extend([conv_norm(inside, last, 1, activation=relu()), global_pool()])
    return classifier(he_init(body), last, inputs.classes, units)


class Unit(nn.Module):
    """One half of the maps passes, the other is filtered (figure 3c)."""

    def __init__(self, maps: int) -> None:
        super().__init__()
        self.branch = _branch(maps // 2, maps // 2, stride=1)

    def forward(self, x: Tensor) -> Tensor:
        passed, filtered = x.chunk(2, dim=1)
        return _shuffle(passed, self.branch(filtered))


class Halve(nn.Module):
    """Both branches see all maps and halve the sides (figure 3d)."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.short = nn.Sequential(
            conv_norm(inside, inside, 3, stride=2, groups=inside),
            conv_norm(inside, outside // 2, 1, activation=relu()),
        )
        self.branch = _branch(inside, outside // 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        return _shuffle(self.short(x), self.branch(x))


def _branch(inside: int, outside: int, stride: int) -> nn.Sequential:
    return nn.Sequential(
        conv_norm(inside, outside, 1, activation=relu()),
        conv_norm(outside, outside, 3, stride, groups=outside),
        conv_norm(outside, outside, 1, activation=relu()),
    )


def _shuffle(a: Tensor, b: Tensor) -> Tensor:
    """The maps of both branches in turn: a0 b0 a1 b1 ..."""
    return torch.stack([a, b], dim=2).flatten(1, 2)

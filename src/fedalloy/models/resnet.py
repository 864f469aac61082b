"""ResNet: He, Zhang, Ren, Sun, "Deep Residual Learning for Image Recognition", CVPR 2016."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn

from fedalloy.core.net import Inputs, Net
from fedalloy.core.parameters import Scale, Width
from fedalloy.models.blocks import Norm, classifier, conv_norm, global_pool, he_init, is_small, relu, round_to


def resnet18(
    inputs: Inputs, *, norm: Norm = "batch", width: Scale = 1.0, units: tuple[Width, ...] = ()
) -> Net:
    """ResNet-18 (He et al., CVPR 2016), without the ImageNet stem for sides up to 64."""
    return _resnet(inputs, _basic, (2, 2, 2, 2), norm, width, units)


def resnet34(
    inputs: Inputs, *, norm: Norm = "batch", width: Scale = 1.0, units: tuple[Width, ...] = ()
) -> Net:
    """ResNet-34 (He et al., CVPR 2016), without the ImageNet stem for sides up to 64."""
    return _resnet(inputs, _basic, (3, 4, 6, 3), norm, width, units)


def resnet50(
    inputs: Inputs, *, norm: Norm = "batch", width: Scale = 1.0, units: tuple[Width, ...] = ()
) -> Net:
    """ResNet-50 (He et al., CVPR 2016), without the ImageNet stem for sides up to 64."""
    return _resnet(inputs, _bottleneck, (3, 4, 6, 3), norm, width, units, expansion=4)


def resnet110(inputs: Inputs) -> Net:
    """ResNet-110 for CIFAR (He et al., CVPR 2016, section 4.2): 16, 32 and 64 maps, shortcuts of option A."""
    body = nn.Sequential(conv_norm(inputs.shape[0], 16, activation=relu()))
    inside = 16
    for outside in (16, 32, 64):
        for _ in range(18):  # 6 * 18 + 2 layers
            shortcut = nn.Identity() if inside == outside else Subsample(outside - inside)
            body.append(Residual(_pair(inside, outside, outside // inside, "batch"), shortcut))
            inside = outside
    return Net(he_init(body.append(global_pool())), nn.Linear(inside, inputs.classes))


class Residual(nn.Module):
    """relu(branch(x) + shortcut(x))."""

    def __init__(self, branch: nn.Module, shortcut: nn.Module) -> None:
        super().__init__()
        self.branch = branch
        self.shortcut = shortcut
        self.relu = relu()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.relu(self.branch(x) + self.shortcut(x))
        return out


class EveryOther(nn.Module):
    """Every other pixel of every other line."""

    def forward(self, x: Tensor) -> Tensor:
        return x[:, :, ::2, ::2]


class Subsample(EveryOther):
    """Option A: every other pixel, and maps of zeros for the ones that are missing."""

    def __init__(self, missing: int) -> None:
        super().__init__()
        self.missing = missing

    def forward(self, x: Tensor) -> Tensor:
        before = self.missing // 2
        return nn.functional.pad(super().forward(x), (0, 0, 0, 0, before, self.missing - before))


Block = Callable[[int, int, int, Norm], nn.Module]  # (maps before, width, stride, norm)


def _basic(inside: int, width: int, stride: int, norm: Norm) -> nn.Module:
    return Residual(_pair(inside, width, stride, norm), _projection(inside, width, stride, norm))


def _bottleneck(inside: int, width: int, stride: int, norm: Norm) -> nn.Module:
    branch = nn.Sequential(
        conv_norm(inside, width, 1, norm=norm, activation=relu()),
        conv_norm(width, width, 3, stride, norm=norm, activation=relu()),
        conv_norm(width, 4 * width, 1, norm=norm),
    )
    return Residual(branch, _projection(inside, 4 * width, stride, norm))


def _pair(inside: int, outside: int, stride: int, norm: Norm) -> nn.Sequential:
    first = conv_norm(inside, outside, 3, stride, norm=norm, activation=relu())
    return nn.Sequential(first, conv_norm(outside, outside, norm=norm))


def _projection(inside: int, outside: int, stride: int, norm: Norm) -> nn.Module:
    """Option B: the identity where shapes agree, else a 1x1 convolution.

    Its stride is taken before it: on a CPU gradients of a 1x1 convolution with a stride, from fewer than 16 channels
    stored last, write past their memory (https://github.com/uxlfoundation/oneDNN/issues/6035).
    """
    if inside == outside and stride == 1:
        return nn.Identity()
    convolution = conv_norm(inside, outside, 1, norm=norm)
    return convolution if stride == 1 else nn.Sequential(EveryOther(), *convolution)


def _resnet(
    inputs: Inputs,
    block: Block,
    depths: Sequence[int],
    norm: Norm,
    width: float,
    units: Sequence[int],
    *,
    expansion: int = 1,
) -> Net:
    maps = round_to(64 * width)
    inside, channels = maps, inputs.shape[0]
    if is_small(inputs):
        body = nn.Sequential(conv_norm(channels, maps, norm=norm, activation=relu()))
    else:
        body = nn.Sequential(conv_norm(channels, maps, 7, stride=2, norm=norm), nn.MaxPool2d(3, 2, 1), relu())
    for stage, depth in enumerate(depths):
        for index in range(depth):
            body.append(block(inside, maps, 2 if stage > 0 and index == 0 else 1, norm))
            inside = expansion * maps
        maps *= 2
    return classifier(he_init(body.append(global_pool())), inside, inputs.classes, units)

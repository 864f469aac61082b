"""The small convolutional nets of federated-learning papers."""

from collections.abc import Sequence

from torch import nn

from fedalloy.core.net import Inputs, Net
from fedalloy.core.parameters import Width
from fedalloy.models.blocks import classifier, conv_norm, global_pool, he_init, relu


def cnn(inputs: Inputs) -> Net:
    """Two 5x5 convolutions of 32 and 64 maps, then 512 units: FedAvg (McMahan et al., AISTATS 2017)."""
    return _two_convolutions(inputs, maps=(32, 64), units=(512,))


def cnn_feddw(inputs: Inputs, *, widths: tuple[Width, Width] = (16, 32)) -> Net:
    """Two 5x5 convolutions, then 256 and 128 units, as in FedDW; the number of maps is ours."""
    return _two_convolutions(inputs, maps=widths, units=(256, 128))


def cnn_fedrda(inputs: Inputs) -> Net:
    """SimpleCNN of FedRDA: two 5x5 convolutions of 6 and 16 maps, then 120 and 84 units."""
    return _two_convolutions(inputs, maps=(6, 16), units=(120, 84))


def cnn_bn(inputs: Inputs) -> Net:
    """Three strided 3x3 convolutions of 32, 64 and 128 maps with BatchNorm and a global mean."""
    body, inside = nn.Sequential(), inputs.shape[0]
    for maps in (32, 64, 128):
        body.extend(conv_norm(inside, maps, stride=2, activation=relu()))
        inside = maps
    return Net(he_init(body.extend(global_pool())), nn.Linear(inside, inputs.classes))


def _two_convolutions(inputs: Inputs, maps: tuple[int, int], units: Sequence[int]) -> Net:
    """[5x5 convolution, pool, ReLU] twice, then [linear, ReLU]; padded where the maps would vanish."""
    inside, *sides = inputs.shape
    padding = 2 if min(sides) < 16 else 0
    body = nn.Sequential()
    for outside in maps:
        # max and ReLU commute, and after the pool there is a quarter of the work
        body.extend([nn.Conv2d(inside, outside, 5, padding=padding), nn.MaxPool2d(2), relu()])
        sides = [(side + 2 * padding - 4) // 2 for side in sides]
        inside = outside
    body.append(nn.Flatten())
    return classifier(body, inside * sides[0] * sides[1], inputs.classes, units)

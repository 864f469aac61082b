"""LeNet-5: LeCun et al., "Gradient-Based Learning Applied to Document Recognition", Proc. IEEE 1998."""

from torch import nn

from fedalloy.core.net import Inputs, Net


def lenet(inputs: Inputs) -> Net:
    """LeNet-5 (LeCun et al., 1998): mean pooling and tanh as published, C3 fully connected."""
    inside, *sides = inputs.shape
    first = 2 if min(sides) < 32 else 0  # the paper sets 28x28 digits into a 32x32 frame
    second = 2 if min(sides) < 12 else 0
    sides = [((side + 2 * first - 4) // 2 + 2 * second - 4) // 2 for side in sides]
    body = nn.Sequential(
        nn.Conv2d(inside, 6, 5, padding=first),
        nn.AvgPool2d(2),
        nn.Tanh(),
        nn.Conv2d(6, 16, 5, padding=second),
        nn.AvgPool2d(2),
        nn.Tanh(),
        nn.Flatten(),
        nn.Linear(16 * sides[0] * sides[1], 120),
        nn.Tanh(),
        nn.Linear(120, 84),
        nn.Tanh(),
    )
    return Net(body, nn.Linear(84, inputs.classes))

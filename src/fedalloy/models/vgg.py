"""VGG: Simonyan and Zisserman, "Very Deep Convolutional Networks", ICLR 2015."""

from typing import Literal

from torch import nn

from fedalloy.core.net import Inputs, Net
from fedalloy.models.blocks import global_pool, he_init, relu

STAGES = ((64,), (128,), (256, 256), (512, 512), (512, 512))


def vgg11(inputs: Inputs, *, norm: Literal["none", "batch"] = "none") -> Net:
    """VGG-11 (Simonyan and Zisserman, ICLR 2015); a global mean stands for the two layers of 4096."""
    body, inside, side = nn.Sequential(), inputs.shape[0], min(inputs.shape[1:])
    for number, stage in enumerate(STAGES, start=1):
        least = (
            2 if number == len(STAGES) else 4
        )  # on 1x1 maps, 3x3 convolutions would see little but padding
        for index, outside in enumerate(stage, start=1):
            body.append(nn.Conv2d(inside, outside, 3, padding=1))
            if norm == "batch":
                body.append(nn.BatchNorm2d(outside))
            if index == len(stage) and side >= least:  # the pool goes before the ReLU: the same, but faster
                body.append(nn.MaxPool2d(2))
                side //= 2
            body.append(relu())
            inside = outside
    return Net(he_init(body.extend(global_pool())), nn.Linear(inside, inputs.classes))

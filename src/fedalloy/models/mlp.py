"""Multilayer perceptrons, the model of "2NN" in McMahan et al., AISTATS 2017."""

from math import prod
from typing import Literal

from torch import nn

from fedalloy.core.net import Inputs, Net
from fedalloy.core.parameters import Depth, Width
from fedalloy.models.blocks import relu


def mlp(
    inputs: Inputs, *, hidden: Width = 64, depth: Depth = 1, norm: Literal["none", "batch"] = "none"
) -> Net:
    """Multilayer perceptron; depth=0 is multinomial logistic regression."""
    width = prod(inputs.shape)
    body = nn.Sequential(nn.Flatten())
    for _ in range(depth):
        body.append(nn.Linear(width, hidden))
        if norm == "batch":
            body.append(nn.BatchNorm1d(hidden))
        body.append(relu())
        width = hidden
    return Net(body, nn.Linear(width, inputs.classes))

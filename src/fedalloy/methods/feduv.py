"""FedUV: local training imitates IID training: class probabilities that vary, representations that spread.

Son, Kim, Chung, Huang, Liu. CVPR 2024, pp. 5863-5872.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import NonNegative
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import StepView
from fedalloy.mechanisms.share import Share


def variance_gap(logits: Tensor) -> Tensor:
    """L_V = (1/C) sum_c max(0, g - std_i q_ic), g = 1/sqrt(C): the deviation of a column of the identity I_C."""
    g = 1 / math.sqrt(logits.shape[1])
    return F.relu(g - logits.softmax(1).std(0)).mean()


def uniformity(z: Tensor) -> Tensor | None:
    """L_U = mean over i < j of exp(-D_ij / sigma), D_ij = ||z_i - z_j||^2, sigma = median of the D_ij that are not 0.

    sigma is part of the graph: L_U is then the same for z and a z, where a constant would reward norms that grow
    without bound. Without a distance, or with a single one, there is nothing to spread.
    """
    if len(z) < 3:
        return None
    d = torch.pdist(z).square()  # exactly 0 between equal rows, and so is its gradient
    apart = d[d > 0]
    return torch.exp(-d / apart.median()).mean() if len(apart) else None


@dataclass(frozen=True)
class Variance(Mechanism):
    """lambda_v L_V on the class probabilities: a classifier that says one class of everything is held back."""

    lambda_v: NonNegative = 2.5

    def loss(self, step: StepView, my: State) -> Tensor | None:
        if not self.lambda_v or len(step.y) < 2:
            return None
        return self.lambda_v * variance_gap(step.out.logits)


@dataclass(frozen=True)
class Uniformity(Mechanism):
    """lambda_u L_U on what the classifier reads."""

    lambda_u: NonNegative = 0.5

    def loss(self, step: StepView, my: State) -> Tensor | None:
        term = uniformity(step.out.embedding) if self.lambda_u else None
        return None if term is None else self.lambda_u * term


@recipe("FedUV", family="representation", paper="Son et al., CVPR 2024")
def feduv(lambda_v: NonNegative = 2.5, lambda_u: NonNegative = 0.5) -> Alloy:
    return alloy("FedUV", Share(), Variance(lambda_v), Uniformity(lambda_u))

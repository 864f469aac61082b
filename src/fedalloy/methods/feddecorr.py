"""FedDecorr: the features of a batch are decorrelated, against dimensional collapse.

Shi, Liang, Zhang, Tan, Bai. ICLR 2023; IEEE TPAMI 46(5), 2024.
"""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import NonNegative, Positive
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import StepView
from fedalloy.mechanisms.share import Share


def z_scores(z: Tensor, var_eps: float = 1e-8) -> Tensor:
    """Every feature with mean 0 and unbiased variance 1 over the batch."""
    return (z - z.mean(0)) / (z.var(0) + var_eps).sqrt()


def decorrelation(
    z: Tensor, norm: Literal["official", "paper"] = "official", var_eps: float = 1e-8
) -> Tensor:
    """`paper`: ||K||_F^2 / d^2 with K = X^T X / (B - 1); `official`: (1/B) mean squared off-diagonal entry of X^T X.

    ||X^T X||_F = ||X X^T||_F, so the smaller of the two Gram matrices is built.
    """
    batch, width = z.shape
    x = z_scores(z, var_eps)
    squares = ((x @ x.T) if batch < width else (x.T @ x)).square().sum()
    if norm == "paper":
        return squares / ((batch - 1) ** 2 * width**2)
    diagonal = x.square().sum(0).square().sum()
    return (squares - diagonal) / (batch * width * max(width - 1, 1))


@dataclass(frozen=True)
class Decorr(Mechanism):
    """L = L_base + beta L_D; the authors' beta = 0.1 belongs to their code's form of L_D, hence the default."""

    beta: NonNegative = 0.1
    norm: Literal["official", "paper"] = "official"
    var_eps: Positive = 1e-8

    claims = frozenset({"the decorrelation of features"})

    def loss(self, step: StepView, my: State) -> Tensor | None:
        if not self.beta or len(step.y) < 2:
            return None
        return self.beta * decorrelation(step.out.features, self.norm, self.var_eps)


@recipe("FedDecorr", family="representation", paper="Shi et al., ICLR 2023")
def feddecorr(
    beta: NonNegative = 0.1, norm: Literal["official", "paper"] = "official", var_eps: Positive = 1e-8
) -> Alloy:
    return alloy("FedDecorr", Share(), Decorr(beta, norm, var_eps))

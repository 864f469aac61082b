"""FML: each client trains a model of its own and a shared "meme" model, which teach each other; the meme is averaged.

Shen, Zhang, Jia, Zhang, Huang, Zhou, Kuang, Wu, Wu. Federated Mutual Learning. 2020, arXiv 2006.16765.
"""

from dataclasses import dataclass
from typing import Literal

import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import Positive, Share01
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import StepView
from fedalloy.mechanisms.auxiliary import Auxiliary
from fedalloy.mechanisms.clip import Clip
from fedalloy.mechanisms.mutual import auxiliary_outputs, divergence
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class Meme(Mechanism):
    """L_l = alpha CE(p_l, y) + (1 - alpha) KL(p_g || p_l), L_g = beta CE(p_g, y) + (1 - beta) KL(p_l || p_g).

    Both models move at once, each by its own loss: the other's output is a constant there (`detach`). `kl="mean"`
    averages the divergence over classes, where "sum" is the definition.
    """

    alpha: Share01 = 0.5
    beta: Share01 = 0.5
    detach: bool = True
    kl: Literal["sum", "mean"] = "sum"

    needs = frozenset({"an auxiliary model"})
    claims = frozenset({"the auxiliary model's loss"})

    def task(self, step: StepView, my: State) -> Tensor | None:
        return self.alpha * F.cross_entropy(step.out.logits, step.y)

    def loss(self, step: StepView, my: State) -> Tensor | None:
        own, meme = step.out.logits, auxiliary_outputs(step).logits
        loss = self.beta * F.cross_entropy(meme, step.y)
        per = 1 if self.kl == "sum" else own.shape[1]
        if self.alpha < 1:
            loss = loss + (1 - self.alpha) / per * divergence(self._teacher(meme), own)
        if self.beta < 1:
            loss = loss + (1 - self.beta) / per * divergence(self._teacher(own), meme)
        return loss

    def _teacher(self, logits: Tensor) -> Tensor:
        return logits.detach() if self.detach else logits


@recipe("FML", family="different models", paper="Shen et al., 2020, arXiv 2006.16765")
def fml(
    alpha: Share01 = 0.5,
    beta: Share01 = 0.5,
    meme: str | None = None,
    agg_weights: Literal["uniform", "size"] = "uniform",
    detach: bool = True,
    kl: Literal["sum", "mean"] = "sum",
    clip: Positive | None = None,
) -> Alloy:
    share = Share(part="aux", agg_weights=agg_weights)
    limit = [Clip(clip)] if clip is not None else []
    return alloy("FML", share, Auxiliary(meme), Meme(alpha, beta, detach, kl), *limit)

"""Mutual: a client's own model and the common auxiliary one learn from the labels and from each other."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Mechanism
from fedalloy.core.net import Outputs
from fedalloy.core.random import seeded
from fedalloy.core.state import State
from fedalloy.core.views import StepView

FLOOR = 1e-8  # of the denominator: two perfect models have no cross-entropy


def divergence(a: Tensor, b: Tensor) -> Tensor:
    """KL(softmax(a) || softmax(b)), summed over classes, batch mean."""
    return F.kl_div(b.log_softmax(1), a.log_softmax(1), reduction="batchmean", log_target=True)


def auxiliary_outputs(step: StepView) -> Outputs:
    """The auxiliary model on this batch; it draws its dropout elsewhere and leaves the own model's alone."""
    at = step.client
    with seeded(at.seed, at.round, at.id, at.steps, "aux"):
        outputs: Outputs = at.net.aux(step.x)
    return outputs


@dataclass(frozen=True)
class Mutual(Mechanism):
    """Both models: cross-entropy + KL from the other / (sum of both cross-entropies); partner and sum are constants."""

    adaptive: bool = True  # False: the KL terms are not divided
    distil: bool = True  # False: the auxiliary model learns from the labels alone

    needs = frozenset({"an auxiliary model"})
    claims = frozenset({"the auxiliary model's loss"})

    def loss(self, step: StepView, my: State) -> Tensor | None:
        aux = auxiliary_outputs(step)
        ce = F.cross_entropy(aux.logits, step.y)
        if not self.distil:
            return ce
        both = (ce + F.cross_entropy(step.out.logits, step.y)).detach() if self.adaptive else torch.ones(())
        return ce + self.gap(step, aux) / both.clamp(min=FLOOR)

    def gap(self, step: StepView, aux: Outputs) -> Tensor:
        """What the models disagree in; every term reaches one of them only."""
        own = step.out.logits
        return divergence(own.detach(), aux.logits) + divergence(aux.logits.detach(), own)

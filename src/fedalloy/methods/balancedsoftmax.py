"""Balanced softmax: cross-entropy with the client's label prior added to the logits; prediction leaves it out.

Ren et al., "Balanced Meta-Softmax for Long-Tailed Visual Recognition". NeurIPS 2020.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import NonNegative
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, StepView
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class BalancedSoftmax(Mechanism):
    """L = mean CE(o + log m, y), m_c = n_c of the client's training data; an absent class counts as `absent_count`.

    With `absent_count` 0 the term of an absent class drops out of the softmax and its logit gets no gradient.
    """

    absent_count: Literal[0, 1] = 1
    tau_prior: NonNegative = 1.0

    def before_training(self, client: ClientView, my: State) -> None:
        my.scratch["prior"] = self.tau_prior * log_prior(client.data.counts, self.absent_count)

    def task(self, step: StepView, my: State) -> Tensor | None:
        if not self.tau_prior:
            return None
        return F.cross_entropy(step.out.logits + my.scratch["prior"], step.y)


def log_prior(counts: Tensor, absent_count: int = 1) -> Tensor:
    """log m: minus infinity masks a class that a client lacks."""
    return counts.clamp(min=absent_count).to(torch.get_default_dtype()).log()


@recipe("Balanced softmax", family="calibration", paper="Ren et al., NeurIPS 2020")
def balancedsoftmax(absent_count: Literal[0, 1] = 1, tau_prior: NonNegative = 1.0) -> Alloy:
    return alloy("Balanced softmax", Share(), BalancedSoftmax(absent_count, tau_prior))

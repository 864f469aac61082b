"""FedDistill+: FedAvg with distillation towards the federation's mean soft label of the true class.

A host in the comparison of FedDW, Liu et al. 2024, arXiv 2412.04521, written Fedistill+ there.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import Momentum, NonNegative
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, StepView
from fedalloy.mechanisms.class_means import ClassMeans
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class SoftLabelDistillation(Mechanism):
    """L = CE + lam KL(Omega_y || softmax(a)), batch mean; Omega is measured and averaged as in FedDW, Omega_1 = I."""

    lam: NonNegative = 1.0
    sl_momentum: Momentum = 0.0  # how much of the old soft labels stays

    @property
    def brings(self) -> tuple[Mechanism, ...]:
        return (ClassMeans("probabilities", self.sl_momentum, identity=True),)

    def before_training(self, client: ClientView, my: State) -> None:
        my.scratch["omega"] = client.state_of(self.brings[0]).received["means"]

    def loss(self, step: StepView, my: State) -> Tensor | None:
        if not self.lam:
            return None
        omega = my.scratch["omega"][step.y]
        return self.lam * F.kl_div(step.out.logits.log_softmax(1), omega, reduction="batchmean")


@recipe("FedDistill+", family="representation", paper="a host in Liu et al., 2024, arXiv 2412.04521")
def feddistillplus(lam: NonNegative = 1.0, sl_momentum: Momentum = 0.0) -> Alloy:
    return alloy("FedDistill+", Share(), SoftLabelDistillation(lam, sl_momentum))

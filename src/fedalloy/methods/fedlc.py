"""FedLC: logits calibrated by the client's own label counts, with a wider margin for rare classes.

Zhang, Li, Li, Xu, Wu, Ding, Wu, "Federated Learning with Label Distribution Skew via Logits Calibration". ICML 2022.
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

Form = Literal["softmax", "pairwise"]
Absent = Literal["mask", "floor"]


def margins(counts: Tensor, tau: float, absent: Absent = "mask") -> Tensor:
    """tau n_c^(-1/4); of a class that a client lacks infinity (its logit leaves the sum), or as if it held one."""
    margin = tau * counts.clamp(min=1).to(torch.get_default_dtype()) ** -0.25
    return margin if absent == "floor" else margin.masked_fill(counts == 0, torch.inf)


def pairwise(logits: Tensor, y: Tensor) -> Tensor:
    """-mean log(e^o_y / sum over c != y of e^o_c): the printed denominator, without the true class; it has no floor."""
    true = F.one_hot(y, logits.shape[1]).bool()
    others = logits.masked_fill(true, -torch.inf).logsumexp(1)
    return (others - logits[true]).mean()


@dataclass(frozen=True)
class Calibration(Mechanism):
    """L = mean CE(o - tau n^(-1/4), y), n_c the client's own class counts; prediction is by the raw logits.

    `form`: the "softmax" over all classes, or "pairwise" against all but the true one, as printed in the paper; of a
    client with a single class that would be minus infinity, and the softmax stands in.
    """

    tau: NonNegative = 10.0
    form: Form = "softmax"
    absent: Absent = "mask"

    def before_training(self, client: ClientView, my: State) -> None:
        counts = client.data.counts
        my.scratch["margins"] = margins(counts, self.tau, self.absent)
        my.scratch["pairwise"] = self.form == "pairwise" and int((counts > 0).sum()) > 1

    def task(self, step: StepView, my: State) -> Tensor | None:
        calibrated = step.out.logits - my.scratch["margins"]
        return (pairwise if my.scratch["pairwise"] else F.cross_entropy)(calibrated, step.y)


@recipe("FedLC", family="calibration", paper="Zhang et al., ICML 2022")
def fedlc(tau: NonNegative = 10.0, form: Form = "softmax", absent: Absent = "mask") -> Alloy:
    return alloy("FedLC", Share(), Calibration(tau, form, absent))

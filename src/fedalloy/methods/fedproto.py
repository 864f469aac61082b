"""FedProto: clients exchange class prototypes (mean features) and pull their features towards the global ones.

Tan, Long, Liu, Zhou, Lu, Jiang, Zhang. AAAI 2022, arXiv 2105.00243.
"""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import NonNegative, Width
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, StepView
from fedalloy.mechanisms.class_means import ClassMeans, RunningMeans, prototypes
from fedalloy.mechanisms.common_width import CommonWidth


@dataclass(frozen=True)
class PrototypePull(Mechanism):
    """L = L_S + lam L_R, L_R the mean squared distance of features to their class's global prototype.

    A sample whose class has no prototype yet adds nothing, and still counts in the mean.
    """

    lam: NonNegative = 1.0

    needs = frozenset({"class means of features"})

    def before_training(self, client: ClientView, my: State) -> None:
        my.scratch["P"], my.scratch["seen"] = prototypes(client)

    def loss(self, step: StepView, my: State) -> Tensor | None:
        known = my.scratch["seen"][step.y]
        if not self.lam or not bool(known.any()):
            return None
        z = step.out.features
        gap: Tensor = (z[known] - my.scratch["P"][step.y[known]]).square().sum()
        return self.lam * gap / z.numel()


@dataclass(frozen=True)
class NearestPrototype(Mechanism):
    """A client predicts the class of the nearest global prototype; before there are any, its own head speaks."""

    needs = frozenset({"class means of features"})

    def predict(self, step: StepView, my: State) -> Tensor | None:
        means, seen = prototypes(step.client)
        if not bool(seen.any()):
            return None
        scores = -torch.cdist(step.out.features, means, compute_mode="donot_use_mm_for_euclid_dist")
        return scores.masked_fill(~seen, -torch.inf)


@recipe("FedProto", family="different models", paper="Tan et al., AAAI 2022, arXiv 2105.00243")
def fedproto(
    lam: NonNegative = 1.0,
    weighted: bool = False,
    proto_pass: Literal["eval", "train"] = "eval",
    evaluate: Literal["proto", "head"] = "proto",
    feature_dim: Width | None = None,
) -> Alloy:
    kind = ClassMeans if proto_pass == "eval" else RunningMeans
    by = [NearestPrototype()] if evaluate == "proto" else []
    return alloy(
        "FedProto", CommonWidth(feature_dim), kind("features", uniform=not weighted), PrototypePull(lam), *by
    )

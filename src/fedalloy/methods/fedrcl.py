"""FedRCL: a supervised contrastive loss at several depths, relaxed by a penalty on same-class pairs that are too close.

Seo, Kim, Kim, Han, "Relaxed Contrastive Learning for Federated Learning". CVPR 2024, pp. 12279-12288.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import AtLeastOne, Depth, Fraction, NonNegative, Positive
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, ReplicaView, StepView
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.clip import Clip
from fedalloy.mechanisms.levels import Levels, depths
from fedalloy.mechanisms.share import Share

Form = Literal["mined", "full"]


@dataclass(frozen=True)
class Relaxed(Mechanism):
    """Mean over levels and anchors of w_s L_S + w_p L_P, from the cosines s_ij of the pooled maps.

    `form`: "mined" looks at the `topk_pos` least similar samples of an anchor's class and the `topk_neg` most similar
    ones of others, "full" at all. `levels` picks some (0: the stem); none given, all count.
    """

    w_s: NonNegative = 1.0
    w_p: NonNegative = 1.0
    tau: Positive = 0.05
    kappa: Fraction = 0.7
    form: Form = "mined"
    topk_pos: AtLeastOne = 1
    topk_neg: AtLeastOne = 2
    levels: tuple[Depth, ...] = ()

    def build(self, replica: ReplicaView) -> None:
        found = max(1, len(depths(replica.net, replica.inputs)))
        if self.levels and max(self.levels) >= found:
            raise FedAlloyError(f"{self}: {replica.model} has the levels 0 to {found - 1}; pick among these")

    def before_training(self, client: ClientView, my: State) -> None:
        if (self.w_s or self.w_p) and "levels" not in client.replica.memo:
            client.replica.memo["levels"] = Levels(client.net, client.replica.inputs)

    def loss(self, step: StepView, my: State) -> Tensor | None:
        if not self.w_s and not self.w_p:
            return None
        heard: Levels = step.client.replica.memo["levels"]
        levels = heard.pooled or [step.out.features]  # a net whose activations are no modules
        chosen = [levels[i] for i in self.levels] or levels
        return torch.stack([self._at(z, step.y) for z in chosen]).mean()

    def _at(self, z: Tensor, y: Tensor) -> Tensor:
        unit = F.normalize(z, dim=1)
        s, same = unit @ unit.T, y[:, None] == y
        mined = self.form == "mined"
        near = positives(s, same, self.topk_pos if mined else len(y))
        terms = s.new_zeros(len(y))
        if self.w_s and not bool(same.all()):  # no other class: L_S = 0
            far = negatives(s, same, self.topk_neg if mined else len(y))
            terms = terms + self.w_s * contrastive(near, far, self.tau)
        if self.w_p:
            terms = terms + self.w_p * penalty(near, self.kappa, self.tau)
        return terms.mean()


def positives(s: Tensor, same: Tensor, most: int) -> Tensor:
    """Of each anchor the lowest s_ij of its class, itself left out; infinity where there are no more."""
    partners = same & ~torch.eye(len(s), dtype=torch.bool, device=s.device)
    return s.masked_fill(~partners, torch.inf).topk(min(most, len(s)), dim=1, largest=False).values


def negatives(s: Tensor, same: Tensor, most: int) -> Tensor:
    """Of each anchor the highest s_ij of other classes; minus infinity where there are no more."""
    return s.masked_fill(same, -torch.inf).topk(min(most, len(s)), dim=1).values


def contrastive(near: Tensor, far: Tensor, tau: float) -> Tensor:
    """L_S,i = mean over positives p of -log(e^(p/tau) / (e^(p/tau) + sum over n of e^(n/tau))).

    An anchor without a partner is its own, with similarity 1.
    """
    missing = near.isinf()
    alone = missing.all(1)
    p = near.masked_fill(missing, 1.0)
    each = F.softplus((far / tau).logsumexp(1, keepdim=True) - p / tau)
    counts = ~missing
    counts[:, 0] |= alone
    return (each * counts).sum(1) / counts.sum(1)


def penalty(near: Tensor, kappa: float, tau: float) -> Tensor:
    """L_P,i = -log(e^(1/tau) / (e^(1/tau) + sum over r of e^(r/tau))), r the similarities of at least kappa."""
    close = (near >= kappa) & ~near.isinf()
    return torch.exp((near.masked_fill(~close, -torch.inf) - 1) / tau).sum(1).log1p()


@recipe("FedRCL", family="representation", paper="Seo et al., CVPR 2024")
def fedrcl(
    w_s: NonNegative = 1.0,
    w_p: NonNegative = 1.0,
    tau: Positive = 0.05,
    kappa: Fraction = 0.7,
    form: Form = "mined",
    topk_pos: AtLeastOne = 1,
    topk_neg: AtLeastOne = 2,
    levels: tuple[Depth, ...] = (),
    grad_clip: Positive | None = 10.0,
    agg_weights: Literal["size", "uniform"] = "size",
) -> Alloy:
    relaxed = Relaxed(w_s, w_p, tau, kappa, form, topk_pos, topk_neg, levels)
    limit = [Clip(grad_clip)] if grad_clip is not None else []
    return alloy("FedRCL", Share(agg_weights=agg_weights), relaxed, *limit)

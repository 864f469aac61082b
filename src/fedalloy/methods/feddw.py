"""FedDW: the classifier's class relations are tied to the global soft labels.

Liu et al. 2024, arXiv 2412.04521.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.diagnostics import Seen
from fedalloy.core.parameters import AtLeastOne, Momentum, NonNegative, Positive
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, Findings, ServerView, StepView
from fedalloy.mechanisms.class_means import ClassMeans
from fedalloy.mechanisms.head import HeadWithoutBias
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class DW(Mechanism):
    """L = L_cla + mu/C^2 ||Omega - softmax(omega omega^T)||_F^2 (Eqs 3, 11, 12); Omega is a constant of the round.

    `mu_decay` divides mu by this every `mu_decay_every` rounds; `sl_momentum` keeps a share of the old soft labels.
    Both are in the authors' released code and not in the paper.
    """

    mu: NonNegative = 0.1
    sl_momentum: Momentum = 0.0
    mu_decay: Positive = 1.0
    mu_decay_every: AtLeastOne = 9

    needs = frozenset({"shared weights", "class means of probabilities", "class weights"})

    @property
    def brings(self) -> tuple[Mechanism, ...]:
        return HeadWithoutBias(), ClassMeans("probabilities", self.sl_momentum, identity=True)  # Omega_1 = I

    def before_training(self, client: ClientView, my: State) -> None:
        my.scratch["omega"] = client.state_of(self.brings[1]).received["means"]
        my.scratch["mu"] = self.mu / self.mu_decay ** ((client.round - 1) // self.mu_decay_every)

    def loss(self, step: StepView, my: State) -> Tensor | None:
        if not my.scratch["mu"]:
            return None
        omega = step.client.net.head.weight
        assert isinstance(omega, Tensor)
        loss: Tensor = my.scratch["mu"] * F.mse_loss(class_relations(omega), my.scratch["omega"])
        return loss

    def examine(self, server: ServerView, my: State, seen: Seen) -> Findings:
        omega, weights = server.state_of(self.brings[1]).persistent["means"], seen.net.head.weight
        assert isinstance(weights, Tensor)
        relations = class_relations(weights.detach())
        return {
            "soft labels": omega,
            "class relations": relations,
            "distance of class relations to soft labels": float((omega - relations).norm()),
        }

    def examine_client(self, client: ClientView, my: State) -> Findings:
        weights = client.net.head.weight
        assert isinstance(weights, Tensor)
        share = client.data.counts / client.data.samples
        return {"norms of class weights": weights.detach().norm(dim=1), "class shares": share}


def class_relations(omega: Tensor) -> Tensor:
    """softmax over each row of omega omega^T (Eq 3)."""
    return (omega @ omega.T).softmax(1)


@recipe("FedDW", family="representation", paper="Liu et al., 2024, arXiv 2412.04521")
def feddw(
    mu: NonNegative = 0.1,
    sl_momentum: Momentum = 0.0,
    mu_decay: Positive = 1.0,
    mu_decay_every: AtLeastOne = 9,
) -> Alloy:
    return alloy("FedDW", Share(), DW(mu, sl_momentum, mu_decay, mu_decay_every))

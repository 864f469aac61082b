"""FedProx: a proximal pull towards the received model in the local objective; stragglers may do less work.

Li, Sahu, Zaheer, Sanjabi, Talwalkar, Smith. MLSys 2020.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import AtLeastOne, Fraction, NonNegative
from fedalloy.core.registry import recipe
from fedalloy.core.state import Phase, State
from fedalloy.core.views import ClientView, Oracle, StepView
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class Prox(Mechanism):
    """h_k(w) = F_k(w) + mu/2 ||w - w_t||^2: its gradient is added before the optimiser sees it; buffers are free."""

    mu: NonNegative = 0.01
    part: str = "main"

    needs = frozenset({"shared weights"})

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        g = oracle(step)
        if self.mu:
            span = step.client.weights.span(self.part)
            g[span] += self.mu * (step.weights[span] - step.client.received[span])
        return g


@dataclass(frozen=True)
class Stragglers(Mechanism):
    """Inexact work: in every round a share of the clients runs only 1 to E - 1 epochs; or fixed epochs per client."""

    fraction: Fraction = 0.0
    epochs: tuple[AtLeastOne, ...] = ()

    def phases(self, client: ClientView, my: State, epochs: int) -> Sequence[Phase] | None:
        if client.local.steps is not None:
            raise FedAlloyError(
                "stragglers save epochs, but local work is counted in steps; leave --steps out"
            )
        if self.epochs:
            return [Phase(self.epochs[client.id % len(self.epochs)])]
        dice = client.rng("stragglers")
        slow = float(torch.rand((), generator=dice)) < self.fraction
        if slow and epochs > 1:
            return [Phase(int(torch.randint(1, epochs, (), generator=dice)))]
        return None


@recipe("FedProx", family="classic", paper="Li et al., MLSys 2020")
def fedprox(
    mu: NonNegative = 0.01,
    straggler_fraction: Fraction = 0.0,
    local_epochs: tuple[AtLeastOne, ...] = (),
    agg_weights: Literal["size", "uniform"] = "size",
) -> Alloy:
    inexact = [Stragglers(straggler_fraction, local_epochs)] if straggler_fraction or local_epochs else []
    return alloy("FedProx", Share(agg_weights=agg_weights), Prox(mu), *inexact)

"""Clip: gradients longer than a limit are shortened to it."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.alloy import Mechanism
from fedalloy.core.parameters import Positive
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, Oracle, StepView


@dataclass(frozen=True)
class Clip(Mechanism):
    """g <- g min(1, norm / ||g||), for a client's own model and for an auxiliary one separately."""

    norm: Positive = 10.0

    @property
    def outermost(self) -> bool:
        return True

    def before_training(self, client: ClientView, my: State) -> None:
        my.scratch["spans"] = [client.weights.span(part) for part in ("main", "aux")]

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        g = oracle(step)
        for span in my.scratch["spans"]:
            g[span] *= torch.clamp(self.norm / (g[span].norm() + 1e-6), max=1.0)
        return g

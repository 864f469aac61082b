"""Clip: the gradient that reaches the optimiser is no longer than a limit."""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.alloy import Box, Mechanism, Oracle
from fedalloy.client import Step
from fedalloy.ranges import Positive


@dataclass(frozen=True)
class Clip(Mechanism):
    """g <- g min(1, max_norm / ||g||), after all other corrections."""

    max_norm: Positive = 10.0

    @property
    def outermost(self) -> bool:
        return True

    def gradient(self, step: Step, my: Box, oracle: Oracle) -> Tensor:
        g = oracle(step)
        g *= torch.clamp(self.max_norm / (g.norm() + 1e-6), max=1.0)
        return g

"""How clients train: how long, at what rate, with which optimiser."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.optim.sgd import sgd


@dataclass(frozen=True)
class Local:
    """How clients train."""

    epochs: int = 1
    steps: int | None = None  # a fixed number of steps in place of epochs
    batch: int = 32
    lr: float = 0.01
    momentum: float = 0.0
    weight_decay: float = 0.0
    optimizer: str = "sgd"
    lr_decay: float = 1.0  # per round: a schedule depends on the round alone
    diagnose_every: int | None = None  # rounds in which mechanisms say what they see

    def rate(self, round: int) -> float:
        """The learning rate of a round, counted from 1."""
        return self.lr * self.lr_decay ** (round - 1)

    @property
    def plain_sgd(self) -> bool:
        return self.optimizer == "sgd" and self.momentum == 0 and self.weight_decay == 0

    @property
    def as_plain_sgd(self) -> "Local":
        return replace(self, optimizer="sgd", momentum=0.0, weight_decay=0.0)

    def optimiser(self, flat: Tensor, lr: float) -> Callable[[Tensor], None]:
        """A fresh optimiser for a flat vector, a function of the gradient: no state survives a round."""
        if self.optimizer == "sgd":
            return self._sgd(flat, lr)
        kind = torch.optim.Adam if self.optimizer == "adam" else torch.optim.AdamW
        adam = kind([flat], lr=lr, weight_decay=self.weight_decay)

        def step(gradient: Tensor) -> None:
            flat.grad = gradient
            adam.step()

        return step

    def _sgd(self, flat: Tensor, lr: float) -> Callable[[Tensor], None]:
        """torch.optim.SGD as a function, without the bookkeeping of its class, which costs a tiny model dear."""
        momentum: list[Tensor | None] = [None]

        @torch.no_grad()
        def step(gradient: Tensor) -> None:
            sgd(
                [flat],
                [gradient],
                momentum,
                weight_decay=self.weight_decay,
                momentum=self.momentum,
                lr=lr,
                dampening=0.0,
                nesterov=False,
                maximize=False,
                foreach=False,
                fused=False,
            )

        return step

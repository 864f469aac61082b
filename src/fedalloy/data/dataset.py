"""A data set in memory: training samples first, then test samples, in one tensor."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from fedalloy.errors import FedAlloyError
from fedalloy.nets.base import Inputs, Kind
from fedalloy.random import generator


@dataclass(frozen=True)
class Dataset:
    """Samples `x`, labels `y`; `x[:train]` is for training, the rest is the global test set."""

    name: str
    x: Tensor  # image: uint8 N C H W; vector: float32 N F; tokens: integer N L
    y: Tensor  # int64 N
    train: int
    kind: Kind
    classes: int
    class_names: tuple[str, ...] = ()
    domain: Tensor | None = None  # int64 N: which domain a sample comes from
    domain_names: tuple[str, ...] = ()
    mean: tuple[float, ...] = field(
        default=()
    )  # per channel, of pixels scaled to [0, 1]; or per vector entry
    std: tuple[float, ...] = field(default=())
    vocab: int = 0

    @property
    def inputs(self) -> Inputs:
        """What a net is sized by."""
        return Inputs(self.kind, tuple(self.x.shape[1:]), self.classes, self.vocab)

    def limited(self, samples: int, seed: int) -> Self:
        """The same data set with only so many training samples, drawn at random; the test samples all stay."""
        if not 1 <= samples <= self.train:
            raise FedAlloyError(f"--limit {samples}: {self.name!r} has 1 to {self.train} samples to train on")
        drawn = torch.randperm(self.train, generator=generator(seed, "limit"))[:samples].sort().values
        kept = torch.cat([drawn, torch.arange(self.train, len(self.y))])
        domain = None if self.domain is None else self.domain[kept]
        return replace(self, x=self.x[kept], y=self.y[kept], train=samples, domain=domain)

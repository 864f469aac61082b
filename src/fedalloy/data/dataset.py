"""A data set in memory: training samples first, then test samples, in one tensor."""

from dataclasses import dataclass, field, replace
from typing import Self

import torch
from torch import Tensor

from fedalloy.core.net import Inputs, Kind
from fedalloy.core.random import generator
from fedalloy.core.wire import fingerprint
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.errors import FedAlloyError


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
    vocabulary: tuple[str, ...] = ()  # texts: the words that have numbers, from 2 on
    feature_names: tuple[str, ...] = ()  # tables: the columns

    @property
    def inputs(self) -> Inputs:
        """What a net is sized by."""
        return self.preprocessing.inputs

    @property
    def preprocessing(self) -> Preprocessing:
        """How these samples become what a net takes."""
        return Preprocessing(
            self.kind,
            tuple(self.x.shape[1:]),
            self.classes,
            self.class_names,
            self.mean,
            self.std,
            self.vocab,
            self.vocabulary,
            self.feature_names,
        )

    @property
    def fingerprint(self) -> str:
        """Tells data sets apart: sha256 over all labels and a thousand samples, so that every run can afford it."""
        step = max(1, len(self.y) // 1000)
        return fingerprint({"x": self.x[::step], "y": self.y})

    def limited(self, samples: int, seed: int) -> Self:
        """The same data set with only so many training samples, drawn at random; the test samples all stay."""
        if not 1 <= samples <= self.train:
            raise FedAlloyError(f"--limit {samples}: {self.name!r} has 1 to {self.train} samples to train on")
        drawn = torch.randperm(self.train, generator=generator(seed, "limit"))[:samples].sort().values
        return self._of(drawn, torch.arange(self.train, len(self.y)))

    def validating(self, share: float, seed: int) -> Self:
        """A share of the training samples, drawn at random, in place of the test samples, which all go."""
        held = round(self.train * share)
        if not 1 <= held < self.train:
            raise FedAlloyError(
                f"--validation {share:g} of {self.train} training samples is {held}; "
                "take a share that leaves some on both sides, such as 0.2"
            )
        drawn = torch.randperm(self.train, generator=generator(seed, "validation"))
        return self._of(drawn[held:].sort().values, drawn[:held].sort().values)

    def _of(self, train: Tensor, test: Tensor) -> Self:
        kept = torch.cat([train, test])
        domain = None if self.domain is None else self.domain[kept]
        return replace(self, x=self.x[kept], y=self.y[kept], train=len(train), domain=domain)

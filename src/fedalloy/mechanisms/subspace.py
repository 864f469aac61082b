"""Subspace: all that is additive lives, for one round, in a random subspace that both ends draw from a seed."""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.alloy import Box, Mechanism, Oracle
from fedalloy.client import Step
from fedalloy.random import generator
from fedalloy.ranges import AtLeastOne, Share01
from fedalloy.site import Site

Draw = Literal["haar", "gaussian", "coordinate"]


def projector(rows: int, rank: int, draw: torch.Generator, kind: Draw = "haar") -> Tensor:
    """P, rank x rows. "haar" and "coordinate" have orthonormal rows; "gaussian" only in expectation."""
    if kind == "coordinate":
        signs = torch.randint(2, (rank,), generator=draw) * 2.0 - 1
        chosen = torch.randperm(rows, generator=draw)[:rank]
        return torch.zeros(rank, rows, dtype=torch.float64).index_put_(
            (torch.arange(rank), chosen), signs.double()
        )
    noise = torch.randn(rows, rank, generator=draw, dtype=torch.float64)
    if kind == "gaussian":
        return noise.T / math.sqrt(rows)
    q, r = torch.linalg.qr(noise)
    haar: Tensor = (q * r.diagonal().sign()).T  # the sign makes it Haar distributed
    return haar


@dataclass(frozen=True)
class Subspace(Mechanism):
    """Every additive value v travels as P v, and the gradient is P^T P g, so that training stays in the range of P^T.

    A weight of shape out x rest is seen as an m x n matrix and P acts from the left, rank max(1, round(ratio m));
    `scope="global"` draws one P for the whole vector (small problems only). Vectors and matrices of fewer than
    `min_rows` rows travel whole. P is drawn anew every `refresh` rounds, from (seed, round, tensor).
    """

    ratio: Share01 = 0.2
    refresh: AtLeastOne = 1
    scope: Literal["tensor", "global"] = "tensor"
    side: Literal["left", "longer"] = "left"
    min_rows: AtLeastOne = 4
    draw: Draw = "haar"

    needs = frozenset({"global model"})

    @property
    def outermost(self) -> bool:
        return True

    def gradient(self, step: Step, my: Box, oracle: Oracle) -> Tensor:
        site, round = step.client.site, step.client.round
        return self.decode(site, self.encode(site, oracle(step), round), round)

    def encode(self, site: Site, value: Tensor, round: int) -> Tensor:
        return torch.cat([block.coded(value) for block in self.blocks(site, round)])

    def decode(self, site: Site, coded: Tensor, round: int) -> Tensor:
        blocks = self.blocks(site, round)
        pieces = torch.split(coded, [block.coded_size for block in blocks])
        return torch.cat([block.full(piece) for block, piece in zip(blocks, pieces, strict=True)])

    def coded_size(self, site: Site) -> int:
        return sum(block.coded_size for block in self.blocks(site, 1))

    def blocks(self, site: Site, round: int) -> "list[Block]":
        """The flat vector cut into matrices, each with this round's projector, drawn once for all clients."""
        epoch = (round - 1) // self.refresh
        if site.memo.get("subspace epoch") != epoch:
            site.memo["subspace epoch"] = epoch
            site.memo["subspace"] = [self._block(site, epoch, *cut) for cut in self._cuts(site)]
        drawn: list[Block] = site.memo["subspace"]
        return drawn

    def _cuts(self, site: Site) -> Iterator[tuple[str, slice, tuple[int, int]]]:
        layout = site.weights.layout
        if self.scope == "global":
            yield "all", slice(0, layout.size), (layout.size, 1)
            return
        for name, (start, stop) in layout.spans.items():
            shape = layout.shapes[name]
            rows = shape[0] if len(shape) > 1 else 1
            yield name, slice(start, stop), (rows, (stop - start) // rows)

    def _block(self, site: Site, epoch: int, name: str, span: slice, shape: tuple[int, int]) -> "Block":
        turned = self.side == "longer" and shape[0] < shape[1] and shape[0] > 1
        rows = shape[1] if turned else shape[0]
        if rows < self.min_rows:
            return Block(span, shape, False, None)
        rank = max(1, round(self.ratio * rows))
        p = projector(rows, rank, generator(site.seed, epoch, name, "subspace"), self.draw)
        return Block(span, shape, turned, p.to(site.initial.dtype), self.draw != "gaussian")


@dataclass(frozen=True)
class Block:
    """One tensor of the flat vector as a matrix, its projected side turned to the rows; without P it goes whole."""

    span: slice
    shape: tuple[int, int]
    turned: bool
    p: Tensor | None
    orthonormal: bool = True

    @property
    def coded_size(self) -> int:
        rows, columns = self.shape[::-1] if self.turned else self.shape
        return (rows if self.p is None else len(self.p)) * columns

    def projected(self, flat: Tensor) -> Tensor:
        """P M."""
        if self.p is None:
            return flat[self.span]
        matrix = flat[self.span].view(self.shape)
        return (self.p @ (matrix.T if self.turned else matrix)).flatten()

    def coded(self, flat: Tensor) -> Tensor:
        """The coordinates b of a move M = P^T b; P M where the rows of P are orthonormal."""
        if self.p is None or self.orthonormal:
            return self.projected(flat)
        b: Tensor = torch.linalg.solve(self.p @ self.p.T, self.projected(flat).view(len(self.p), -1))
        return b.flatten()

    def full(self, coded: Tensor) -> Tensor:
        if self.p is None:
            return coded
        matrix = self.p.T @ coded.view(len(self.p), -1)
        return (matrix.T if self.turned else matrix).flatten()

"""Subspace: all that is additive lives, for one round, in a random subspace that both ends draw from a seed."""

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core.alloy import Mechanism, Names
from fedalloy.core.parameters import AtLeastOne, Share01
from fedalloy.core.random import generator
from fedalloy.core.state import State
from fedalloy.core.views import Oracle, ReplicaView, StepView

Draw = Literal["haar", "gaussian", "coordinate"]
Side = Literal["left", "longer", "input"]

REMEMBERED = 2  # draws at hand: a client decodes the update of the last round, then works in this one


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
    """Every additive value v travels as P v, and the gradient as P^T P g, so that training stays in the range of P^T.

    A weight of shape out x rest is seen as an m x n matrix and P acts from the left, rank max(1, round(ratio m));
    `side="longer"` projects the longer of m and n, "input" the second axis (the columns of a linear layer, the input
    channels of a convolution), `scope="whole"` draws one P for the whole vector (small problems only). Vectors, and
    sides shorter than `min_rows`, travel whole. P is drawn anew every `refresh` rounds, from (seed, round, tensor).
    Of `draw="gaussian"` only the range counts: values and gradients are projected onto it.
    """

    ratio: Share01 = 0.2
    refresh: AtLeastOne = 1
    scope: Literal["tensor", "whole"] = "tensor"
    side: Side = "left"
    min_rows: AtLeastOne = 4
    draw: Draw = "haar"

    @property
    def needs(self) -> Names:
        return frozenset({"global model"})

    @property
    def outermost(self) -> bool:
        return True

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        return step.client.as_sent(oracle(step))

    def encode(self, replica: ReplicaView, value: Tensor, round: int) -> Tensor:
        return torch.cat([block.coded(value) for block in self.blocks(replica, round)])

    def decode(self, replica: ReplicaView, coded: Tensor, round: int) -> Tensor:
        blocks = self.blocks(replica, round)
        pieces = torch.split(coded, [block.cut.coded_size for block in blocks])
        return torch.cat([block.full(piece) for block, piece in zip(blocks, pieces, strict=True)])

    def coded_size(self, replica: ReplicaView) -> int:
        return sum(cut.coded_size for cut in self.cuts(replica))

    def cuts(self, replica: ReplicaView) -> "list[Cut]":
        """The flat vector, tensor by tensor."""
        layout = replica.weights.layout
        if self.scope == "whole":
            return [self._cut("all", slice(0, layout.size), (1, layout.size, 1))]
        return [
            self._cut(name, slice(*span), self._seen(layout.shapes[name]))
            for name, span in layout.spans.items()
        ]

    def blocks(self, replica: ReplicaView, round: int) -> "list[Block]":
        """The cuts with this round's projectors, drawn once for all clients."""
        epoch = self.epoch(round)
        drawn: dict[int, list[Block]] = replica.memo.setdefault("subspace", {})
        blocks = (
            drawn.pop(epoch)
            if epoch in drawn
            else [self._block(replica, epoch, c) for c in self.cuts(replica)]
        )
        drawn[epoch] = blocks  # in the order of their last use
        for old in list(drawn)[:-REMEMBERED]:
            del drawn[old]
        return blocks

    def epoch(self, round: int) -> int:
        """Rounds of the same epoch share their projectors."""
        return (round - 1) // self.refresh

    def _seen(self, shape: torch.Size) -> tuple[int, int, int]:
        """A tensor with three axes, of which the middle one is projected."""
        if len(shape) < 2:
            return shape.numel(), 1, 1
        out, rest = shape[0], shape[1:].numel()
        if self.side == "input":
            return out, shape[1], rest // shape[1]
        return (out, rest, 1) if self.side == "longer" and rest > out else (1, out, rest)

    def _cut(self, name: str, span: slice, shape: tuple[int, int, int]) -> "Cut":
        rows = shape[1]
        whole = rows < max(self.min_rows, 2)
        return Cut(name, span, shape, 0 if whole else max(1, round(self.ratio * rows)))

    def _block(self, replica: ReplicaView, epoch: int, cut: "Cut") -> "Block":
        if not cut.rank:
            return Block(cut)
        p = projector(cut.shape[1], cut.rank, generator(replica.seed, epoch, cut.name, "subspace"), self.draw)
        coder = _left_inverse(p.T) if self.draw == "gaussian" else p
        device, dtype = replica.device, replica.initial.dtype
        return Block(cut, p.to(device, dtype), coder.to(device, dtype))


def _left_inverse(matrix: Tensor) -> Tensor:
    """By QR: the condition number is not squared."""
    q, r = torch.linalg.qr(matrix)
    inverse: Tensor = torch.linalg.solve_triangular(r, q.T, upper=True)
    return inverse


@dataclass(frozen=True)
class Cut:
    """One tensor of the flat vector; the middle of its three axes is projected to `rank`, if that is not 0."""

    name: str
    span: slice
    shape: tuple[int, int, int]
    rank: int

    @property
    def coded_size(self) -> int:
        before, rows, behind = self.shape
        return before * (self.rank or rows) * behind


@dataclass(frozen=True)
class Block:
    """One tensor with this round's P. Seen from the projected axis it is a matrix M; without P it goes whole."""

    cut: Cut
    p: Tensor | None = None
    coder: Tensor | None = None  # turns P^T b into b; P itself where its rows are orthonormal

    def projected(self, flat: Tensor) -> Tensor:
        """P M."""
        return self._times(self.p, flat)

    def coded(self, flat: Tensor) -> Tensor:
        """The coordinates b of a move M = P^T b."""
        return self._times(self.coder, flat)

    def full(self, coded: Tensor) -> Tensor:
        if self.p is None:
            return coded
        before, rows, behind = self.cut.shape
        return (self.p.T @ coded.view(len(self.p), -1)).view(rows, before, behind).movedim(0, 1).flatten()

    def _times(self, p: Tensor | None, flat: Tensor) -> Tensor:
        if p is None:
            return flat[self.cut.span]
        matrix = flat[self.cut.span].view(self.cut.shape).movedim(1, 0).reshape(self.cut.shape[1], -1)
        return (p @ matrix).flatten()

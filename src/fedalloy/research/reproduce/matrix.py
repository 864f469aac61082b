"""Matrix regression, the experiment on which SSF, SCAFFOLD, FedAvg and FedSub can be told apart to the last digit.

Client i holds A_i (200 x 100) and B_i = A_i (W* + zeta D_i) + noise and minimises f_i(W) = |A_i W - B_i|^2 / 400.
Every gradient is H_i W - G_i, so the clients of many settings are columns of one product: the whole study takes about
a minute. The iterates are those of `fedalloy run` (a test holds them against it).

Axes: N clients, D rows of W, C columns of W, S settings, R rank of the projector, K local steps.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core.random import generator
from fedalloy.mechanisms.subspace import Draw, projector

STEPS = 10  # K
TENSOR = "head.weight"  # whose projectors are drawn


@dataclass(frozen=True)
class Problem:
    """The data of all clients."""

    a: Tensor  # N n D
    b: Tensor  # N n C

    @classmethod
    def drawn(
        cls,
        zeta: float,
        seed: int = 0,
        *,
        clients: int = 10,
        samples: int = 200,
        rows: int = 100,
        columns: int = 10,
    ) -> "Problem":
        """Heterogeneity zeta scales how far the clients' own solutions W* + zeta D_i are apart."""
        draw = generator(seed, "matrix regression")

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=draw, dtype=torch.float64)

        truth, apart = normal(rows, columns) / rows**0.5, normal(clients, rows, columns) / rows**0.5
        apart -= apart.mean(0)
        a = normal(clients, samples, rows)
        return cls(a, a @ (truth + zeta * apart) + 0.1 * normal(clients, samples, columns))

    @cached_property
    def hessians(self) -> Tensor:  # N D D
        return self.a.mT @ self.a / self.a.shape[1]

    @cached_property
    def targets(self) -> Tensor:  # N D C: G_i
        return self.a.mT @ self.b / self.a.shape[1]

    @cached_property
    def optimum(self) -> Tensor:  # D C
        solved: Tensor = torch.linalg.solve(self.hessians.mean(0), self.targets.mean(0))
        return solved


@dataclass(frozen=True)
class Method:
    """A method and its projector; rank 0 stands for the whole space."""

    name: Literal["FedAvg", "SCAFFOLD", "SSF", "FedSub"]
    rank: int = 0
    draw: Draw = "haar"


@lru_cache(maxsize=16)  # methods that run side by side share it
def frame(h: Tensor, rank: int, draw: Draw, seed: int, round: int) -> tuple[Tensor, Tensor]:
    """This round's P (R D), and P H_i P^T (N R R)."""
    if not rank:
        return torch.eye(h.shape[1], dtype=h.dtype), h
    p = projector(h.shape[1], rank, generator(seed, round - 1, TENSOR, "subspace"), draw)
    return p, p @ h @ p.T


class Run:
    """One method on several settings side by side: problems that differ in B_i alone, learning rates."""

    def __init__(
        self, method: Method, problems: Sequence[Problem], rates: Sequence[float], seed: int = 0
    ) -> None:
        self.method, self.seed, self.round = method, seed, 0
        self.h = problems[0].hessians  # N D D
        self.g = torch.cat([problem.targets for problem in problems], 2)  # N D SC
        self.optimum = torch.stack([problem.optimum for problem in problems], 1)  # D S C
        self.rates = torch.tensor(rates, dtype=torch.float64).repeat_interleave(self.optimum.shape[2])  # SC
        self.x = torch.zeros_like(self.g[0])  # D SC
        self.c = torch.zeros_like(self.x)  # the server's control variate
        self.controls = torch.zeros_like(self.g)  # N D SC: c_i
        self.duals = torch.zeros_like(self.g)  # N D SC: P^T Lambda_i

    @property
    def errors(self) -> Tensor:
        """|W - W_opt| / |W_opt| of every setting."""
        w = self.x.view_as(self.optimum)
        squares = ((w - self.optimum) ** 2).sum((0, 2)) / (self.optimum**2).sum((0, 2))
        return squares.sqrt()

    def step(self, noise: Tensor | None = None) -> None:
        """One round; `noise` (K N D C) is added to the gradients, the same in every setting."""
        self.round += 1
        p, curvature = frame(self.h, self.method.rank, self.method.draw, self.seed, self.round)
        start = p @ (self.h @ self.x - self.g)  # P g where the round begins
        if self.method.name == "FedSub":
            dual = p @ self.duals  # carried over from the last round's coordinates
            start += dual / (self.rates * STEPS)
        elif self.method.name != "FedAvg":
            p_c, p_i = p @ self.c, p @ self.controls
            start += p_c - p_i
        projected = noise if noise is None or not self.method.rank else p @ noise
        b = self._trained(curvature, start, projected)
        if self.method.name == "FedSub":
            self.duals = p.T @ (dual + b - b.mean(0))
        elif self.method.name != "FedAvg":
            change = -p_c - b / (self.rates * STEPS)  # option II: p_i+ - p_i
            self.controls += p.T @ change
            self.c += p.T @ change.mean(0)
        self.x += p.T @ b.mean(0)

    def _trained(self, curvature: Tensor, start: Tensor, noise: Tensor | None) -> Tensor:
        """b after K steps against P H_i P^T b + start (+ P noise): N R SC."""
        b = torch.zeros_like(start)
        by_setting = start.view(*start.shape[:2], *self.optimum.shape[1:])
        for k in range(STEPS):
            here = start if noise is None else (by_setting + noise[k].unsqueeze(2)).flatten(2)
            b.addcmul_(torch.baddbmm(here, curvature, b), self.rates, value=-1)
        return b

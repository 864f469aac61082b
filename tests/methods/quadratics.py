"""Federations with a known answer: the model is a vector, a client's loss a quadratic or a slope."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from laboratory import Lab, consecutive, handed_out
from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.net import Inputs, Net, Outputs
from fedalloy.core.state import State
from fedalloy.core.views import StepView
from fedalloy.data import Dataset
from fedalloy.data.federation import Federation

Rows = tuple[tuple[float, ...], ...]


class _Point(Net):
    """The weights are the vector; the "logits" of any batch are the vector itself."""

    def __init__(self, size: int) -> None:
        super().__init__(nn.Identity(), nn.Linear(size, 1, bias=False))

    def forward(self, x: Tensor) -> Outputs:
        (vector,) = self.head.parameters()
        return Outputs(x, x, vector.flatten())


def point(inputs: Inputs) -> Net:
    return _Point(*inputs.shape)


@dataclass(frozen=True)
class _Quadratic(Mechanism):
    """Client k minimises 1/2 sum_j a_kj (x_j - b_kj)^2, whatever the batch."""

    a: Rows
    b: Rows

    def task(self, step: StepView, my: State) -> Tensor:
        a, b = torch.tensor(self.a[step.client.id]), torch.tensor(self.b[step.client.id])
        return 0.5 * (a * (step.out.logits - b) ** 2).sum()

    def gradient_at(self, client: int, x: Tensor) -> Tensor:
        return torch.tensor(self.a[client]) * (x - torch.tensor(self.b[client]))

    @property
    def optimum(self) -> Tensor:
        """The minimiser of the plain mean of all clients' losses."""
        a, b = torch.tensor(self.a), torch.tensor(self.b)
        return (a * b).sum(0) / a.sum(0)


@dataclass(frozen=True)
class _Slope(Mechanism):
    """A loss with the same gradient everywhere."""

    slope: tuple[float, ...]

    def task(self, step: StepView, my: State) -> Tensor:
        return (torch.tensor(self.slope) * step.out.logits).sum()


def different(clients: int = 6, size: int = 5) -> _Quadratic:
    """Quadratics that differ in curvature (0.5 to 2) and in minimiser."""
    draw = torch.Generator().manual_seed(0)
    a = 0.5 + 1.5 * torch.rand(clients, size, generator=draw, dtype=torch.float64)
    b = torch.randn(clients, size, generator=draw, dtype=torch.float64)
    return _Quadratic(tuple(map(tuple, a.tolist())), tuple(map(tuple, b.tolist())))


def dummies(sizes: Sequence[int], size: int) -> Federation:
    """Samples that nobody looks at, only counts."""
    total = sum(sizes)
    dataset = Dataset("dummies", torch.zeros(total, size), torch.zeros(total).long(), total, "vector", 1)
    return handed_out(dataset, consecutive(sizes), [[] for _ in sizes])


def solve(
    method: Alloy,
    loss: _Quadratic | _Slope,
    sizes: Sequence[int] = (4,) * 6,
    batch: int = 10**6,
    **local: Any,
) -> Lab:
    """The method on these losses. Every step sees the full gradient; by default an epoch is one step."""
    size = len(loss.a[0]) if isinstance(loss, _Quadratic) else len(loss.slope)
    made = alloy(method.title, method, loss)
    return Lab(made, dummies(sizes, size), "quadratics:point", batch=batch, **local)


def halves(rounds: int, clients: int = 6) -> list[list[int]]:
    """Half of the clients for every round, at random."""
    draw = torch.Generator().manual_seed(1)
    return [sorted(torch.randperm(clients, generator=draw)[: clients // 2].tolist()) for _ in range(rounds)]

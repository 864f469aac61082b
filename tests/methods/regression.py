"""Problems in float64: the matrix regression that `reproduce` studies, through the real core, and a net for digits."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from laboratory import Lab, consecutive, handed_out
from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.net import Inputs, Net, Outputs
from fedalloy.core.state import State
from fedalloy.core.views import StepView
from fedalloy.data import Dataset
from fedalloy.research.reproduce.matrix import STEPS, Problem


class _Matrix(Net):
    """W, which starts at zero; the "logits" of any batch are W itself."""

    def __init__(self, rows: int, columns: int) -> None:
        head = nn.Linear(columns, rows, bias=False)
        nn.init.zeros_(head.weight)
        super().__init__(nn.Identity(), head)

    def forward(self, x: Tensor) -> Outputs:
        (w,) = self.head.parameters()
        return Outputs(x, x, w)


def matrix(inputs: Inputs) -> Net:
    (rows,) = inputs.shape
    return _Matrix(rows, inputs.classes)


def transposed(inputs: Inputs) -> Net:
    """W^T, as a linear layer stores it: out x in."""
    (rows,) = inputs.shape
    return _Matrix(inputs.classes, rows)


class _Cast(nn.Module):
    """Samples arrive in float32."""

    def forward(self, x: Tensor) -> Tensor:
        return x.to(torch.get_default_dtype()).flatten(1)


def net(inputs: Inputs) -> Net:
    """An MLP with BatchNorm in the precision of the moment."""
    layers = [nn.Linear(math.prod(inputs.shape), 16), nn.BatchNorm1d(16), nn.ReLU()]
    return Net(nn.Sequential(_Cast(), *layers), nn.Linear(16, inputs.classes))


def smooth(inputs: Inputs) -> Net:
    """A small net without kinks."""
    layers = [nn.Linear(math.prod(inputs.shape), 6), nn.Tanh()]
    return Net(nn.Sequential(_Cast(), *layers), nn.Linear(6, inputs.classes))


def dropout(inputs: Inputs) -> Net:
    """The same with dropout."""
    net = smooth(inputs)
    return Net(nn.Sequential(net.body, nn.Dropout(0.5)), nn.Linear(6, inputs.classes))


@dataclass(frozen=True)
class _Regression(Mechanism):
    """f_i(W) up to a constant: its gradient is H_i W - G_i."""

    problem: Problem = field(compare=False)

    def task(self, step: StepView, my: State) -> Tensor:
        i, g = step.client.id, self.problem.targets[step.client.id]
        w = step.out.logits if step.out.logits.shape == g.shape else step.out.logits.T
        return 0.5 * (w * (self.problem.hessians[i] @ w)).sum() - (w * g).sum()


def small(zeta: float = 1.0, rows: int = 12, seed: int = 0) -> Problem:
    return Problem.drawn(zeta, seed, clients=4, samples=2 * rows, rows=rows, columns=3)


def regress(method: Alloy, problem: Problem, model: str = "matrix", **local: Any) -> Lab:
    """The method on this problem: K steps a round with exact gradients. Needs float64."""
    (clients, _, rows), columns = problem.a.shape, problem.b.shape[2]
    dataset = Dataset(
        "dummies", torch.zeros(clients, rows), torch.zeros(clients).long(), clients, "vector", columns
    )
    federation = handed_out(dataset, consecutive((1,) * clients), [[] for _ in range(clients)])
    settings = {"lr": 0.05, "steps": STEPS, **local}
    return Lab(
        alloy(method.title, method, _Regression(problem)), federation, f"regression:{model}", **settings
    )


def error(lab: Lab, problem: Problem) -> float:
    """|W - W_opt| / |W_opt|."""
    best = problem.optimum
    return float((lab.weights.view_as(best) - best).norm() / best.norm())

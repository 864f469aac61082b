"""Per-FedAvg: the server's model is trained to be good after one gradient step of each client.

Fallah, Mokhtari, Ozdaglar, "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach". NeurIPS 2020.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import count
from typing import Literal

import torch
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import AtLeastOne, Count, NonNegative, Positive
from fedalloy.core.random import seeded
from fedalloy.core.registry import recipe
from fedalloy.core.state import Phase, State
from fedalloy.core.views import EVAL_BATCH, ClientView, Oracle, StepView
from fedalloy.mechanisms.label_loss import label_loss
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class Meta(Mechanism):
    """The gradient of f_k(w - alpha grad f_k(w)). With w~ = w - alpha grad l(w; D) and v = grad l(w~; D') a step is
    w <- w - beta v ("fo", first order) or w <- w - beta (I - alpha grad^2 l(w; D'')) v.

    That product is "exact", or taken from two gradients at w +- delta v ("hf", Hessian-free). Steps are plain SGD,
    whatever optimiser the clients have; beta follows the run's schedule. D' are FedAvg's batches; D and D'' come from
    streams of their own ("independent") or are the same batch. Running statistics are those of the pass on D'.
    """

    alpha: NonNegative = 0.01
    beta: Positive = 0.001
    variant: Literal["fo", "hf", "exact"] = "fo"
    delta: Positive = 1e-3
    inner_batch: Literal["independent", "same"] = "independent"

    def phases(self, client: ClientView, my: State, epochs: int) -> Sequence[Phase]:
        rate = replace(client.local, lr=self.beta).rate(client.round)
        return [Phase(epochs, lr=rate, steps=client.local.steps, plain=True)]

    def before_training(self, client: ClientView, my: State) -> None:
        my.scratch["streams"] = {name: shuffled(client, name) for name in ("inner", "curvature")}

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        client, w = step.client, step.weights.clone()
        with aside(client, "inner"):
            step.weights.sub_(self.alpha * oracle(self._batch(step, my, "inner")))
        v = oracle(step).clone()
        step.weights.copy_(w)  # w~ leaves no trace
        if self.variant == "fo":
            return v
        other = self._batch(step, my, "curvature")
        if self.variant == "exact":
            with aside(client, "curvature"):
                return v - self.alpha * curvature(other, v)
        ahead, behind = (
            self._gradient_at(w + move, other, oracle) for move in (self.delta * v, -self.delta * v)
        )
        step.weights.copy_(w)
        return v - self.alpha * (ahead - behind) / (2 * self.delta)

    def _gradient_at(self, point: Tensor, step: StepView, oracle: Oracle) -> Tensor:
        step.weights.copy_(point)
        with aside(step.client, "curvature"):  # the same dropout on either side
            return oracle(step).clone()

    def _batch(self, step: StepView, my: State, name: str) -> StepView:
        batch: StepView = copy.copy(step) if self.inner_batch == "same" else next(my.scratch["streams"][name])
        return batch


def shuffled(client: ClientView, name: str) -> Iterator[StepView]:
    """Batches without end, in an order of their own."""
    data = client.data
    for lap in count():
        order, augment = client.rng(lap, name, "batches"), client.rng(lap, name, "augment")
        for index in torch.split(torch.randperm(data.samples, generator=order), client.local.batch):
            if len(index) > 1 or not client.replica.has_batchnorm:
                yield client.step(data.prepare(data.x[index], augment), data.y[index], index, lap)


@contextmanager
def aside(client: ClientView, name: str) -> Iterator[None]:
    """Passes that leave no trace in the running statistics and in the dropout of the training steps."""
    statistics = client.weights.buffers.clone()
    with seeded(client.seed, client.round, client.id, client.steps, name):
        yield
    client.weights.buffers.copy_(statistics)


@torch.enable_grad()
def curvature(step: StepView, v: Tensor) -> Tensor:
    """The Hessian of the objective on a batch, times v."""
    parameters = list(step.client.net.parameters())
    step.out = step.client.net(step.x)
    loss = step.client.objective(step)
    slopes = torch.autograd.grad(
        loss, parameters, create_graph=True, allow_unused=True, materialize_grads=True
    )
    along = torch.cat([slope.flatten() for slope in slopes]) @ v
    if not along.requires_grad:
        return torch.zeros_like(v)
    rows = torch.autograd.grad(along, parameters, allow_unused=True, materialize_grads=True)
    return torch.cat([row.flatten() for row in rows])


@dataclass(frozen=True)
class InnerSteps(Mechanism):
    """A personal model is w - alpha grad f_k(w), made for an evaluation from the client's own training data."""

    alpha: NonNegative = 0.01
    steps: AtLeastOne = 1

    @property
    def outermost(self) -> bool:  # whatever else makes up the personal model comes before
        return True

    def adapt(self, client: ClientView, my: State) -> None:
        samples = client.data.samples
        for _ in range(self.steps):
            client.weights.grad.zero_()
            for index in torch.split(torch.arange(samples), EVAL_BATCH):
                loss = label_loss(client, index)
                loss.backward(loss.new_tensor(len(index) / samples))  # type: ignore[no-untyped-call]
            client.weights.flat.sub_(self.alpha * client.weights.grad)


@recipe("Per-FedAvg", family="personal", paper="Fallah, Mokhtari, Ozdaglar, NeurIPS 2020")
def perfedavg(
    alpha: NonNegative = 0.01,
    beta: Positive = 0.001,
    variant: Literal["fo", "hf", "exact"] = "fo",
    delta: Positive = 1e-3,
    inner_batch: Literal["independent", "same"] = "independent",
    adapt_steps: Count = 1,
    agg_weights: Literal["size", "uniform"] = "size",
) -> Alloy:
    meta = Meta(alpha, beta, variant, delta, inner_batch)
    adapted = [InnerSteps(alpha, adapt_steps)] if adapt_steps else []
    return alloy("Per-FedAvg", Share(agg_weights=agg_weights), meta, *adapted)

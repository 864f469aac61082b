"""FedSCE: subspace-constrained local training and contribution-weighted averaging of an auxiliary model.

Zhang et al. CVPR 2025, pp. 20632-20642.
"""

import warnings
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, Mechanism, Slots, alloy
from fedalloy.core.parameters import AtLeastOne, NonNegative
from fedalloy.core.random import generator
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import EVAL_BATCH, ClientView, Oracle, ReplicaView, ServerView, StepView
from fedalloy.core.wire import Items, Reply, Slot
from fedalloy.errors import FedAlloyError, FedAlloyWarning
from fedalloy.mechanisms.auxiliary import Auxiliary
from fedalloy.mechanisms.mutual import Mutual
from fedalloy.mechanisms.share import Share

LAYERS = (nn.Linear, nn.modules.conv._ConvNd, nn.modules.batchnorm._NormBase, nn.LayerNorm, nn.GroupNorm)


@dataclass(frozen=True)
class SubspaceConstraint(Mechanism):
    """mu ||P P^T delta - delta||^2 on the last p layers, delta the move since the round began (Eqs 7, 9, 10).

    It works through its gradient, 2 mu (I - P P^T) delta, and reaches from the p-th last layer to the end of the
    client's own model. P starts as a random orthonormal basis of rank R; every s rounds it becomes
    the first R left singular vectors of [P, delta] (Eq 8). It never leaves the client.
    """

    mu: NonNegative = 5.0
    p: AtLeastOne = 5
    rank: AtLeastOne = 3
    every: AtLeastOne = 3

    def build(self, replica: ReplicaView) -> None:
        layers = own_layers(replica.net)
        if not layers:
            raise FedAlloyError(f"{replica.model} has no linear, convolutional or norm layer to constrain")
        if self.p > len(layers) / 2:
            covered = f"{min(self.p, len(layers))} of the {len(layers)} layers of {replica.model}"
            advice = "for small nets start from p <= 2 and mu <= 0.1"
            warnings.warn(
                f"the subspace constraint covers {covered}; {advice}", FedAlloyWarning, stacklevel=2
            )

    def init_client(self, client: ClientView, my: State) -> None:
        draw = generator(client.seed, client.id, "subspace")
        length = len(client.weights.flat[self._span(client)])
        drawn = torch.linalg.qr(torch.randn(length, self.rank, generator=draw)).Q
        my.persistent["P"] = drawn.to(client.replica.device)

    def before_training(self, client: ClientView, my: State) -> None:
        my.scratch["span"] = span = self._span(client)
        my.scratch["began"] = client.received[span]

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        g = oracle(step)
        if self.mu:
            delta, P = self._moved(step.client, my), my.persistent["P"]
            g[my.scratch["span"]] += 2 * self.mu * outside(delta, P)
        return g

    def upload(self, client: ClientView, my: State) -> Items:
        delta = self._moved(client, my)
        due = (client.round - 1) % self.every == 0  # t mod s = 0; rounds are counted from 1, t from 0
        if due and bool(torch.isfinite(delta).all()):  # else diverged, and an SVD would raise
            pair = torch.cat([my.persistent["P"], delta[:, None]], dim=1)
            my.persistent["P"] = torch.linalg.svd(pair, full_matrices=False).U[:, : self.rank].contiguous()
        return {}

    def _span(self, client: ClientView) -> slice:
        first = own_layers(client.net)[-self.p :][0]
        return slice(client.weights.span(first).start, client.weights.span("main").stop)

    def _moved(self, client: ClientView, my: State) -> Tensor:
        """delta (Eq 9)."""
        moved: Tensor = client.weights.flat[my.scratch["span"]] - my.scratch["began"]
        return moved


def outside(delta: Tensor, P: Tensor) -> Tensor:
    """(I - P P^T) delta, whose squared length is L_proj (Eq 7)."""
    return delta - P @ (P.T @ delta)


def own_layers(net: nn.Module) -> list[str]:
    """Names of the parameterised layers of a client's own model, the output last."""
    return [
        name
        for name, module in net.named_modules()
        if isinstance(module, LAYERS) and list(module.parameters()) and not name.startswith("aux.")
    ]


@dataclass(frozen=True)
class Contribution(Mechanism):
    """W_m from how far a client moved the auxiliary model, in parameters (F_1) and in features (F_2) (Eqs 13-15)."""

    squared: bool = False  # F_2 as the sum of squared distances (Algorithm 1) in place of its root

    needs = frozenset({"an auxiliary model", "size weights"})

    @property
    def up(self) -> Slots:
        return {"moved": Slot("all", (), least=0), "shifted": Slot("all", (), least=0)}

    def upload(self, client: ClientView, my: State) -> Items:
        span = client.weights.span("aux")
        moved = (client.weights.flat[span] - client.received[span]).norm()
        before = client.frozen(client.received, client.received_buffers).net.aux
        total = moved.new_zeros((), dtype=torch.float64)
        for x in torch.split(client.data.x, EVAL_BATCH):
            batch = client.data.prepare(x, None)
            total += (client.net.aux(batch).features - before(batch).features).double().square().sum()
        return {"moved": moved, "shifted": (total if self.squared else total.sqrt()).to(moved.dtype)}

    def weigh(self, server: ServerView, my: State, replies: Sequence[Reply]) -> Sequence[float]:
        shares = [contributions([float(r.items[f"{self.label}.{f}"]) for r in replies]) for f in self.up]
        return [sum(both) / 2 for both in zip(*shares, strict=True)]  # W_m (Eq 15): either share sums to 1


def contributions(values: Sequence[float]) -> list[float]:
    """F / sum F (Eq 14); equal shares where nobody moved."""
    total = sum(values)
    return [value / total for value in values] if total > 0 else [1 / len(values)] * len(values)


@recipe("FedSCE", family="different models", paper="Zhang et al., CVPR 2025")
def fedsce(
    mu: NonNegative = 5.0,
    p: AtLeastOne = 5,
    rank: AtLeastOne = 3,
    every: AtLeastOne = 3,
    aux: str | None = None,
    subspace: bool = True,
    mutual: bool = True,
    contribution: bool = True,
    adaptive: bool = True,
    squared: bool = False,
) -> Alloy:
    share = Share(part="aux", agg_weights="size" if contribution else "uniform")
    constraint = [SubspaceConstraint(mu, p, rank, every)] if subspace else []
    weights = [Contribution(squared)] if contribution else []
    # Mutual: KL / (L_g^ce + L_l^ce), partner and denominator constant (Eqs 4-6)
    return alloy("FedSCE", share, Auxiliary(aux), Mutual(adaptive, mutual), *constraint, *weights)

"""FedPAC: a common body whose features are drawn to global centroids, and personal heads combined across clients.

Xu, Tong, Huang, "Personalized Federated Learning with Feature Alignment and Classifier Collaboration". ICLR 2023.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, Slots, alloy
from fedalloy.core.parameters import Count, NonNegative, Positive
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, ServerView, StepView
from fedalloy.core.weights import BASE, HEAD
from fedalloy.core.wire import Items, Slot
from fedalloy.mechanisms.class_means import ClassMeans, held_means
from fedalloy.mechanisms.share import Share
from fedalloy.mechanisms.simplex import simplex_minimum
from fedalloy.methods.fedrep import Alternate

LEAST = 1e-3  # a smaller weight is taken as 0


@dataclass(frozen=True)
class CentroidAlignment(Mechanism):
    """lam times the mean of (z - t_y)^2 over batch and features; only where features are trained.

    t_y is the global centroid of class y, or the client's own under the received body where there is none yet. Before
    there is any, in the first round, nothing is aligned.
    """

    lam: NonNegative = 1.0

    needs = frozenset({"class means of features"})

    @property
    def brings(self) -> tuple[Mechanism, ...]:
        return (ClassMeans(),)

    def before_training(self, client: ClientView, my: State) -> None:
        got = client.state_of(ClassMeans()).received
        targets, seen, held = got["means"].clone(), got["seen"], client.data.counts > 0
        my.scratch["targets"] = targets if bool(seen.any()) else None
        if bool(seen.any()) and bool((held & ~seen).any()):
            targets[held & ~seen] = held_means(features(client), client.data.y)[~seen[held]]

    def loss(self, step: StepView, my: State) -> Tensor | None:
        z, targets = step.out.features, my.scratch["targets"]
        if not self.lam or targets is None or not z.requires_grad:
            return None
        return self.lam * F.mse_loss(z, targets[step.y])


@dataclass(frozen=True)
class HeadCombination(Mechanism):
    """phi_i <- sum_j a_ij phi_j over the participants; a_i minimises a^T P a over a >= 0, sum a = 1, where
    P_jl = V_j [j = l] + <H_i - H_j, H_i - H_l>.

    H_k[c] = pi_c mu_c and V_k = (1/n_k) sum_c (pi_c s_c - |pi_c mu_c|^2), from class shares, means and mean squared
    norms of the features under the received body. Who is not sampled keeps the head. The model shown as global has the
    mean head, by size.
    """

    needs = frozenset({"a shared body", "size weights"})
    part = HEAD

    @property
    def shares(self) -> str:
        return self.part

    @property
    def down(self) -> Slots:
        return {"head": Slot()}

    @property
    def up(self) -> Slots:
        return {"head": Slot("all"), "H": Slot("all", ("classes", "features")), "V": Slot("all", (), least=0)}

    def init_server(self, server: ServerView, my: State) -> None:
        my.persistent["mean"] = server.replica.initial[server.replica.weights.span(self.part)].clone()

    def download(self, server: ServerView, my: State, client: int) -> Items:
        first = server.replica.initial[server.replica.weights.span(self.part)]
        return {"head": my.persistent.get(f"head{client}", first)}

    def install(self, client: ClientView, my: State) -> None:
        client.weights.flat[client.weights.span(self.part)] = my.received["head"]

    def before_training(self, client: ClientView, my: State) -> None:
        my.scratch["H"], my.scratch["V"] = statistics(features(client), client.data.y, client.data.classes)

    def upload(self, client: ClientView, my: State) -> Items:
        head = client.weights.flat[client.weights.span(self.part)].clone()
        return {"head": head, "H": my.scratch["H"], "V": my.scratch["V"]}

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        H, V, heads = (torch.stack(list(got[name].values())).double() for name in ("H", "V", "head"))
        n = torch.tensor([reply.samples for reply in server.participants], dtype=torch.float64)
        combined = (combination(H.flatten(1), V) @ heads).to(server.weights.dtype)
        my.persistent |= {f"head{k}": head.clone() for k, head in zip(got["head"], combined, strict=True)}
        my.persistent["mean"] = (n / n.sum() @ heads).to(server.weights.dtype)

    def eval_models(self, server: ServerView, my: State) -> dict[str, tuple[Tensor, Tensor]]:
        share = server.method.find(Share)
        assert share is not None  # fedpac shares the body
        flat, buffers = server.replica.whole(share.part, server.weights, server.buffers)
        flat[server.replica.weights.span(self.part)] = my.persistent["mean"]
        return {"global": (flat, buffers)}


def features(client: ClientView) -> Tensor:
    """Of all of a client's training samples, by the model as it stands."""
    return torch.cat([out.features for out in client.outputs(client.data.x)])


def statistics(z: Tensor, y: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """H, with a row of zeros (a share of 0) for an absent class, and V; pi_c mu_c is the sum over class c by n."""
    rows, n = z.double(), len(z)
    H = rows.new_zeros(classes, z.shape[1]).index_add_(0, y, rows) / n
    V = (rows.square().sum() / n - H.square().sum()) / n
    return H.to(z.dtype), V.clamp(min=0).to(z.dtype)


def combination(H: Tensor, V: Tensor) -> Tensor:
    """One row of weights a_i for each participant; H has a flattened row for each."""
    centred = H - H.mean(0)  # differences stay, and fewer digits cancel
    gram = centred @ centred.T
    return torch.stack([kept(simplex_minimum(quadratic(gram, V, i))) for i in range(len(V))])


def quadratic(gram: Tensor, V: Tensor, i: int) -> Tensor:
    """P of participant i, from the inner products of all rows of H."""
    return gram + gram[i, i] - gram[i][:, None] - gram[i] + V.clamp(min=0).diag()


def kept(a: Tensor) -> Tensor:
    """Without weights that are next to nothing."""
    large = torch.where(a < min(LEAST, float(a.max())), 0, a)
    return large / large.sum()


@recipe("FedPAC", family="personal", paper="Xu, Tong, Huang, ICLR 2023")
def fedpac(
    lam: NonNegative = 1.0,
    head_epochs: Count = 1,
    head_lr: Positive | None = None,
    combine: bool = True,
) -> Alloy:
    aligned = [CentroidAlignment(lam)] if lam else []
    combined = [HeadCombination()] if combine else []
    phases = Alternate(head_epochs, "all", head_lr)
    return alloy("FedPAC", Share(part=BASE), *combined, phases, *aligned)

"""MOON: a contrast that pulls the representation to the global model's and away from the client's previous one.

Li, He, Song. CVPR 2021.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import Few, NonNegative, Positive, Width
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, ReplicaView, StepView
from fedalloy.core.wire import Items
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class Projector(Mechanism):
    """z = W2 ReLU(W1 h): the classifier reads z, so the projection is part of the deployed model."""

    width: Width = 256

    claims = frozenset({"the neck"})

    def build(self, replica: ReplicaView) -> None:
        features = replica.net.width
        replica.net.neck = nn.Sequential(
            nn.Linear(features, features), nn.ReLU(), nn.Linear(features, self.width)
        )
        biased = getattr(replica.net.head, "bias", None) is not None
        replica.net.head = nn.Linear(self.width, replica.inputs.classes, bias=biased)


@dataclass(frozen=True)
class Contrast(Mechanism):
    """mu * cross-entropy of [s(z, z_global), s(z, z_prev), ...] / T against column 0; s is the cosine similarity."""

    mu: NonNegative = 5.0
    temperature: Positive = 0.5
    buffer_size: Few = 1

    needs = frozenset({"global model"})

    def before_training(self, client: ClientView, my: State) -> None:
        previous = [i for i in range(self.buffer_size) if f"prev{i}" in my.persistent] if self.mu else []
        my.scratch["prev"] = [
            client.frozen(my.persistent[f"prev{i}"], my.persistent[f"stats{i}"]) for i in previous
        ]
        if previous:  # a client's first participation has nothing to contrast with
            my.scratch["global"] = client.frozen(client.received, client.received_buffers)

    def loss(self, step: StepView, my: State) -> Tensor | None:
        if not my.scratch["prev"]:
            return None
        references = [step.seen_by(net).embedding for net in (my.scratch["global"], *my.scratch["prev"])]
        return self.mu * contrast(step.out.embedding, references, self.temperature)

    def upload(self, client: ClientView, my: State) -> Items:
        for i in reversed(range(1, self.buffer_size)):  # first in, first out: prev0 is the newest
            if f"prev{i - 1}" in my.persistent:
                my.persistent[f"prev{i}"], my.persistent[f"stats{i}"] = (
                    my.persistent[f"prev{i - 1}"],
                    my.persistent[f"stats{i - 1}"],
                )
        my.persistent["prev0"], my.persistent["stats0"] = (
            client.weights.flat.clone(),
            client.weights.buffers.clone(),
        )
        return {}


def contrast(z: Tensor, references: list[Tensor], temperature: float) -> Tensor:
    """The model-contrastive loss: the first reference attracts, the others repel."""
    similarity = torch.stack([F.cosine_similarity(z, r, dim=1) for r in references], dim=1)
    return F.cross_entropy(similarity / temperature, torch.zeros_like(z[:, 0], dtype=torch.long))


@recipe("MOON", family="representation", paper="Li, He, Song, CVPR 2021")
def moon(
    mu: NonNegative = 5.0,
    temperature: Positive = 0.5,
    proj_dim: Width = 256,
    buffer_size: Few = 1,
    projection: Literal["mlp", "penultimate"] = "mlp",
) -> Alloy:
    neck = [Projector(proj_dim)] if projection == "mlp" else []
    return alloy("MOON", Share(), *neck, Contrast(mu, temperature, buffer_size))

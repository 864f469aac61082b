"""FedGH: one head for all extractors, trained at the server on the clients' class-mean features.

Yi, Wang, Liu, Shi, Yu. ACM Multimedia 2023, arXiv 2303.13137.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import functional_call

from fedalloy.core.alloy import Alloy, Mechanism, Slots, alloy
from fedalloy.core.parameters import AtLeastOne, AtLeastZero, NonNegative, Width
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, ServerView
from fedalloy.core.wire import Items, Slot
from fedalloy.mechanisms.class_means import each_mean, labelled, mean_features
from fedalloy.mechanisms.common_width import CommonWidth


@dataclass(frozen=True)
class GlobalHead(Mechanism):
    """Clients start from the received head and train the whole model; what they did to the head is thrown away.

    The server trains it on all (mean feature, class) pairs, every mean counting once: `epochs` of SGD over shuffled
    batches. `evaluate`: a client is tried with the "received" head, or with the one it "trained" itself last.
    """

    epochs: AtLeastZero = 100
    lr: NonNegative = 0.01
    batch: AtLeastOne | None = None  # None: that of the clients
    evaluate: Literal["received", "trained"] = "received"

    part = "head"
    claims = frozenset({"the aggregation of weights", "the neck"})  # the head reads the features themselves

    @property
    def shares(self) -> str | None:
        return self.part

    @property
    def down(self) -> Slots:
        return {"weights": Slot()}

    @property
    def up(self) -> Slots:
        return each_mean()

    def init_server(self, server: ServerView, my: State) -> None:
        server.weights = server.replica.initial[server.replica.shared].clone()

    def download(self, server: ServerView, my: State, client: int) -> Items:
        return {"weights": server.weights}

    def install(self, client: ClientView, my: State) -> None:
        client.weights.flat[client.replica.shared] = my.received["weights"]

    def upload(self, client: ClientView, my: State) -> Items:
        if self.evaluate == "trained":
            my.persistent["head"] = client.weights.flat[client.replica.shared].clone()
        return mean_features(client)

    def adapt(self, client: ClientView, my: State) -> None:
        if "head" in my.persistent:
            client.weights.flat[client.replica.shared] = my.persistent["head"]

    @torch.enable_grad()
    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        means, y = labelled(got)
        flat = server.weights.clone().requires_grad_()
        optimiser = torch.optim.SGD([flat], lr=self.lr)
        for epoch in range(self.epochs):
            order = torch.randperm(len(y), generator=server.rng("head", epoch))
            for index in torch.split(order, self.batch or server.local.batch):
                optimiser.zero_grad()
                F.cross_entropy(logits(server, flat, means[index]), y[index]).backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        server.weights = flat.detach()


def logits(server: ServerView, flat: Tensor, features: Tensor) -> Tensor:
    """What a head with these weights says of features."""
    head = server.replica.net.head
    shapes = {name: weight.shape for name, weight in head.named_parameters()}
    pieces = torch.split(flat, [shape.numel() for shape in shapes.values()])
    weights = {name: p.view(shape) for (name, shape), p in zip(shapes.items(), pieces, strict=True)}
    said: Tensor = functional_call(head, weights, (features,))
    return said


@recipe("FedGH", family="different models", paper="Yi, Wang, Liu, Shi, Yu, ACM MM 2023, arXiv 2303.13137")
def fedgh(
    server_epochs: AtLeastZero = 100,
    server_lr: NonNegative = 0.01,
    server_batch: AtLeastOne | None = None,
    evaluate: Literal["received", "trained"] = "received",
    feature_dim: Width | None = None,
) -> Alloy:
    head = GlobalHead(server_epochs, server_lr, server_batch, evaluate)
    return alloy("FedGH", CommonWidth(feature_dim), head)

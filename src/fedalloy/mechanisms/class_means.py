"""ClassMeans: what the model says of each class on average, folded by class counts (prototypes, soft labels)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.alloy import Box, Mechanism, Names, Slots
from fedalloy.client import Client
from fedalloy.nets.base import Outputs
from fedalloy.ranges import Momentum
from fedalloy.server import Server
from fedalloy.wire import Items, Slot

Kind = Literal["features", "probabilities"]


@dataclass(frozen=True)
class ClassMeans(Mechanism):
    """M_c <- sum_k n_kc m_kc / sum_k n_kc over the participants that hold class c; other classes keep their row.

    "Never seen" is the mask `seen`, never a row of zeros that looks like data. Only rows of classes that a client
    holds travel up. `momentum` mixes the old row in; `identity` starts at one-hot rows (soft labels).
    """

    of: Kind = "features"
    momentum: Momentum = 0.0
    identity: bool = False

    @property
    def label(self) -> str:
        return f"{self.of}-means"

    @property
    def gives(self) -> Names:
        return frozenset({f"class means of {self.of}"})

    @property
    def down(self) -> Slots:
        return {
            "means": Slot(shape=("classes", self._width)),
            "seen": Slot(shape=("classes",), dtype=torch.bool),
        }

    @property
    def up(self) -> Slots:
        return {
            "means": Slot("class_mean", ("held", self._width), counts="counts"),
            "counts": Slot("sum", ("classes",), torch.int64),
        }

    def open(self, server: Server, my: Box) -> None:
        classes = server.site.inputs.classes
        width = server.site.net.width if self.of == "features" else classes
        my.keep["means"] = torch.eye(classes) if self.identity else torch.zeros(classes, width)
        my.keep["seen"] = torch.full((classes,), self.identity)

    def send(self, server: Server, my: Box, client: int) -> Items:
        return {"means": my.keep["means"], "seen": my.keep["seen"]}

    def finish(self, client: Client, my: Box) -> Items:
        said = torch.cat([_said(self.of, out) for out in client.outputs(client.data.x)])
        return {"means": held_means(said, client.data.y), "counts": client.data.counts}

    def receive(self, server: Server, my: Box, got: Mapping[str, Any]) -> None:
        held, old = got["counts"] > 0, my.keep["means"]
        mixed = torch.lerp(got["means"], old, self.momentum) if self.momentum else got["means"]
        fresh = torch.where(my.keep["seen"][:, None], mixed, got["means"])
        my.keep["means"] = torch.where(held[:, None], fresh, old)
        my.keep["seen"] = my.keep["seen"] | held

    @property
    def _width(self) -> str:
        return "features" if self.of == "features" else "classes"


def held_means(values: Tensor, y: Tensor) -> Tensor:
    """The mean row of each class that occurs, in ascending order of class; summed in float64."""
    _, place, counts = torch.unique(y, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(counts), values.shape[1], dtype=torch.float64)
    means: Tensor = sums.index_add_(0, place, values.double()) / counts[:, None]
    return means.to(values.dtype)


def _said(of: Kind, out: Outputs) -> Tensor:
    return out.features if of == "features" else out.logits.softmax(1)

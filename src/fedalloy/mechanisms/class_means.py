"""ClassMeans: what the model says of each class on average, folded over the clients (prototypes, soft labels)."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.core.alloy import Mechanism, Names, Slots
from fedalloy.core.net import Outputs
from fedalloy.core.parameters import Momentum
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, Oracle, ServerView, StepView
from fedalloy.core.wire import Items, Slot

Kind = Literal["features", "probabilities", "logits"]


@dataclass(frozen=True)
class ClassMeans(Mechanism):
    """M_c <- sum_k n_kc m_kc / sum_k n_kc over the participants that hold class c; other classes keep their row.

    "Never seen" is the mask `seen`, never a row of zeros that looks like data. Only rows of classes that a client
    holds travel up. `momentum` mixes the old row in; `identity` starts at one-hot rows (soft labels); `uniform` lets
    every holder of a class count the same: n_kc is 1, and only which classes a client holds is told.
    """

    of: Kind = "features"
    momentum: Momentum = 0.0
    identity: bool = False
    uniform: bool = False

    @property
    def label(self) -> str:
        return f"{self.of}-means"

    @property
    def gives(self) -> Names:
        return frozenset({f"class means of {self.of}"})

    @property
    def claims(self) -> Names:
        return self.gives

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

    def init_server(self, server: ServerView, my: State) -> None:
        classes = server.replica.inputs.classes
        width = server.replica.net.width if self.of == "features" else classes
        my.persistent["means"] = torch.eye(classes) if self.identity else torch.zeros(classes, width)
        my.persistent["seen"] = torch.full((classes,), self.identity)

    def download(self, server: ServerView, my: State, client: int) -> Items:
        return {"means": my.persistent["means"], "seen": my.persistent["seen"]}

    def upload(self, client: ClientView, my: State) -> Items:
        means, counts = self.measured(client, my)
        return {"means": means, "counts": counts.clamp(max=1) if self.uniform else counts}

    def measured(self, client: ClientView, my: State) -> tuple[Tensor, Tensor]:
        """A row for each class that this client holds, and how many samples of each class it is the mean of."""
        said = torch.cat([_said(self.of, out) for out in client.outputs(client.data.x)])
        return held_means(said, client.data.y), client.data.counts

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        held, old = got["counts"] > 0, my.persistent["means"]
        mixed = torch.lerp(got["means"], old, self.momentum) if self.momentum else got["means"]
        fresh = torch.where(my.persistent["seen"][:, None], mixed, got["means"])
        my.persistent["means"] = torch.where(held[:, None], fresh, old)
        my.persistent["seen"] = my.persistent["seen"] | held

    @property
    def _width(self) -> str:
        return "features" if self.of == "features" else "classes"


@dataclass(frozen=True)
class RunningMeans(ClassMeans):
    """ClassMeans of all that the model says while it trains, in place of a pass over the data at the end."""

    def before_training(self, client: ClientView, my: State) -> None:
        width = client.net.width if self.of == "features" else client.data.classes
        my.scratch["sums"] = client.received.new_zeros(client.data.classes, width, dtype=torch.float64)
        my.scratch["counts"] = torch.zeros_like(client.data.counts)

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        g = oracle(step)
        my.scratch["sums"].index_add_(0, step.y, _said(self.of, step.out).double())
        my.scratch["counts"] += torch.bincount(step.y, minlength=len(my.scratch["counts"]))
        return g

    def measured(self, client: ClientView, my: State) -> tuple[Tensor, Tensor]:
        counts = my.scratch["counts"]
        held = counts > 0
        means = my.scratch["sums"][held] / counts[held, None]
        return means.to(client.weights.flat.dtype), counts


def prototypes(client: ClientView) -> tuple[Tensor, Tensor]:
    """What the mail brought of class means of features: a row for each class, and which rows mean something."""
    got = next(
        client.state_of(piece).received for piece in client.method if "class means of features" in piece.gives
    )
    return got["means"], got["seen"]


def each_mean() -> Slots:
    """Slots by which the server gets every client's class means of features one by one, to learn from them."""
    return {
        "means": Slot("all", ("held", "features"), counts="held"),
        "held": Slot("all", ("classes",), torch.bool),
    }


def mean_features(client: ClientView) -> Items:
    """What fills these slots: a row for each class that this client holds, of the model as it stands."""
    means, counts = ClassMeans("features").measured(client, State())
    return {"means": means, "held": counts > 0}


def labelled(got: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """All rows that came in, in ascending client id, and the class of each."""
    rows, held = got["means"].values(), got["held"].values()
    return torch.cat(list(rows)), torch.cat([classes.nonzero().flatten() for classes in held])


def held_means(values: Tensor, y: Tensor) -> Tensor:
    """The mean row of each class that occurs, in ascending order of class; summed in float64."""
    _, place, counts = torch.unique(y, return_inverse=True, return_counts=True)
    sums = values.new_zeros(len(counts), values.shape[1], dtype=torch.float64)
    means: Tensor = sums.index_add_(0, place, values.double()) / counts[:, None]
    return means.to(values.dtype)


def _said(of: Kind, out: Outputs) -> Tensor:
    if of == "features":
        return out.features
    return out.logits if of == "logits" else out.logits.softmax(1)

"""FedFM: features are matched to class anchors that all clients share, the class means of the global model.

Ye, Ni, Xu, Wang, Chen, Eldar. IEEE Transactions on Signal Processing 71, 2023, pp. 4224-4239.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import NOTHING, Alloy, Mechanism, Names, Slots, alloy
from fedalloy.core.parameters import AtLeastOne, NonNegative, Positive
from fedalloy.core.reduce import Fold
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientData, ClientView, ReplicaView, ServerView, StepView, outputs
from fedalloy.core.wire import Items, Reply
from fedalloy.mechanisms.class_means import ClassMeans, held_means
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class ClassAnchors(ClassMeans):
    """A_c <- sum_k n_kc a_kc / sum_k n_kc over the participants; a class that nobody holds keeps its anchor.

    a_kc is the mean feature of the new global model, asked for once it is there; with `one_trip` of the client's
    own trained model, sent along with it. `equal_avg`: the plain mean over the participants, where a client without
    class c stands for the old anchor.
    """

    one_trip: bool = False
    equal_avg: bool = False

    @property
    def label(self) -> str:
        return "classanchors"

    @property
    def gives(self) -> Names:
        return frozenset({"class anchors"})

    @property
    def needs(self) -> Names:
        return NOTHING if self.one_trip else frozenset({"global model"})

    @property
    def up(self) -> Slots:
        return self._anchors if self.one_trip else {}

    @property
    def query(self) -> Slots:
        return {} if self.one_trip else self._anchors

    def upload(self, client: ClientView, my: State) -> Items:
        return super().upload(client, my) if self.one_trip else {}

    def answer(self, replica: ReplicaView, data: ClientData) -> Items:
        z = torch.cat([out.features for out in outputs(replica.net, data, data.x)])
        return {"means": held_means(z, data.y), "counts": data.counts}

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        if got:
            super().aggregate(server, my, self._equal(my, got) if self.equal_avg else got)

    def on_answers(self, server: ServerView, my: State, answers: Iterator[Reply]) -> None:
        fold = Fold(self.query)
        for reply in answers:
            fold.add(reply)
        self.aggregate(server, my, fold.got())

    @property
    def _anchors(self) -> Slots:
        slots = super().up
        if not self.equal_avg:
            return slots
        return {
            "means": replace(slots["means"], uniform=True),
            "counts": replace(slots["counts"], reduce="all"),
        }

    def _equal(self, my: State, got: Mapping[str, Any]) -> Mapping[str, Any]:
        """The holders' plain mean, with the old anchor for every client that lacks the class."""
        counts = torch.stack(list(got["counts"].values()))
        lacking = (counts == 0).to(got["means"].dtype).mean(0)[:, None]
        mixed = torch.lerp(got["means"], my.persistent["means"], lacking)
        known = my.persistent["seen"][:, None]
        return {"means": torch.where(known, mixed, got["means"]), "counts": counts.sum(0)}


def contrastive_guiding(z: Tensor, y: Tensor, anchors: Tensor, seen: Tensor, tau: float) -> Tensor:
    """mean CE(cos(z, A_c) / tau over the classes with an anchor, y)."""
    scores = F.normalize(z, dim=1) @ F.normalize(anchors, dim=1).T / tau
    return F.cross_entropy(scores.masked_fill(~seen, -torch.inf), y)


def l2_matching(z: Tensor, y: Tensor, anchors: Tensor) -> Tensor:
    """mean over samples and dimensions of (z/||z|| - A_y/||A_y||)^2."""
    return F.mse_loss(F.normalize(z, dim=1), F.normalize(anchors[y], dim=1))


@dataclass(frozen=True)
class Matching(Mechanism):
    """lam times the distance of features to the anchors, over the samples whose class has one; anchors are constants.

    It begins in round `start_round`, counted from 0: at 1 as soon as there are anchors.
    """

    lam: NonNegative = 1.0
    tau: Positive = 0.1
    matching: Literal["cg", "l2"] = "cg"
    start_round: AtLeastOne = 1
    one_trip: bool = False
    equal_avg: bool = False

    needs = frozenset({"class anchors"})

    @property
    def brings(self) -> tuple[Mechanism, ...]:
        return (ClassAnchors(one_trip=self.one_trip, equal_avg=self.equal_avg),)

    def before_training(self, client: ClientView, my: State) -> None:
        anchors = client.state_of(self.brings[0]).received
        my.scratch["A"], my.scratch["seen"] = anchors["means"], anchors["seen"]
        my.scratch["on"] = bool(self.lam) and client.round - 1 >= self.start_round

    def loss(self, step: StepView, my: State) -> Tensor | None:
        known = my.scratch["seen"][step.y]
        if not my.scratch["on"] or not bool(known.any()):
            return None
        z, y = step.out.features[known], step.y[known]
        if self.matching == "l2":
            return self.lam * l2_matching(z, y, my.scratch["A"])
        return self.lam * contrastive_guiding(z, y, my.scratch["A"], my.scratch["seen"], self.tau)


@recipe("FedFM", family="representation", paper="Ye et al., IEEE TSP 2023")
def fedfm(
    lam: NonNegative = 1.0,
    tau: Positive = 0.1,
    matching: Literal["cg", "l2"] = "cg",
    start_round: AtLeastOne = 1,
    one_trip: bool = False,
    equal_avg: bool = False,
) -> Alloy:
    return alloy("FedFM", Share(), Matching(lam, tau, matching, start_round, one_trip, equal_avg))

"""FedFA: one feature anchor per class, which the clients' features and their classifiers are both aligned with.

Zhou, Zhang, Tsang, "Federated Learning With Feature Anchors to Align Features and Classifiers for Heterogeneous Data".
IEEE Transactions on Mobile Computing 23(6), 2024.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, Slots, alloy
from fedalloy.core.parameters import Fraction, NonNegative, Positive
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, Oracle, ServerView, StepView
from fedalloy.core.wire import Items, Slot
from fedalloy.mechanisms.class_means import held_means
from fedalloy.mechanisms.head import classifier
from fedalloy.mechanisms.share import Share


def first_anchors(classes: int, width: int, draw: torch.Generator) -> Tensor:
    """Distinct rows of the identity, as long as there are enough of them; else random unit vectors."""
    if classes <= width:
        return torch.eye(width)[torch.randperm(width, generator=draw)[:classes]]
    return F.normalize(torch.randn(classes, width, generator=draw), dim=1)


def distance(z: Tensor, y: Tensor, anchors: Tensor) -> Tensor:
    """(1/C) sum_i ||z_i - A_{y_i}||^2 / b_{y_i}, b_c the samples of class c in the batch."""
    counts = torch.bincount(y, minlength=len(anchors))
    return ((z - anchors[y]).square().sum(1) / counts[y]).sum() / len(anchors)


@dataclass(frozen=True)
class Anchors(Mechanism):
    """lam times the distance of features to the anchors of their classes; A stands still within a round.

    After each epoch a copy of A moves, for the classes seen: A_c <- m A_c + (1 - m) (mean over batches of their class
    means). It goes up, and the server averages it like the weights. `official_mean` divides by all batches, also by
    those without the class; `class_weighted` averages each anchor over its holders, by their class counts.
    """

    lam: NonNegative = 0.1
    momentum: Fraction = 0.5
    official_mean: bool = False
    class_weighted: bool = False

    needs = frozenset({"shared weights"})
    gives = frozenset({"feature anchors"})

    @property
    def down(self) -> Slots:
        return {"anchors": Slot(shape=("classes", "features"))}

    @property
    def up(self) -> Slots:
        if not self.class_weighted:
            return {"anchors": Slot(shape=("classes", "features"))}
        held = Slot("class_mean", ("held", "features"), counts="counts")
        return {"anchors": held, "counts": Slot("sum", ("classes",), torch.int64)}

    def init_server(self, server: ServerView, my: State) -> None:
        classes, width = server.replica.inputs.classes, server.replica.net.width
        my.persistent["anchors"] = first_anchors(classes, width, server.rng("anchors"))

    def download(self, server: ServerView, my: State, client: int) -> Items:
        return {"anchors": my.persistent["anchors"]}

    def before_training(self, client: ClientView, my: State) -> None:
        my.scratch["moving"] = my.received["anchors"].clone()
        self._new_epoch(my, 0)

    def loss(self, step: StepView, my: State) -> Tensor | None:
        return self.lam * distance(step.out.features, step.y, my.received["anchors"]) if self.lam else None

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        if step.epoch != my.scratch["epoch"]:
            self._move(my)
            self._new_epoch(my, step.epoch)
        g = oracle(step)
        present = torch.unique(step.y)
        my.scratch["sums"][present] += held_means(step.out.features.detach(), step.y)
        my.scratch["times"][present] += 1
        my.scratch["batches"] += 1
        return g

    def upload(self, client: ClientView, my: State) -> Items:
        self._move(my)
        if not self.class_weighted:
            return {"anchors": my.scratch["moving"]}
        return {"anchors": my.scratch["moving"][client.data.counts > 0], "counts": client.data.counts}

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        held = (got["counts"] > 0)[:, None] if self.class_weighted else torch.tensor(True)
        my.persistent["anchors"] = torch.where(held, got["anchors"], my.persistent["anchors"])

    def _new_epoch(self, my: State, epoch: int) -> None:
        zeros = torch.zeros_like(my.scratch["moving"])
        my.scratch.update(epoch=epoch, sums=zeros, times=zeros[:, :1].clone(), batches=0)

    def _move(self, my: State) -> None:
        """An epoch is over. Classes that a client lacks keep the anchor as it was received, bit for bit."""
        seen = my.scratch["times"][:, 0] > 0
        means = my.scratch["sums"] / (my.scratch["batches"] if self.official_mean else my.scratch["times"])
        my.scratch["moving"][seen] = torch.lerp(means, my.scratch["moving"], self.momentum)[seen]


@dataclass(frozen=True)
class AnchoredHead(Mechanism):
    """The classifier learns to tell the anchors apart: a step of its own on mean_c CE(phi(A_c), c), phi alone.

    `schedule`: after every "batch" (the method), "before" every batch, after every "epoch" or once "after" training.
    """

    schedule: Literal["batch", "before", "epoch", "after"] = "batch"
    optimizer: Literal["adam", "sgd"] = "adam"
    lr: Positive = 1e-3

    needs = frozenset({"feature anchors"})

    @property
    def outermost(self) -> bool:
        return True  # it moves weights between two steps, while no wrapper is looking

    def before_training(self, client: ClientView, my: State) -> None:
        leaf = client.weights.flat[classifier(client.weights)].detach()
        make = {"adam": torch.optim.Adam, "sgd": torch.optim.SGD}[self.optimizer]
        my.scratch.update(leaf=leaf, optimiser=make([leaf], lr=self.lr), epoch=0)

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        new_epoch, my.scratch["epoch"] = step.epoch != my.scratch["epoch"], step.epoch
        due = {"batch": step.client.steps > 0, "before": True, "epoch": new_epoch, "after": False}
        if due[self.schedule]:
            self._calibrate(step.client, my)
        return oracle(step)

    def after_training(self, client: ClientView, my: State) -> None:
        if client.steps and self.schedule != "before":
            self._calibrate(client, my)

    @torch.enable_grad()
    def _calibrate(self, client: ClientView, my: State) -> None:
        net, weights = client.net, client.weights
        given = client.method.find(Anchors)
        assert given is not None
        anchors = client.state_of(given).received["anchors"]
        scores = net.head(net.neck(anchors))
        if not scores.requires_grad:
            return  # this phase leaves the classifier alone
        weights.grad.zero_()
        classes = torch.arange(len(anchors), device=scores.device)
        F.cross_entropy(scores, classes).backward()  # type: ignore[no-untyped-call]
        my.scratch["leaf"].grad = weights.grad[classifier(weights)]
        my.scratch["optimiser"].step()


@recipe("FedFA", family="representation", paper="Zhou, Zhang, Tsang, IEEE TMC 2024")
def fedfa(
    lam: NonNegative = 0.1,
    momentum: Fraction = 0.5,
    calibration: Literal["none", "batch", "before", "epoch", "after"] = "batch",
    calib_optimizer: Literal["adam", "sgd"] = "adam",
    calib_lr: Positive = 1e-3,
    official_mean: bool = False,
    class_weighted: bool = False,
) -> Alloy:
    anchors = Anchors(lam, momentum, official_mean, class_weighted)
    aligned = [] if calibration == "none" else [AnchoredHead(calibration, calib_optimizer, calib_lr)]
    return alloy("FedFA", Share(), anchors, *aligned)

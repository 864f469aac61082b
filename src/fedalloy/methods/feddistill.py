"""FedDistill: clients exchange their mean output for each class and distil towards the average.

Jeong, Oh, Kim, Park, Bennis, Kim. 2018, arXiv 1811.11479 (federated distillation).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, Slots, alloy
from fedalloy.core.parameters import NonNegative
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, ServerView, StepView
from fedalloy.core.wire import Items, Reply, Slot
from fedalloy.mechanisms.class_means import RunningMeans


@dataclass(frozen=True)
class OutputDistillation(Mechanism):
    """L = CE(a, y) + lam CE(softmax(a), softmax(g_y)), g_y the federation's mean output for the true class.

    `leave_one_out`: of the M_c holders of a class a client learns from the others, (M_c g_c - own_c) / (M_c - 1), and
    not at all where it is the only one. The server says whose means a row holds: a client may have been away since.
    """

    lam: NonNegative = 1.0
    output: Literal["logits", "prob"] = "logits"
    leave_one_out: bool = False

    @property
    def brings(self) -> tuple[Mechanism, ...]:
        return (self._means,)

    @property
    def _means(self) -> RunningMeans:
        return RunningMeans("logits" if self.output == "logits" else "probabilities", uniform=True)

    @property
    def down(self) -> Slots:
        mine = Slot(shape=("classes",), dtype=torch.bool)  # whether a row holds this client's own mean
        return (
            {"holders": Slot(shape=("classes",), dtype=torch.int64), "mine": mine}
            if self.leave_one_out
            else {}
        )

    def init_server(self, server: ServerView, my: State) -> None:
        if self.leave_one_out:
            my.persistent["held"] = torch.zeros(
                server.info.clients, server.replica.inputs.classes, dtype=torch.bool
            )

    def download(self, server: ServerView, my: State, client: int) -> Items:
        held = my.persistent.get("held")
        return {} if held is None else {"holders": held.sum(0), "mine": held[client]}

    def before_training(self, client: ClientView, my: State) -> None:
        got = client.state_of(self._means).received
        rows, known = got["means"], got["seen"]
        if self.leave_one_out and "own" in my.persistent:
            mine, others = my.received["mine"], my.received["holders"] - 1
            without = ((others + 1)[:, None] * rows - my.persistent["own"]) / others.clamp(min=1)[:, None]
            rows, known = torch.where(mine[:, None], without, rows), known & (~mine | (others > 0))
        my.scratch["targets"] = rows.softmax(1) if self.output == "logits" else rows
        my.scratch["known"] = known

    def loss(self, step: StepView, my: State) -> Tensor | None:
        known = my.scratch["known"][step.y]
        if not self.lam or not bool(known.any()):
            return None  # round 0, or no row for any of these classes
        targets = my.scratch["targets"][step.y[known]]
        return self.lam * F.cross_entropy(step.out.logits[known], targets, reduction="sum") / len(step.y)

    def upload(self, client: ClientView, my: State) -> Items:
        if self.leave_one_out:
            means, counts = self._means.measured(client, client.state_of(self._means))
            my.persistent["own"] = means.new_zeros(len(counts), means.shape[1])
            my.persistent["own"][counts > 0] = means
        return {}

    def on_reply(self, server: ServerView, my: State, reply: Reply) -> None:
        if self.leave_one_out:
            my.scratch[str(reply.client)] = reply.items[f"{self._means.label}.counts"] > 0

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        if self.leave_one_out:
            renewed = torch.stack(list(my.scratch.values())).any(0)
            my.persistent["held"] = my.persistent["held"] & ~renewed
            for client, held in my.scratch.items():
                my.persistent["held"][int(client)] |= held


@recipe("FedDistill", family="different models", paper="Jeong et al., 2018, arXiv 1811.11479")
def feddistill(
    lam: NonNegative = 1.0, output: Literal["logits", "prob"] = "logits", leave_one_out: bool = False
) -> Alloy:
    return alloy("FedDistill", OutputDistillation(lam, output, leave_one_out))

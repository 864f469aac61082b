"""FedKD: a private teacher and a shared student distil from each other; the student's updates travel as truncated SVDs.

Wu, Wu, Lyu, Huang, Xie. Nature Communications 2022, arXiv 2108.13323.
"""

from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.net import Outputs
from fedalloy.core.parameters import AtLeastOne, Positive, Share01
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, Oracle, ReplicaView, StepView
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.auxiliary import Auxiliary, smallest
from fedalloy.mechanisms.clip import Clip
from fedalloy.mechanisms.mutual import Mutual
from fedalloy.mechanisms.share import Share
from fedalloy.mechanisms.stream import Stream
from fedalloy.mechanisms.svd import SVD


@dataclass(frozen=True)
class Student(Auxiliary):
    """The common model, and W_h, which maps its features to those of the client's own model, the teacher."""

    gives = frozenset({"an auxiliary model", "a map of features"})

    def build(self, replica: ReplicaView) -> None:
        student = replica.build_model(self.model or smallest(replica))
        replica.net.bridge = nn.Linear(
            student.width, replica.net.width, bias=False
        )  # before aux: it stays private
        replica.net.aux = student


@dataclass(frozen=True)
class HiddenMutual(Mutual):
    """L_t = L_t^ce + (KL(p_s || p_t) + L^h) / D, L_s = L_s^ce + (KL(p_t || p_s) + L^h) / D, D = L_t^ce + L_s^ce.

    L^h = MSE(h_t, W_h h_s): in L_t it moves the teacher, in L_s the student and W_h.
    """

    needs = frozenset({"an auxiliary model", "a map of features"})

    def gap(self, step: StepView, aux: Outputs) -> Tensor:
        h_t, mapped = step.out.features, step.client.net.get_submodule("bridge")(aux.features)
        hidden = F.mse_loss(h_t, mapped.detach()) + F.mse_loss(mapped, h_t.detach())
        return super().gap(step, aux) + hidden


@dataclass(frozen=True)
class StudentRate(Mechanism):
    """The auxiliary model learns at a rate of its own: under SGD, a factor of its gradient and its weight decay."""

    lr: Positive = 0.01

    needs = frozenset({"an auxiliary model"})

    @property
    def outermost(self) -> bool:
        return True

    def before_training(self, client: ClientView, my: State) -> None:
        if client.local.optimizer != "sgd":
            raise FedAlloyError(f"{self} needs --optimizer sgd: others do not feel the length of a gradient")
        my.scratch["span"], my.scratch["factor"] = client.weights.span("aux"), self.lr / client.local.lr

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        g, span, factor = oracle(step), my.scratch["span"], my.scratch["factor"]
        g[span] = factor * g[span] + (factor - 1) * step.client.local.weight_decay * step.weights[span]
        return g


@recipe("FedKD", family="different models", paper="Wu et al., Nature Communications 2022, arXiv 2108.13323")
def fedkd(
    t_start: Share01 = 0.95,
    t_end: Share01 = 0.98,
    rounds: AtLeastOne | None = None,
    student: str | None = None,
    student_lr: Positive | None = None,
    hidden: bool = True,
    compress: bool = True,
    clip: Positive | None = None,
) -> Alloy:
    codec = [SVD(t_start, t_end, rounds)] if compress else []
    travel = (Stream if compress else Share)("aux", "uniform")
    models = [Student(student), HiddenMutual()] if hidden else [Auxiliary(student), Mutual()]
    limit = [Clip(clip)] if clip is not None else []
    rate = [StudentRate(student_lr)] if student_lr is not None else []
    return alloy("FedKD", travel, *codec, *models, *limit, *rate)

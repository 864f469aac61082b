"""FedSOL: the local gradient is taken where a step against the global model's knowledge would lead.

Lee, Jeong, Kim, Oh, Yun, "Stabilized Orthogonal Learning with Proximal Restrictions in Federated Learning". CVPR 2024.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import NonNegative, Positive
from fedalloy.core.random import seeded
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, Oracle, StepView
from fedalloy.core.weights import Weights
from fedalloy.mechanisms.share import Share

EPS = 1e-12
NOISE = 1e-7  # a shorter proximal gradient is round-off, and its direction means nothing


def proximal(scores: Tensor, known: Tensor, temperature: float) -> Tensor:
    """L_p = KL(softmax(o_g / T) || softmax(o / T)), batch mean: only the direction of its gradient counts."""
    p, q = (known / temperature).log_softmax(1), (scores / temperature).log_softmax(1)
    return F.kl_div(q, p, reduction="batchmean", log_target=True)


def strength(weights: Weights, moved: Tensor) -> Tensor:
    """Lambda: |w - w_g|, scaled tensor by tensor to unit length along the first axis; what has not moved gets 0."""
    columns = [F.normalize(tensor.abs(), dim=0) for tensor in weights.views(moved).values()]
    return torch.cat([column.flatten() for column in columns])


@dataclass(frozen=True)
class Perturbed(Mechanism):
    """The gradient at w + eps, eps = rho Lambda g_p / ||g_p||, g_p the gradient of L_p at w; the step starts from w.

    `variant`: "adaptive" scales by how far each weight has moved since the round began, "fixed" has Lambda = 1.
    Without `perturb_head` or `perturb_body` that part is left where it is.
    """

    rho: NonNegative = 1.0
    variant: Literal["adaptive", "fixed"] = "adaptive"
    temperature: Positive = 3.0
    perturb_head: bool = True
    perturb_body: bool = True

    needs = frozenset({"global model"})

    def before_training(self, client: ClientView, my: State) -> None:
        if self.rho:
            my.scratch["global"] = client.frozen(client.received, client.received_buffers)

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        if not self.rho:
            return oracle(step)
        weights, epsilon = step.client.weights, self.perturbation(step, my)
        state = [weights.flat, weights.buffers, *weights.counters]  # running statistics have seen this batch
        before = [tensor.clone() for tensor in state]
        weights.flat += epsilon
        g = oracle(step)
        for now, then in zip(state, before, strict=True):
            now.copy_(then)
        return g

    def perturbation(self, step: StepView, my: State) -> Tensor:
        """eps: rho times the unit vector along which the global model's knowledge is lost the fastest."""
        at, weights = step.client, step.client.weights
        known = step.seen_by(my.scratch["global"]).logits
        weights.grad.zero_()
        dropout = seeded(at.seed, at.round, at.id, at.steps, "proximal")  # the task's own is left alone
        with torch.enable_grad(), dropout:
            loss = proximal(at.net(step.x).logits, known, self.temperature)
            loss.backward()  # type: ignore[no-untyped-call]
        length = weights.grad.norm()
        if length < NOISE:
            return weights.zeros()
        epsilon: Tensor = weights.grad * (self.rho / (length + EPS))
        if self.variant == "adaptive":
            epsilon *= strength(weights, weights.flat - at.received)
        head = weights.span("head")
        if not self.perturb_head:
            epsilon[head] = 0
        if not self.perturb_body:
            epsilon[: head.start] = 0  # what lies behind the head has no part in L_p
        return epsilon


@recipe("FedSOL", family="optimisation", paper="Lee et al., CVPR 2024")
def fedsol(
    rho: NonNegative = 1.0,
    variant: Literal["adaptive", "fixed"] = "adaptive",
    temperature: Positive = 3.0,
    perturb_head: bool = True,
    perturb_body: bool = True,
) -> Alloy:
    return alloy("FedSOL", Share(), Perturbed(rho, variant, temperature, perturb_head, perturb_body))

"""FedBABU: only the body is trained and averaged; the head stays as it was drawn until clients fine-tune it.

Oh, Kim, Yun, "FedBABU: Toward Enhanced Representation for Federated Image Classification". ICLR 2022.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import Count, Positive
from fedalloy.core.registry import recipe
from fedalloy.core.state import Phase, State
from fedalloy.core.views import ClientView, ReplicaView, ServerView
from fedalloy.core.weights import BASE, HEAD
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.finetune import FineTune
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class FixedHead(Share):
    """theta <- theta - eta grad_theta l(theta, phi_0), then theta <- sum_k p_k theta_k; phi_0 never moves.

    It is in no optimiser, so momentum, weight decay and Adam cannot reach it, and in no mail: both ends draw it from
    the seed, and clients keep nothing.
    """

    part: str = BASE

    spoils = frozenset(
        {"class weights", "an auxiliary model", "compact features"}
    )  # nothing but theta is trained

    @property
    def label(self) -> str:
        return "share"

    @property
    def shares(self) -> str:
        return ""  # the server holds phi_0 as well

    def init_server(self, server: ServerView, my: State) -> None:
        super().init_server(server, my)
        if 0 < len(server.buffers) < server.replica.weights.buffer_span(":").stop:
            raise FedAlloyError(f"{self} would fix layers with running statistics; fix fewer layers")

    def phases(self, client: ClientView, my: State, epochs: int) -> Sequence[Phase]:
        return [Phase(epochs, self.part, steps=client.local.steps)]

    def eval_models(self, server: ServerView, my: State) -> dict[str, tuple[Tensor, Tensor]]:
        return {"global": server.replica.whole(self.part, server.weights, server.buffers)}


@dataclass(frozen=True)
class OrthogonalHead(Mechanism):
    """The head starts with orthogonal rows: a head that never adapts should tell its classes apart from the start."""

    claims = frozenset({"the neck"})  # who changes the neck brings a new head

    def build(self, replica: ReplicaView) -> None:
        head = replica.net.head
        if not isinstance(head, nn.Linear):
            raise FedAlloyError(f"{self} needs a linear head; {replica.model} has {type(head).__name__}")
        nn.init.orthogonal_(head.weight)


@recipe("FedBABU", family="personal", paper="Oh, Kim, Yun, ICLR 2022")
def fedbabu(
    ft_epochs: Count = 5,
    ft_lr: Positive | None = None,
    ft_part: Literal["full", "head", "body"] = "full",
    head_init: Literal["default", "orthogonal"] = "default",
    agg_weights: Literal["size", "uniform"] = "size",
) -> Alloy:
    part = {"full": "", "head": HEAD, "body": BASE}[ft_part]
    tuned = [FineTune(ft_epochs, ft_lr, part)] if ft_epochs else []
    start = [OrthogonalHead()] if head_init == "orthogonal" else []
    return alloy("FedBABU", FixedHead(agg_weights=agg_weights), *start, *tuned)

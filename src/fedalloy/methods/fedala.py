"""FedALA: each client starts from a learned element-wise mixture of the received model and its own old one.

Zhang, Hua, Wang, Song, Xue, Ma, Guan, "FedALA: Adaptive Local Aggregation for Personalized Federated Learning".
AAAI 2023.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import AtLeastOne, Count, NonNegative, Percent
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView
from fedalloy.core.wire import Items
from fedalloy.mechanisms.label_loss import label_loss
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class ALA(Mechanism):
    """Training starts from w_hat = w_k + (w - w_k) * W on the top layers and from the received w below them.

    W, one value in [0, 1] per scalar, starts at 1 and is learned before training on a random part of the client's
    data: W <- clip(W - eta_W dl/dw_hat * (w - w_k), 0, 1). The first time until the loss settles, later in one pass.
    W never leaves the client. An evaluation takes the client's model as its training left it; with `ala_all` it takes
    every client's mixture with the newest w. Nothing is learned for it.
    """

    num_ala_layers: Count = 1  # p, counted from the output; 0: all
    eta_w: NonNegative = 1.0
    rand_percent: Percent = 80.0  # s
    threshold: NonNegative = 0.1  # settled: the last losses deviate by less than this ...
    num_pre_loss: AtLeastOne = 10  # ... over so many passes, after at least one more
    max_start_epochs: AtLeastOne = 100
    start_until_converged: bool = True
    ala_all: bool = False

    needs = frozenset({"global model"})
    claims = frozenset({"the personal model"})

    def before_training(self, client: ClientView, my: State) -> None:
        if "w_k" not in my.persistent:
            return  # the first participation starts from w
        top, first = self._top(client), "W" not in my.persistent
        w, w_k = client.received[top], my.persistent["w_k"][top]
        W = torch.ones_like(w) if first else my.persistent["W"]
        batches = self._batches(client)
        losses: list[float] = []
        for _ in range(self.max_start_epochs if first and self.start_until_converged else 1):
            for index in batches:
                client.weights.flat[top] = mixed(w, w_k, W)
                loss, gradient = slope(client, index, top)
                W = (W - self.eta_w * gradient * (w - w_k)).clamp(0, 1)
            losses.append(loss)  # that of the last batch
            if self._settled(losses):
                break
        my.persistent["W"] = W
        client.weights.flat[top] = mixed(w, w_k, W)

    def upload(self, client: ClientView, my: State) -> Items:
        my.persistent["w_k"], my.persistent["buffers"] = (
            client.weights.flat.clone(),
            client.weights.buffers.clone(),
        )
        return {}

    def adapt(self, client: ClientView, my: State) -> None:
        if "w_k" not in my.persistent:
            return
        if not self.ala_all:
            client.weights.load(my.persistent["w_k"], my.persistent["buffers"])
        elif "W" in my.persistent:  # where nothing was learned yet W is 1, and the mixture is w
            top = self._top(client)
            client.weights.flat[top] = mixed(
                client.received[top], my.persistent["w_k"][top], my.persistent["W"]
            )

    def _batches(self, client: ClientView) -> tuple[Tensor, ...]:
        """A random s percent of the client's samples; every pass goes through the same batches."""
        count = max(1, int(client.data.samples * self.rand_percent / 100))
        order = torch.randperm(client.data.samples, generator=client.rng("ala"))
        return torch.split(order[:count], client.local.batch)

    def _settled(self, losses: list[float]) -> bool:
        last = torch.tensor(losses[-self.num_pre_loss :], dtype=torch.float64)
        return len(losses) > self.num_pre_loss and float(last.std(correction=0)) < self.threshold

    def _top(self, client: ClientView) -> slice:
        """The last p layers."""
        return client.weights.span(f"-{self.num_ala_layers}:" if self.num_ala_layers else "main")


def mixed(w: Tensor, w_k: Tensor, W: Tensor) -> Tensor:
    """w_k + (w - w_k) * W, which is exactly w where W is 1 and exactly w_k where it is 0."""
    return torch.lerp(w_k, w, W)


def slope(client: ClientView, index: Tensor, top: slice) -> tuple[float, Tensor]:
    """The loss on a batch, and its gradient by the top layers' weights alone."""
    spans, loss = client.weights.layout.spans, label_loss(client, index)
    upper = [p for name, p in client.net.named_parameters() if top.start <= spans[name][0] < top.stop]
    gradients = torch.autograd.grad(loss, upper, allow_unused=True, materialize_grads=True)
    return loss.item(), torch.cat([g.flatten() for g in gradients])


@recipe("FedALA", family="personal", paper="Zhang et al., AAAI 2023")
def fedala(
    num_ala_layers: Count = 1,
    eta_w: NonNegative = 1.0,
    rand_percent: Percent = 80.0,
    threshold: NonNegative = 0.1,
    num_pre_loss: AtLeastOne = 10,
    max_start_epochs: AtLeastOne = 100,
    start_until_converged: bool = True,
    ala_all: bool = False,
) -> Alloy:
    settled = threshold, num_pre_loss, max_start_epochs, start_until_converged
    return alloy("FedALA", Share(), ALA(num_ala_layers, eta_w, rand_percent, *settled, ala_all))

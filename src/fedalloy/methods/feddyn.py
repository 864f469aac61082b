"""FedDyn: a linear and a quadratic term in each local loss, so that local and global stationary points agree.

Acar, Zhao, Matas Navarro, Mattina, Whatmough, Saligrama. ICLR 2021.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import Positive
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, Oracle, ServerView, StepView
from fedalloy.core.wire import Items
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class Dynamic(Mechanism):
    """R_k(w) = L_k(w) - <g_k, w> + alpha/2 ||w - w_t||^2; g_k stays at the client, h = mean of all g_k at the server.

    `eval_model`: accuracy of the "mean" of the participants' models (the authors) or of the "server" model that is
    sent out; both are logged. `size_scaled`: alpha_k = alpha / (m n_k / n), the authors' code for unbalanced data.
    """

    alpha: Positive = 0.01
    max_grad_norm: Positive | None = 10.0
    eval_model: Literal["mean", "server"] = "mean"
    size_scaled: bool = False

    needs = frozenset({"uniform weights", "global model"})
    claims = frozenset({"the server's step"})

    def init_client(self, client: ClientView, my: State) -> None:
        my.persistent["g"] = client.weights.zeros()

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        g = oracle(step) - my.persistent["g"]
        g += self._alpha(step.client) * (step.weights - step.client.received)
        if self.max_grad_norm is not None:
            g *= torch.clamp(self.max_grad_norm / (g.norm() + 1e-6), max=1.0)
        return g

    def after_upload(self, client: ClientView, my: State, items: Items) -> None:
        w_k = items.get("share.weights", client.weights.flat)  # what h will see of it, sealed or not
        my.persistent["g"] -= self._alpha(client) * (
            w_k - client.received
        )  # = grad L_k at a minimiser of R_k

    def refuses(self, other: Mechanism) -> str | None:
        if self.size_scaled and "size weights" in other.spoils:
            return "it scales by the number of samples, which nobody is told"
        return None

    def init_server(self, server: ServerView, my: State) -> None:
        my.persistent["h"] = torch.zeros_like(server.weights)
        my.persistent["mean"] = server.weights

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        mean = my.persistent["mean"] = server.weights
        my.persistent["h"] = my.persistent["h"] - self.alpha * server.participation * (
            mean - server.previous
        )  # 1/m, all clients
        server.weights = mean - my.persistent["h"] / self.alpha

    def eval_models(self, server: ServerView, my: State) -> dict[str, Tensor]:
        models = {"mean": my.persistent["mean"], "server": server.weights}
        return {"global": models[self.eval_model], **models}

    def _alpha(self, client: ClientView) -> float:
        if not self.size_scaled:
            return self.alpha
        return self.alpha * client.info.samples / (client.info.clients * client.data.samples)


@recipe("FedDyn", family="classic", paper="Acar et al., ICLR 2021")
def feddyn(
    alpha: Positive = 0.01,
    max_grad_norm: Positive | None = 10.0,
    eval_model: Literal["mean", "server"] = "mean",
    size_scaled: bool = False,
) -> Alloy:
    return alloy(
        "FedDyn", Share(agg_weights="uniform"), Dynamic(alpha, max_grad_norm, eval_model, size_scaled)
    )

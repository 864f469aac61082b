"""Ditto: FedAvg, and beside it one personal model per client, tied to the global one by a proximal term.

Li, Hu, Beirami, Smith, "Ditto: Fair and Robust Federated Learning Through Personalization". ICML 2021.
"""

from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import AtLeastOne, NonNegative, Positive, Share01
from fedalloy.core.random import generator
from fedalloy.core.registry import recipe
from fedalloy.core.state import Phase, State
from fedalloy.core.views import ClientData, ClientView, StepView
from fedalloy.core.wire import Items
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class PersonalModel(Mechanism):
    """v_k <- v_k - eta_p (grad l(v_k) + lam (v_k - w_t)) (Algorithm 1); v_k and its statistics never leave the client.

    The anchor w_t is the model as it was received; the batches are those of the global part, and neither part notices
    the other. `candidates`: at each step the lam whose step loses least on held-out samples, a share `validation` of
    the client's own, on which v_k is then not trained.
    """

    lam: NonNegative = 1.0
    epochs: AtLeastOne | None = None  # None: as much work as for the global model
    lr: Positive | None = None  # None: that of the global model; it follows the same schedule
    candidates: tuple[NonNegative, ...] = ()
    validation: Share01 = 0.1

    needs = frozenset({"global model"})
    claims = frozenset({"the personal model"})

    def init_client(self, client: ClientView, my: State) -> None:
        self._remember(client, my)  # v_k starts at the initial w

    def before_training(self, client: ClientView, my: State) -> None:
        pull = max(self.candidates or (self.lam,)) * self._rate(client)
        if client.local.optimizer == "sgd" and not client.local.momentum and pull >= 2:
            raise FedAlloyError(
                f"{self} overshoots: lam times the learning rate is {pull:g} and must stay below 2; lower either"
            )

    def upload(self, client: ClientView, my: State) -> Items:
        ended = client.weights.flat.clone(), client.weights.buffers.clone()
        self.adapt(client, my)
        steps = client.local.steps if self.epochs is None else None
        phase = Phase(self.epochs or client.local.epochs, lr=self._rate(client), steps=steps)
        rest, held = self._split(client) if self.candidates else (client.data, None)
        client.fit(0, phase, partial(self._pulled, held), rest)
        self._remember(client, my)
        client.weights.load(*ended)
        return {}

    def adapt(self, client: ClientView, my: State) -> None:
        client.weights.load(my.persistent["v"], my.persistent["statistics"])

    def _remember(self, client: ClientView, my: State) -> None:
        my.persistent["v"], my.persistent["statistics"] = (
            client.weights.flat.clone(),
            client.weights.buffers.clone(),
        )

    def _rate(self, client: ClientView) -> float:
        return replace(client.local, lr=self.lr or client.local.lr).rate(client.round)

    def _pulled(self, held: ClientData | None, step: StepView) -> Tensor:
        """grad l(v) + lam (v - w_t)."""
        g, away = step.client.plain_gradient(step), step.weights - step.client.received
        if held is None:
            return g + self.lam * away
        return min((g + lam * away for lam in self.candidates), key=partial(self._loss_after, held, step))

    def _loss_after(self, held: ClientData, step: StepView, g: Tensor) -> float:
        """The loss on held-out samples after a plain step along g, which is then taken back."""
        v = step.weights.clone()
        step.weights.sub_(g, alpha=self._rate(step.client))
        logits = torch.cat([out.logits for out in step.client.outputs(held.x)])
        step.weights.copy_(v)
        return float(F.cross_entropy(logits, held.y))

    def _split(self, client: ClientView) -> tuple[ClientData, ClientData]:
        """The client's samples for training v_k and for the choice of lam, the same in every round."""
        data = client.data
        order = torch.randperm(data.samples, generator=generator(client.seed, client.id, "validation"))
        most = max(1, data.samples - 1)  # a client of one sample uses it for both
        held = order[: min(max(1, round(self.validation * data.samples)), most)]
        rest = order[len(held) :].sort().values if data.samples > 1 else order
        return replace(data, x=data.x[rest], y=data.y[rest]), replace(data, x=data.x[held], y=data.y[held])


@recipe("Ditto", family="personal", paper="Li, Hu, Beirami, Smith, ICML 2021")
def ditto(
    lam: NonNegative = 1.0,
    personal_epochs: AtLeastOne | None = None,
    personal_lr: Positive | None = None,
    lam_candidates: tuple[NonNegative, ...] = (),
    validation: Share01 = 0.1,
    agg_weights: Literal["size", "uniform"] = "size",
) -> Alloy:
    personal = PersonalModel(lam, personal_epochs, personal_lr, lam_candidates, validation)
    return alloy("Ditto", Share(agg_weights=agg_weights), personal)

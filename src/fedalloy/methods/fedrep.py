"""FedRep: a common body under personal heads; each round fits the head to the body first, then the body to the head.

Collins, Hassani, Mokhtari, Shakkottai, "Exploiting Shared Representations for Personalized FL". ICML 2021.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import Count, Positive
from fedalloy.core.registry import recipe
from fedalloy.core.state import Phase, State
from fedalloy.core.views import ClientView
from fedalloy.core.weights import BASE, HEAD
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.as_trained import AsTrained
from fedalloy.mechanisms.finetune import FineTune
from fedalloy.mechanisms.share import Share


@dataclass(frozen=True)
class Alternate(Mechanism):
    """phi_k <- phi_k - eta_h grad_phi l(theta, phi_k), then theta <- theta - eta grad_theta l(theta, phi_k).

    Each phase has an optimiser of its own that knows nothing of the frozen part. `body_epochs`: None is what is left of
    the local epochs, at least one; "all" are all of them. `freeze_bn`: in the head's phase the body uses its running
    statistics.
    """

    head_epochs: Count = 1
    body_epochs: Count | Literal["all"] | None = None
    head_lr: Positive | None = None  # None: that of the body; it follows the same schedule
    freeze_bn: bool = False

    spoils = frozenset({"an auxiliary model", "compact features"})  # neither phase would train them

    def phases(self, client: ClientView, my: State, epochs: int) -> Sequence[Phase]:
        if client.local.steps is not None:
            raise FedAlloyError(
                f"{self} counts epochs of head and body, but local work is counted in steps; leave --steps out"
            )
        lr = replace(client.local, lr=self.head_lr or client.local.lr).rate(client.round)
        head = Phase(self.head_epochs, HEAD, lr, freeze_bn=self.freeze_bn)
        body = Phase(self._body_epochs(epochs), BASE)
        return [phase for phase in (head, body) if phase.epochs]

    def _body_epochs(self, epochs: int) -> int:
        if self.body_epochs is None:
            return max(1, epochs - self.head_epochs)
        return epochs if self.body_epochs == "all" else self.body_epochs


@recipe("FedRep", family="personal", paper="Collins et al., ICML 2021")
def fedrep(
    head_epochs: Count = 1,
    body_epochs: Count | None = None,
    head_lr: Positive | None = None,
    freeze_bn: bool = False,
    agg_weights: Literal["size", "uniform"] = "size",
    eval_body: Literal["averaged", "own"] = "averaged",
    ft_epochs: Count = 0,
) -> Alloy:
    phases = Alternate(head_epochs, body_epochs, head_lr, freeze_bn)
    tested = [AsTrained()] if eval_body == "own" else []
    tuned = [FineTune(ft_epochs, part=HEAD)] if ft_epochs else []
    return alloy("FedRep", Share(part=BASE, agg_weights=agg_weights), phases, *tested, *tuned)

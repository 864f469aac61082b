"""Private: what a client adds in a round is clipped and noised; an accountant says how much that hides."""

import math
import warnings
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

import torch
from torch import Tensor

from fedalloy.core.alloy import AlloyConflict, Folded, Mechanism
from fedalloy.core.parameters import Chance, Noise, Positive
from fedalloy.core.random import gaussian
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, ReplicaView, ServerView
from fedalloy.core.wire import Items, Slot
from fedalloy.errors import FedAlloyError


@dataclass(frozen=True)
class Private(Mechanism):
    """v_k <- v_k min(1, clip / ||v_k||), plain mean over n clients, noise: (epsilon, delta)-differential privacy.

    v_k is all that client k adds in a round, as one vector: the change of the shared weights and every increment.
    `where`: "client" adds N(0, (noise clip)^2) to each v_k before it leaves; "server" adds N(0, (noise clip / n)^2) to
    the mean, and is trusted. `amplify` counts on nobody knowing who was sampled (Poisson sampling; "server" only).
    """

    clip: Positive = 1.0
    noise: Noise = 1.0
    delta: Chance = 1e-5
    where: Literal["client", "server"] = "client"
    amplify: bool = False

    needs = frozenset({"shared weights"})
    gives = frozenset({"uniform weights"})
    spoils = frozenset({"size weights"})  # how many samples a client holds is its secret too

    def __post_init__(self) -> None:
        if self.amplify and self.where == "client":
            raise FedAlloyError(
                "private(amplify=true) counts on nobody knowing who took part, but the server does; use where=server"
            )

    def implements(self, hook: str) -> bool:
        return super().implements(hook) and (hook != "folded" or self.where == "server")

    def refuses(self, other: Mechanism) -> str | None:
        bare = [name for name, slot in other.up.items() if not _covered(slot) and slot.shape != ("buffers",)]
        for name in [*bare, *other.query]:  # whether there are buffers the net decides
            return f"{other.label}.{name} would leave a client neither clipped nor noised"
        if other.implements("weigh"):
            return "it weighs replies by what it sees in them, where a plain mean is promised"
        if self.where == "server" and other.implements("on_reply"):
            return "it looks at each reply, where noise only hides their mean"
        if self.where == "server" and other.implements("encode"):
            return "what it decodes may be longer than what was clipped, unless where=client"
        return None

    def fits(self, replica: ReplicaView) -> None:
        for piece in replica.method:
            bare = [f"{piece.label}.{name}" for name, slot in piece.up.items() if not _covered(slot)]
            for key in bare:
                if replica.specs("up")[key].bytes:
                    raise AlloyConflict(
                        f"{self} refuses {piece} on {replica.model}: {key}, statistics of BatchNorm, would leave a "
                        "client neither clipped nor noised; keep them there ('fedavg(buffers=local)') or take "
                        "another model"
                    )

    def seal(self, client: ClientView, my: State, items: Items) -> Items:
        slots, shared = client.replica.additive("up"), client.received[client.replica.shared].double()
        origins = {key: shared if slot.relative else torch.zeros(()) for key, slot in slots.items()}
        moves = [items[key].double() - origin for key, origin in origins.items()]
        factor = shortening(moves, self.clip)
        if factor == 1 and self.where == "server":
            return items
        moves = [factor * torch.nan_to_num(move) for move in moves]
        if self.where == "client":
            counter = client.secret, client.seed, client.round, client.id, "privacy"
            moves = self._hidden(moves, self.noise * self.clip, *counter)
        ends = [origin + move for origin, move in zip(origins.values(), moves, strict=True)]
        return items | {key: end.to(items[key].dtype) for key, end in zip(slots, ends, strict=True)}

    def folded(self, server: ServerView, my: State, got: Folded) -> Folded:
        keys = [key.rpartition(".")[::2] for key in server.replica.additive("up")]
        means = [got[label][name] for label, name in keys]
        counter = server.secret, server.seed, server.round, "server", "privacy"
        hidden = self._hidden(means, self.noise * self.clip / len(server.participants), *counter)
        noised = {label: dict(items) for label, items in got.items()}
        for (label, name), mean, value in zip(keys, means, hidden, strict=True):
            noised[label][name] = value.to(mean.dtype)
        return noised

    def account(self, sampled: Sequence[float]) -> dict[str, float]:
        rates = sampled if self.amplify else [1.0] * len(sampled)
        return {"epsilon": epsilon(self.noise, rates, self.delta), "delta": self.delta}

    def _hidden(self, values: Sequence[Tensor], deviation: float, *counter: int | str) -> list[Tensor]:
        noise = gaussian(values, *counter)
        return [value + deviation * z for value, z in zip(values, noise, strict=True)]


def _covered(slot: Slot) -> bool:
    """Whether a slot takes a change, of which the server sees the mean."""
    return (slot.increment or slot.relative) and slot.reduce in ("mean", "uniform")


def shortening(vectors: Iterable[Tensor], clip: float) -> float:
    """What vectors are multiplied by so that, as one, they are no longer than `clip`; 0 if they are not finite."""
    norm = math.sqrt(sum(float(vector.double().square().sum()) for vector in vectors))
    if not math.isfinite(norm):
        return 0.0
    return clip / norm if norm > clip else 1.0


def epsilon(noise: float, rates: Sequence[float], delta: float) -> float:
    """What Gaussian noise is worth over rounds that ask clients at these rates, by opacus' RDP accountant.

    `noise` is the deviation of the noise over the length to which one client is clipped. A rate of 1 counts on nothing;
    one below on Poisson sampling that nobody can see.
    """
    return composed([(noise, rate) for rate in rates], delta)


def composed(rounds: Sequence[tuple[float, float]], delta: float) -> float:
    """The same over rounds of any noise and rate, of one run or of many: pairs of them."""
    orders, analysis = _opacus()
    if not rounds:
        return 0.0
    spent = sum(count * _step(*one) for one, count in Counter(rounds).items())
    with warnings.catch_warnings():  # at the edge of its orders the figure is right, if not the tightest
        warnings.filterwarnings("ignore", message="Optimal order is the")
        found, _ = analysis.get_privacy_spent(orders=orders, rdp=spent, delta=delta)
    return max(0.0, float(found))


@lru_cache
def _step(noise: float, rate: float) -> Any:
    """One round's Rényi divergence at every order."""
    orders, analysis = _opacus()
    return analysis.compute_rdp(q=rate, noise_multiplier=noise, steps=1, orders=orders)


@lru_cache
def _opacus() -> tuple[list[float], Any]:
    """Loaded when it is needed: that takes seconds."""
    try:
        from opacus.accountants import RDPAccountant
        from opacus.accountants.analysis import rdp
    except ImportError:
        raise FedAlloyError(
            "private counts epsilon with the library opacus: pip install 'fedalloy[dp]'"
        ) from None
    return RDPAccountant.DEFAULT_ALPHAS, rdp

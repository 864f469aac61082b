"""A federated method is an alloy of small mechanisms.

A `Mechanism` is a stateless value: its fields are hyper-parameters, its hooks are called at fixed moments of a
round (drawn in `client.py` and `server.py`), its state lives in the `Box` it is handed. `alloy()` joins pieces,
merges equal ones and refuses what cannot work, naming both parts.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from inspect import isfunction, signature
from typing import Any, TypeVar

import torch
from torch import Tensor

from fedalloy.core.diagnostics import Seen
from fedalloy.core.state import Phase, State
from fedalloy.core.views import ClientData, ClientView, Findings, Oracle, ReplicaView, ServerView, StepView
from fedalloy.core.wire import Items, Reply, Slot
from fedalloy.errors import FedAlloyError, FedAlloyWarning

Slots = Mapping[str, Slot]
Names = frozenset[str]
Folded = Mapping[str, Mapping[str, Any]]
M = TypeVar("M")
NOTHING: Names = frozenset()


class AlloyConflict(FedAlloyError):
    """Two parts that cannot work together, or a part that lacks what it needs."""


RENAMED = {  # hooks that had other names up to version 0.1
    "born": "init_client",
    "open": "init_server",
    "load": "install",
    "start": "before_training",
    "trained": "after_training",
    "finish": "upload",
    "sent": "after_upload",
    "send": "download",
    "absorb": "on_reply",
    "receive": "aggregate",
    "told": "query",
    "tell": "answer",
    "hear": "on_answers",
    "shown": "eval_models",
    "has": "implements",
    "everyone": "full_participation",
}


@dataclass(frozen=True)
class Mechanism:
    """The base of all mechanisms: every hook does nothing."""

    def __init_subclass__(cls) -> None:
        """Let a mechanism that was written with the old names of hooks work, with a warning."""
        for old, new in RENAMED.items():
            mine = vars(cls).get(old)
            if new not in vars(cls) and _same_form(mine, vars(Mechanism)[new]):
                warnings.warn(
                    f"{cls.__name__}.{old} is now called {new}; rename it", FedAlloyWarning, stacklevel=2
                )
                setattr(cls, new, mine)

    # What crosses the wire (nothing else can), and how parts fit together.
    @property
    def down(self) -> Slots:
        return {}

    @property
    def up(self) -> Slots:
        return {}

    @property
    def query(self) -> Slots:  # what clients say of the new global model when the server asks
        return {}

    @property
    def needs(self) -> Names:  # what another part must give
        return NOTHING

    @property
    def gives(self) -> Names:
        return NOTHING

    @property
    def claims(self) -> Names:  # what only one part may do
        return NOTHING

    @property
    def spoils(self) -> Names:  # what no other part may need once this one is there
        return NOTHING

    def refuses(self, other: Mechanism) -> str | None:
        """Why it cannot work beside another part, or None; for what the words above cannot say."""
        return None

    @property
    def brings(self) -> tuple[Mechanism, ...]:
        """Parts that come along wherever this one is added."""
        return ()

    @property
    def label(self) -> str:
        """The name of this instance on the wire; two of a kind must differ here."""
        return type(self).__name__.lower()

    @property
    def outermost(self) -> bool:
        """Whether it wraps the gradient around all others, and adapts after them, whatever the order of the parts."""
        return False

    @property
    def full_participation(self) -> bool:
        """Whether every client trains in every round, whatever the participation."""
        return False

    @property
    def asks_at_end(self) -> bool:
        """Whether the question is put once, after the last round, or in every round."""
        return False

    @property
    def asks_everyone(self) -> bool:
        """Whether every client is asked, or only those that took part in the round."""
        return False

    @property
    def shares(self) -> str | None:
        """The part of the model that the server holds; what no mechanism shares stays with each client."""
        return None

    # At a client.
    def build(self, replica: ReplicaView) -> None:
        """Model surgery: a projector, a fixed head, an auxiliary model."""

    def fits(self, replica: ReplicaView) -> None:
        """The net is laid out: an AlloyConflict if this part cannot work on it."""

    def init_client(self, client: ClientView, my: State) -> None:
        """Prepare the state of a client that has none yet."""

    def install(self, client: ClientView, my: State) -> None:
        """Install what was received; also before an evaluation, so nothing is trained here."""

    def before_training(self, client: ClientView, my: State) -> None:
        """A round of training begins."""

    def phases(self, client: ClientView, my: State, epochs: int) -> Sequence[Phase] | None:
        """How local training is cut up (a claim), or None for all of the model at once."""
        return None

    def task(self, step: StepView, my: State) -> Tensor | None:
        """The task loss in place of cross-entropy (a claim)."""
        return None

    def loss(self, step: StepView, my: State) -> Tensor | None:
        """A term added to the task loss."""
        return None

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        """Wraps the gradient; the first mechanism of the alloy is the innermost wrapper."""
        return oracle(step)

    def after_training(self, client: ClientView, my: State) -> None:
        """Local training is over: a last change of the model, before anybody looks at it in `upload`."""

    def upload(self, client: ClientView, my: State) -> Items:
        """What goes up; the keys must equal `up`."""
        return {}

    def seal(self, client: ClientView, my: State, items: Items) -> Items:
        """A last change of all that goes up, every part's items by "label.slot" (a claim)."""
        return items

    def after_upload(self, client: ClientView, my: State, items: Items) -> None:
        """What went up, every part's; where a part sealed it, as the server will see it."""

    def answer(self, replica: ReplicaView, data: ClientData) -> Items:
        """Asked about the new global model, which stands in `replica`: the keys must equal `query`; nothing is kept."""
        return {}

    def adapt(self, client: ClientView, my: State) -> None:
        """Fine-tune a personal model before it is evaluated."""

    def predict(self, step: StepView, my: State) -> Tensor | None:
        """Scores in place of the logits when a personal model is evaluated."""
        return None

    # On the way, where values that are declared additive may travel compressed (a claim).
    def encode(self, replica: ReplicaView, value: Tensor, round: int) -> Tensor:
        """A flat vector of additive values, compressed."""
        return value

    def decode(self, replica: ReplicaView, coded: Tensor, round: int) -> Tensor:
        """What the other end makes of `encode`; a FedAlloyError where that cannot have made it."""
        return coded

    def coded_size(self, replica: ReplicaView) -> int:
        """The length of an encoded vector; of an elastic one the most."""
        return len(replica.initial)

    @property
    def elastic(self) -> bool:
        """Whether the length of an encoded vector depends on its values."""
        return False

    def split(self, replica: ReplicaView, coded: Tensor) -> Sequence[Tensor]:
        """Encoded vectors that travelled as one, apart again."""
        return torch.split(coded, self.coded_size(replica))

    # At the server.
    def init_server(self, server: ServerView, my: State) -> None:
        """Before the first round."""

    def download(self, server: ServerView, my: State, client: int) -> Items:
        """The keys must equal `down`."""
        return {}

    def weigh(self, server: ServerView, my: State, replies: Sequence[Reply]) -> Sequence[float] | None:
        """Aggregation weights for all `mean` slots (a claim); they need not sum to one."""
        return None

    def on_reply(self, server: ServerView, my: State, reply: Reply) -> None:
        """A look at each usable reply as it is folded, before `aggregate`."""

    def folded(self, server: ServerView, my: State, got: Folded) -> Folded:
        """A last change of what was folded, by label and slot, before any part receives it (a claim)."""
        return got

    def aggregate(self, server: ServerView, my: State, got: Mapping[str, Any]) -> None:
        """Aggregation: `got` holds the folded value of every `up` slot (of an `all` slot a dict by client)."""

    def on_answers(self, server: ServerView, my: State, answers: Iterator[Reply]) -> None:
        """What clients tell when they are asked, usable replies one by one in ascending id, keys as in `query`."""

    def eval_models(self, server: ServerView, my: State) -> Mapping[str, Tensor | tuple[Tensor, Tensor]]:
        """Models to evaluate beside or, under the name "global", instead of the server's: weights, or with buffers."""
        return {}

    def account(self, sampled: Sequence[float]) -> Mapping[str, float]:
        """What the history says after some rounds, by nothing but the share of clients that each of them asked."""
        return {}

    # For those who look: numbers are recorded, matrices are drawn; nothing here may change a state.
    def examine(self, server: ServerView, my: State, seen: Seen) -> Findings:
        """What this mechanism shows of the global model and the server's state."""
        return {}

    def examine_client(self, client: ClientView, my: State) -> Findings:
        """What this mechanism shows of a client after its local training."""
        return {}

    def implements(self, hook: str) -> bool:
        """Whether this mechanism does anything at a hook."""
        return getattr(type(self), hook) is not getattr(Mechanism, hook)

    def __str__(self) -> str:
        shown = [
            f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if getattr(self, f.name) != f.default
        ]
        return f"{type(self).__name__.lower()}({', '.join(shown)})" if shown else type(self).__name__.lower()


def _same_form(mine: object, hook: object) -> bool:
    """Whether an attribute with the old name of a hook is that hook, and not a parameter or a helper of its owner."""
    if isinstance(hook, property):
        return isinstance(mine, property)
    return (
        isfunction(mine)
        and isfunction(hook)
        and len(signature(mine).parameters) == len(signature(hook).parameters)
    )


CLAIMED_HOOKS = {
    "task": "the task loss",
    "phases": "the phases of local training",
    "weigh": "the aggregation weights",
    "predict": "the prediction",
    "encode": "the compression",
    "seal": "the last word on what leaves",
    "folded": "the last word on what was folded",
}


HINTS = {
    "shared weights": "; start from a method that shares them, such as 'fedavg'",
    "global model": "; start from a method that has one, such as 'fedavg'",
    "uniform weights": "; start from one such as 'fedavg(agg_weights=uniform)'",
    "size weights": "; start from one such as 'fedavg'",
    "an ETF head": "; start from 'fedetf'",
    "an auxiliary model": "; start from 'fedsce' or add 'auxiliary'",
    "mean updates": "; start from 'ssf' or 'fedsub', which stream them",
    "compact features": "; start from 'fedrda'",
    "feature anchors": "; start from 'fedfa'",
    "class means of features": "; start from 'fedproto' or add 'classmeans'",
    "a shared body": "; start from a method that shares all but the head, such as 'fedper'",
}


@dataclass(frozen=True)
class Alloy:
    """A checked combination of mechanisms: a federated method."""

    title: str
    pieces: tuple[Mechanism, ...]
    expression: str = ""  # what a user types to get it

    def __post_init__(self) -> None:
        _check(self.title, self.pieces)
        if not self.expression:
            object.__setattr__(self, "expression", "+".join(map(str, self.pieces)))

    def __iter__(self) -> Iterator[Mechanism]:
        return iter(self.pieces)

    def __add__(self, other: Alloy | Mechanism) -> Alloy:
        title = other.title if isinstance(other, Alloy) else type(other).__name__
        return alloy(f"{self.title} + {title}", self, other)

    def with_hook(self, hook: str) -> tuple[Mechanism, ...]:
        """The mechanisms that do something at a hook, in order."""
        found = [piece for piece in self.pieces if piece.implements(hook)]
        last = hook in ("gradient", "adapt")
        return tuple(sorted(found, key=lambda piece: piece.outermost)) if last else tuple(found)

    def claimant(self, hook: str) -> Mechanism | None:
        """The one mechanism that claims a hook."""
        return next(iter(self.with_hook(hook)), None)

    def find(self, kind: type[M]) -> M | None:
        """The first piece of a kind."""
        return next((piece for piece in self.pieces if isinstance(piece, kind)), None)

    @property
    def gives(self) -> Names:
        return NOTHING.union(*(piece.gives for piece in self.pieces))

    @property
    def shared(self) -> str | None:
        """The part of the model that travels, "" for all of it; None where nothing does."""
        sharer = next((piece for piece in self.pieces if piece.shares is not None), None)
        return None if sharer is None else getattr(sharer, "part", sharer.shares)

    @property
    def full_participation(self) -> bool:
        return any(piece.full_participation for piece in self.pieces)

    @property
    def whole(self) -> bool:
        """Whether the server holds a whole model, for everybody."""
        return any(piece.shares == "" for piece in self.pieces)

    @property
    def by_size(self) -> bool:
        """Whether samples may count; a part that spoils size weights makes every reply count the same."""
        return not any("size weights" in piece.spoils for piece in self.pieces)

    @property
    def weighed(self) -> bool:
        """Whether clients tell how many samples they hold, to be weighed by it."""
        return self.by_size and any(slot.reduce == "mean" for piece in self for slot in piece.up.values())

    def asking(self, *, last: bool) -> list[Mechanism]:
        """The mechanisms that have a question when a round is over."""
        return [piece for piece in self.pieces if piece.query and (last or not piece.asks_at_end)]

    @property
    def personal(self) -> bool:
        """Whether clients end up with models of their own."""
        return not self.whole or bool(self.with_hook("adapt"))


def alloy(title: str, *pieces: Mechanism | Alloy, expression: str = "") -> Alloy:
    """Join mechanisms and alloys; equal parts merge, impossible combinations raise `AlloyConflict`."""
    flat: list[Mechanism] = []
    for piece in pieces:
        for part in piece if isinstance(piece, Alloy) else [piece]:
            flat += [one for one in (*part.brings, part) if one not in flat]
    flat.sort(key=lambda part: part.shares is None)  # who shares weights comes first: others build on them
    return Alloy(title, tuple(flat), expression)


def _check(title: str, pieces: tuple[Mechanism, ...]) -> None:
    if not pieces:
        raise AlloyConflict(f"{title} has no parts; start from a method such as 'fedavg'")
    for i, first in enumerate(pieces):
        for second in pieces[i + 1 :]:
            _check_pair(first, second, pieces)
    for piece in pieces:
        others = [other for other in pieces if other is not piece]
        for need in sorted(piece.needs):
            if not any(need in other.gives for other in others):
                found = " and ".join(str(other) for other in others)
                lack = (
                    f"which {found} {'do' if len(others) > 1 else 'does'} not give"
                    if found
                    else "and stands alone"
                )
                raise AlloyConflict(f"{piece} needs {need}, {lack}{HINTS.get(need, '')}")


def _named(piece: Mechanism, pieces: tuple[Mechanism, ...]) -> str:
    """A part by what a user may have typed: a companion together with who brought it."""
    hosts = [str(other) for other in pieces if piece in other.brings]
    return f"{piece} (brought by {' and '.join(hosts)})" if hosts else str(piece)


def _check_pair(first: Mechanism, second: Mechanism, pieces: tuple[Mechanism, ...]) -> None:
    one, other = _named(first, pieces), _named(second, pieces)
    if first.label == second.label and type(first) is type(second):
        raise AlloyConflict(f"{one} and {other} are the same part with different settings; keep one of them")
    for claim in sorted(first.claims & second.claims):
        raise AlloyConflict(f"{one} and {other} both claim {claim}; keep one of them")
    for hook, what in CLAIMED_HOOKS.items():
        if first.implements(hook) and second.implements(hook):
            raise AlloyConflict(f"{one} and {other} both claim {what}; keep one of them")
    for spoiler, victim in ((first, second), (second, first)):
        for need in sorted(spoiler.spoils & victim.needs):
            spoils, needs = (one, other) if spoiler is first else (other, one)
            raise AlloyConflict(f"{spoils} spoils {need}, which {needs} needs; keep one of them")
    for who, whom in ((first, second), (second, first)):
        if why := who.refuses(whom):
            refuses, refused = (one, other) if who is first else (other, one)
            raise AlloyConflict(f"{refuses} refuses {refused}: {why}; keep one of them")

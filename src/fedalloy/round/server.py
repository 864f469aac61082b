"""The server's side of a round: send, receive, fold. It knows slots, never a method."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from fedalloy.core.alloy import Alloy, Folded, Mechanism, Slots
from fedalloy.core.random import generator
from fedalloy.core.reduce import Fold
from fedalloy.core.state import State
from fedalloy.core.training import Local
from fedalloy.core.views import Info, Part
from fedalloy.core.wire import Errand, Items, Mail, Reply, Spec
from fedalloy.errors import renamed
from fedalloy.round.lengths import too_long
from fedalloy.round.replica import Replica
from fedalloy.round.replies import Outcome, usable


class Server:
    """Shared weights, every mechanism's state, and the facts that mechanisms may ask for."""

    def __init__(
        self, method: Alloy, replica: Replica, info: Info, local: Local, seed: int, secret: int = 0
    ) -> None:
        self.method = method
        self.replica = replica
        self.info = info
        self.local = local
        self.seed = seed
        self.secret = secret  # what the server's noise is drawn from
        self.round = 0
        self.weights = torch.empty(0)  # the shared span; empty when nothing is shared
        self.buffers = torch.empty(0)
        self.previous = torch.empty(0)  # the shared weights that this round's clients started from
        self.participants: list[Reply] = []  # this round's usable replies, without their items
        self.states = {piece.label: State() for piece in method}
        self.weighed = method.weighed
        self.most_norm: float | None = None  # how many times as long as usual a reply may be
        self._declared = replica.specs("up")
        self._variances = _variances(replica)
        for piece in method.with_hook("init_server"):
            piece.init_server(self, self.state_of(piece))

    def state_of(self, piece: Part) -> State:
        return self.states[piece.label]

    @property
    def site(self) -> Replica:
        renamed("Server.site", "replica")
        return self.replica

    def box(self, piece: Part) -> State:
        renamed("Server.box", "state_of")
        return self.state_of(piece)

    def rng(self, *purpose: int | str) -> torch.Generator:
        return generator(self.seed, self.round, "server", *purpose)

    @property
    def participation(self) -> float:
        """|S| / N of this round's usable replies."""
        return len(self.participants) / self.info.clients

    @property
    def participation_by_size(self) -> float:
        """The share of all samples that this round's usable replies stand for."""
        return sum(reply.samples for reply in self.participants) / self.info.samples

    def send(self, client: int, errand: Errand = "train") -> Mail:
        """One client's mail, checked against what the mechanisms declared."""
        items: Items = {}
        for piece in self.method:
            sent = piece.download(self, self.state_of(piece), client)
            assert sent.keys() == piece.down.keys(), (
                f"{piece} declared {sorted(piece.down)} but sent {sorted(sent)}"
            )
            items |= {f"{piece.label}.{name}": value for name, value in sent.items()}
        return Mail(errand, self.round, client, self.replica.pack("down", items, self.weights, self.round))

    @torch.no_grad()
    def receive(self, expected: Sequence[int], replies: Iterable[Reply]) -> Outcome:
        """Check every reply, fold them in ascending client id, let every mechanism aggregate."""
        outcome = Outcome()
        folds = {piece.label: Fold(piece.up) for piece in self.method}
        claimant = self.method.claimant("weigh")
        held: list[Reply] = []
        for reply in self._believable(expected, replies, "up", self._declared, outcome):
            for piece in self.method.with_hook("on_reply"):
                piece.on_reply(self, self.state_of(piece), reply)
            if claimant:
                held.append(reply)  # its weights need every reply
            else:
                _add(folds, reply, float(reply.samples) if self.method.by_size else 1.0)
        if self.weighed:
            outcome.bytes_up["samples"] = 8 * (len(outcome.accepted) + len(outcome.refused))
        if claimant and held:
            weights = claimant.weigh(self, self.state_of(claimant), held)
            for reply, weight in zip(held, weights or [float(r.samples) for r in held], strict=True):
                _add(folds, reply, weight)
        self.participants = outcome.accepted
        if outcome.accepted:
            got: Folded = {label: fold.got() for label, fold in folds.items()}
            if last := self.method.claimant("folded"):
                got = last.folded(self, self.state_of(last), got)
            for piece in self.method:
                piece.aggregate(self, self.state_of(piece), got[piece.label])
        for box in self.states.values():
            box.scratch.clear()
        return outcome

    def ask(self, asker: Mechanism, clients: Sequence[int]) -> list[Mail]:
        """The global model as it is evaluated, whole, for clients to tell something of; the same tensors for all."""
        weights, buffers = self.shown()["global"]
        items = {f"{asker.label}.weights": weights, f"{asker.label}.buffers": buffers}
        return [Mail("tell", self.round, client, items) for client in clients]

    @torch.no_grad()
    def hear(self, asker: Mechanism, expected: Sequence[int], replies: Iterable[Reply]) -> Outcome:
        """Hand what clients told to the mechanism that asked."""
        outcome, specs = Outcome(), self.replica.specs("query")
        declared = {key: specs[key] for key in (f"{asker.label}.{name}" for name in asker.query)}
        found = self._believable(expected, replies, "query", declared, outcome)
        told = (replace(reply, items=_of(asker.label, asker.query, reply)) for reply in found)
        asker.on_answers(self, self.state_of(asker), told)
        for _ in told:  # whoever was not listened to
            pass
        self.state_of(asker).scratch.clear()
        return outcome

    def _believable(
        self,
        expected: Sequence[int],
        replies: Iterable[Reply],
        way: str,
        declared: Mapping[str, Spec],
        outcome: Outcome,
    ) -> Iterable[Reply]:
        """Usable replies one by one; with `most_norm` all are held first, for it takes all to say what is too long."""
        found = self._usable(expected, replies, way, declared, outcome)
        if self.most_norm is None:
            return found
        held = list(found)
        slots = {key: spec.slot for key, spec in declared.items()}
        refused = too_long(held, slots, self.weights, self.most_norm)
        outcome.refused |= refused
        outcome.accepted[:] = [reply for reply in outcome.accepted if reply.client not in refused]
        return [reply for reply in held if reply.client not in refused]

    def _usable(
        self,
        expected: Sequence[int],
        replies: Iterable[Reply],
        way: str,
        declared: Mapping[str, Spec],
        outcome: Outcome,
    ) -> Iterator[Reply]:
        """Every reply that can be used, unpacked; where nothing hides it, each says how many samples it stands for."""

        def read(reply: Reply) -> Reply:
            return replace(reply, items=self.replica.unpack(way, reply.items, self.weights, self.round))

        weighed = self.method.claimant("seal") is None
        doubt = self._negative_variance
        return usable(
            self.round, expected, replies, declared, outcome, weighed=weighed, read=read, doubt=doubt
        )

    def _negative_variance(self, reply: Reply) -> str | None:
        for key, places in self._variances.items():
            if key in reply.items and bool((reply.items[key][places] < 0).any()):
                return f"{key} holds a negative variance"
        return None

    def shown(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The models to evaluate, by name: flat weights and buffers of the whole net, or of `aux`."""
        replica, shared = self.replica, self.method.shared
        span = replica.weights.buffer_span(shared or "")
        buffers = self.buffers if len(self.buffers) else replica.initial_buffers[span]
        models: dict[str, Tensor | tuple[Tensor, Tensor]] = (
            {"global": self.weights} if self.method.whole else {}
        )
        if shared == "aux" and "an auxiliary model" in self.method.gives:
            models["aux"] = self.weights
        for piece in sorted(
            self.method.with_hook("eval_models"), key=lambda piece: bool(piece.query)
        ):  # who asked comes last
            models |= piece.eval_models(self, self.state_of(piece))
        return {
            name: model if isinstance(model, tuple) else (model, buffers) for name, model in models.items()
        }

    def state(self) -> Items:
        """Everything that must survive: a run resumed from it gives the same bits."""
        items = {
            f"{label}.{name}": value
            for label, box in self.states.items()
            for name, value in box.persistent.items()
        }
        return items | {"server.weights": self.weights, "server.buffers": self.buffers}

    def resume(self, state: Items, round: int) -> None:
        """Take over what `state` returned after a round."""
        self.round = round
        self.weights, self.buffers = state["server.weights"], state["server.buffers"]
        for label, box in self.states.items():
            prefix = label + "."
            box.persistent = {
                k.removeprefix(prefix): v.clone() for k, v in state.items() if k.startswith(prefix)
            }


def _variances(replica: Replica) -> dict[str, Tensor]:
    """Where variances lie in the slots that hold a net's statistics: those of BatchNorm, and others of that name."""
    found: dict[str, Tensor] = {}
    layout = replica.weights.buffer_layout
    for piece in replica.method:
        span = replica.weights.buffer_span(getattr(piece, "part", ""))
        places = [
            torch.arange(a, b) - span.start
            for name, (a, b) in layout.spans.items()
            if name.endswith(("running_var", "variances")) and span.start <= a and b <= span.stop
        ]
        for name, slot in piece.up.items():
            key = f"{piece.label}.{name}"
            if slot.shape == ("buffers",) and places and replica.specs("up")[key].bytes:
                found[key] = torch.cat(places)
    return found


def _add(folds: Mapping[str, Fold], reply: Reply, weight: float) -> None:
    for label, fold in folds.items():
        if fold.slots:
            fold.add(replace(reply, items=_of(label, fold.slots, reply)), weight)


def _of(label: str, slots: Slots, reply: Reply) -> Items:
    """A mechanism's own items of a reply, by the names of its slots."""
    return {name: reply.items[f"{label}.{name}"] for name in slots}

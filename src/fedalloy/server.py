"""The server's side of a round: send, receive, fold. It knows slots, never a method."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from fedalloy.alloy import Alloy, Box, Mechanism
from fedalloy.client import Info, Local
from fedalloy.random import generator
from fedalloy.site import Site
from fedalloy.wire import Errand, Items, Mail, Reply, Spec, bytes_of, refusal


@dataclass
class Outcome:
    """What one round brought."""

    accepted: list[Reply] = field(default_factory=list)  # without their items, once these are folded
    refused: dict[int, str] = field(default_factory=dict)
    bytes_up: dict[str, int] = field(default_factory=dict)


class Server:
    """Shared weights, every mechanism's drawer, and the facts that mechanisms may ask for."""

    def __init__(self, method: Alloy, site: Site, info: Info, local: Local, seed: int) -> None:
        self.method = method
        self.site = site
        self.info = info
        self.local = local
        self.seed = seed
        self.round = 0
        self.weights = torch.empty(0)  # the shared span; empty when nothing is shared
        self.buffers = torch.empty(0)
        self.previous = torch.empty(0)  # the shared weights that this round's clients started from
        self.participants: list[Reply] = []  # this round's usable replies, without their items
        self.boxes = {piece.label: Box() for piece in method}
        self.weighed = any(slot.reduce == "mean" for piece in method for slot in piece.up.values())
        self._declared = site.specs("up")
        for piece in method.with_hook("open"):
            piece.open(self, self.box(piece))

    def box(self, piece: Mechanism) -> Box:
        return self.boxes[piece.label]

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
            sent = piece.send(self, self.box(piece), client)
            assert sent.keys() == piece.down.keys(), (
                f"{piece} declared {sorted(piece.down)} but sent {sorted(sent)}"
            )
            items |= {f"{piece.label}.{name}": value for name, value in sent.items()}
        return Mail(errand, self.round, client, self.site.pack("down", items, self.weights, self.round))

    @torch.no_grad()
    def receive(self, expected: Sequence[int], replies: Iterable[Reply]) -> Outcome:
        """Check every reply, fold them in ascending client id, let every mechanism aggregate."""
        outcome = Outcome()
        fold = Fold(self.method)
        claimant = self.method.claimant("weigh")
        held: list[Reply] = []
        for reply in self._usable(expected, replies, self._declared, outcome, weighed=self.weighed):
            reply = replace(reply, items=self.site.unpack("up", reply.items, self.weights, self.round))
            for piece in self.method.with_hook("absorb"):
                piece.absorb(self, self.box(piece), reply)
            if claimant:
                held.append(reply)  # its weights need every reply
            else:
                fold.add(reply, float(reply.samples))
        if self.weighed:
            outcome.bytes_up["samples"] = 8 * (len(outcome.accepted) + len(outcome.refused))
        if claimant and held:
            weights = claimant.weigh(self, self.box(claimant), held)
            for reply, weight in zip(held, weights or [float(r.samples) for r in held], strict=True):
                fold.add(reply, weight)
        self.participants = outcome.accepted
        if outcome.accepted:
            for piece in self.method:
                piece.receive(self, self.box(piece), fold.got(piece))
        for box in self.boxes.values():
            box.memo.clear()
        return outcome

    def question(self, client: int) -> Mail:
        """The final global model, for a client to tell something of."""
        weights, buffers = self.shown()["global"]
        return Mail("tell", self.round, client, {"model.weights": weights, "model.buffers": buffers})

    @torch.no_grad()
    def conclude(self, expected: Sequence[int], replies: Iterable[Reply]) -> Outcome:
        """Hand what clients told to the mechanism that asked, one usable reply after the other."""
        outcome, asker = Outcome(), self.method.claimant("tell")
        assert asker is not None
        usable = self._usable(expected, replies, self.site.specs("told"), outcome, weighed=False)
        told = ({name: reply.items[f"{asker.label}.{name}"] for name in asker.told} for reply in usable)
        asker.conclude(self, self.box(asker), told)
        for _ in told:  # whoever was not listened to
            pass
        self.box(asker).memo.clear()
        return outcome

    def _usable(
        self,
        expected: Sequence[int],
        replies: Iterable[Reply],
        declared: Mapping[str, Spec],
        outcome: Outcome,
        *,
        weighed: bool,
    ) -> Iterator[Reply]:
        """Check every reply, in ascending client id; what came and what was refused goes into the outcome."""
        due = set(expected)
        for reply in in_order(sorted(expected), replies):
            for key, count in bytes_of(reply.items).items():
                outcome.bytes_up[key] = outcome.bytes_up.get(key, 0) + count
            why = self._stray(reply, expected, due) or refusal(reply, declared, weighed=weighed)
            if why:
                outcome.refused.setdefault(reply.client, why)
                continue
            outcome.accepted.append(_without_items(reply))
            yield reply

    def _stray(self, reply: Reply, expected: Sequence[int], due: set[int]) -> str | None:
        """Why nobody waits for a reply, or None; `due` are the clients that have not answered yet."""
        if reply.client not in due:
            return "answered twice" if reply.client in expected else "was not asked"
        due.remove(reply.client)
        return None if reply.round == self.round else f"answered round {reply.round}"

    def shown(self) -> dict[str, tuple[Tensor, Tensor]]:
        """The models to evaluate, by name: whole flat weights and buffers."""
        if "global model" not in self.method.gives:
            return {}
        models = {"global": self.weights}
        for piece in sorted(self.method.with_hook("shown"), key=lambda piece: piece.has("tell")):  # that last
            models |= piece.shown(self, self.box(piece))
        buffers = self.buffers if len(self.buffers) else self.site.initial_buffers
        return {name: (flat, buffers) for name, flat in models.items()}

    def state(self) -> Items:
        """Everything that must survive: a run resumed from it gives the same bits."""
        items = {
            f"{label}.{name}": value for label, box in self.boxes.items() for name, value in box.keep.items()
        }
        return items | {"server.weights": self.weights, "server.buffers": self.buffers}

    def resume(self, state: Items, round: int) -> None:
        """Take over what `state` returned after a round."""
        self.round = round
        self.weights, self.buffers = state["server.weights"], state["server.buffers"]
        for label, box in self.boxes.items():
            prefix = label + "."
            box.keep = {k.removeprefix(prefix): v.clone() for k, v in state.items() if k.startswith(prefix)}


def in_order(expected: Sequence[int], replies: Iterable[Reply]) -> Iterator[Reply]:
    """Replies in ascending client id, each as soon as all before it are there: sums are always taken in this order.

    What nobody waits for comes last.
    """
    waiting: dict[int, Reply] = {}
    strays: list[Reply] = []
    missing = set(expected)
    ahead = iter(expected)
    due = next(ahead, None)
    for reply in replies:
        if reply.client not in missing:
            strays.append(reply)
            continue
        missing.remove(reply.client)
        waiting[reply.client] = reply
        while due in waiting:
            yield waiting.pop(due)
            due = next(ahead, None)
    yield from (waiting[client] for client in sorted(waiting))
    yield from strays


class Fold:
    """Streams replies into one float64 accumulator per slot; never holds them."""

    def __init__(self, method: Alloy) -> None:
        self._slots = [
            (f"{piece.label}.{name}", slot, piece) for piece in method for name, slot in piece.up.items()
        ]
        self._sums: dict[str, Tensor] = {}
        self._weights: dict[str, Tensor] = {}
        self._all: dict[str, dict[int, Tensor]] = {
            key: {} for key, slot, _ in self._slots if slot.reduce == "all"
        }

    def add(self, reply: Reply, weight: float) -> None:
        for key, slot, piece in self._slots:
            value = reply.items[key]
            if slot.reduce == "all":
                self._all[key][reply.client] = value
            elif slot.reduce == "class_mean":
                counts = reply.items[f"{piece.label}.{slot.counts}"].double()
                rows = value.new_zeros(len(counts), *value.shape[1:], dtype=torch.float64)
                rows[counts > 0] = value.double() if slot.shape[0] == "held" else value[counts > 0].double()
                weights = (counts > 0).double() if slot.uniform else counts
                self._accumulate(key, rows * _rows(weights, rows), weights)
            else:
                scale = weight if slot.reduce == "mean" else 1.0
                self._accumulate(key, value.double() * scale, torch.tensor(scale, dtype=torch.float64))

    def got(self, piece: Mechanism) -> Mapping[str, object]:
        """The folded value of each of a mechanism's slots."""
        return {
            name: self._result(f"{piece.label}.{name}", slot.reduce, slot.dtype)
            for name, slot in piece.up.items()
        }

    def _accumulate(self, key: str, value: Tensor, weight: Tensor) -> None:
        if key in self._sums:
            self._sums[key] += value
            self._weights[key] += weight
        else:
            self._sums[key], self._weights[key] = value, weight.clone()

    def _result(self, key: str, reduce: str, dtype: torch.dtype) -> object:
        if reduce == "all":
            return self._all[key]
        total, weight = self._sums[key], self._weights[key]
        if reduce == "sum":
            return total.to(dtype)
        if reduce == "class_mean":  # a class nobody holds: rows of zeros, told apart by its count of zero
            return (total / _rows(weight.clamp(min=1), total)).to(dtype)
        return (total / weight).to(dtype)


def _rows(counts: Tensor, like: Tensor) -> Tensor:
    return counts.view(-1, *[1] * (like.dim() - 1))


def _without_items(reply: Reply) -> Reply:
    return replace(reply, items={})

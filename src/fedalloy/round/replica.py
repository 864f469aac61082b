"""A replica: the net of one architecture as a method has built it, lent to one client after another."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, Mechanism
from fedalloy.core.frozen import Frozen
from fedalloy.core.imports import Imports
from fedalloy.core.net import Inputs, Net
from fedalloy.core.random import CPU, seeded
from fedalloy.core.weights import Layout, Weights
from fedalloy.core.wire import Items, Slot, Spec
from fedalloy.errors import FedAlloyError
from fedalloy.models import build, size_of, width_of
from fedalloy.models.chain import chain

OWN = ("own.weights", "own.buffers")
BATCHNORM = nn.modules.batchnorm._BatchNorm


class Replica:
    """A net, its flat weights and its initial state."""

    def __init__(
        self,
        method: Alloy,
        model: str,
        inputs: Inputs,
        seed: int,
        models: tuple[str, ...] = (),
        precision: str = "fp32",
        rounds: int | None = None,
        device: torch.device = CPU,
        imports: Imports | None = None,
    ) -> None:
        self.method = method
        self.model = model
        self.imports = imports
        self.models = models or (model,)  # all architectures of the federation
        self.inputs = inputs
        self.seed = seed
        self.rounds = rounds  # of the whole run, where that is known: for schedules
        self.device = device
        with seeded(seed, "init", model):
            self.net: Net = build(model, inputs, imports)
        for piece in method.with_hook(
            "build"
        ):  # surgery draws from counters of its own: the body stays the same
            with seeded(seed, "init", model, piece.label):
                piece.build(self)
        for part in (self.net, getattr(self.net, "aux", None)):
            if part is not None:
                part.bf16 = precision == "bf16"
        self.net.to(device)  # drawn on the CPU whatever the device: the same initial weights
        self.weights = Weights(self.net)
        self.initial = self.weights.flat.clone()
        self.initial_buffers = self.weights.buffers.clone()
        self.shared = self.weights.span(method.shared or "")  # where the server's weights have their place
        self.chain = (
            chain(self.net) if precision == "fp32" else ()
        )  # a perceptron, where the method leaves it one
        self.has_batchnorm = any(isinstance(m, BATCHNORM) for m in self.net.modules())
        self._own = [_gaps(layout, self._shared(kind)) for layout, kind in self._layouts()]
        self.coder = method.claimant("encode")
        self.memo: dict[str, Any] = {}  # what a mechanism computes once for all clients of a round
        self._modules = list(self.net.modules())
        self._plain = all(type(module).train is nn.Module.train for module in self._modules)
        self._spares: list[Frozen] = []
        self._lent = 0
        for piece in method.with_hook("fits"):
            piece.fits(self)

    def build_model(self, model: str) -> Net:
        """Another net for the same samples and classes."""
        return build(model, self.inputs, self.imports)

    def parameters_of(self, model: str) -> int:
        """How many parameters another net has."""
        return size_of(model, self.inputs, self.imports).parameters

    def width_of(self, model: str) -> int:
        """How many features the body of another net has."""
        return width_of(model, self.inputs, self.imports)

    def mode(self, *, training: bool) -> None:
        """net.train(training), without the walk through the tree where every module takes it plainly."""
        if self._plain:
            for module in self._modules:
                module.__dict__["training"] = training
        else:
            self.net.train(training)

    def reset(self) -> None:
        """Hand the replica to another client."""
        self.weights.load(self.initial, self.initial_buffers)
        self._lent = 0
        for spare in self._spares:
            spare.forget()

    def own(self) -> Items:
        """The weights and buffers that nobody shares, as they stand: they stay with the client."""
        if not any(self._own):
            return {}
        vectors = self.weights.flat, self.weights.buffers
        return {
            name: torch.cat([vector[gap] for gap in gaps] or [vector[:0]])
            for name, vector, gaps in zip(OWN, vectors, self._own, strict=True)
        }

    def put_own(self, keep: Items) -> None:
        """Install what `own` returned."""
        for name, vector, gaps in zip(OWN, (self.weights.flat, self.weights.buffers), self._own, strict=True):
            if gaps:
                pieces = torch.split(keep[name], [gap.stop - gap.start for gap in gaps])
                for gap, piece in zip(gaps, pieces, strict=True):
                    vector[gap] = piece

    def _layouts(self) -> list[tuple[Layout, str]]:
        return [(self.weights.layout, "weights"), (self.weights.buffer_layout, "buffers")]

    def _shared(self, kind: str) -> list[str]:
        sharers = [piece for piece in self.method if piece.shares is not None]
        return [
            str(p.shares) for p in sharers if kind == "weights" or getattr(p, "buffers", "average") != "local"
        ]

    def showing(self, name: str, flat: Tensor, buffers: Tensor) -> Net:
        """One of the server's models, to look at: the net, or its auxiliary model, with these weights."""
        part = "aux" if name == "aux" else ""
        self.weights.load(flat, buffers, part)
        return self.net.eval().aux if part else self.net.eval()

    def whole(self, part: str, flat: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """The state of the net with a part as given and the rest as it was initially; no buffers: all initial."""
        full, statistics = self.initial.clone(), self.initial_buffers.clone()
        full[self.weights.span(part)] = flat
        if len(buffers):
            statistics[self.weights.buffer_span(part)] = buffers
        return full, statistics

    def frozen(self, flat: Tensor, buffers: Tensor) -> "Frozen":
        """A copy of the net with other weights, in eval mode and without gradient, until the round ends."""
        if self._lent == len(self._spares):
            self._spares.append(Frozen(self.net))
        spare = self._spares[self._lent]
        self._lent += 1
        spare.weights.load(flat, buffers)
        return spare

    def sizes(self, piece: Mechanism) -> dict[str, int]:
        """What the named dimensions of a mechanism's slots stand for here."""
        part = getattr(piece, "part", "")
        span, buffers = self.weights.span(part), self.weights.buffer_span(part)
        keeps_buffers = getattr(piece, "buffers", "average") == "average"
        return {
            "weights": span.stop - span.start,
            "buffers": buffers.stop - buffers.start if keeps_buffers else 0,
            "classes": self.inputs.classes,
            "held": self.inputs.classes,
            "coded": self.coded_size,
            "missing": 0,
            "features": self.net.width,
        }

    def pack(self, direction: str, items: Items, shared: Tensor, round: int) -> Items:
        """Items as they travel: what is additive is encoded, if the method has a codec."""
        packed = dict(items)
        if self.coder:
            for key, slot in self.additive(direction).items():
                value = items[key] - shared if slot.relative else items[key]
                packed[key] = self.coder.encode(self, value, round)
        return packed

    def unpack(self, direction: str, items: Items, shared: Tensor, round: int) -> Items:
        """The inverse of `pack`, as far as the codec has one."""
        full = dict(items)
        if self.coder:
            for key, slot in self.additive(direction).items():
                value = self.coder.decode(self, items[key], round)
                full[key] = value + shared if slot.relative else value
        return full

    def encoded(self, value: Tensor, round: int) -> Tensor:
        return self.coder.encode(self, value, round) if self.coder else value

    def decoded(self, coded: Tensor, round: int) -> Tensor:
        return self.coder.decode(self, coded, round) if self.coder else coded

    @property
    def coded_size(self) -> int:
        return self.coder.coded_size(self) if self.coder else len(self.initial[self.shared])

    def split(self, coded: Tensor) -> Sequence[Tensor]:
        """Encoded vectors that travelled as one, apart again."""
        return self.coder.split(self, coded) if self.coder else torch.split(coded, self.coded_size)

    def as_sent(self, value: Tensor, round: int) -> Tensor:
        """What the other end will see of an additive value."""
        return self.decoded(self.encoded(value, round), round)

    def additive(self, direction: str) -> dict[str, Slot]:
        """The declared slots that hold a change: of the shared weights, or of something else."""
        return {
            f"{piece.label}.{name}": slot
            for piece in self.method
            for name, slot in getattr(piece, direction).items()
            if slot.increment or slot.relative
        }

    def specs(self, direction: str) -> dict[str, Spec]:
        """Every declared slot, "label.slot", with its exact shape: `direction` is "down" or "up"."""
        specs: dict[str, Spec] = {}
        for piece in self.method:
            sizes = self.sizes(piece)
            slots: dict[str, Slot] = getattr(piece, direction)
            for name, slot in slots.items():
                shape = tuple(dim if isinstance(dim, int) else sizes[dim] for dim in slot.shape)
                if self.coder and (slot.increment or slot.relative):
                    shape = (self.coder.coded_size(self),)
                    slot = replace(slot, shape=("coded",)) if self.coder.elastic else slot
                specs[f"{piece.label}.{name}"] = Spec(slot, shape)
        return specs


def _gaps(layout: Layout, shared: list[str]) -> list[slice]:
    """What is left of a flat vector when the shared parts are taken out."""
    gaps, at = [], 0
    for span in [
        *sorted((layout.span(part) for part in shared), key=lambda s: s.start),
        slice(layout.size, layout.size),
    ]:
        if span.start > at:
            gaps.append(slice(at, span.start))
        at = max(at, span.stop)
    return gaps


class Replicas:
    """The replicas of a federation, one for each architecture, built when first needed."""

    def __init__(
        self,
        method: Alloy,
        models: tuple[str, ...],
        inputs: Inputs,
        seed: int,
        precision: str = "fp32",
        rounds: int | None = None,
        device: torch.device = CPU,
        imports: Imports | None = None,
    ) -> None:
        self.imports = imports
        self.method, self.models, self.inputs, self.seed = method, models, inputs, seed
        self.precision, self.rounds, self.device = precision, rounds, device
        self._built: dict[str, Replica] = {}

    def of(self, client: int) -> Replica:
        """Client k has architecture k mod number of architectures."""
        return self.named(self.models[client % len(self.models)])

    def named(self, model: str) -> Replica:
        if model not in self._built:
            self._built[model] = Replica(
                self.method,
                model,
                self.inputs,
                self.seed,
                self.models,
                self.precision,
                self.rounds,
                self.device,
                self.imports,
            )
        return self._built[model]

    def check(self) -> None:
        """Refuse methods that share weights between different architectures."""
        if len(set(self.models)) > 1 and "one architecture" in self.method.gives:
            what = "whole models" if self.method.whole else "layers of models"
            raise FedAlloyError(
                f"{self.method.title} averages {what}, but this federation mixes "
                f"{', '.join(dict.fromkeys(self.models))}; "
                "use one --model, or a method for different models such as 'local'"
            )

"""What the hooks of a mechanism may look at and touch: a client, a step, the server, a replica of the model.

These are views: the classes behind them, in `fedalloy.round`, can do more. A mechanism that keeps to what is written
here runs on every engine.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from fedalloy.core.frozen import Frozen
from fedalloy.core.imports import Imports
from fedalloy.core.net import Inputs, Net, Outputs
from fedalloy.core.state import Phase, State
from fedalloy.core.training import Local
from fedalloy.core.weights import Weights
from fedalloy.core.wire import Reply, Slot, Spec

EVAL_BATCH = 512  # fixed: the bits of a convolution may depend on it
Findings = dict[str, float | Tensor]
Oracle = Callable[["StepView"], Tensor]  # the gradient of a step
T = TypeVar("T")


class Prepare(Protocol):
    """Makes a batch of stored samples; with a generator, augmented where the federation says so."""

    @property
    def augments(self) -> bool: ...
    def __call__(self, x: Tensor, generator: torch.Generator | None) -> Tensor: ...


@dataclass(frozen=True)
class ClientData:
    """What one client holds. `x` is as stored (uint8 images); `prepare` makes a batch of it."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor
    classes: int
    prepare: Prepare

    @property
    def samples(self) -> int:
        return len(self.y)

    @cached_property
    def counts(self) -> Tensor:
        """Training samples per class."""
        return torch.bincount(self.y, minlength=self.classes)


@dataclass(frozen=True)
class Info:
    """What every party knows of the federation."""

    clients: int
    samples: int  # of all clients together


class Part(Protocol):
    """A mechanism, as far as a view must know it."""

    @property
    def label(self) -> str: ...
    @property
    def up(self) -> Mapping[str, Slot]: ...
    @property
    def gives(self) -> frozenset[str]: ...


class MethodView(Protocol):
    """The method that a mechanism is a part of."""

    @property
    def title(self) -> str: ...
    @property
    def shared(self) -> str | None: ...
    def __iter__(self) -> Iterator[Part]: ...
    def find(self, kind: type[T]) -> T | None:
        """The first part of a kind."""


class ReplicaView(Protocol):
    """The net of one architecture as the method has built it, lent to one client after another."""

    net: Net
    memo: dict[str, Any]  # what a mechanism computes once for all clients of a round

    @property
    def method(self) -> MethodView: ...
    @property
    def model(self) -> str: ...
    @property
    def models(self) -> tuple[str, ...]:
        """All architectures of the federation."""

    @property
    def imports(self) -> Imports | None: ...
    @property
    def inputs(self) -> Inputs: ...
    @property
    def seed(self) -> int: ...
    @property
    def rounds(self) -> int | None:
        """Of the whole run, where that is known: for schedules."""

    @property
    def device(self) -> torch.device: ...
    @property
    def weights(self) -> Weights: ...
    @property
    def initial(self) -> Tensor: ...
    @property
    def initial_buffers(self) -> Tensor: ...
    @property
    def shared(self) -> slice:
        """Where the server's weights have their place."""

    @property
    def has_batchnorm(self) -> bool: ...
    def build_model(self, model: str) -> Net:
        """Another net for the same samples and classes."""

    def parameters_of(self, model: str) -> int:
        """How many parameters another net has."""

    def width_of(self, model: str) -> int:
        """How many features the body of another net has."""

    def mode(self, *, training: bool) -> None: ...
    def whole(self, part: str, flat: Tensor, buffers: Tensor) -> tuple[Tensor, Tensor]:
        """The state of the net with a part as given and the rest as it was initially."""

    def specs(self, direction: str) -> dict[str, Spec]:
        """Every declared slot, "label.slot", with its exact shape."""

    def additive(self, direction: str) -> dict[str, Slot]:
        """The declared slots that hold a change."""

    def encoded(self, value: Tensor, round: int) -> Tensor: ...
    def decoded(self, coded: Tensor, round: int) -> Tensor: ...
    def split(self, coded: Tensor) -> Sequence[Tensor]: ...
    def as_sent(self, value: Tensor, round: int) -> Tensor:
        """What the other end will see of an additive value."""


class ClientView(Protocol):
    """A client during a round."""

    id: int
    round: int
    seed: int
    secret: int  # what this client's noise is drawn from
    steps: int  # taken so far in this round
    received: Tensor  # the flat weights before anything is trained
    received_buffers: Tensor
    states: dict[str, State]

    @property
    def method(self) -> MethodView: ...
    @property
    def replica(self) -> ReplicaView: ...
    @property
    def net(self) -> Net: ...
    @property
    def weights(self) -> Weights: ...
    @property
    def data(self) -> ClientData: ...
    @property
    def info(self) -> Info: ...
    @property
    def local(self) -> Local: ...
    @property
    def lr(self) -> float: ...
    def state_of(self, piece: Part) -> State: ...
    def rng(self, *purpose: int | str) -> torch.Generator:
        """A generator of this client's own in this round."""

    def frozen(self, flat: Tensor, buffers: Tensor) -> Frozen:
        """The net with other weights, to look at: eval mode, no gradient."""

    def outputs(self, x: Tensor, frozen: Frozen | None = None) -> Iterator[Outputs]:
        """The model as it stands, or a frozen one, over stored samples: eval mode, no augmentation, no gradient."""

    def step(self, x: Tensor, y: Tensor, index: Tensor, epoch: int) -> "StepView":
        """A batch of one's own, to take a gradient on."""

    def plain_gradient(self, step: "StepView") -> Tensor:
        """The gradient of cross-entropy alone, at the weights as they stand."""

    def full_gradient(self, flat: Tensor) -> Tensor:
        """The gradient of the local objective at other weights, over all samples as stored."""

    def objective(self, step: "StepView") -> Tensor:
        """Task and losses of a batch after its forward pass, as a graph."""

    def fit(
        self, stream: int | str, phase: Phase, oracle: Oracle | None = None, data: ClientData | None = None
    ) -> None:
        """Training beside that of the method, by default on cross-entropy alone."""

    def as_sent(self, value: Tensor) -> Tensor:
        """What the server will see of an additive value: the value itself unless a codec is at work."""


class StepView(Protocol):
    """One batch: what losses and gradient wrappers look at."""

    out: Outputs  # the main model on this batch, in the latest forward pass
    value: Tensor  # the loss of that pass
    x: Tensor
    y: Tensor
    index: Tensor  # the places of these samples in the client's data
    epoch: int

    @property
    def client(self) -> ClientView: ...
    @property
    def weights(self) -> Tensor:
        """The flat weights at this moment."""

    def seen_by(self, frozen: Frozen) -> Outputs:
        """A frozen model on this batch."""


class ServerView(Protocol):
    """The server, before, during and after a round."""

    round: int
    seed: int
    secret: int  # what the server's noise is drawn from
    weights: Tensor  # the shared span; empty when nothing is shared
    buffers: Tensor
    previous: Tensor  # the shared weights that this round's clients started from
    participants: list[Reply]  # this round's usable replies, without their items

    @property
    def method(self) -> MethodView: ...
    @property
    def replica(self) -> ReplicaView: ...
    @property
    def info(self) -> Info: ...
    @property
    def local(self) -> Local: ...
    @property
    def participation(self) -> float:
        """The share of all clients whose replies could be used in this round."""

    @property
    def participation_by_size(self) -> float:
        """The share of all samples that this round's usable replies stand for."""

    def state_of(self, piece: Part) -> State: ...
    def rng(self, *purpose: int | str) -> torch.Generator: ...
    def shown(self) -> Mapping[str, tuple[Tensor, Tensor]]:
        """The models to evaluate, by name: flat weights and buffers."""


def outputs(net: Net | Frozen, data: ClientData, x: Tensor) -> Iterator[Outputs]:
    """A model over stored samples."""
    for batch in torch.split(x, EVAL_BATCH):
        yield net(data.prepare(batch, None))

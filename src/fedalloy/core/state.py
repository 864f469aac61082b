"""What a mechanism keeps, and how it cuts up local training."""

from dataclasses import dataclass, field
from typing import Any

from fedalloy.core.wire import Items


@dataclass
class Box:
    """A mechanism's own drawer."""

    keep: Items = field(default_factory=dict)  # survives rounds, never leaves its owner
    memo: dict[str, Any] = field(default_factory=dict)  # lasts one round
    got: Items = field(default_factory=dict)  # what the mail brought for this mechanism


@dataclass(frozen=True)
class Phase:
    """Some epochs of local training on one part of the model; the rest is frozen."""

    epochs: int
    part: str = ""
    lr: float | None = None
    steps: int | None = None  # a fixed number of steps in place of epochs
    freeze_bn: bool = False  # BatchNorm in the frozen rest uses its running statistics and leaves them alone
    plain: bool = False  # plain SGD, whatever optimiser the clients have

"""What a mechanism keeps, and how it cuts up local training."""

from dataclasses import dataclass, field
from typing import Any

from fedalloy.core.wire import Items
from fedalloy.errors import renamed


@dataclass
class State:
    """What one mechanism holds at the server, or at one client."""

    persistent: Items = field(default_factory=dict)  # survives rounds, never leaves its owner
    scratch: dict[str, Any] = field(default_factory=dict)  # lasts one round
    received: Items = field(default_factory=dict)  # what the message brought for this mechanism

    @property
    def keep(self) -> Items:
        renamed("State.keep", "persistent")
        return self.persistent

    @keep.setter
    def keep(self, items: Items) -> None:
        renamed("State.keep", "persistent")
        self.persistent = items

    @property
    def memo(self) -> dict[str, Any]:
        renamed("State.memo", "scratch")
        return self.scratch

    @property
    def got(self) -> Items:
        renamed("State.got", "received")
        return self.received


@dataclass(frozen=True)
class Phase:
    """Some epochs of local training on one part of the model; the rest is frozen."""

    epochs: int
    part: str = ""
    lr: float | None = None
    steps: int | None = None  # a fixed number of steps in place of epochs
    freeze_bn: bool = False  # BatchNorm in the frozen rest uses its running statistics and leaves them alone
    plain: bool = False  # plain SGD, whatever optimiser the clients have

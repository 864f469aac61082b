"""A user's own method and model, in a module that actors can import: the method makes trouble where it is told to."""

import os
import signal
import time
from dataclasses import dataclass
from pathlib import Path

from torch import Tensor, nn

from fedalloy.core import registry
from fedalloy.core.alloy import Alloy, Mechanism
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, StepView
from fedalloy.errors import FedAlloyError
from fedalloy.models import Inputs


@dataclass(frozen=True)
class _Trouble(Mechanism):
    """Trouble at one client: always, or only until the file `once` is there."""

    what: str = ""
    client: int = 2
    once: str = ""

    def before_training(self, client: ClientView, my: State) -> None:
        if self.what == "sleep":
            time.sleep(0.3)

    def loss(self, step: StepView, my: State) -> Tensor | None:
        if step.client.id != self.client or self.what in ("", "sleep") or self._already():
            return None
        if self.what == "die":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.what == "hang":
            time.sleep(100)
        if self.what == "bug":
            raise ZeroDivisionError("a bug in a mechanism")
        raise FedAlloyError("something the user can mend")

    def _already(self) -> bool:
        if not self.once:
            return False
        try:
            Path(self.once).touch(exist_ok=False)
        except FileExistsError:
            return True
        return False


def troubled(what: str = "", client: int = 2, once: str = "") -> Alloy:
    return registry.make("scaffold") + _Trouble(what, client, once)


def net(inputs: Inputs) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 512), nn.Tanh(), nn.Linear(512, inputs.classes))

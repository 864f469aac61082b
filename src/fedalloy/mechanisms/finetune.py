"""FineTune: before its evaluation every client's model is trained once more on the client's own data."""

from dataclasses import dataclass

from fedalloy.core.alloy import Mechanism
from fedalloy.core.parameters import AtLeastOne, Positive
from fedalloy.core.state import Phase, State
from fedalloy.core.views import ClientView


@dataclass(frozen=True)
class FineTune(Mechanism):
    """Some epochs of cross-entropy on a copy, with a fresh optimiser; nothing flows back into the federation.

    `lr`: None is the rate of the latest round. `part`: what is trained, by default everything.
    """

    epochs: AtLeastOne = 5
    lr: Positive | None = None
    part: str = ""

    @property
    def outermost(self) -> bool:  # whatever else makes up the personal model comes before
        return True

    def adapt(self, client: ClientView, my: State) -> None:
        client.fit("finetune", Phase(self.epochs, self.part, self.lr))

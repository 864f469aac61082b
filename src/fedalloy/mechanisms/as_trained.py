"""AsTrained: personal models are tested as local training left them, not refreshed with the latest average."""

from dataclasses import dataclass

from fedalloy.core.alloy import Mechanism
from fedalloy.core.state import State
from fedalloy.core.views import ClientView
from fedalloy.core.wire import Items


@dataclass(frozen=True)
class AsTrained(Mechanism):
    """A client keeps the whole model of its last participation for its own use; before the first, the initial one."""

    claims = frozenset({"the personal model"})

    def init_client(self, client: ClientView, my: State) -> None:
        self._remember(client, my)

    def upload(self, client: ClientView, my: State) -> Items:
        self._remember(client, my)
        return {}

    def adapt(self, client: ClientView, my: State) -> None:
        client.weights.load(my.persistent["weights"], my.persistent["buffers"])

    def _remember(self, client: ClientView, my: State) -> None:
        my.persistent["weights"] = client.weights.flat.clone()
        my.persistent["buffers"] = client.weights.buffers.clone()

"""AsTrained: personal models are tested as local training left them, not refreshed with the latest average."""

from dataclasses import dataclass

from fedalloy.core.alloy import Box, Mechanism
from fedalloy.core.wire import Items
from fedalloy.round.client import Client


@dataclass(frozen=True)
class AsTrained(Mechanism):
    """A client keeps the whole model of its last participation for its own use; before the first, the initial one."""

    claims = frozenset({"the personal model"})

    def born(self, client: Client, my: Box) -> None:
        self._remember(client, my)

    def finish(self, client: Client, my: Box) -> Items:
        self._remember(client, my)
        return {}

    def adapt(self, client: Client, my: Box) -> None:
        client.weights.load(my.keep["weights"], my.keep["buffers"])

    def _remember(self, client: Client, my: Box) -> None:
        my.keep["weights"] = client.weights.flat.clone()
        my.keep["buffers"] = client.weights.buffers.clone()

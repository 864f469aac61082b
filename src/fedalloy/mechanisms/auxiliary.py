"""Auxiliary: a second, common model beside the client's own, for federations of different architectures."""

from dataclasses import dataclass

from fedalloy.core.alloy import Mechanism
from fedalloy.core.views import ReplicaView


@dataclass(frozen=True)
class Auxiliary(Mechanism):
    """Every client also holds `net.aux`; by default the smallest of the federation's architectures."""

    model: str | None = None

    claims = frozenset({"the auxiliary model"})
    gives = frozenset({"an auxiliary model"})

    def build(self, replica: ReplicaView) -> None:
        replica.net.aux = replica.build_model(self.model or smallest(replica))


def smallest(replica: ReplicaView) -> str:
    """The federation's architecture with the fewest parameters."""
    return min(replica.models, key=replica.parameters_of)

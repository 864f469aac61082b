"""Local (SOLO): every client trains alone on its own data; nothing is exchanged. The floor of every comparison."""

from dataclasses import dataclass

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.registry import recipe


@dataclass(frozen=True)
class Alone(Mechanism):
    """Keep the whole model; by default train in every round, sampled or not."""

    participation_applies: bool = False

    claims = frozenset({"the aggregation of weights"})

    @property
    def full_participation(self) -> bool:
        return not self.participation_applies


@recipe("Local", family="floor", paper="a lower bound without a paper of its own; SOLO in FedSCE")
def local(participation_applies: bool = False) -> Alloy:
    return alloy("Local", Alone(participation_applies))

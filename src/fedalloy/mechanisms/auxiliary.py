"""Auxiliary: a second, common model beside the client's own, for federations of different architectures."""

from dataclasses import dataclass

from fedalloy import models
from fedalloy.core.alloy import Mechanism
from fedalloy.round.replica import Site


@dataclass(frozen=True)
class Auxiliary(Mechanism):
    """Every client also holds `net.aux`; by default the smallest of the federation's architectures."""

    model: str | None = None

    claims = frozenset({"the auxiliary model"})
    gives = frozenset({"an auxiliary model"})

    def build(self, site: Site) -> None:
        site.net.aux = models.build(self.model or smallest(site), site.inputs, site.imports)


def smallest(site: Site) -> str:
    """The federation's architecture with the fewest parameters."""
    return min(site.models, key=lambda model: models.size_of(model, site.inputs, site.imports).parameters)

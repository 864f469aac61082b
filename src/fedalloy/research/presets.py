"""The comparisons of the seed papers: a column of a table of theirs, to be changed by any flag."""

from dataclasses import dataclass
from typing import Any

from fedalloy.core import registry
from fedalloy.errors import unknown
from fedalloy.research.reproduce import GRIDS

PRESETS = {
    "feddw": ("table1", "CIFAR-10 practical"),
    "fedblade": ("table1", "CIFAR-10 α=0.1"),
    "fedrda": ("table1", "CIFAR-10 ρ = 0.1"),
    "fedsce": ("table2", ""),
}
"""By paper: which table, and which of its columns."""


@dataclass(frozen=True)
class Preset:
    """What a paper compares, and how."""

    methods: tuple[str, ...]
    settings: dict[str, Any]


def preset(name: str) -> Preset:
    """A paper's comparison by name: the methods that it has numbers for, and its settings."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    table, label = PRESETS[name]
    cells = GRIDS[f"{name}/{table}"].cells("paper", seeds=[0])
    configs = [cell.configs[0] for cell in cells if cell.column.label == label and any(cell.paper)]
    settings = configs[0].model_dump(exclude_unset=True, exclude={"method", "seed"})
    return Preset(tuple(config.method for config in configs), settings)


def every_method(architectures: tuple[str, ...]) -> tuple[str, ...]:
    """All methods that a federation of these architectures allows, with their default parameters.

    >>> "fedavg" in every_method(("mlp",)), "fedavg" in every_method(("mlp", "cnn"))
    (True, False)
    """
    mixed = len(set(architectures)) > 1
    return tuple(
        name
        for name, recipe in registry.RECIPES.items()
        if not (mixed and "one architecture" in recipe.make().gives)
    )

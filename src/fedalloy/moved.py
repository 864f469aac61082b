"""Modules that have moved: what an old name holds can still be imported, with a warning that says the new name."""

import sys
import warnings
from importlib import import_module
from pathlib import Path
from types import ModuleType

from fedalloy.errors import FedAlloyWarning

HOME = Path(__file__).parent
MOVED = {
    "alloy": "core.alloy",
    "bench": "research.bench",
    "client": "round.client",
    "compare": "research.compare",
    "config": "experiment.config",
    "console": "cli.console",
    "data.picture": "cli.picture",
    "diagnose": "analysis.diagnose",
    "diagnostics": "core.diagnostics",
    "engines.base": "round.engine",
    "evaluate": "round.evaluate",
    "explain": "analysis.explain",
    "expression": "core.expression",
    "federation": "data.federation",
    "flower": "deploy",
    "flower.cli": "cli.deploy",
    "folder": "experiment.folder",
    "imports": "core.imports",
    "lengths": "round.lengths",
    "local": "core.training",
    "nets": "models",
    "nets.base": "core.net",
    "nets.levels": "mechanisms.levels",
    "nets.measure": "core.measure",
    "papers": "analysis.papers",
    "presets": "research.presets",
    "processes": "engines.processes",
    "random": "core.random",
    "ranges": "core.parameters",
    "registry": "core.registry",
    "replies": "round.replies",
    "reproduce": "research.reproduce",
    "run": "experiment.run",
    "seals": "experiment.seals",
    "search": "research.search",
    "series": "experiment.series",
    "server": "round.server",
    "show": "cli.show",
    "site": "round.replica",
    "storage": "core.files",
    "tune": "research.tune",
    "weights": "core.weights",
    "wire": "core.wire",
    "workshop": "round.runtime",
}


NAMES = {"Box": "State", "Site": "Replica", "Sites": "Replicas", "Workshop": "ClientRuntime"}


class Moved(ModuleType):
    """Stands under an old name, and hands out what the module of the new name holds."""

    def __init__(self, old: str, new: str) -> None:
        super().__init__(old, f"Moved to {new}.")
        self.__dict__["_new"] = new

    def __getattr__(self, name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        new = self.__dict__["_new"]
        found: object = getattr(import_module(new), NAMES.get(name, name))
        warnings.warn(
            f"{self.__name__} is now {new}; import {name} from there", FedAlloyWarning, stacklevel=2
        )
        return found


def names() -> dict[str, str]:
    """Every old name with its new one, the modules of packages that moved included."""
    found = {}
    for old, new in MOVED.items():
        for module in sorted((HOME / new.replace(".", "/")).glob("*.py")):
            if module.stem != "__init__":
                found[f"fedalloy.{old}.{module.stem}"] = f"fedalloy.{new}.{module.stem}"
    return found | {f"fedalloy.{old}": f"fedalloy.{new}" for old, new in MOVED.items()}


def follow() -> None:
    """Let old names be imported. They are no attributes of `fedalloy`: functions have some of these names."""
    for old, new in names().items():
        sys.modules.setdefault(old, Moved(old, new))

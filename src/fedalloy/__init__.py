"""FedAlloy: heterogeneous federated learning, every method an alloy of small mechanisms."""

from fedalloy import methods, moved
from fedalloy.api import Result, resume, train
from fedalloy.core.alloy import Alloy, AlloyConflict, Mechanism, alloy
from fedalloy.core.registry import method, recipe
from fedalloy.core.state import Phase, State
from fedalloy.core.version import VERSION
from fedalloy.core.wire import Slot
from fedalloy.data import IID, BalancedDirichlet, Dataset, Dirichlet, Domain, Pathological, Quantity
from fedalloy.data.federation import Federation, federate
from fedalloy.errors import FedAlloyError, renamed
from fedalloy.experiment.config import Config
from fedalloy.trained import Model, export, load_model, predict

__version__ = VERSION


def __getattr__(name: str) -> object:
    """What had another name up to version 0.1."""
    if name == "Box":
        renamed("fedalloy.Box", "fedalloy.State")
        return State
    raise AttributeError(f"module 'fedalloy' has no attribute {name!r}")


moved.follow()

__all__ = [
    "IID",
    "Alloy",
    "AlloyConflict",
    "BalancedDirichlet",
    "Config",
    "Dataset",
    "Dirichlet",
    "Domain",
    "FedAlloyError",
    "Federation",
    "Mechanism",
    "Model",
    "Pathological",
    "Phase",
    "Quantity",
    "Result",
    "Slot",
    "State",
    "alloy",
    "export",
    "federate",
    "load_model",
    "method",
    "methods",
    "predict",
    "recipe",
    "resume",
    "train",
]

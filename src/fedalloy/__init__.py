"""FedAlloy: heterogeneous federated learning, every method an alloy of small mechanisms."""

__version__ = "0.2.0"

from fedalloy import methods
from fedalloy.alloy import Alloy, AlloyConflict, Box, Mechanism, Phase, alloy
from fedalloy.config import Config
from fedalloy.data import IID, BalancedDirichlet, Dataset, Dirichlet, Domain, Pathological, Quantity
from fedalloy.errors import FedAlloyError
from fedalloy.federation import Federation, federate
from fedalloy.registry import method, recipe
from fedalloy.run import Result, resume, train
from fedalloy.trained import Model, export, load_model, predict
from fedalloy.wire import Slot

__all__ = [
    "IID",
    "Alloy",
    "AlloyConflict",
    "BalancedDirichlet",
    "Box",
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

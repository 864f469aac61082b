"""FedAlloy: heterogeneous federated learning, every method an alloy of small mechanisms."""

__version__ = "0.2.0"

from fedalloy import methods, moved
from fedalloy.core.alloy import Alloy, AlloyConflict, Mechanism, alloy
from fedalloy.core.registry import method, recipe
from fedalloy.core.state import Box, Phase
from fedalloy.core.wire import Slot
from fedalloy.data import IID, BalancedDirichlet, Dataset, Dirichlet, Domain, Pathological, Quantity
from fedalloy.data.federation import Federation, federate
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.run import Result, resume, train
from fedalloy.trained import Model, export, load_model, predict

moved.follow()

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

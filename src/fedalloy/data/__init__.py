"""Data sets, how they are dealt to clients, and how a batch is made ready."""

from fedalloy.data.batches import Augment, Prepare, parse_augment
from fedalloy.data.catalogue import load
from fedalloy.data.dataset import Dataset
from fedalloy.data.partition import Split, partition
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.data.skew import (
    IID,
    BalancedDirichlet,
    Dirichlet,
    Domain,
    Pathological,
    Quantity,
    Skew,
    parse_skew,
)

__all__ = [
    "IID",
    "Augment",
    "BalancedDirichlet",
    "Dataset",
    "Dirichlet",
    "Domain",
    "Pathological",
    "Prepare",
    "Preprocessing",
    "Quantity",
    "Skew",
    "Split",
    "load",
    "parse_augment",
    "parse_skew",
    "partition",
]

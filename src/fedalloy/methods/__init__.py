"""One file per paper: the mechanisms it introduced, then its recipe."""

from fedalloy.methods.fedavg import fedavg
from fedalloy.methods.feddyn import feddyn
from fedalloy.methods.fednova import fednova
from fedalloy.methods.fedprox import fedprox
from fedalloy.methods.local import local
from fedalloy.methods.moon import moon
from fedalloy.methods.scaffold import scaffold

__all__ = ["fedavg", "feddyn", "fednova", "fedprox", "local", "moon", "scaffold"]

"""One file per paper: the mechanisms it introduced, then its recipe."""

from fedalloy.methods.balancedsoftmax import balancedsoftmax
from fedalloy.methods.fedavg import fedavg
from fedalloy.methods.fedblade import fedblade
from fedalloy.methods.feddecorr import feddecorr
from fedalloy.methods.feddistill import feddistill
from fedalloy.methods.feddistillplus import feddistillplus
from fedalloy.methods.feddw import feddw
from fedalloy.methods.feddyn import feddyn
from fedalloy.methods.fedetf import fedetf
from fedalloy.methods.fedgh import fedgh
from fedalloy.methods.fedkd import fedkd
from fedalloy.methods.fednova import fednova
from fedalloy.methods.fedproto import fedproto
from fedalloy.methods.fedprox import fedprox
from fedalloy.methods.fedrda import fedrda
from fedalloy.methods.fedsce import fedsce
from fedalloy.methods.fedsub import fedsub
from fedalloy.methods.fedtgp import fedtgp
from fedalloy.methods.fml import fml
from fedalloy.methods.local import local
from fedalloy.methods.moon import moon
from fedalloy.methods.scaffold import scaffold
from fedalloy.methods.ssf import ssf

__all__ = [
    "balancedsoftmax",
    "fedavg",
    "fedblade",
    "feddecorr",
    "feddistill",
    "feddistillplus",
    "feddw",
    "feddyn",
    "fedetf",
    "fedgh",
    "fedkd",
    "fednova",
    "fedproto",
    "fedprox",
    "fedrda",
    "fedsce",
    "fedsub",
    "fedtgp",
    "fml",
    "local",
    "moon",
    "scaffold",
    "ssf",
]

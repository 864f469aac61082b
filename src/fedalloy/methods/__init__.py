"""One file per paper: the mechanisms it introduced, then its recipe."""

from fedalloy.methods.balancedsoftmax import balancedsoftmax
from fedalloy.methods.ccvr import ccvr
from fedalloy.methods.fedavg import fedavg
from fedalloy.methods.fedblade import fedblade
from fedalloy.methods.feddecorr import feddecorr
from fedalloy.methods.feddw import feddw
from fedalloy.methods.feddyn import feddyn
from fedalloy.methods.fedetf import fedetf
from fedalloy.methods.fedfa import fedfa
from fedalloy.methods.fedfa_aug import fedfa_aug
from fedalloy.methods.fednova import fednova
from fedalloy.methods.fedprox import fedprox
from fedalloy.methods.fedrda import fedrda
from fedalloy.methods.fedsce import fedsce
from fedalloy.methods.fedsol import fedsol
from fedalloy.methods.fedsub import fedsub
from fedalloy.methods.local import local
from fedalloy.methods.moon import moon
from fedalloy.methods.scaffold import scaffold
from fedalloy.methods.ssf import ssf

__all__ = [
    "balancedsoftmax",
    "ccvr",
    "fedavg",
    "fedblade",
    "feddecorr",
    "feddw",
    "feddyn",
    "fedetf",
    "fedfa",
    "fedfa_aug",
    "fednova",
    "fedprox",
    "fedrda",
    "fedsce",
    "fedsol",
    "fedsub",
    "local",
    "moon",
    "scaffold",
    "ssf",
]

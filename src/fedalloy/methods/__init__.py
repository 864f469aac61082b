"""One file per paper: the mechanisms it introduced, then its recipe."""

from fedalloy.methods.balancedsoftmax import balancedsoftmax
from fedalloy.methods.ditto import ditto
from fedalloy.methods.fedala import fedala
from fedalloy.methods.fedavg import fedavg
from fedalloy.methods.fedbabu import fedbabu
from fedalloy.methods.fedblade import fedblade
from fedalloy.methods.feddecorr import feddecorr
from fedalloy.methods.feddw import feddw
from fedalloy.methods.feddyn import feddyn
from fedalloy.methods.fedetf import fedetf
from fedalloy.methods.fedfa import fedfa
from fedalloy.methods.fedlc import fedlc
from fedalloy.methods.fednova import fednova
from fedalloy.methods.fedpac import fedpac
from fedalloy.methods.fedper import fedper
from fedalloy.methods.fedprox import fedprox
from fedalloy.methods.fedrda import fedrda
from fedalloy.methods.fedrep import fedrep
from fedalloy.methods.fedsce import fedsce
from fedalloy.methods.fedsol import fedsol
from fedalloy.methods.fedsub import fedsub
from fedalloy.methods.feduv import feduv
from fedalloy.methods.local import local
from fedalloy.methods.moon import moon
from fedalloy.methods.perfedavg import perfedavg
from fedalloy.methods.scaffold import scaffold
from fedalloy.methods.ssf import ssf

__all__ = [
    "balancedsoftmax",
    "ditto",
    "fedala",
    "fedavg",
    "fedbabu",
    "fedblade",
    "feddecorr",
    "feddw",
    "feddyn",
    "fedetf",
    "fedfa",
    "fedlc",
    "fednova",
    "fedpac",
    "fedper",
    "fedprox",
    "fedrda",
    "fedrep",
    "fedsce",
    "fedsol",
    "fedsub",
    "feduv",
    "local",
    "moon",
    "perfedavg",
    "scaffold",
    "ssf",
]

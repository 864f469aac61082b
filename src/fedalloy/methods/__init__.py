"""One file per paper: the mechanisms it introduced, then its recipe."""

from fedalloy.mechanisms import privacy as _privacy  # noqa: F401 -- a part that no recipe is made of
from fedalloy.methods.balancedsoftmax import balancedsoftmax
from fedalloy.methods.ccvr import ccvr
from fedalloy.methods.ditto import ditto
from fedalloy.methods.fedala import fedala
from fedalloy.methods.fedavg import fedavg
from fedalloy.methods.fedbabu import fedbabu
from fedalloy.methods.fedblade import fedblade
from fedalloy.methods.feddecorr import feddecorr
from fedalloy.methods.feddistill import feddistill
from fedalloy.methods.feddistillplus import feddistillplus
from fedalloy.methods.feddw import feddw
from fedalloy.methods.feddyn import feddyn
from fedalloy.methods.fedetf import fedetf
from fedalloy.methods.fedfa import fedfa
from fedalloy.methods.fedfa_aug import fedfa_aug
from fedalloy.methods.fedfm import fedfm
from fedalloy.methods.fedgh import fedgh
from fedalloy.methods.fedkd import fedkd
from fedalloy.methods.fedlc import fedlc
from fedalloy.methods.fednova import fednova
from fedalloy.methods.fedpac import fedpac
from fedalloy.methods.fedper import fedper
from fedalloy.methods.fedproto import fedproto
from fedalloy.methods.fedprox import fedprox
from fedalloy.methods.fedrcl import fedrcl
from fedalloy.methods.fedrda import fedrda
from fedalloy.methods.fedrep import fedrep
from fedalloy.methods.fedsce import fedsce
from fedalloy.methods.fedsol import fedsol
from fedalloy.methods.fedsub import fedsub
from fedalloy.methods.fedtgp import fedtgp
from fedalloy.methods.feduv import feduv
from fedalloy.methods.fml import fml
from fedalloy.methods.local import local
from fedalloy.methods.moon import moon
from fedalloy.methods.perfedavg import perfedavg
from fedalloy.methods.scaffold import scaffold
from fedalloy.methods.ssf import ssf

__all__ = [
    "balancedsoftmax",
    "ccvr",
    "ditto",
    "fedala",
    "fedavg",
    "fedbabu",
    "fedblade",
    "feddecorr",
    "feddistill",
    "feddistillplus",
    "feddw",
    "feddyn",
    "fedetf",
    "fedfa",
    "fedfa_aug",
    "fedfm",
    "fedgh",
    "fedkd",
    "fedlc",
    "fednova",
    "fedpac",
    "fedper",
    "fedproto",
    "fedprox",
    "fedrcl",
    "fedrda",
    "fedrep",
    "fedsce",
    "fedsol",
    "fedsub",
    "fedtgp",
    "feduv",
    "fml",
    "local",
    "moon",
    "perfedavg",
    "scaffold",
    "ssf",
]

"""FedETF: one fixed simplex-ETF classifier for all clients, with a trained projector and a balanced loss.

Li, Shang, He, Lin, Wu, "No Fear of Classifier Biases". ICCV 2023.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import Positive, Width
from fedalloy.core.random import generator
from fedalloy.core.registry import recipe
from fedalloy.core.views import ReplicaView
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.share import Share
from fedalloy.methods.balancedsoftmax import BalancedSoftmax


def simplex_etf(dim: int, classes: int, draw: torch.Generator) -> Tensor:
    """V = sqrt(C/(C-1)) U (I - 11^T/C), U^T U = I: unit columns with pairwise cosine -1/(C-1)."""
    if classes < 2:
        raise FedAlloyError("an ETF classifier needs at least 2 classes; this data set has 1")
    if dim < classes:
        raise FedAlloyError(
            f"etf_dim {dim} is too small for {classes} classes; it must be at least {classes}"
        )
    u, _ = torch.linalg.qr(torch.randn(dim, classes, generator=draw, dtype=torch.float64))
    centred = torch.eye(classes, dtype=torch.float64) - 1 / classes
    etf: Tensor = math.sqrt(classes / (classes - 1)) * u @ centred
    return etf.to(torch.get_default_dtype())


class Projection(nn.Linear):
    """mu = f_Psi(z) / ||f_Psi(z)||."""

    def forward(self, z: Tensor) -> Tensor:
        return F.normalize(super().forward(z), dim=1)


class ETF(nn.Module):
    """Logits s mu V; V is a constant, outside of every average, and s is learned."""

    V: Tensor

    def __init__(self, etf: Tensor, scale: float) -> None:
        super().__init__()
        self.register_buffer("V", etf, persistent=False)
        self.scale = nn.Parameter(torch.tensor(scale))

    def forward(self, mu: Tensor) -> Tensor:
        return self.scale * (mu @ self.V)


@dataclass(frozen=True)
class ETFHead(Mechanism):
    """z -> linear projector -> unit sphere -> fixed ETF. V has a generator of its own, whatever the model."""

    etf_dim: Width | None = None  # None: as many dimensions as classes
    scale_init: Positive = 1.0

    claims = frozenset({"the neck", "the classifier"})
    gives = frozenset({"an ETF head"})
    spoils = frozenset({"class weights"})  # those of V never change

    def build(self, replica: ReplicaView) -> None:
        classes = replica.inputs.classes
        dim = self.etf_dim or classes
        replica.net.neck = Projection(replica.net.width, dim)
        replica.net.head = ETF(simplex_etf(dim, classes, generator(replica.seed, "etf")), self.scale_init)


@recipe("FedETF", family="calibration", paper="Li et al., ICCV 2023")
def fedetf(
    etf_dim: Width | None = None, scale_init: Positive = 1.0, absent_count: Literal[0, 1] = 1
) -> Alloy:
    return alloy("FedETF", Share(), ETFHead(etf_dim, scale_init), BalancedSoftmax(absent_count))

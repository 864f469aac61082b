"""FedBlade: log-det decorrelation of features and prototype-guided bilateral alignment around a fixed ETF classifier.

Seed paper, under review; equation numbers are those of its text.
"""

import math
import warnings
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.parameters import NonNegative, Positive, Width
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, ReplicaView, StepView
from fedalloy.errors import FedAlloyWarning
from fedalloy.mechanisms.class_means import ClassMeans
from fedalloy.methods.balancedsoftmax import log_prior
from fedalloy.methods.feddecorr import Decorr, z_scores
from fedalloy.methods.fedetf import ETF, fedetf

NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm, nn.LayerNorm)


def log_det(z: Tensor, eps: float = 1e-4, var_eps: float = 1e-8) -> Tensor:
    """L_LD = -log det(K + eps I_d), K = X^T X / (B - 1) (Eq 11), less its constant -(d - r) log eps, r = min(B, d).

    det(eps I_d + X^T X / (B-1)) = eps^(d-B) det(eps I_B + X X^T / (B-1)): the Gram matrix of the batch has the same
    gradient, in milliseconds. Float64: the d x d Cholesky in float32 gives noise. Centring leaves one eigenvalue 0
    in the batch's Gram matrix, so for B <= d the value still holds one -log eps.
    """
    batch, width = z.shape
    x = z_scores(z.double(), var_eps) / math.sqrt(batch - 1)
    gram = x @ x.T if batch < width else x.T @ x
    identity = torch.eye(len(gram), dtype=gram.dtype, device=gram.device)
    volume: Tensor = torch.linalg.slogdet(gram + eps * identity).logabsdet
    return -volume.to(z.dtype)


def bounded(z: Tensor, limit: float | None) -> Tensor:
    """z; the gradient that comes back through this copy of it is shortened to the norm `limit` if it is longer."""
    if limit is None or not z.requires_grad:
        return z
    z = z.view_as(z)
    z.register_hook(lambda g: g * (limit / n) if (n := g.norm()) > limit else g)  # type: ignore[no-untyped-call]
    return z


@dataclass(frozen=True)
class LDDecorr(Mechanism):
    """beta L_LD on the features: weak where the spectrum is healthy, strong where it collapses.

    The z-score divides by a feature's deviation: where nothing normalises the features, a unit that has all but died
    (sigma near sqrt(var_eps)) lifts beta ||dL/dZ||_F from at most 0.3 to tens and thousands, and a single step throws
    the features away. `grad_limit` bounds this norm, beyond what normalised features reach; none: no bound.
    """

    beta: NonNegative = 0.005
    eps: Positive = 1e-4
    var_eps: Positive = 1e-8
    grad_limit: Positive | None = 1.0

    claims = frozenset({"the decorrelation of features"})

    def build(self, replica: ReplicaView) -> None:
        if self.beta and not any(isinstance(m, NORMS) for m in replica.net.body.modules()):
            warnings.warn(
                f"LDDecorr leaves the scale of features free and {replica.model} has no normalisation layer: they may "
                "blow up; take a model with BatchNorm, or a small beta",
                FedAlloyWarning,
                stacklevel=2,
            )

    def loss(self, step: StepView, my: State) -> Tensor | None:
        if not self.beta or len(step.y) < 2:
            return None
        z = bounded(step.out.features, self.grad_limit)
        return self.beta * log_det(z, self.eps, self.var_eps)


@dataclass(frozen=True)
class PBA(Mechanism):
    """gamma (L_PA + L_FA): prototypes pull the projector to the ETF, features are pulled to the prototypes.

    L_PA = sum_c 1/2 (1 - mu_c^T v_c)^2, mu_c = normalised f_Psi(P_c) (Eq 15): gradient into the projector alone.
    L_FA = mean CE(cos(z, P_c) / tau + log m_c, y) over classes with a prototype (Eq 16): gradient into the body alone.
    """

    gamma: NonNegative = 1.0
    tau: Positive = 0.1
    pa: bool = True
    fa: bool = True
    distribution_factor: bool = True  # log m_c in L_FA
    pa_reduction: Literal["sum", "mean"] = "sum"
    absent_count: Literal[0, 1] = 1

    needs = frozenset({"an ETF head", "class means of features"})

    @property
    def brings(self) -> tuple[Mechanism, ...]:
        return (ClassMeans("features"),)

    def before_training(self, client: ClientView, my: State) -> None:
        prototypes = client.state_of(self.brings[0]).received
        seen = prototypes["seen"]
        my.scratch["P"] = prototypes["means"][seen]
        my.scratch["unit P"] = F.normalize(my.scratch["P"], dim=1)
        assert isinstance(client.net.head, ETF)
        my.scratch["V"] = client.net.head.V.T[seen]
        prior = log_prior(client.data.counts, self.absent_count)[seen]
        my.scratch["prior"] = prior if self.distribution_factor else torch.zeros_like(prior)  # not 0 * -inf
        my.scratch["place"] = seen.cumsum(0) - 1  # of a class among those with a prototype
        my.scratch["seen"] = seen

    def loss(self, step: StepView, my: State) -> Tensor | None:
        if not self.gamma or not len(my.scratch["P"]):
            return None  # round 0: no prototypes yet
        terms = [term(step, my) for term, on in ((self._pa, self.pa), (self._fa, self.fa)) if on]
        return self.gamma * torch.stack(terms).sum() if terms else None

    def _pa(self, step: StepView, my: State) -> Tensor:
        mu = step.client.net.neck(my.scratch["P"])
        gaps: Tensor = 0.5 * (1 - (mu * my.scratch["V"]).sum(1)).square()
        return gaps.sum() if self.pa_reduction == "sum" else gaps.mean()

    def _fa(self, step: StepView, my: State) -> Tensor:
        known = my.scratch["seen"][step.y]
        z = F.normalize(step.out.features[known], dim=1)
        scores = z @ my.scratch["unit P"].T / self.tau + my.scratch["prior"]
        target = my.scratch["place"][step.y[known]]
        return F.cross_entropy(scores, target) if len(target) else scores.sum()


@recipe("FedBlade", family="representation", paper="seed paper, under review")
def fedblade(
    beta: NonNegative = 0.005,
    gamma: NonNegative = 1.0,
    tau: Positive = 0.1,
    decorr: Literal["none", "feddecorr", "logdet"] = "logdet",
    pba: bool = True,
    no_pa: bool = False,
    no_fa: bool = False,
    no_df: bool = False,
    pa_reduction: Literal["sum", "mean"] = "sum",
    eps: Positive = 1e-4,
    var_eps: Positive = 1e-8,
    grad_limit: Positive | None = 1.0,
    etf_dim: Width | None = None,
    scale_init: Positive = 1.0,
    absent_count: Literal[0, 1] = 1,
) -> Alloy:
    options: dict[str, list[Mechanism]] = {
        "none": [],
        "feddecorr": [Decorr(beta, var_eps=var_eps)],
        "logdet": [LDDecorr(beta, eps, var_eps, grad_limit)],
    }
    alignment = [PBA(gamma, tau, not no_pa, not no_fa, not no_df, pa_reduction, absent_count)] if pba else []
    host = fedetf(etf_dim=etf_dim, scale_init=scale_init, absent_count=absent_count)
    return alloy("FedBlade", host, *options[decorr], *alignment)

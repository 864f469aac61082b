"""Numbers that look inside a model: how many dimensions its features use, and how far classes have collapsed.

All in float64. Suffixes: N samples, D features, C classes.
"""

from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.net import Net
from fedalloy.core.views import Findings


@dataclass(frozen=True)
class Seen:
    """The global model over the global test set."""

    net: Net
    features: Tensor  # N D
    embedding: Tensor
    logits: Tensor
    y: Tensor


def generic(seen: Seen) -> Findings:
    """What can be said of any model: the dimensions that features and embedding use, and neural collapse."""
    found: Findings = {}
    spaces = {"features": seen.features}
    if seen.embedding is not seen.features and seen.embedding.shape[1] > 1:
        spaces["embedding"] = seen.embedding
    for name, z in spaces.items():
        for kind in ("covariance", "correlation"):
            values = spectrum(z, correlation=kind == "correlation")
            found[f"effective rank of {name} ({kind})"] = effective_rank(values)
            found[f"spectrum of {name} ({kind})"] = values
    return found | {f.name: getattr(collapse(seen.features, seen.y), f.name) for f in fields(Collapse)}


def spectrum(z_ND: Tensor, *, correlation: bool = False) -> Tensor:
    """Singular values of the covariance or correlation matrix of features, in descending order."""
    z = z_ND.double() - z_ND.double().mean(0)
    if correlation:
        z = z / (z.std(0) + 1e-12)
    values: Tensor = torch.linalg.svdvals(z)
    return values.square() / max(len(z) - 1, 1)


def effective_rank(values: Tensor) -> float:
    """exp of the entropy of the normalised spectrum (Roy & Vetterli, EUSIPCO 2007)."""
    share = values / values.sum()
    share = share[share > 0]
    return float(torch.exp(-(share * share.log()).sum()))


@dataclass(frozen=True)
class Collapse:
    """Neural collapse in the variants that papers use without printing a formula."""

    nc1: float  # tr(S_W S_B^+) / C
    nc1n: float  # mean squared distance of unit-norm features to their class mean
    nc1r: float  # tr S_W / tr S_B
    nc2: float  # ||M^T M - C/(C-1) (I - 11^T/C)||_F of the centred unit-norm class means
    nc2n: float  # the same, both Gram matrices divided by their Frobenius norm


def collapse(z_ND: Tensor, y: Tensor) -> Collapse:
    """Within-class spread against between-class spread, and the angle between class means."""
    z = z_ND.double()
    within, means = _within(z, y)
    between = means - means.mean(0)
    classes = len(means)
    s_w, s_b = within.T @ within / len(z), between.T @ between / classes
    unit_within, _ = _within(F.normalize(z, dim=1), y)
    m = F.normalize(between, dim=1)
    gram = m @ m.T
    simplex = classes / (classes - 1) * (torch.eye(classes, dtype=z.dtype, device=z.device) - 1 / classes)
    return Collapse(
        nc1=float(torch.trace(s_w @ torch.linalg.pinv(s_b)) / classes),
        nc1n=float(unit_within.square().sum(1).mean()),
        nc1r=float(torch.trace(s_w) / torch.trace(s_b)),
        nc2=float((gram - simplex).norm()),
        nc2n=float((gram / gram.norm() - simplex / simplex.norm()).norm()),
    )


def _within(z: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Samples less their class mean, and the class means; classes that do not occur have none."""
    _, place, counts = torch.unique(y, return_inverse=True, return_counts=True)
    sums = z.new_zeros(len(counts), z.shape[1]).index_add_(0, place, z)
    means = sums / counts[:, None]
    return z - means[place], means

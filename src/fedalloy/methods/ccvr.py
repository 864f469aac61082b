"""CCVR: after training, the classifier learns again, from virtual features drawn of one Gaussian per class.

Luo, Chen, Hu, Zhang, Liang, Feng, "No Fear of Heterogeneity: Classifier Calibration for Federated Learning with
Non-IID Data". NeurIPS 2021.
"""

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, Slots, alloy
from fedalloy.core.parameters import AtLeastOne, Momentum, NonNegative, Positive, Samples
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientData, ReplicaView, ServerView, outputs
from fedalloy.core.wire import Items, Reply, Slot
from fedalloy.errors import FedAlloyWarning
from fedalloy.mechanisms.head import classifier
from fedalloy.mechanisms.share import Share

Covariance = Literal["full", "diag"]
Moments = tuple[Tensor, Tensor, Tensor]  # n_c of all classes; mean and covariance of each class with n_c > 0


def squared(rows: Tensor, cov: Covariance) -> Tensor:
    """x x^T of every row, or its diagonal."""
    return rows[..., :, None] * rows[..., None, :] if cov == "full" else rows.square()


def moments(z: Tensor, y: Tensor, classes: int, cov: Covariance = "full") -> Moments:
    """Mean and unbiased covariance of each class that occurs; the covariance of a single sample is 0."""
    means, covariances = [], []
    counts = torch.bincount(y, minlength=classes)
    for c in counts.nonzero().flatten():
        rows = z[y == c].double()
        means.append(rows.mean(0))
        centred = rows - means[-1]
        total = centred.T @ centred if cov == "full" else centred.square().sum(0)
        covariances.append(total / max(len(rows) - 1, 1))
    return counts, torch.stack(means), torch.stack(covariances)


def pooled(parts: Iterable[Moments], classes: int, width: int, cov: Covariance = "full") -> Moments:
    """The moments of everybody's samples together, of all classes; float64, for large terms cancel.

    mu_c = sum_k n_k/N mu_k and
    Sigma_c = sum_k (n_k - 1)/(N - 1) Sigma_k + sum_k n_k/(N - 1) mu_k mu_k^T - N/(N - 1) mu_c mu_c^T.
    """
    count = torch.zeros(classes, dtype=torch.int64)
    first = torch.zeros(classes, width, dtype=torch.float64)
    second = squared(first, cov)
    for counts, means, covariances in parts:
        held = counts > 0
        n, mu = counts[held].double(), means.double()
        count += counts
        first[held] += _times(n, mu)
        second[held] += _times(n - 1, covariances.double()) + _times(n, squared(mu, cov))
    n = count.double()
    mu = _times(1 / n.clamp(min=1), first)
    return count, mu, _times(1 / (n - 1).clamp(min=1), second - _times(n, squared(mu, cov)))


def _times(weights: Tensor, rows: Tensor) -> Tensor:
    return weights.view(-1, *[1] * (rows.dim() - 1)) * rows


def drawn(mean: Tensor, covariance: Tensor, delta: float, samples: int, draw: torch.Generator) -> Tensor:
    """Samples of N(mu, Sigma + delta I), by its symmetric root: of few samples Sigma has no Cholesky factor."""
    noise = torch.randn(samples, len(mean), generator=draw, dtype=torch.float64)
    if covariance.dim() == 1:
        return mean + noise * (covariance.clamp(min=0) + delta).sqrt()
    values, vectors = torch.linalg.eigh(covariance)
    root: Tensor = vectors * (values.clamp(min=0) + delta).sqrt() @ vectors.T  # whatever the vectors' signs
    return mean + noise @ root


@dataclass(frozen=True)
class VirtualFeatures(Mechanism):
    """Clients tell class means and covariances of the final model's features; its classifier is trained on draws.

    `samples` per class; `jitter` times the mean variance is added to all variances; `relu_clip` cuts draws off at 0;
    `clients`: "all" are asked, or those of the "last" round. The classifier is all that follows the features.
    """

    samples: Samples = 200
    cov: Covariance = "full"
    head_lr: Positive = 0.01
    head_momentum: Momentum = 0.9
    head_epochs: AtLeastOne = 10
    head_batch: AtLeastOne = 64
    jitter: NonNegative = 1e-6
    relu_clip: bool = False
    clients: Literal["all", "last"] = "all"

    needs = frozenset({"global model"})
    claims = frozenset({"the classifier"})

    asks_at_end = True

    @property
    def asks_everyone(self) -> bool:
        return self.clients == "all"

    @property
    def query(self) -> Slots:
        wide = ("features",) * (2 if self.cov == "full" else 1)
        return {
            "counts": Slot("sum", ("classes",), torch.int64),
            "means": Slot("class_mean", ("held", "features"), counts="counts"),
            "covariances": Slot("class_mean", ("held", *wide), counts="counts"),
        }

    def answer(self, replica: ReplicaView, data: ClientData) -> Items:
        z = torch.cat([out.features for out in outputs(replica.net, data, data.x)])
        counts, means, covariances = moments(z, data.y, data.classes, self.cov)
        return {"counts": counts, "means": means.to(z.dtype), "covariances": covariances.to(z.dtype)}

    def on_answers(self, server: ServerView, my: State, answers: Iterator[Reply]) -> None:
        replica, said = server.replica, (reply.items for reply in answers)
        parts = ((one["counts"], one["means"], one["covariances"]) for one in said)
        gaussians = pooled(parts, replica.inputs.classes, replica.net.width, self.cov)
        z, y = self.virtual(gaussians, server.rng("virtual features"))
        if not len(y):
            return
        weights, buffers = server.shown()["global"]
        replica.weights.load(weights, buffers)
        replica.net.eval()
        self.calibrate(replica, z.to(weights.dtype), y, server.rng("virtual batches"))
        my.persistent["uncalibrated"], my.persistent["calibrated"] = (
            weights.clone(),
            replica.weights.flat.clone(),
        )

    def virtual(self, gaussians: Moments, draw: torch.Generator) -> tuple[Tensor, Tensor]:
        """M features of each class that somebody holds."""
        counts, means, covariances = gaussians
        held = counts > 0
        if not held.all():
            absent = ", ".join(map(str, (~held).nonzero().flatten().tolist()))
            warnings.warn(
                f"no client that was asked holds class {absent}: CCVR calibrates the others",
                FedAlloyWarning,
                stacklevel=2,
            )
        variances = covariances.diagonal(dim1=1, dim2=2) if self.cov == "full" else covariances
        delta = self.jitter * float(variances[held].mean()) if held.any() else 0.0
        classes = held.nonzero().flatten()
        z = [drawn(means[c], covariances[c], delta, self.samples, draw) for c in classes]
        features = torch.cat([means[:0], *z])
        return features.clamp(min=0) if self.relu_clip else features, classes.repeat_interleave(self.samples)

    @torch.enable_grad()
    def calibrate(self, replica: ReplicaView, z: Tensor, y: Tensor, draw: torch.Generator) -> None:
        """Cross-entropy on the virtual features, the classifier's weights alone."""
        leaf = replica.weights.flat[classifier(replica.weights)].detach()
        optimiser = torch.optim.SGD([leaf], lr=self.head_lr, momentum=self.head_momentum)
        for _ in range(self.head_epochs):
            for batch in torch.split(torch.randperm(len(y), generator=draw), self.head_batch):
                replica.weights.grad.zero_()
                scores = replica.net.head(replica.net.neck(z[batch]))
                F.cross_entropy(scores, y[batch]).backward()  # type: ignore[no-untyped-call]
                leaf.grad = replica.weights.grad[classifier(replica.weights)]
                optimiser.step()

    def eval_models(self, server: ServerView, my: State) -> dict[str, Tensor]:
        if "calibrated" not in my.persistent:
            return {}
        return {"global": my.persistent["calibrated"], "uncalibrated": my.persistent["uncalibrated"]}


@recipe("CCVR", family="calibration", paper="Luo et al., NeurIPS 2021")
def ccvr(
    samples: Samples = 200,
    cov: Covariance = "full",
    head_lr: Positive = 0.01,
    head_momentum: Momentum = 0.9,
    head_epochs: AtLeastOne = 10,
    head_batch: AtLeastOne = 64,
    jitter: NonNegative = 1e-6,
    relu_clip: bool = False,
    clients: Literal["all", "last"] = "all",
) -> Alloy:
    training = (head_lr, head_momentum, head_epochs, head_batch)
    return alloy("CCVR", Share(), VirtualFeatures(samples, cov, *training, jitter, relu_clip, clients))

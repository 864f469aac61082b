"""FedRDA: a compact feature head, and a loss on how far local features deviate from the global principal space.

Yao et al., IEEE Transactions on Industrial Informatics, 2025, doi 10.1109/TII.2025.3588630.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedalloy.core.alloy import NOTHING, Alloy, Mechanism, Names, alloy
from fedalloy.core.frozen import Frozen
from fedalloy.core.parameters import Layers, NonNegative, Share01
from fedalloy.core.registry import recipe
from fedalloy.core.state import State
from fedalloy.core.views import ClientView, Findings, Oracle, ReplicaView, StepView
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.share import Share

Encoder = Literal["mlp", "autoencoder", "orthogonal"]
Decomposition = Literal["svd", "qr", "pca"]
Kappa = Literal["constant", "free"]
EPS = 1e-12
ROUNDING = 1e-4  # of a feature's length: what lies outside of a space that should hold it all


@dataclass(frozen=True)
class CompactHead(Mechanism):
    """z = x W_p + b_p, r1 wide, and a classifier a_e = z W_c + b_c on it; alpha L_e is added to L_o (Eqs 4-6).

    `encoder`: an "mlp" of any `depth` (1: one linear layer), an "autoencoder" (adds the reconstruction error) or a
    random "orthogonal" map that nobody trains. `main_loss=False` (Table VI, without L_o) trains and predicts through
    the compact head; L_e is then the task loss, with weight 1.
    """

    width: Share01 = 0.5  # r1 / d
    alpha: NonNegative = 0.1
    encoder: Encoder = "mlp"
    depth: Layers = 1
    main_loss: bool = True

    gives = frozenset({"compact features"})

    @property
    def claims(self) -> Names:
        return NOTHING if self.main_loss else frozenset({"the neck", "the head's bias"})

    def build(self, replica: ReplicaView) -> None:
        if self.encoder == "orthogonal" and self.depth > 1:
            raise FedAlloyError(f"an orthogonal encoder is one map; leave depth={self.depth} out")
        r1 = max(2, round(self.width * replica.net.width))  # at least one direction inside and one outside
        replica.net.compact = compact = Compact(replica.net.width, r1, replica.inputs.classes, self)
        if not self.main_loss:
            replica.net.neck, replica.net.head = compact.encoder, compact.head

    def loss(self, step: StepView, my: State) -> Tensor | None:
        compact, out = compact_of(step.client.net), step.out
        z, logits = compact(out.features) if self.main_loss else (out.embedding, out.logits)
        my.scratch["out"] = z, logits
        terms: list[Tensor] = []
        if self.main_loss and self.alpha:
            terms.append(F.cross_entropy(logits, step.y))  # L_e (Eq 4)
        if compact.decoder is not None and self.alpha:
            terms.append(F.mse_loss(compact.decoder(z), out.features.detach()))
        return self.alpha * torch.stack(terms).sum() if terms else None


class Compact(nn.Module):
    """The compact encoder and the compact head."""

    def __init__(self, width: int, r1: int, classes: int, how: CompactHead) -> None:
        super().__init__()
        deeper = [layer for _ in range(how.depth - 1) for layer in (nn.ReLU(), nn.Linear(r1, r1))]
        self.encoder: nn.Module = (
            Orthogonal(width, r1)
            if how.encoder == "orthogonal"
            else nn.Sequential(nn.Linear(width, r1), *deeper)
        )
        self.head = nn.Linear(r1, classes)
        self.decoder = nn.Linear(r1, width) if how.encoder == "autoencoder" else None

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(features)
        return z, self.head(z)


def compact_of(net: nn.Module) -> Compact:
    assert isinstance(net.compact, Compact)
    return net.compact


class Orthogonal(nn.Module):
    """A random orthonormal map: a constant of the net, outside of training and of every average."""

    weight: Tensor

    def __init__(self, width: int, r1: int) -> None:
        super().__init__()
        self.register_buffer("weight", nn.init.orthogonal_(torch.empty(r1, width)), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight)


def origin(head: nn.Linear) -> Tensor:
    """o = -b_c W_c^+, so that o W_c + b_c = 0 (Eq 7, corrected); a constant. Of a diverged head it is not finite."""
    bias, weight = head.bias.detach().double(), head.weight.detach().double()
    if not bool(torch.isfinite(weight).all()):
        return torch.full_like(head.weight[0], torch.nan, requires_grad=False)  # pinv would raise
    zero: Tensor = -(bias @ torch.linalg.pinv(weight.T))
    return zero.to(head.bias.dtype)


def residual_space(z: Tensor, rank: int, by: Decomposition = "svd") -> Tensor:
    """S: what the first `rank` principal directions of the features (seen from the origin) leave over (Eqs 8, 9).

    "svd" takes the eigenvectors of Z^T Z, in descending order, "pca" those of the covariance, "qr" the Q of Z^T Z.
    Features that are not finite have no space: it is not finite either, and says so through the loss.
    """
    if not bool(torch.isfinite(z).all()):
        return torch.full((z.shape[1], z.shape[1] - rank), torch.nan, dtype=z.dtype)  # eigh would raise
    rows = z.double()
    if by == "pca":
        rows = rows - rows.mean(0)
    gram = rows.T @ rows
    q: Tensor = torch.linalg.qr(gram).Q if by == "qr" else torch.linalg.eigh(gram).eigenvectors.flip(1)
    return q[:, rank:].to(z.dtype)


def distance(z: Tensor, space: Tensor, scores: Tensor, kappa: Kappa = "constant") -> Tensor:
    """d_i = kappa ||S^T z_i||, kappa = sum of top scores / sum of residuals (Eq 10).

    As a constant it makes the gradient grow like 1 / residual; with a gradient of its own ("free") residuals can only
    move from one sample to another.
    Top logits may be negative; as a negative kappa would push features out of the space, it then is 0. So it is where
    features lie in the principal space but for rounding, as those of fewer than r samples do: it would only magnify it.
    """
    residual: Tensor = torch.linalg.vector_norm(z @ space, dim=1)
    with nullcontext() if kappa == "free" else torch.no_grad():
        total = residual.sum()
        outside = total > ROUNDING * torch.linalg.vector_norm(z)
        scale: Tensor = outside * scores.max(1).values.sum().clamp(min=0) / (total + EPS)
    return scale * residual


def deviation(u_g: Tensor, u_l: Tensor, scores: Tensor) -> Tensor:
    """E = mean (e^u_g + e^u_l) / (sum_c e^l_c + e^u_g + e^u_l) (Eq 11), in a form that does not overflow."""
    return torch.sigmoid(torch.logaddexp(u_g, u_l) - scores.logsumexp(1)).mean()


def consistency(u_g: Tensor, u_l: Tensor) -> Tensor:
    """U: the KL divergence of softmax(u_l) from softmax(u_g) over the batch (Eq 12)."""
    return F.kl_div(u_g.log_softmax(0), u_l.log_softmax(0), reduction="sum", log_target=True)


@dataclass(frozen=True)
class Deviation(Mechanism):
    """gamma (E + U): features may leave neither the global nor the client's own earlier principal space (Eq 13).

    `rank` is r as a share of r1; the `scores` l are "softmax" (the paper) or "logits" (ViM's form).
    Only z and l of the trained model carry a gradient, and `kappa` if it is "free"; spaces, origins and frozen
    features are constants.
    """

    gamma: NonNegative = 0.1
    rank: Share01 = 0.25
    decomposition: Decomposition = "svd"
    scores: Literal["softmax", "logits"] = "softmax"
    kappa: Kappa = "constant"
    compact: CompactHead = CompactHead()

    needs = frozenset({"global model", "compact features"})

    @property
    def brings(self) -> tuple[Mechanism, ...]:
        return (self.compact,)

    def build(self, replica: ReplicaView) -> None:
        r1 = compact_of(replica.net).head.in_features
        if self._rank(r1) >= r1:
            raise FedAlloyError(f"rank={self.rank:g} leaves nothing of {r1} compact features; lower it")

    def before_training(self, client: ClientView, my: State) -> None:
        if not self.gamma or not client.data.samples:
            return
        my.scratch["frozen"] = client.frozen(client.received, client.received_buffers)
        my.scratch["o_g"] = origin(compact_of(my.scratch["frozen"].net).head)
        my.scratch["z_g"], my.scratch["l_g"] = self._seen(client, my.scratch["frozen"])
        my.scratch["S_g"] = my.scratch["S_l"] = self._space(
            my.scratch["z_g"]
        )  # epoch 0: the two models agree
        my.scratch["epoch"] = 0

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        if (
            self.gamma and step.epoch != my.scratch["epoch"]
        ):  # the epoch's first batch, before its forward pass
            my.scratch["epoch"] = step.epoch
            z_l, _ = self._seen(step.client)
            my.scratch["S_l"] = self._space(z_l)
        return oracle(step)

    def loss(self, step: StepView, my: State) -> Tensor | None:
        if not self.gamma:
            return None
        z, logits = step.client.state_of(self.compact).scratch["out"]
        z_b, l_b = z - origin(compact_of(step.client.net).head), self._scores(logits)
        z_g, l_g = self._frozen(step, my)
        u_g, u_l = (
            distance(z_b, S, l_b, self.kappa) - distance(z_g, S, l_g)
            for S in (my.scratch["S_g"], my.scratch["S_l"])
        )
        return self.gamma * (deviation(u_g, u_l, l_b) + consistency(u_g, u_l))  # of one sample, U is 0

    def examine_client(self, client: ClientView, my: State) -> Findings:
        if "S_g" not in my.scratch:
            return {}
        z, _ = self._seen(client)
        left = (z @ my.scratch["S_g"]).double().square().sum() / z.double().square().sum()
        return {"share of local features outside the global space": float(left)}

    def _rank(self, r1: int) -> int:
        return max(1, round(self.rank * r1))

    def _space(self, z: Tensor) -> Tensor:
        return residual_space(z, self._rank(z.shape[1]), self.decomposition)

    def _scores(self, logits: Tensor) -> Tensor:
        return logits.softmax(1) if self.scores == "softmax" else logits

    def _seen(self, client: ClientView, frozen: Frozen | None = None) -> tuple[Tensor, Tensor]:
        """z - o and l of all samples as stored, by the frozen model or the present one; eval mode."""
        compact = compact_of(frozen.net if frozen else client.net)
        outs = [compact(out.features) for out in client.outputs(client.data.x, frozen)]
        z, logits = (torch.cat(parts) for parts in zip(*outs, strict=True))
        return z - origin(compact.head), self._scores(logits)

    @torch.no_grad()
    def _frozen(self, step: StepView, my: State) -> tuple[Tensor, Tensor]:
        """z - o and l of a batch by the frozen model: known since the round began, unless the batch is augmented."""
        if not step.client.data.prepare.augments:
            return my.scratch["z_g"][step.index], my.scratch["l_g"][step.index]
        frozen: Frozen = my.scratch["frozen"]
        compact = compact_of(frozen.net)
        z, logits = compact(frozen(step.x).features)
        return z - my.scratch["o_g"], self._scores(logits)


@recipe("FedRDA", family="representation", paper="Yao et al., IEEE TII 2025")
def fedrda(
    alpha: NonNegative = 0.1,
    gamma: NonNegative = 0.1,
    width: Share01 = 0.5,
    rank: Share01 = 0.25,
    encoder: Encoder = "mlp",
    depth: Layers = 1,
    decomposition: Decomposition = "svd",
    scores: Literal["softmax", "logits"] = "softmax",
    kappa: Kappa = "constant",
    main_loss: bool = True,
) -> Alloy:
    compact = CompactHead(width, alpha, encoder, depth, main_loss)
    return alloy("FedRDA", Share(), compact, Deviation(gamma, rank, decomposition, scores, kappa, compact))

"""FedRDA: a compact feature head, and a loss on how far local features deviate from the global principal space.

Yao et al., IEEE Transactions on Industrial Informatics, 2025, doi 10.1109/TII.2025.3588630.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedalloy.alloy import Alloy, Box, Mechanism, alloy
from fedalloy.client import Client, Step
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.share import Share
from fedalloy.ranges import AtLeastOne, NonNegative, Share01
from fedalloy.registry import recipe
from fedalloy.site import Frozen, Site

Encoder = Literal["mlp", "autoencoder", "orthogonal"]
Decomposition = Literal["svd", "qr", "pca"]
EPS = 1e-12


@dataclass(frozen=True)
class CompactHead(Mechanism):
    """z = x W_p + b_p, r1 wide, and a classifier a_e = z W_c + b_c on it; alpha L_e is added to L_o (Eqs 4, 5).

    `encoder`: an "mlp" of any `depth` (1: one linear layer), an "autoencoder" (adds the reconstruction error) or a
    random "orthogonal" map. `main_loss=False` (Table VI, without L_o) trains and predicts through the compact head.
    """

    width: Share01 = 0.5  # r1 / d
    alpha: NonNegative = 0.1
    encoder: Encoder = "mlp"
    depth: AtLeastOne = 1
    main_loss: bool = True

    gives = frozenset({"compact features"})

    def build(self, site: Site) -> None:
        r1 = max(2, round(self.width * site.net.width))
        site.net.compact = compact = Compact(site.net.width, r1, site.inputs.classes, self)
        if not self.main_loss:
            site.net.neck, site.net.head = compact.encoder, compact.head

    def loss(self, step: Step, my: Box) -> Tensor | None:
        compact = compact_of(step.client.net)
        z, logits = my.memo["out"] = compact(step.out.features)
        if not self.alpha or not self.main_loss:
            return None  # without the main head, L_e is the task loss
        loss = self.alpha * F.cross_entropy(logits, step.y)
        if compact.decoder is not None:
            loss = loss + self.alpha * F.mse_loss(compact.decoder(z), step.out.features.detach())
        return loss


class Compact(nn.Module):
    """The compact encoder and the compact head."""

    def __init__(self, width: int, r1: int, classes: int, how: CompactHead) -> None:
        super().__init__()
        layers: list[nn.Module] = [nn.Linear(width, r1)]
        for _ in range(how.depth - 1):
            layers += [nn.ReLU(), nn.Linear(r1, r1)]
        self.encoder: nn.Module = nn.Sequential(*layers)
        if how.encoder == "orthogonal":
            self.encoder = Orthogonal(width, r1)
        self.head = nn.Linear(r1, classes)
        self.decoder = nn.Linear(r1, width) if how.encoder == "autoencoder" else None

    def forward(self, features: Tensor) -> tuple[Tensor, Tensor]:
        z = self.encoder(features)
        return z, self.head(z)


def compact_of(net: nn.Module) -> Compact:
    assert isinstance(net.compact, Compact)
    return net.compact


class Orthogonal(nn.Module):
    """A random orthonormal map that nobody trains."""

    weight: Tensor

    def __init__(self, width: int, r1: int) -> None:
        super().__init__()
        self.register_buffer("weight", nn.init.orthogonal_(torch.empty(r1, width)), persistent=False)

    def forward(self, features: Tensor) -> Tensor:
        return F.linear(features, self.weight)


def origin(head: nn.Linear) -> Tensor:
    """o = -b_c W_c^+, so that o W_c + b_c = 0 (Eq 7, corrected)."""
    bias, weight = head.bias.detach().double(), head.weight.detach().double()
    zero: Tensor = -(bias @ torch.linalg.pinv(weight.T))
    return zero.to(head.bias.dtype)


def residual_space(z: Tensor, rank: int, by: Decomposition = "svd") -> Tensor:
    """S: the directions of the centred-at-origin features that their first `rank` principal ones leave (Eqs 8, 9)."""
    rows = (z - z.mean(0)).double() if by == "pca" else z.double()
    gram = rows.T @ rows
    q: Tensor = torch.linalg.qr(gram).Q if by == "qr" else torch.linalg.eigh(gram).eigenvectors.flip(1)
    return q[:, rank:].to(z.dtype)


def distance(z: Tensor, space: Tensor, scores: Tensor) -> Tensor:
    """d_i = kappa ||S^T z_i||, kappa = sum of top scores / sum of residuals, detached (Eq 10)."""
    residual: Tensor = torch.linalg.vector_norm(z @ space, dim=1)
    kappa = scores.max(1).values.sum() / (residual.sum() + EPS)
    return kappa.detach() * residual


def deviation(u_g: Tensor, u_l: Tensor, scores: Tensor) -> Tensor:
    """E (Eq 11)."""
    outside = u_g.exp() + u_l.exp()
    return (outside / (scores.exp().sum(1) + outside)).mean()


def consistency(u_g: Tensor, u_l: Tensor) -> Tensor:
    """U: the KL divergence of softmax(u_l) from softmax(u_g) over the batch (Eq 12)."""
    return F.kl_div(u_g.log_softmax(0), u_l.log_softmax(0), reduction="sum", log_target=True)


@dataclass(frozen=True)
class Deviation(Mechanism):
    """gamma (E + U): features may leave neither the global nor the client's own earlier principal space.

    `rank` is r as a share of r1; `scores` in E are "softmax" (the paper) or "logits" (ViM's form).
    """

    gamma: NonNegative = 0.1
    rank: Share01 = 0.25
    decomposition: Decomposition = "svd"
    scores: Literal["softmax", "logits"] = "softmax"
    compact: CompactHead = CompactHead()

    needs = frozenset({"global model", "compact features"})

    @property
    def brings(self) -> tuple[Mechanism, ...]:
        return (self.compact,)

    def start(self, client: Client, my: Box) -> None:
        if not self.gamma or not client.data.samples:
            return
        my.memo["frozen"] = frozen = client.frozen(client.received, client.received_buffers)
        my.memo[
            "still"
        ] = not client.data.prepare.augments  # then the frozen features of a sample never change
        my.memo["o_g"] = origin(compact_of(frozen.net).head)
        z, logits = self._seen(client, frozen)
        my.memo["z_g"], my.memo["a_g"] = z, logits
        my.memo["S_g"] = my.memo["S_l"] = self._space(z - my.memo["o_g"])  # epoch 0: both models agree
        my.memo["epoch"] = 0

    def loss(self, step: Step, my: Box) -> Tensor | None:
        if not self.gamma or len(step.y) < 2:
            return None
        client = step.client
        if step.epoch != my.memo["epoch"]:  # the client's own space is that of the epoch before
            my.memo["epoch"] = step.epoch
            z, _ = self._seen(client, None)
            my.memo["S_l"] = self._space(z - origin(compact_of(client.net).head))
        z, logits = client.box(self.compact).memo["out"]
        z_g, a_g = self._frozen(step, my)
        z, z_g = z - origin(compact_of(client.net).head), z_g - my.memo["o_g"]
        said, said_g = logits.softmax(1), a_g.softmax(1)
        u_g, u_l = (
            distance(z, space, said) - distance(z_g, space, said_g)
            for space in (my.memo["S_g"], my.memo["S_l"])
        )
        scores = said if self.scores == "softmax" else logits
        return self.gamma * (deviation(u_g, u_l, scores) + consistency(u_g, u_l))

    def _space(self, z: Tensor) -> Tensor:
        rank = max(1, round(self.rank * z.shape[1]))
        if rank >= z.shape[1]:
            raise FedAlloyError(
                f"FedRDA: rank {rank} leaves nothing of {z.shape[1]} compact features; lower rank"
            )
        if not bool(
            torch.isfinite(z).all()
        ):  # diverged: say so through the loss, not through an obscure solver error
            return torch.full((z.shape[1], z.shape[1] - rank), torch.nan)
        return residual_space(z, rank, self.decomposition)

    def _seen(self, client: Client, frozen: Frozen | None) -> tuple[Tensor, Tensor]:
        """Compact features and logits of all samples, by the frozen or the present model; eval mode."""
        compact = compact_of(frozen.net if frozen else client.net)
        with torch.no_grad():
            outs = [compact(out.features) for out in client.outputs(client.data.x, frozen)]
        return torch.cat([z for z, _ in outs]), torch.cat([a for _, a in outs])

    def _frozen(self, step: Step, my: Box) -> tuple[Tensor, Tensor]:
        if my.memo["still"]:
            return my.memo["z_g"][step.index], my.memo["a_g"][step.index]
        frozen: Frozen = my.memo["frozen"]
        with torch.no_grad():
            z, logits = compact_of(frozen.net)(frozen(step.x).features)
        return z, logits


@recipe("FedRDA", family="representation", paper="Yao et al., IEEE TII 2025")
def fedrda(
    alpha: NonNegative = 0.1,
    gamma: NonNegative = 0.1,
    width: Share01 = 0.5,
    rank: Share01 = 0.25,
    encoder: Encoder = "mlp",
    depth: AtLeastOne = 1,
    decomposition: Decomposition = "svd",
    scores: Literal["softmax", "logits"] = "softmax",
    main_loss: bool = True,
) -> Alloy:
    compact = CompactHead(width, alpha, encoder, depth, main_loss)
    return alloy("FedRDA", Share(), compact, Deviation(gamma, rank, decomposition, scores, compact))

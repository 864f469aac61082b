"""SVD: updates travel as truncated singular value decompositions, as long as their spectra ask for."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from fedalloy.core.alloy import Mechanism
from fedalloy.core.parameters import AtLeastOne, Share01
from fedalloy.core.views import ReplicaView
from fedalloy.errors import FedAlloyError


@dataclass(frozen=True)
class SVD(Mechanism):
    """Every matrix as U, sigma, V, cut where they hold the share T of its energy; in front of all, the ranks.

    T rises in even steps from `t_start` to `t_end` in the last of `rounds`, by default those of the run. A tensor of
    shape out x rest is a matrix; vectors, and what would be no shorter in factors, go as they are.
    """

    t_start: Share01 = 0.95
    t_end: Share01 = 0.98
    rounds: AtLeastOne | None = None

    needs = frozenset({"shared weights"})
    spoils = frozenset({"repeatable compression"})  # to cut once more takes more away

    @property
    def elastic(self) -> bool:
        return True

    def energy(self, replica: ReplicaView, round: int) -> float:
        """T(t) = T_start + (t + 1) / T_rounds (T_end - T_start); rounds are counted from 1, t from 0."""
        last = self.rounds or replica.rounds or round
        return self.t_start + min(round / last, 1.0) * (self.t_end - self.t_start)

    def encode(self, replica: ReplicaView, value: Tensor, round: int) -> Tensor:
        matrices, energy = matrices_of(replica), self.energy(replica, round)
        pieces = list(torch.split(value, [matrix.size for matrix in matrices]))
        ranks = []
        for i, matrix in enumerate(matrices):
            if matrix.pays:
                rank, pieces[i] = matrix.cut(pieces[i], energy)
                ranks.append(float(rank))
        return torch.cat([value.new_tensor(ranks), *pieces])

    def decode(self, replica: ReplicaView, coded: Tensor, round: int) -> Tensor:
        matrices, ranks, lengths = read(replica, coded)
        if len(coded) != sum(lengths):
            raise FedAlloyError(f"{len(coded)} numbers are no matrices of the ranks they begin with")
        _, *pieces = torch.split(coded, lengths)
        return torch.cat([m.rebuilt(k, piece) for m, k, piece in zip(matrices, ranks, pieces, strict=True)])

    def coded_size(self, replica: ReplicaView) -> int:
        return sum(matrix.size + matrix.pays for matrix in matrices_of(replica))

    def split(self, replica: ReplicaView, coded: Tensor) -> Sequence[Tensor]:
        found = []
        while len(coded):
            length = sum(read(replica, coded)[2])
            found.append(coded[:length])
            coded = coded[length:]
        return found


@dataclass(frozen=True)
class Matrix:
    """A tensor of the shared weights as P x Q; a vector is P x 1."""

    P: int
    Q: int

    @property
    def size(self) -> int:
        return self.P * self.Q

    @property
    def pays(self) -> bool:
        """Whether factors can be shorter than the matrix, so that its rank is told."""
        return self.size > self.P + self.Q + 1

    def length(self, rank: int) -> int:
        """Numbers on the wire: k (P + Q + 1), or P Q if that is no more."""
        return min(rank * (self.P + self.Q + 1), self.size) if self.pays else self.size

    def cut(self, dense: Tensor, energy: float) -> tuple[int, Tensor]:
        """The smallest k with sum_{i<=k} sigma_i^2 >= energy sum_i sigma_i^2; U, sigma, V of that rank.

        By the eigenvectors of the smaller Gram matrix, in float64: several times faster than an SVD.
        """
        if not bool(torch.isfinite(dense).all()):
            return min(self.P, self.Q), dense  # the server is to see that this diverged
        tall = self.P > self.Q
        matrix = dense.double().view(self.P, self.Q)
        matrix = matrix.T if tall else matrix
        squares, vectors = torch.linalg.eigh(matrix @ matrix.T)  # ascending
        reached = squares.clamp(min=0).flip(0).cumsum(0)
        k = int((reached < energy * reached[-1]).sum()) + 1 if reached[-1] > 0 else 0
        if self.length(k) == self.size:
            return k, dense
        left = vectors.flip(1)[:, :k]
        rows = left.T @ matrix  # diag(sigma) V
        sigma = rows.norm(dim=1)
        right = rows / sigma[:, None]
        U, V = (right.T, left.T) if tall else (left, right)
        return k, torch.cat([U.flatten(), sigma, V.flatten()]).to(dense.dtype)

    def rebuilt(self, rank: int, coded: Tensor) -> Tensor:
        """U diag(sigma) V."""
        if len(coded) == self.size:
            return coded
        U, sigma, V = torch.split(coded, [self.P * rank, rank, rank * self.Q])
        return ((U.view(self.P, rank) * sigma) @ V.view(rank, self.Q)).flatten()


def matrices_of(replica: ReplicaView) -> list[Matrix]:
    """The shared weights, tensor by tensor."""
    layout, shared = replica.weights.layout, replica.shared
    inside = [name for name, (a, b) in layout.spans.items() if shared.start <= a and b <= shared.stop]
    shapes = [layout.shapes[name] for name in inside]
    return [Matrix(shape[:1].numel(), shape[1:].numel()) for shape in shapes]


def read(replica: ReplicaView, coded: Tensor) -> tuple[list[Matrix], list[int], list[int]]:
    """All matrices, the rank of each (0 where none is told), and the lengths of what travels: first the ranks."""
    matrices = matrices_of(replica)
    head = sum(matrix.pays for matrix in matrices)
    told = iter(coded[:head].tolist())
    ranks = [next(told, -1.0) if matrix.pays else 0.0 for matrix in matrices]
    for rank, matrix in zip(ranks, matrices, strict=True):
        if rank not in range(min(matrix.P, matrix.Q) + 1):
            raise FedAlloyError(f"{rank:g} is no rank of a {matrix.P} x {matrix.Q} matrix")
    whole = [int(rank) for rank in ranks]
    return matrices, whole, [head, *(m.length(k) for m, k in zip(matrices, whole, strict=True))]

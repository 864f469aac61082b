"""Who holds what: a data set dealt to clients.

Every skew is a quota, a table of how many samples of each group (class, domain, or all) go to each client;
the samples of a group are then dealt in random order (`deal`). The local test sets are dealt the same way.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fedalloy.core.random import generator, seed_of
from fedalloy.data.dataset import Dataset
from fedalloy.data.deal import deal, ranks
from fedalloy.data.skew import IID, BalancedDirichlet, Dirichlet, Domain, Pathological, Quantity, Skew
from fedalloy.errors import FedAlloyError

Array = npt.NDArray[np.float64]
LEAST = 10  # samples that a balanced deal leaves nobody without
DRAWS = 1000


@dataclass(frozen=True, eq=False)
class Split:
    """The samples of client k are index[offsets[k] : offsets[k + 1]], ascending; all tensors are int64."""

    train_index: Tensor
    train_offsets: Tensor  # clients + 1
    test_index: Tensor
    test_offsets: Tensor  # clients + 1
    global_test: Tensor  # ascending

    @property
    def clients(self) -> int:
        """How many clients there are, those without samples included."""
        return len(self.train_offsets) - 1

    def train(self, client: int) -> Tensor:
        """Where the client's training samples are in the data set (a view)."""
        return self.train_index[self.train_offsets[client] : self.train_offsets[client + 1]]

    def test(self, client: int) -> Tensor:
        """Where the client's local test samples are in the data set (a view)."""
        return self.test_index[self.test_offsets[client] : self.test_offsets[client + 1]]

    def counts(self, dataset: Dataset) -> Tensor:
        """Training samples, clients x classes."""
        owner = torch.arange(self.clients).repeat_interleave(self.train_offsets.diff())
        return _count(owner, dataset.y[self.train_index], self.clients, dataset.classes)

    @property
    def owner_of_test(self) -> Tensor:
        """For each position of `global_test` the client that has it as a local test sample, -1 for none."""
        owner = torch.full_like(self.global_test, -1)
        holder = torch.arange(self.clients).repeat_interleave(self.test_offsets.diff())
        ours = torch.isin(self.test_index, self.global_test)
        owner[torch.searchsorted(self.global_test, self.test_index[ours])] = holder[ours]
        return owner

    def validating(self, share: float, seed: int) -> "Split":
        """A share of each client's training samples, drawn at random, in place of all test samples."""
        holder = torch.arange(self.clients).repeat_interleave(self.train_offsets.diff())
        held = _held_out(holder, self.clients, share, generator(seed, "validation"))
        if not held.any():
            raise FedAlloyError(
                f"--validation {share:g} is less than a sample of each client; take more, such as 0.2"
            )
        train, train_offsets = _compress(holder.masked_fill(held, -1), self.clients)
        test, test_offsets = _compress(holder.masked_fill(~held, -1), self.clients)
        index = self.train_index
        return Split(index[train], train_offsets, index[test], test_offsets, index[test].sort().values)


def partition(dataset: Dataset, clients: int, skew: Skew, seed: int, test_share: float = 0.0) -> Split:
    """Deal the training samples to the clients, and give every client a local test set.

    With `test_share = 0` the global test set (everything behind `dataset.train`) is dealt out: the test
    samples of a class (for `Domain`: of a class in a domain) go to the clients in proportion to their
    training samples of it, by largest remainder. A class that nobody trains on has no owner.

    With `0 < test_share < 1` that share of each client's own shard, drawn at random, is its test set; at
    least one training sample stays. The global test set is not dealt then. For `Domain` the shards are cut
    from the training and test samples of a domain pooled (FedSCE halves whole Office domains), and the global
    test set is the union of the local ones.

    Clients may end up without training samples (small alpha or beta, few samples).
    """
    if not 0 <= test_share < 1:
        raise FedAlloyError(f"test share {test_share} is out of range; expected 0 up to, but below, 1")
    if clients < 1:
        raise FedAlloyError(f"{clients} clients; at least 1 is needed")
    total = len(dataset.y)
    pooled = test_share > 0 and isinstance(skew, Domain)
    samples = total if pooled else dataset.train
    if clients > samples:
        raise FedAlloyError(
            f"{clients} clients but only {samples} samples to deal; take at most {samples} clients"
        )
    key, quota = _quota(dataset, samples, clients, skew, seed)
    owner = torch.full((total,), -1)
    owner[:samples] = deal(key, quota, generator(seed, "partition", "train"))
    if test_share > 0:
        test = _held_out(owner, clients, test_share, generator(seed, "partition", "held out"))
        train_index, train_offsets = _compress(owner.masked_fill(test, -1), clients)
        test_index, test_offsets = _compress(owner.masked_fill(~test, -1), clients)
    else:
        train_index, train_offsets = _compress(owner, clients)
        test_owner = _proportional(dataset, owner[:samples], clients, isinstance(skew, Domain), seed)
        test_index, test_offsets = _compress(test_owner, clients)
        test_index += dataset.train
    global_test = test_index.sort().values if pooled else torch.arange(dataset.train, total)
    return Split(train_index, train_offsets, test_index, test_offsets, global_test)


def _quota(dataset: Dataset, samples: int, clients: int, skew: Skew, seed: int) -> tuple[Tensor, Tensor]:
    """The group of each sample, and how many of each group go to each client (groups x clients)."""
    together = torch.zeros(samples, dtype=torch.int64)
    y = dataset.y[:samples]
    sizes = y.bincount(minlength=dataset.classes)
    match skew:
        case IID():
            return together, _even(torch.tensor([samples]), torch.ones(1, clients, dtype=torch.bool), seed)
        case Quantity(beta):
            return together, _dirichlet(torch.tensor([samples]), clients, beta, seed)
        case Dirichlet(alpha):
            return y, _dirichlet(sizes, clients, alpha, seed)
        case BalancedDirichlet(alpha):
            return y, _balanced(sizes, clients, alpha, seed)
        case Pathological(classes_per_client):
            return y, _even(sizes, _holders(dataset, sizes, clients, classes_per_client, seed), seed)
        case Domain():
            if dataset.domain is None:
                raise FedAlloyError(
                    f"skew domain: data set {dataset.name!r} has no domains; "
                    "take digit5, office10, a+b, or a folder of images by domain and class"
                )
            domains = len(dataset.domain_names)
            if clients < domains:
                raise FedAlloyError(
                    f"skew domain: {clients} clients for {domains} domains; take at least {domains} clients"
                )
            domain = dataset.domain[:samples]
            held = torch.arange(clients) % domains == torch.arange(domains)[:, None]
            return domain, _even(domain.bincount(minlength=domains), held, seed)


def _even(sizes: Tensor, held: Tensor, seed: int) -> Tensor:
    """Each group in equal parts to those who hold it; what is left over goes one by one to random holders."""
    holders = held.sum(1)
    divisor = holders.clamp(min=1)[:, None]
    chance = torch.rand(held.shape, generator=generator(seed, "partition", "left over"), dtype=torch.float64)
    place = chance.masked_fill(~held, 2.0).argsort(1).argsort(1)
    return held * (sizes[:, None] // divisor + (place < sizes[:, None] % divisor))


def _dirichlet(sizes: Tensor, clients: int, alpha: float, seed: int) -> Tensor:
    """Each group cut by shares ~ Dir(alpha)."""
    draw = np.random.Generator(np.random.Philox(seed_of(seed, "partition", "dirichlet")))
    return _cut(sizes, *_drawn(draw, (len(sizes), clients), alpha), alpha)


def _balanced(sizes: Tensor, clients: int, alpha: float, seed: int) -> Tensor:
    """The same, one group after the other: who holds an even share of all samples gets none of the next group.

    Drawn anew until everybody holds `LEAST` samples.
    """
    draw = np.random.Generator(np.random.Philox(seed_of(seed, "partition", "balanced")))
    even = float(sizes.sum()) / clients
    for _ in range(DRAWS):
        log_gamma, minus_log_u = _drawn(draw, (len(sizes), clients), alpha)
        quota = torch.zeros(len(sizes), clients, dtype=torch.int64)
        for group in range(len(sizes)):
            one = slice(group, group + 1)
            minus_log_u[one, (quota.sum(0) >= even).numpy()] = np.inf  # a share of 0
            quota[one] = _cut(sizes[one], log_gamma[one], minus_log_u[one], alpha)
        if quota.sum(0).min() >= LEAST:
            return quota
    raise FedAlloyError(
        f"skew balanced-dirichlet:{alpha:g}: in {DRAWS} draws some client always held fewer than {LEAST} samples; "
        f"take fewer clients or a larger alpha, or type dirichlet:{alpha:g}"
    )


def _drawn(draw: np.random.Generator, shape: tuple[int, int], alpha: float) -> tuple[Array, Array]:
    """What shares ~ Dir(alpha) are made of: log Gamma(alpha + 1) and -log U."""
    return np.log(draw.standard_gamma(alpha + 1, shape)), draw.standard_exponential(shape)


def _cut(sizes: Tensor, log_gamma: Array, minus_log_u: Array, alpha: float) -> Tensor:
    """Each group cut where the running sum of its shares says; no sample is lost.

    Shares are softmax(log G) with G ~ Gamma(alpha) = Gamma(alpha + 1) U^(1 / alpha), which neither underflows
    for tiny alpha nor overflows for huge ones.
    """
    with np.errstate(over="ignore"):  # a share of exp(-inf) = 0 is right
        log_share = log_gamma - (minus_log_u - minus_log_u.min(1, keepdims=True)) / alpha
    share = torch.from_numpy(log_share).softmax(1)
    cuts = (share.cumsum(1) * sizes[:, None]).floor().long().minimum(sizes[:, None])
    cuts[:, -1] = sizes
    return cuts.diff(dim=1, prepend=torch.zeros(len(sizes), 1, dtype=torch.int64))


def _holders(dataset: Dataset, sizes: Tensor, clients: int, wanted: int, seed: int) -> Tensor:
    """Who holds which class (classes x clients): each client takes the classes with fewest holders so far."""
    classes = int((sizes > 0).sum())
    if wanted > classes:
        raise FedAlloyError(
            f"skew pathological:{wanted}: {dataset.name!r} has {classes} classes; take {classes} or fewer"
        )
    chance = np.random.Generator(np.random.Philox(seed_of(seed, "partition", "classes")))
    free = sizes.numpy().astype(np.float64)
    order = np.zeros(len(free))  # holders so far; classes without a free sample come last
    held = np.zeros((clients, len(free)), dtype=bool)
    for row in held:
        order[free == 0] = np.inf
        chosen = (order + chance.random(len(free))).argsort()[:wanted]
        if np.isinf(order[chosen]).any():
            raise FedAlloyError(
                f"skew pathological:{wanted}: too few samples for {clients} clients with {wanted} classes "
                "each; take fewer clients or fewer classes"
            )
        row[chosen] = True
        order[chosen] += 1
        free[chosen] -= 1
    return torch.from_numpy(held.T.copy())


def _proportional(dataset: Dataset, owner: Tensor, clients: int, by_domain: bool, seed: int) -> Tensor:
    """The owner of each sample of the global test set, by largest remainder; ties fall at random."""
    key = dataset.y
    groups = dataset.classes
    if by_domain and dataset.domain is not None:
        key = key + groups * dataset.domain
        groups *= len(dataset.domain_names)
    held = owner >= 0
    count = _count(key[: dataset.train][held], owner[held], groups, clients)
    total = count.sum(1, keepdim=True)
    size = key[dataset.train :].bincount(minlength=groups)[:, None] * (total > 0)
    quota = size * count // total.clamp(min=1)
    remainder = size * count % total.clamp(min=1)
    left = size - quota.sum(1, keepdim=True)
    tie = torch.rand(count.shape, generator=generator(seed, "partition", "tie"), dtype=torch.float64)
    place = (remainder + tie).argsort(1, descending=True).argsort(1)
    return deal(key[dataset.train :], quota + (place < left), generator(seed, "partition", "test"))


def _held_out(owner: Tensor, clients: int, share: float, draw: torch.Generator) -> Tensor:
    """A mask of the samples that each client keeps for testing."""
    key = owner + 1  # nobody's samples come first
    sizes = key.bincount(minlength=clients + 1)
    wanted = (sizes * share).round().long().minimum(sizes - 1)
    wanted[0] = 0
    return ranks(key, draw) < wanted[key]


def _compress(owner: Tensor, clients: int) -> tuple[Tensor, Tensor]:
    index = owner.argsort(stable=True)[(owner < 0).sum() :]
    sizes = owner[index].bincount(minlength=clients)
    return index, torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])


def _count(row: Tensor, column: Tensor, rows: int, columns: int) -> Tensor:
    return (row * columns + column).bincount(minlength=rows * columns).reshape(rows, columns)

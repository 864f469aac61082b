"""A federation: a data set, dealt out to clients."""

from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path

import torch
from torch import Tensor

from fedalloy.core.alloy import Alloy
from fedalloy.core.views import ClientData, Info
from fedalloy.data import Dataset, Dirichlet, Prepare, Skew, Split, load, parse_augment, parse_skew, partition
from fedalloy.errors import FedAlloyError


@dataclass(frozen=True)
class Federation:
    """Who holds what. Data stay in one tensor; a client's share is gathered when the client is asked."""

    dataset: Dataset
    split: Split
    prepare: Prepare
    origin: dict[str, object] = field(
        default_factory=dict
    )  # the arguments of `federate`, for the run's config

    def on(self, device: torch.device) -> "Federation":
        """The same federation with its samples on a device."""
        dataset = self.dataset
        if dataset.x.device == device:
            return self
        return replace(self, dataset=replace(dataset, x=dataset.x.to(device), y=dataset.y.to(device)))

    @property
    def clients(self) -> int:
        return self.split.clients

    def client(self, k: int) -> ClientData:
        train, test = self.split.train(k), self.split.test(k)
        x, y = self.dataset.x, self.dataset.y
        return ClientData(x[train], y[train], x[test], y[test], self.dataset.classes, self.prepare)

    @cached_property
    def sizes(self) -> Tensor:
        """Training samples per client."""
        return self.split.train_offsets.diff()

    @property
    def counts(self) -> Tensor | None:
        """Training samples, clients x classes; None where nobody may know."""
        return self.split.counts(self.dataset)

    @cached_property
    def eligible(self) -> list[int]:
        """Clients that hold any training data."""
        found: list[int] = self.sizes.nonzero().flatten().tolist()
        return found

    @cached_property
    def scored(self) -> Tensor:
        """The samples that a global model is tried on: the global test set, then local test samples outside of it."""
        known = torch.zeros(len(self.dataset.y), dtype=torch.bool)
        known[self.split.global_test] = True
        return torch.cat([self.split.global_test, self.split.test_index[~known[self.split.test_index]]])

    def judged_locally(self, method: Alloy) -> bool:
        """Whether models are tried where the clients are: personal ones, or any where there is no global test set."""
        return method.personal or len(self.scored) == 0

    @property
    def common_test(self) -> bool:
        """Whether clients have the global test set at hand, to try their own models on."""
        return True

    @cached_property
    def test_owner(self) -> Tensor:
        """For each of the scored samples the client whose local test split holds it, or -1."""
        owner = torch.full((len(self.dataset.y),), -1)
        counts = self.split.test_offsets.diff()
        owner[self.split.test_index] = torch.arange(self.clients).repeat_interleave(counts)
        return owner[self.scored]

    @cached_property
    def info(self) -> Info:
        return Info(self.clients, int(self.sizes.sum()))


def federate(
    data: str | Dataset = "digits",
    clients: int = 10,
    skew: str | Skew = Dirichlet(0.1),  # noqa: B008 -- a frozen value
    seed: int = 0,
    test_share: float = 0.0,
    data_root: str | Path | None = None,
    augment: str = "none",
    limit: int | None = None,
    validation: float = 0.0,
) -> Federation:
    """Deal a data set to clients; with a limit, that many of its training samples.

    With `validation` that share of the training samples is held out and takes the place of the test set, which is
    neither dealt nor scored. With a `test_share` the test samples are only known once they are dealt: then it is a
    share of what each client trains on.

    >>> federate("digits", clients=10, skew="dirichlet:0.1").clients
    10
    """
    root = Path(data_root) if data_root is not None else None
    dataset = data if isinstance(data, Dataset) else load(data, root)
    if limit is not None:
        dataset = dataset.limited(limit, seed)
    if not 0 <= validation < 1:
        raise FedAlloyError(f"validation {validation} is out of range; expected 0 up to, but below, 1")
    if validation and not test_share:
        dataset = dataset.validating(validation, seed)
    chosen = parse_skew(skew) if isinstance(skew, str) else skew
    split = partition(dataset, clients, chosen, seed, test_share)
    if validation and test_share:
        split = split.validating(validation, seed)
    origin: dict[str, object] = {
        "data": dataset.name if isinstance(data, Dataset) else data,
        "data_root": str(root) if root is not None else None,
        "clients": clients,
        "skew": str(chosen),
        "seed": seed,
        "test_share": test_share,
        "augment": augment,
        "limit": limit,
        "validation": validation,
    }
    return Federation(dataset, split, Prepare.of(dataset, parse_augment(augment)), origin)

"""Dealing samples in random order: the one primitive behind every partition and every held-out test set."""

import torch
from torch import Tensor


def ranks(key: Tensor, generator: torch.Generator) -> Tensor:
    """Each sample's place in a random order of the samples that share its key, from 0."""
    shuffled = torch.randperm(len(key), generator=generator)
    order = shuffled[key[shuffled].argsort(stable=True)]
    sizes = key.bincount()
    start = sizes.cumsum(0) - sizes
    rank = torch.empty_like(key)
    rank[order] = torch.arange(len(key)) - start[key[order]]
    return rank


def deal(key: Tensor, quota: Tensor, generator: torch.Generator) -> Tensor:
    """The owner of each sample, -1 for none: client k gets quota[g, k] random samples with key g."""
    groups, clients = quota.shape
    rank = ranks(key, generator)
    given = quota.sum(1)
    start = given.cumsum(0) - given
    owners = torch.arange(clients).repeat(groups).repeat_interleave(quota.flatten())  # by group, then rank
    owner = torch.full_like(key, -1)
    dealt = rank < given[key]
    owner[dealt] = owners[start[key[dealt]] + rank[dealt]]
    return owner

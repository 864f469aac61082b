"""All randomness is drawn from counters: a name such as (seed, round, client, epoch, purpose) is the generator.

Nothing has to be saved to resume, and no draw depends on who else drew, where, or in which order.
"""

import hashlib

import torch


def seed_of(*counter: int | str) -> int:
    """63 bits that depend on every item of the counter and on their order."""
    name = "/".join(f"{type(item).__name__}:{item}" for item in counter)
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little") >> 1


def generator(*counter: int | str) -> torch.Generator:
    """A fresh torch generator for this counter."""
    return torch.Generator().manual_seed(seed_of(*counter))

"""All randomness is drawn from counters: a name such as (seed, round, client, epoch, purpose) is the generator.

Nothing has to be saved to resume, and no draw depends on who else drew, where, or in which order.
"""

import hashlib
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

CPU = torch.device("cpu")
BLOCK = 2**18  # normal numbers that are made at a time


def seed_of(*counter: int | str) -> int:
    """63 bits that depend on every item of the counter and on their order."""
    return int.from_bytes(hashlib.blake2b(_name(counter), digest_size=8).digest(), "little") >> 1


def generator(*counter: int | str) -> torch.Generator:
    """A fresh torch generator for this counter."""
    return torch.Generator().manual_seed(seed_of(*counter))


def _name(counter: Sequence[int | str]) -> bytes:
    return "/".join(f"{type(item).__name__}:{item}" for item in counter).encode()


def gaussian(values: Sequence[Tensor], *counter: int | str) -> list[Tensor]:
    """Standard normal numbers in float64 to hide flat vectors, from this counter and every bit of the values.

    A cryptographic stream: who does not know all of the counter cannot guess them, as one can those of a `generator`,
    whose states are few. Two different lists of values never share their noise, so their difference hides it too.
    """
    key = hashlib.blake2b(_name(counter))
    for value in values:
        key.update(value.to("cpu").contiguous().numpy().tobytes())
    sizes = [len(value) for value in values]
    total = sum(sizes)
    blocks = [_block(key.digest(), start, min(BLOCK, total - start)) for start in range(0, total, BLOCK)]
    parts = torch.split(torch.cat(blocks or [torch.empty(0).double()]), sizes)
    return [part.to(value.device) for part, value in zip(parts, values, strict=True)]


def _block(key: bytes, start: int, size: int) -> Tensor:
    """Normal numbers by Box and Muller's transform of 53-bit uniform ones."""
    pairs = (size + 1) // 2
    stream = hashlib.shake_256(key + start.to_bytes(8, "little")).digest(16 * pairs)
    whole = torch.frombuffer(bytearray(stream), dtype=torch.int64) & (2**53 - 1)
    radius, angle = ((whole.double() + 0.5) / 2**53).view(2, pairs)
    radius, angle = (-2 * radius.log()).sqrt(), 2 * math.pi * angle
    return torch.cat([radius * angle.cos(), radius * angle.sin()])[:size]


@contextmanager
def seeded(*counter: int | str, device: torch.device = CPU) -> Iterator[None]:
    """Torch's own generator, which initialisers and dropout use, seeded by a counter and given back as it was."""
    cuda = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=cuda):
        torch.default_generator.manual_seed(seed_of(*counter))  # torch.manual_seed walks the stack: slow
        if cuda:
            torch.cuda.manual_seed(seed_of(*counter))
        yield

"""Several data sets as the domains of one: same classes, other looks."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.functional import interpolate

from fedalloy.data.dataset import Dataset
from fedalloy.data.totals import CHUNK, Totals
from fedalloy.errors import FedAlloyError


def join(name: str, parts: Sequence[Dataset], side: int | None = None) -> Dataset:
    """One data set with a domain per part; images get the most channels and the largest size, or `side`."""
    first = parts[0]
    for part in parts:
        if part.kind != first.kind or part.kind == "tokens" or part.domain is not None:
            raise FedAlloyError(
                f"{name}: {first.name} ({first.kind}) and {part.name} ({part.kind}) cannot be domains of one "
                "data set; join sets of images, or of vectors, that have no domains themselves"
            )
        if part.class_names and first.class_names and part.class_names != first.class_names:
            raise FedAlloyError(f"{name}: {first.name} and {part.name} name different classes")
    if first.kind == "image":
        channels, height, width = torch.tensor([part.x.shape[1:] for part in parts]).amax(0).tolist()
        size = (height, width) if side is None else (side, side)
        xs = [_fit(part.x, 3 if side else channels, size) for part in parts]
    else:
        if len({part.x.shape[1] for part in parts}) > 1:
            widths = ", ".join(f"{part.name} {part.x.shape[1]}" for part in parts)
            raise FedAlloyError(f"{name}: the vectors differ in width ({widths})")
        if len({part.feature_names for part in parts if part.feature_names}) > 1:
            raise FedAlloyError(f"{name}: the tables differ in the names or the order of their columns")
        xs = [part.x for part in parts]
    x = _interleave(xs, parts)
    train = sum(part.train for part in parts)
    mean, std = Totals.of(first.kind, x[:train]).stats()
    return Dataset(
        name,
        x,
        _interleave([part.y for part in parts], parts),
        train,
        first.kind,
        max(part.classes for part in parts),
        next((part.class_names for part in parts if part.class_names), ()),
        _interleave([torch.full_like(part.y, number) for number, part in enumerate(parts)], parts),
        tuple(part.name for part in parts),
        mean,
        std,
        feature_names=next((part.feature_names for part in parts if part.feature_names), ()),
    )


def _interleave(columns: Sequence[Tensor], parts: Sequence[Dataset]) -> Tensor:
    """All training parts, then all test parts."""
    pairs = list(zip(columns, parts, strict=True))
    return torch.cat(
        [column[: part.train] for column, part in pairs] + [column[part.train :] for column, part in pairs]
    )


def _fit(x: Tensor, channels: int, size: tuple[int, int]) -> Tensor:
    """Resized (bilinear) and, if grey, repeated over the channels."""
    if tuple(x.shape[2:]) != size:
        x = torch.cat(
            [interpolate(chunk, size, mode="bilinear", antialias=True) for chunk in torch.split(x, CHUNK)]
        )
    if x.shape[1] not in (1, channels):
        raise FedAlloyError(f"images with {x.shape[1]} and {channels} channels cannot be joined")
    return x.expand(-1, channels, -1, -1)

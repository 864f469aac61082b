"""Making a batch ready: normalised, and for training perhaps cropped and flipped at random."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor
from torch.nn.functional import pad

from fedalloy.core.net import Kind
from fedalloy.data.dataset import Dataset
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.errors import FedAlloyError, shown, unknown


@dataclass(frozen=True)
class Augment:
    """Random changes to training images: a crop after padding by `crop` black pixels, a horizontal flip."""

    crop: int = 0
    flip: bool = False

    def __str__(self) -> str:
        words = [f"crop:{self.crop}"] * bool(self.crop) + ["flip"] * self.flip
        return ",".join(words) or "none"


UNCHANGED = Augment()


def parse_augment(text: str) -> Augment:
    """The augmentation a user typed.

    >>> parse_augment("crop:4,flip")
    Augment(crop=4, flip=True)
    >>> str(parse_augment("none"))
    'none'
    """
    crop, flip = 0, False
    words = [word.strip().lower() for word in text.split(",")]
    if words == ["none"]:
        return UNCHANGED
    for word in words:
        name, _, number = word.partition(":")
        if word == "flip":
            flip = True
        elif name == "crop":
            if not (number.isdecimal() and len(number) < 10 and int(number) > 0):
                raise FedAlloyError(
                    f"augmentation {shown(text)}: crop needs its padding in pixels, such as crop:4"
                )
            crop = int(number)
        elif name in ("flip", "none"):
            raise FedAlloyError(
                f"augmentation {shown(text)}: {name!r} stands alone; type for example crop:4,flip or none"
            )
        else:
            raise unknown("augmentation", name, ["crop", "flip", "none"])
    return Augment(crop, flip)


@dataclass(frozen=True)
class Prepare:
    """What turns samples as stored into what a net takes."""

    kind: Kind
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    crop: int = 0
    flip: bool = False

    @staticmethod
    def of(data: Dataset | Preprocessing, augment: Augment = UNCHANGED) -> Prepare:
        """For the samples of this data set, or any that are to be prepared alike."""
        agreed = data.preprocessing if isinstance(data, Dataset) else data
        if augment != UNCHANGED:
            if agreed.kind != "image":
                title = f"data set {data.name!r}" if isinstance(data, Dataset) else "this data set"
                raise FedAlloyError(f"{augment} is for images; {title} holds {agreed.kind}")
            side = min(agreed.shape[1:])
            if augment.crop >= side:
                raise FedAlloyError(
                    f"crop:{augment.crop} is too much for images of side {side}; take less than {side}"
                )
        return Prepare(agreed.kind, agreed.mean, agreed.std, augment.crop, augment.flip)

    @property
    def augments(self) -> bool:
        return self.kind == "image" and bool(self.crop or self.flip)

    def __call__(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """Float32 images or vectors, int64 tokens; with a generator, the one source of chance, augmented."""
        if self.kind == "tokens":
            return x.long()
        if self.augments and generator is not None:
            x = self._augmented(x, generator)
        centre, width = self.scale
        return x.to(torch.float32, copy=True).sub_(centre.to(x.device)).div_(width.to(x.device))

    @cached_property
    def scale(self) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation in the units of the stored samples, shaped to broadcast."""
        both = torch.tensor([self.mean or (0.0,), self.std or (1.0,)], dtype=torch.float64)
        if self.kind == "image":
            both = 255 * both[:, :, None, None]
        centre, width = both.float()
        return centre, width

    def _augmented(self, x: Tensor, generator: torch.Generator) -> Tensor:
        """Every sample's pixels picked from the padded image at its own offset, mirrored for some."""
        batch, channels, height, width = x.shape
        row, column = torch.arange(height).expand(batch, -1), torch.arange(width).expand(batch, -1)
        if self.crop:
            offset = torch.randint(2 * self.crop + 1, (2, batch, 1), generator=generator)
            row, column = row + offset[0], column + offset[1]
        if self.flip:
            mirrored = torch.randint(2, (batch, 1), generator=generator).bool()
            column = torch.where(mirrored, column.flip(1), column)
        padded = pad(x, [self.crop] * 4)
        pixel = (row[:, :, None] * padded.shape[3] + column[:, None, :]).reshape(batch, 1, -1).to(x.device)
        return padded.flatten(2).gather(2, pixel.expand(-1, channels, -1)).reshape(x.shape)

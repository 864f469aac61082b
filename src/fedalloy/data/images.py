"""Image files in folders: NAME/CLASS/*, NAME/train|test/CLASS/*, or NAME/DOMAIN/CLASS/*."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from PIL import Image

from fedalloy.data.raw import Array, Part, Raw, divided
from fedalloy.errors import FedAlloyError

SIDE = 64  # images of differing sizes become squares of this side
ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp"})

_BROKEN = (OSError, SyntaxError, ValueError, Image.DecompressionBombError)


@dataclass(frozen=True)
class _Shelf:
    """The images of one class in one branch (a domain, train or test; "" where there are none)."""

    branch: str
    label: str
    files: tuple[Path, ...]


def read_folder(path: Path) -> Raw:
    """All images below `path`, labelled by the names of their folders."""
    branches = _folders(path)
    names = {branch.name for branch in branches}
    if not branches:
        raise FedAlloyError(f"{path} has no folders; expected one per class with images in it")
    if any(_images(branch) for branch in branches):
        shelves = [_Shelf("", branch.name, _images(branch)) for branch in branches]
    else:
        shelves = [_Shelf(b.name, label.name, _images(label)) for b in branches for label in _folders(b)]
    if not shelves:
        raise FedAlloyError(f"{path}: no images ({', '.join(sorted(ENDINGS))}) one or two folders down")
    for shelf in shelves:
        if not shelf.files:
            raise FedAlloyError(f"{path / shelf.branch / shelf.label} has no images; fill or remove it")
    files = [file for shelf in shelves for file in shelf.files]
    x = stack(len(files), lambda position: _open(files[position]), lambda position: str(files[position]))
    y, _ = _numbered([shelf.label for shelf in shelves for _ in shelf.files])
    branch, branch_names = _numbered([shelf.branch for shelf in shelves for _ in shelf.files])
    class_names = tuple(sorted({shelf.label for shelf in shelves}))
    if branch_names == ("",):
        return Raw(Part(x, y), class_names=class_names)
    if {"train", "test"} <= names:
        _check_train_test(path, shelves)
        return divided(Part(x, y), branch == branch_names.index("test"), class_names)
    return Raw(Part(x, y, branch), class_names=class_names, domain_names=branch_names)


def stack(count: int, image: Callable[[int], Image.Image], title: Callable[[int], str]) -> Array:
    """Images as one uint8 array N H W (all grey) or N H W 3, of their common size or else `SIDE` x `SIDE`."""
    sizes, modes = set(), set()
    for position in range(count):
        with image(position) as opened:
            if opened.mode[0] in "IF":
                raise FedAlloyError(f"{title(position)} has more than 8 bits per pixel; convert it to 8 bits")
            sizes.add(opened.size)
            modes.add(opened.mode)
    width, height = sizes.pop() if len(sizes) == 1 else (SIDE, SIDE)
    mode, shape = ("L", (height, width)) if modes <= {"1", "L", "LA"} else ("RGB", (height, width, 3))
    x = np.empty((count, *shape), np.uint8)
    for position in range(count):
        with image(position) as opened:
            try:
                plain = opened.convert(mode)
            except _BROKEN as error:
                raise FedAlloyError(
                    f"{title(position)} cannot be read ({error}); replace or remove it"
                ) from None
            if plain.size != (width, height):
                plain = plain.resize((width, height), Image.Resampling.BILINEAR)
            x[position] = np.asarray(plain)
    return x


def _open(path: Path) -> Image.Image:
    try:
        return Image.open(path)
    except _BROKEN as error:
        raise FedAlloyError(f"{path} is not a readable image ({error}); replace or remove it") from None


def _folders(path: Path) -> list[Path]:
    return sorted(entry for entry in path.iterdir() if entry.is_dir() and not entry.name.startswith("."))


def _images(path: Path) -> tuple[Path, ...]:
    files = (entry for entry in path.iterdir() if entry.is_file() and not entry.name.startswith("."))
    return tuple(sorted(file for file in files if file.suffix.lower() in ENDINGS))


def _numbered(words: list[str]) -> tuple[Array, tuple[str, ...]]:
    names, numbers = np.unique(np.array(words), return_inverse=True)
    return numbers.astype(np.int64), tuple(str(name) for name in names)


def _check_train_test(path: Path, shelves: list[_Shelf]) -> None:
    labels: dict[str, set[str]] = {}
    for shelf in shelves:
        labels.setdefault(shelf.branch, set()).add(shelf.label)
    if others := sorted(labels.keys() - {"train", "test"}):
        raise FedAlloyError(f"{path} has {others[0]}/ beside train/ and test/; move it elsewhere")
    if untrained := sorted(labels["test"] - labels["train"]):
        raise FedAlloyError(f"{path}: class {untrained[0]!r} is in test/ but not in train/")

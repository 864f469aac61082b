"""Labels as found in files, checked and turned into 0 .. classes - 1."""

from dataclasses import replace

import numpy as np

from fedalloy.data.raw import Array, Raw
from fedalloy.errors import FedAlloyError


def encode(name: str, raw: Raw, among: tuple[str, ...] = ()) -> tuple[Raw, int]:
    """The same data with int64 labels, and the number of classes: those found, or those that are named."""
    if among:
        raw = _named(name, raw, among)
    if all(part.y.dtype.kind == "U" for part in raw.parts):
        raw = _from_strings(name, raw)
    train, *test = (part.with_labels(_whole_numbers(name, part.y)) for part in raw.parts)
    raw = replace(raw, train=train, test=test[0] if test else None)
    for part in raw.parts:
        if len(part.x) != len(part.y):
            raise FedAlloyError(
                f"{name}: {len(part.x)} samples but {len(part.y)} labels; they must be as many"
            )
        if len(part.y) == 0:
            raise FedAlloyError(f"{name}: there are no samples")
    classes = _classes(name, raw)
    if not among and len(np.unique(raw.train.y)) < 2:
        raise FedAlloyError(
            f"{name}: all training samples have label {raw.train.y[0]}; two classes are needed"
        )
    return raw, classes


def _named(name: str, raw: Raw, among: tuple[str, ...]) -> Raw:
    """The same data with names of their own spelt out, to be found among these."""
    own = np.array(raw.class_names)
    if len(own) and all(part.y.dtype.kind != "U" for part in raw.parts):
        _classes(name, raw)
        train, *test = (part.with_labels(own[_whole_numbers(name, part.y)]) for part in raw.parts)
        raw = replace(raw, train=train, test=test[0] if test else None)
    return replace(raw, class_names=among)


def _from_strings(name: str, raw: Raw) -> Raw:
    names = raw.class_names or tuple(sorted(set(raw.train.y.tolist())))
    number = {label: position for position, label in enumerate(names)}
    for part in raw.parts:
        strange = sorted(set(part.y.tolist()) - set(names))
        if strange:
            raise FedAlloyError(
                f"{name}: label {strange[0]!r} is no class; the classes are {', '.join(names[:20])}"
            )
    train, *test = (
        part.with_labels(np.array([number[label] for label in part.y.tolist()])) for part in raw.parts
    )
    return replace(raw, train=train, test=test[0] if test else None, class_names=names)


def _whole_numbers(name: str, y: Array) -> Array:
    if y.ndim == 2 and y.shape[1] == 1:
        y = y[:, 0]
    if y.ndim != 1:
        raise FedAlloyError(f"{name}: labels have shape {y.shape}; one number per sample is expected")
    if y.dtype.kind not in "iufb":
        raise FedAlloyError(f"{name}: labels have type {y.dtype}; whole numbers from 0 are expected")
    if y.dtype.kind == "f":
        if not np.isfinite(y).all():
            raise FedAlloyError(f"{name}: a label is NaN or infinite (sample {_first(~np.isfinite(y))})")
        if (y != np.floor(y)).any():
            bad = _first(y != np.floor(y))
            raise FedAlloyError(
                f"{name}: label {y[bad]} (sample {bad}) is not a whole number; labels name classes"
            )
    if (y < 0).any():
        bad = _first(y < 0)
        raise FedAlloyError(f"{name}: label {y[bad]} (sample {bad}) is negative; labels start at 0")
    if (y > np.iinfo(np.int32).max).any():
        raise FedAlloyError(f"{name}: label {y.max()} is out of range; labels run from 0 to classes - 1")
    return y.astype(np.int64)


def _classes(name: str, raw: Raw) -> int:
    highest = max(int(part.y.max()) for part in raw.parts)
    if raw.class_names:
        if highest >= len(raw.class_names):
            raise FedAlloyError(
                f"{name}: label {highest} is out of range; there are {len(raw.class_names)} class names, "
                f"so labels run from 0 to {len(raw.class_names) - 1}"
            )
        return len(raw.class_names)
    lowest = int(raw.train.y.min())
    if lowest > 0:
        raise FedAlloyError(
            f"{name}: training labels start at {lowest}; they must start at 0 (subtract {lowest})"
        )
    classes = int(raw.train.y.max()) + 1
    if highest >= classes:
        raise FedAlloyError(
            f"{name}: test label {highest} is out of range; training labels run from 0 to {classes - 1} "
            "(name all classes in class_names if some have no training sample)"
        )
    if classes > len(raw.train.y):
        raise FedAlloyError(
            f"{name}: label {classes - 1} is out of range for {len(raw.train.y)} training samples; "
            "labels run from 0 to classes - 1 without gaps"
        )
    return classes


def _first(mask: Array) -> int:
    return int(np.flatnonzero(mask)[0])

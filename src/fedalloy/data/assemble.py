"""From what a reader found to a checked `Dataset`: labels, test split, samples, normalisation."""

from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from fedalloy.core.net import Kind
from fedalloy.core.random import generator
from fedalloy.data.dataset import Dataset
from fedalloy.data.deal import ranks
from fedalloy.data.labels import encode
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.data.raw import Array, Part, Raw
from fedalloy.data.text import numbered, vocabulary_of
from fedalloy.data.totals import CHUNK, Stats, Totals
from fedalloy.errors import FedAlloyError

TEST_SHARE = 0.2  # held out of data that come without a test set

_CIFAR: Stats = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
KNOWN: dict[str, Stats] = {"cifar10": _CIFAR, "cifar100": _CIFAR, "mnist": ((0.1307,), (0.3081,))}


def assemble(
    name: str, raw: Raw, class_names: tuple[str, ...] = (), agreed: Preprocessing | None = None
) -> Dataset:
    """Check everything, hold out a test set if there is none, and normalise.

    With `class_names` labels are numbers or names of these classes, of which the data may lack some. With an agreed
    preprocessing nothing is derived from these data: they fit it or are refused.
    """
    raw, classes = encode(name, raw, agreed.class_names if agreed else class_names)
    raw = with_columns(name, raw, agreed.feature_names) if agreed else raw
    train, test = (raw.train, raw.test) if raw.test is not None else _hold_out(name, raw.train)
    y = torch.from_numpy(np.concatenate([train.y, test.y]))
    domain = None
    if train.domain is not None and test.domain is not None:
        domain = torch.from_numpy(np.concatenate([train.domain, test.domain]))
    words: tuple[str, ...] = ()
    if train.x.dtype == object:
        words, length = (
            (agreed.vocabulary, agreed.shape[0]) if agreed else (vocabulary_of(train.x.tolist()), None)
        )
        both = numbered([*train.x.tolist(), *test.x.tolist()], words, length)
        train, test = replace(train, x=both[: len(train.y)]), replace(test, x=both[len(train.y) :])
    kind, x, vocab = _samples(name, train.x, test.x)
    vocab = len(words) + 2 if words else vocab
    mean, std = (agreed.mean, agreed.std) if agreed else _normalisation(name, kind, x[: len(train.y)])
    features = raw.feature_names if kind == "vector" else ()
    made = Dataset(
        name, x, y, len(train.y), kind, classes, raw.class_names, domain, raw.domain_names, mean, std, vocab,
        words, features,
    )  # fmt: skip
    return fitted(made, agreed) if agreed else made


def with_columns(name: str, raw: Raw, agreed: tuple[str, ...]) -> Raw:
    """The same table with its columns in the agreed order; samples without names of columns stay as they are."""
    found = raw.feature_names
    if not found or not agreed or found == agreed:
        return raw
    if strange := sorted(set(found) ^ set(agreed)):
        what = "lacks" if strange[0] in agreed else "has"
        raise FedAlloyError(
            f"{name} {what} column {strange[0]!r}; the columns agreed on are {', '.join(agreed[:20])}"
        )
    order = [found.index(column) for column in agreed]
    train, *test = (replace(part, x=part.x[:, order]) for part in raw.parts)
    return replace(raw, train=train, test=test[0] if test else None, feature_names=agreed)


def fitted(dataset: Dataset, agreed: Preprocessing) -> Dataset:
    """The data set under what was agreed; an error that says where the two differ."""
    found = dataset.preprocessing
    if (found.kind, found.shape, found.classes) != (agreed.kind, agreed.shape, agreed.classes):
        raise FedAlloyError(
            f"{dataset.name} holds samples of kind {found.kind} and shape {found.shape} in {found.classes} classes; "
            f"agreed on are {agreed.kind}, {agreed.shape} and {agreed.classes}"
        )
    if found.vocab > agreed.vocab:
        raise FedAlloyError(
            f"{dataset.name} holds token {found.vocab - 1}; the ids agreed on end at {agreed.vocab - 1}"
        )
    return replace(
        dataset,
        class_names=agreed.class_names,
        mean=agreed.mean,
        std=agreed.std,
        vocab=agreed.vocab,
        vocabulary=agreed.vocabulary,
        feature_names=agreed.feature_names,
    )


def _samples(name: str, train: Array, test: Array) -> tuple[Kind, Tensor, int]:
    """What the samples are, both parts in one tensor, and how many token ids there are."""
    _check_alike(name, train, test)
    axes, number = train.ndim, train.dtype.kind
    if axes == 2 and number in "iu":
        x = _tokens(name, train, test)
        return "tokens", x, int(x.max()) + 1
    if axes == 2 and number == "f":
        return "vector", _vectors(name, train, test), 0
    if axes in (3, 4) and number in "iuf":
        return "image", _images(name, train, test), 0
    raise FedAlloyError(
        f"{name}: samples of shape {train.shape[1:]} and type {train.dtype} are neither images "
        "(N H W, N H W C or N C H W; uint8, or float in [0, 1]) nor vectors (N F, float) "
        "nor tokens (N L, integer)"
    )


def _normalisation(name: str, kind: Kind, train: Tensor) -> Stats:
    if kind == "tokens":
        return (), ()
    known = known_stats(name, kind, train.shape[1])
    return known or Totals.of(kind, train).stats()


def known_stats(name: str, kind: Kind, channels: int) -> Stats | None:
    """Those that everybody uses for the images of this name."""
    known = KNOWN.get(name)
    return known if known and kind == "image" and len(known[0]) == channels else None


def _hold_out(name: str, whole: Part) -> tuple[Part, Part]:
    """A fixed fifth of every class (of every domain), at least one sample where there are two."""
    key = torch.from_numpy(whole.y)
    if whole.domain is not None:
        key = key + (int(key.max()) + 1) * torch.from_numpy(whole.domain)
    sizes = key.bincount()
    wanted = (sizes * TEST_SHARE).round().long().clamp(min=1).minimum(sizes - 1)
    test = (ranks(key, generator("held-out test set")) < wanted[key]).numpy()
    if not test.any():
        raise FedAlloyError(f"{name}: too few samples to hold out a test set; two per class are needed")
    return whole.take(np.flatnonzero(~test)), whole.take(np.flatnonzero(test))


def _check_alike(name: str, train: Array, test: Array) -> None:
    for x in (train, test):
        if x.size == 0:
            raise FedAlloyError(f"{name}: samples of shape {x.shape} hold no numbers")
    if train.shape[1:] != test.shape[1:]:
        raise FedAlloyError(
            f"{name}: a training sample has shape {train.shape[1:]} but a test sample {test.shape[1:]}"
        )
    if (train.dtype.kind == "f") != (test.dtype.kind == "f"):
        raise FedAlloyError(
            f"{name}: training samples have type {train.dtype} but test samples {test.dtype}; use one type"
        )


def _tokens(name: str, train: Array, test: Array) -> Tensor:
    low, high = (min(train.min(), test.min()), max(train.max(), test.max()))
    if low < 0 or high >= np.iinfo(np.int32).max:
        raise FedAlloyError(
            f"{name}: token ids run from {low} to {high}; they start at 0 and stay below 2^31"
        )
    return torch.from_numpy(np.concatenate([train.astype(np.int32), test.astype(np.int32)]))


def _vectors(name: str, train: Array, test: Array) -> Tensor:
    with np.errstate(over="ignore"):
        x = torch.from_numpy(np.concatenate([train.astype(np.float32), test.astype(np.float32)]))
    finite = x.isfinite()
    if not finite.all():
        sample, entry = (~finite).nonzero()[0].tolist()
        raise FedAlloyError(f"{name}: feature {entry} of sample {sample} is NaN, infinite or beyond float32")
    return x


def _images(name: str, train: Array, test: Array) -> Tensor:
    *_, height, width = shape = train.shape[1:]
    axes: tuple[int, ...] = (0, 1, 2)
    if len(shape) == 2:
        channels = 1
    elif shape[2] in (1, 3) or (shape[2] == 4 and shape[0] not in (1, 3)):
        (height, width, channels), axes = shape, (0, 3, 1, 2)
    elif shape[0] in (1, 3, 4):
        channels, axes = shape[0], (0, 1, 2, 3)
    else:
        raise FedAlloyError(
            f"{name}: images of shape {shape} have no axis of 1, 3 or 4 channels, first or last"
        )
    x = torch.empty(len(train) + len(test), channels, height, width, dtype=torch.uint8)
    for source, target in ((train, x[: len(train)]), (test, x[len(train) :])):
        for start in range(0, len(source), CHUNK):
            chunk = _pixels(name, source[start : start + CHUNK])
            into = target[start : start + CHUNK]
            into.copy_(torch.from_numpy(chunk).permute(axes).reshape(into.shape))
    return x


def _pixels(name: str, chunk: Array) -> Array:
    if chunk.dtype == np.uint8:
        return chunk.copy()
    low, high = chunk.min(), chunk.max()
    if chunk.dtype.kind == "f":
        if not (np.isfinite(low) and np.isfinite(high)):
            raise FedAlloyError(f"{name}: a pixel is NaN or infinite")
        if low < -1e-6 or high > 1 + 1e-6:
            raise FedAlloyError(
                f"{name}: float pixels run from {low:g} to {high:g}; expected [0, 1], or uint8 from 0 to 255"
            )
        scaled: Array = np.rint(np.clip(chunk, 0, 1) * 255)
        return scaled.astype(np.uint8)
    if low < 0 or high > 255:
        raise FedAlloyError(f"{name}: pixels run from {low} to {high}; expected 0 to 255, or float in [0, 1]")
    return chunk.astype(np.uint8)

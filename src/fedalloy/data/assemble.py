"""From what a reader found to a checked `Dataset`: labels, test split, samples, normalisation."""

import numpy as np
import torch
from torch import Tensor

from fedalloy.data.dataset import Dataset
from fedalloy.data.deal import ranks
from fedalloy.data.labels import encode
from fedalloy.data.raw import Array, Part, Raw
from fedalloy.data.text import tokenise
from fedalloy.errors import FedAlloyError
from fedalloy.nets.base import Kind
from fedalloy.random import generator

Stats = tuple[tuple[float, ...], tuple[float, ...]]

TEST_SHARE = 0.2  # held out of data that come without a test set
CHUNK = 4096  # samples converted at a time, so that no float copy of a whole image set is made

_CIFAR: Stats = ((0.4914, 0.4822, 0.4465), (0.2023, 0.1994, 0.2010))
KNOWN: dict[str, Stats] = {"cifar10": _CIFAR, "cifar100": _CIFAR, "mnist": ((0.1307,), (0.3081,))}


def assemble(name: str, raw: Raw, class_names: tuple[str, ...] = ()) -> Dataset:
    """Check everything, hold out a test set if there is none, and normalise.

    With `class_names` labels are numbers or names of these classes, of which the data may lack some.
    """
    raw, classes = encode(name, raw, class_names)
    train, test = (raw.train, raw.test) if raw.test is not None else _hold_out(name, raw.train)
    y = torch.from_numpy(np.concatenate([train.y, test.y]))
    domain = None
    if train.domain is not None and test.domain is not None:
        domain = torch.from_numpy(np.concatenate([train.domain, test.domain]))
    kind, x, vocab = _samples(name, train.x, test.x)
    mean, std = _normalisation(name, kind, x[: len(train.y)])
    return Dataset(
        name, x, y, len(train.y), kind, classes, raw.class_names, domain, raw.domain_names, mean, std, vocab
    )


def _samples(name: str, train: Array, test: Array) -> tuple[Kind, Tensor, int]:
    """What the samples are, both parts in one tensor, and the size of the vocabulary."""
    if train.dtype == object:
        train, test, vocab = tokenise(train.tolist(), test.tolist())
        return "tokens", _tokens(name, train, test), vocab
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
    if kind == "vector":
        return vector_stats(train)
    known = KNOWN.get(name, ((), ()))
    return known if len(known[0]) == train.shape[1] else image_stats(train)


def image_stats(x: Tensor) -> Stats:
    """Mean and standard deviation per channel of uint8 images scaled to [0, 1]: exact, from the histogram."""
    counts = torch.zeros(x.shape[1], 256, dtype=torch.int64)
    for chunk in torch.split(x, CHUNK):
        for channel, count in enumerate(counts):
            count += chunk[:, channel].flatten().bincount(minlength=256)
    share = counts.double() / counts.sum(1, keepdim=True)
    level = torch.arange(256, dtype=torch.float64) / 255
    mean = share @ level
    variance = (share * (level - mean[:, None]).square()).sum(1)
    return _stats(mean, variance)


def vector_stats(x: Tensor) -> Stats:
    """Mean and standard deviation per entry, in float64."""
    variance, mean = torch.var_mean(x.double(), dim=0, correction=0)
    return _stats(mean, variance)


def _stats(mean: Tensor, variance: Tensor) -> Stats:
    std = variance.sqrt()
    constant = std <= 1e-7 * mean.abs()  # below float32's resolution: dividing would only blow up rounding
    return tuple(mean.tolist()), tuple(std.masked_fill(constant, 1.0).tolist())


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

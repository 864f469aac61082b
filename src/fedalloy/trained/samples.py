"""Samples as users have them, in the form in which a data set stores them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedalloy.data.preprocessing import Preprocessing
from fedalloy.data.raw import Array
from fedalloy.data.text import numbered
from fedalloy.errors import FedAlloyError


def stored(samples: Any, how: Preprocessing) -> Tensor:
    """One sample or many: uint8 images N C H W, float32 vectors N F, int32 word numbers N L."""
    if isinstance(samples, str) or _texts(samples):
        return _words([samples] if isinstance(samples, str) else list(samples), how)
    x = _array(samples)
    if how.kind == "image":
        return _images(x, how.shape)
    if how.kind == "vector":
        return _vectors(x, how.shape[0])
    return _numbers(x, how)


def _texts(samples: Any) -> bool:
    if isinstance(samples, np.ndarray):
        return samples.dtype.kind == "U" or (
            samples.dtype == object and all(isinstance(one, str) for one in samples.ravel())
        )
    return (
        isinstance(samples, (list, tuple)) and len(samples) > 0 and all(isinstance(s, str) for s in samples)
    )


def _array(samples: Any) -> Array:
    if isinstance(samples, Tensor):
        return np.asarray(samples.detach().cpu().numpy())
    try:
        found = np.asarray(samples)
    except ValueError:
        found = np.array(None)
    if found.dtype.kind not in "iufb":
        raise FedAlloyError("samples must be an array of numbers or texts, all of one shape")
    return found


def _words(texts: Sequence[str], how: Preprocessing) -> Tensor:
    if how.kind != "tokens":
        raise FedAlloyError(f"these are texts; the model reads {_wanted(how)}")
    if not how.vocabulary:
        raise FedAlloyError("this model was trained on word numbers and knows no words; give it numbers")
    return torch.from_numpy(numbered(texts, how.vocabulary, how.shape[0]))


def _images(x: Array, shape: tuple[int, ...]) -> Tensor:
    channels, height, width = shape
    last = (height, width, channels)
    grey = (height, width) if channels == 1 else None
    if x.shape[-3:] == last and x.ndim in (3, 4):
        x = np.moveaxis(x, -1, -3)
    elif not (x.shape[-3:] == shape and x.ndim in (3, 4)):
        if grey is None or x.shape[-2:] != grey or x.ndim not in (2, 3):
            raise FedAlloyError(
                f"images of shape {_of_one(x, 4)}; the model reads {height}x{width} pixels with {channels} channels"
            )
        x = x[..., None, :, :]
    return torch.from_numpy(np.ascontiguousarray(_pixels(x if x.ndim == 4 else x[None])))


def _pixels(x: Array) -> Array:
    if x.dtype == np.uint8 or x.size == 0:
        return x.astype(np.uint8)
    low, high = x.min(), x.max()
    if x.dtype.kind == "f":
        if not (low >= -1e-6 and high <= 1 + 1e-6):  # false for NaN, too
            raise FedAlloyError(f"float pixels run from {low:g} to {high:g}; expected [0, 1], or uint8")
        scaled: Array = np.rint(np.clip(x, 0, 1) * 255)
        return scaled.astype(np.uint8)
    if low < 0 or high > 255:
        raise FedAlloyError(f"pixels run from {low} to {high}; expected 0 to 255, or float in [0, 1]")
    return x.astype(np.uint8)


def _vectors(x: Array, width: int) -> Tensor:
    if x.ndim not in (1, 2) or x.shape[-1] != width:
        raise FedAlloyError(f"samples of shape {_of_one(x, 2)}; the model reads vectors of {width} numbers")
    with np.errstate(over="ignore"):
        made = x.reshape(-1, width).astype(np.float32)
    if not np.isfinite(made).all():
        row, column = np.argwhere(~np.isfinite(made))[0]
        raise FedAlloyError(f"feature {column} of sample {row} is NaN, infinite or beyond float32")
    return torch.from_numpy(made)


def _numbers(x: Array, how: Preprocessing) -> Tensor:
    length = how.shape[0]
    if x.ndim not in (1, 2) or x.dtype.kind not in "iu" or x.shape[-1] > length:
        raise FedAlloyError(
            f"samples of shape {_of_one(x, 2)} and type {x.dtype}; the model reads {_wanted(how)}"
        )
    rows = x.reshape(-1, x.shape[-1])
    if rows.size and not (rows.min() >= 0 and rows.max() < how.vocab):
        raise FedAlloyError(
            f"word numbers run from {rows.min()} to {rows.max()}; expected 0 to {how.vocab - 1}"
        )
    made = np.zeros((len(rows), length), np.int32)
    made[:, : rows.shape[1]] = rows
    return torch.from_numpy(made)


def _wanted(how: Preprocessing) -> str:
    """What a model reads, for errors."""
    size = "x".join(map(str, how.shape))
    return {
        "image": f"images of {size} (channels, height, width)",
        "vector": f"vectors of {size} numbers",
        "tokens": f"texts, or up to {size} word numbers",
    }[how.kind]


def _of_one(x: Array, batched: int) -> tuple[int, ...]:
    return x.shape[1:] if x.ndim == batched else x.shape

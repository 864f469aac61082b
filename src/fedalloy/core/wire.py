"""What crosses the wire: mail to a client, replies to the server; declared, counted and checked.

Everything is a named tensor plus a little JSON. Serialised form: safetensors; there is no pickle anywhere.
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

import safetensors
import safetensors.torch
import torch
from torch import Tensor

from fedalloy.errors import FedAlloyError, plain

Reduce = Literal["mean", "uniform", "sum", "class_mean", "all"]
Dim = int | str
Items = dict[str, Tensor]
Errand = Literal["train", "evaluate", "score", "tell"]

MOST_SAMPLES = 10**12  # a client that claims more is not believed


@dataclass(frozen=True)
class Slot:
    """One declared item on the wire.

    `reduce` says how the server folds the clients' values: `mean` by the aggregation weights, `uniform`,
    `sum`, `class_mean` row by row by the class counts in the slot `counts`, `all` hands over every value.
    Dimensions are numbers or names that a replica resolves: "weights", "buffers", "classes", "features". A first
    dimension "held" is as long as the classes that a client holds: one row for each positive class count.
    """

    reduce: Reduce = "mean"
    shape: tuple[Dim, ...] = ("weights",)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    increment: bool = False  # an additive update, so that codecs may compress it
    relative: bool = False  # codecs may compress its difference to the shared weights of the round
    counts: str = (
        ""  # the slot that says which classes the rows are for: their counts, or whether they are held
    )
    uniform: bool = False  # class_mean only: every holder of a class counts the same
    least: float | None = None  # what no value can be below

    @property
    def itemsize(self) -> int:
        return self.dtype.itemsize


@dataclass(frozen=True)
class Spec:
    """A slot of a given replica: its exact shape; of a slot with rows for held classes the largest."""

    slot: Slot
    shape: tuple[int, ...]

    @property
    def loose(self) -> bool:
        """Whether the first dimension depends on the client: the classes it holds, the updates it missed."""
        return self.slot.shape[:1] in {("held",), ("missing",), ("coded",)}

    def fits(self, shape: tuple[int, ...]) -> bool:
        if not self.loose:
            return shape == self.shape
        upto = self.shape[0] if self.slot.shape[0] == "held" else math.inf
        return len(shape) == len(self.shape) and shape[0] <= upto and shape[1:] == self.shape[1:]

    @property
    def bytes(self) -> int:
        return math.prod(self.shape) * self.slot.itemsize


@dataclass(frozen=True)
class Mail:
    """From the server to one client: train, tell of the new global model, evaluate your own, score a chunk."""

    errand: Errand
    round: int
    client: int
    items: Items = field(default_factory=dict)


@dataclass(frozen=True)
class Reply:
    """From a client to the server. `samples` weighs; the rest of the facts is for the log."""

    round: int
    client: int
    items: Items = field(default_factory=dict)
    samples: int = 0
    steps: int = 0
    seen: int = 0  # samples trained on, counted once for every pass
    loss: float = 0.0
    seconds: float = 0.0
    notes: dict[str, float] = field(
        default_factory=dict
    )  # diagnostics of a simulation; a real federation sends none
    error: str = ""  # why there is no answer, where an engine has to say so


def bytes_of(items: Mapping[str, Tensor]) -> dict[str, int]:
    """Exact bytes per item."""
    return {key: value.numel() * value.element_size() for key, value in items.items()}


def refusal(reply: Reply, declared: Mapping[str, Spec], *, weighed: bool) -> str | None:
    """Why a reply cannot be used, or None. Broadcastable shapes are wrong shapes."""
    if reply.error:
        return reply.error
    if why := _fact_refusal(reply, weighed=weighed):
        return why
    if missing := sorted(declared.keys() - reply.items.keys()):
        return f"lacks {', '.join(missing)}"
    if extra := sorted(reply.items.keys() - declared.keys()):
        return plain(f"sent undeclared {', '.join(extra)}")
    for key, spec in declared.items():
        value = reply.items[key]
        if value.dtype != spec.slot.dtype:
            return f"{key} is {_short(value.dtype)}, declared {_short(spec.slot.dtype)}"
        if not spec.fits(tuple(value.shape)):
            return plain(f"{key} has shape {tuple(value.shape)}, declared {spec.shape}")
        if value.is_floating_point() and not finite(value):
            return f"{key} is not finite"
    for key, spec in declared.items():
        if spec.slot.counts and (why := _class_refusal(reply, key, spec.slot)):
            return why
    for key, spec in declared.items():
        if why := _range_refusal(key, reply.items[key], spec.slot):
            return why
    if not math.isfinite(reply.loss):
        return "its training loss is not finite"
    return None


def _fact_refusal(reply: Reply, *, weighed: bool) -> str | None:
    """Counts are whole numbers that somebody could hold, also where nothing is weighed by them."""
    for name in ("samples", "steps", "seen"):
        count, least = getattr(reply, name), int(weighed and name == "samples")
        if type(count) is not int or not least <= count <= MOST_SAMPLES:  # True is no count
            return plain(f"claims {count!r} {name}")
    if type(reply.loss) is not float:
        return plain(f"claims a training loss of {reply.loss!r}")
    if type(reply.seconds) is not float or not 0 <= reply.seconds < math.inf:
        return plain(f"claims to have taken {reply.seconds!r} seconds")
    return None


def _range_refusal(key: str, value: Tensor, slot: Slot) -> str | None:
    """What a slot says of its values; whole numbers that are never negative are counts."""
    if slot.least is None:
        return None
    if bool((value < slot.least).any()):
        return f"{key} holds values below {slot.least:g}"
    if not slot.dtype.is_floating_point and bool((value > MOST_SAMPLES).any()):
        return f"claims impossible counts as {key}"
    return None


def finite(value: Tensor) -> bool:
    """Whether there is no NaN and no infinity; the sum tells at once, unless it overflows."""
    return math.isfinite(value.sum()) or bool(torch.isfinite(value).all())


def _class_refusal(reply: Reply, key: str, slot: Slot) -> str | None:
    """Class counts must be believable, and there must be a row for each class that is held."""
    counts = reply.items[f"{key.rpartition('.')[0]}.{slot.counts}"]
    if bool(((counts < 0) | (counts > MOST_SAMPLES)).any()):
        return f"claims impossible counts for {key}"
    held = int((counts > 0).sum())
    if slot.shape[0] == "held" and len(reply.items[key]) != held:
        return f"{key} has {len(reply.items[key])} rows for {held} classes"
    return None


def diverged(why: str) -> bool:
    """Whether a refusal says that numbers blew up rather than that a message was malformed."""
    return why.endswith("not finite")


def _short(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dump(items: Mapping[str, Tensor], facts: Mapping[str, object] | None = None) -> bytes:
    """Tensors and JSON facts as one safetensors blob; the same input gives the same bytes."""
    meta = {"facts": json.dumps(facts or {}, sort_keys=True)}
    apart = {key: items[key].detach().clone(memory_format=torch.contiguous_format) for key in sorted(items)}
    return safetensors.torch.save(apart, metadata=meta)  # it refuses tensors that share memory


def restore(blob: bytes) -> tuple[Items, dict[str, object]]:
    """The inverse of `dump`."""
    try:
        items = safetensors.torch.load(blob)
        header = json.loads(blob[8 : 8 + int.from_bytes(blob[:8], "little")])
        facts = json.loads(header.get("__metadata__", {}).get("facts", "{}"))
    except (safetensors.SafetensorError, ValueError, KeyError, AttributeError, RecursionError) as error:
        raise FedAlloyError(f"not a FedAlloy message: {plain(error)}") from None
    return items, facts


def fingerprint(items: Items) -> str:
    """sha256 over names, shapes, types and bits."""
    return hashlib.sha256(dump(items)).hexdigest()

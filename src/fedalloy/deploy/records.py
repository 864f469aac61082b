"""Mail and replies as Flower's records: named arrays and a few plain values; what comes in is believed in nothing."""

import math
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, MetricRecord, RecordDict

from fedalloy.core.wire import MOST_SAMPLES, Errand, Items, Mail, Reply
from fedalloy.errors import FedAlloyError

ERRANDS: dict[str, Errand] = {"train": "train", "evaluate": "evaluate", "tell": "tell"}  # what sites do
ITEMS, FACTS = "items", "facts"
MAGIC, MOST_HEADER = b"\x93NUMPY\x01\x00", 512
HEADER = re.compile(
    rb"\{'descr': '(?P<dtype>[<>|](?:b1|u1|i4|i8|f2|f4|f8))', 'fortran_order': False, "
    rb"'shape': \((?P<shape>|\d{1,12},|\d{1,12}(, \d{1,12}){1,15})\), \} *\n"
)

Facts = dict[str, int | float | str | bool]


def mail_record(mail: Mail, **facts: int | float | str) -> RecordDict:
    """A mail, and what a site has to know of the run besides."""
    return _record(mail.items, {"errand": mail.errand, "round": mail.round, "client": mail.client, **facts})


def read_mail(content: RecordDict) -> tuple[Mail, Facts]:
    """The inverse of `mail_record`."""
    items, facts = _items(content, math.inf), _facts(content)
    errand, round, client = facts.get("errand"), facts.get("round"), facts.get("client")
    if errand not in ERRANDS or type(round) is not int or type(client) is not int:
        raise FedAlloyError("this message is no mail of FedAlloy's")
    return Mail(ERRANDS[str(errand)], round, client, items), facts


def reply_record(reply: Reply) -> RecordDict:
    """A reply; notes stay at home, for they are diagnostics of simulations."""
    names = ("round", "client", "samples", "steps", "seen", "loss", "seconds")
    return _record(reply.items, {name: getattr(reply, name) for name in names})


def maskable_record(reply: Reply, *, by_samples: bool) -> RecordDict:
    """A reply in the form in which SecAgg+ looks for values to mask: arrays in the order of their names."""
    arrays = reply_record(reply).array_records[ITEMS]
    return RecordDict(
        {
            "fitres.parameters": ArrayRecord({key: arrays[key] for key in sorted(arrays)}),
            "fitres.num_examples": MetricRecord({"num_examples": reply.samples if by_samples else 1}),
            "fitres.metrics": ConfigRecord({}),
            "fitres.status": ConfigRecord({"code": 0, "message": ""}),
        }
    )


def read_reply(content: RecordDict, client: int, most_bytes: float = math.inf) -> Reply:
    """What a client answered; for anything but a reply an error that says what is wrong with it."""
    facts = _facts(content)
    counts = {name: facts.get(name) for name in ("round", "samples", "steps", "seen")}
    if wrong := [name for name, value in counts.items() if type(value) is not int]:
        raise FedAlloyError(f"sent no whole number as {wrong[0]}")
    times = {name: facts.get(name) for name in ("loss", "seconds")}
    if wrong := [name for name, value in times.items() if type(value) is not float]:
        raise FedAlloyError(f"sent no number as {wrong[0]}")
    if facts.get("client") != client or type(facts.get("client")) is not int:
        raise FedAlloyError(f"claims to be client {facts.get('client')}")
    if extra := sorted(facts.keys() - {*counts, *times, "client"}):
        raise FedAlloyError(f"sent undeclared {', '.join(extra)}")
    values: dict[str, Any] = {**counts, **times}
    for name in ("samples", "steps", "seen"):
        if not 0 <= values[name] <= MOST_SAMPLES:
            raise FedAlloyError(f"claims {values[name]} {name}")
    if not math.isfinite(values["seconds"]):
        raise FedAlloyError("took no time that a clock could show")
    return Reply(client=client, items=_items(content, most_bytes), **values)


def _record(items: Items, facts: Mapping[str, Any]) -> RecordDict:
    arrays = {key: Array(value.detach().contiguous().numpy()) for key, value in items.items()}
    return RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(dict(facts))})


def _facts(content: RecordDict) -> Facts:
    record = content.get(FACTS)
    if not isinstance(record, ConfigRecord) or content.keys() - {ITEMS, FACTS}:
        raise FedAlloyError("sent records of another kind")
    return {key: value for key, value in record.items() if isinstance(value, (int, float, str, bool))}


def _items(content: RecordDict, most_bytes: float) -> Items:
    record = content.get(ITEMS)
    if not isinstance(record, ArrayRecord):
        raise FedAlloyError("sent no arrays")
    size = sum(len(array.data) for array in record.values())
    if size > most_bytes:
        raise FedAlloyError(f"sent {size:,} bytes; at most {most_bytes:,.0f} are expected")
    if wrong := next((key for key, array in record.items() if array.stype != "numpy.ndarray"), None):
        raise FedAlloyError(f"{wrong} comes as {record[wrong].stype!r}")
    return {key: torch.from_numpy(read_array(key, array.data)) for key, array in record.items()}


def read_array(key: str, text: bytes) -> "np.ndarray[Any, np.dtype[Any]]":
    """Numbers in numpy's own form, whose header says neither more nor less than what follows it.

    The header is not given to numpy, which would read it as Python.
    """
    begin = len(MAGIC) + 2
    end = begin + int.from_bytes(text[len(MAGIC) : begin], "little")
    header = HEADER.fullmatch(text, begin, min(end, begin + MOST_HEADER))
    if not text.startswith(MAGIC) or header is None or header.end() != end:
        raise FedAlloyError(f"{key} is no array in the form of numpy's save")
    dtype = np.dtype(header["dtype"].decode())
    shape = tuple(int(size) for size in header["shape"].split(b",") if size.strip())
    left = len(text) - end
    if left != math.prod(shape) * dtype.itemsize:
        raise FedAlloyError(f"{key} is no array: {dtype} {shape} in {left} bytes")
    try:
        found = np.frombuffer(text, dtype, offset=end).reshape(shape)
    except ValueError:  # nothing at all, in sizes that no array has
        raise FedAlloyError(f"{key} is no array: {dtype} {shape}") from None
    return found.astype(dtype.newbyteorder("="))  # a copy of our own, which may be written to

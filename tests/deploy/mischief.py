"""Replies that no honest site would send: what can be done to an honest one so that it is certainly bad."""

import io
import math
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, Message, RecordDict
from loopback import SMALL, Loopback, travelled

from fedalloy.core.wire import Mail, Reply
from fedalloy.deploy.post import Lobby, Post
from fedalloy.deploy.records import FACTS, ITEMS, reply_record
from fedalloy.deploy.terms import read_settings
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Setup

Facts = dict[str, Any]
Arrays = dict[str, Array]
Mischief = Callable[[random.Random, Arrays, Facts], None]


class Bench:
    """A server after its first round, and the honest replies that it got."""

    def __init__(self, method: str, room: Path, **changes: Any) -> None:
        settings = {**SMALL, "method": method, **changes}
        config, terms = read_settings(settings)
        self.setup = Setup(config)
        self.grid = Loopback(settings, room / "state", [{}] * 3)
        lobby = Lobby(self.grid, 3)
        lobby.fill(3, 5.0)
        runtime = self.setup.runtime(RunFolder(room))
        self.post = Post(runtime, lobby, "0" * 32, terms)
        self.server = self.setup.server()
        self.server.round = 1
        self.mails = [self.server.send(client) for client in range(3)]
        self.honest = list(self.post.carry(self.mails))
        assert not self.server.receive(range(3), self.honest).refused
        self.server.round = 2
        self.mails = [self.server.send(client) for client in range(3)]
        self.honest = list(self.post.carry(self.mails))

    def read(self, content: RecordDict, mail: Mail) -> Reply:
        question = Message(RecordDict(), 100 + mail.client, "train")
        question.metadata.__dict__["_message_id"] = "question"
        return self.post._read(travelled(Message(content, reply_to=question)), mail)

    def judge(self, content: RecordDict, mail: Mail) -> str | None:
        """Why the server refuses this answer to a mail, or None if it takes it."""
        reply = self.read(content, mail)
        before = self.server.state()
        outcome = self.server.receive([mail.client], [reply])
        if outcome.accepted:
            return None
        after = self.server.state()
        assert all(torch.equal(before[key], after[key]) for key in before), (
            "a refused reply changed the server"
        )
        return outcome.refused[mail.client]


def taken_apart(reply: Reply) -> tuple[Arrays, Facts]:
    content = reply_record(reply)
    return dict(content.array_records[ITEMS]), dict(content.config_records[FACTS])


def array(value: "np.ndarray[Any, Any]") -> Array:
    return Array(np.array(value, order="C"))


def some(chance: random.Random, arrays: Arrays, *, floating: bool = False, filled: bool = True) -> str:
    keys = [
        key
        for key, value in arrays.items()
        if not (floating and value.numpy().dtype.kind != "f") and not (filled and value.numpy().size == 0)
    ]
    return chance.choice(sorted(keys))


def poisoned(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    key = some(chance, arrays, floating=True)
    value = arrays[key].numpy().copy()
    value.flat[chance.randrange(value.size)] = chance.choice([math.nan, math.inf, -math.inf])
    arrays[key] = array(value)


def misshapen(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    key = some(chance, arrays)
    value = arrays[key].numpy()
    flat = value.ravel()
    arrays[key] = array(
        chance.choice(
            [
                value[None],
                value[..., None],
                np.concatenate([flat, flat[:1], flat[:1]]),
                flat[:-1] if value.ndim == 1 and value.size > 1 else value[None],
                flat[0].reshape(()) if value.ndim else value[None],
                flat[:1].reshape((1,) * (value.ndim + 1)),
                np.stack([value, value]),
            ]
        )
    )


def mistyped(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    key = some(chance, arrays)
    value = arrays[key].numpy()
    kinds = ["float64", "float16", "int32", "uint8", "bool", "complex64", "S4", ">f4", "datetime64[s]"]
    kind = chance.choice([name for name in kinds if np.dtype(name) != value.dtype.newbyteorder("=")])
    if kind == ">f4" and value.dtype == np.float32:  # the same numbers, only in another order of bytes
        kind = "float64"
    arrays[key] = array(np.zeros(value.shape, np.dtype(kind)))


def missing(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    del arrays[chance.choice(sorted(arrays))]


def extra(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    name = chance.choice(
        ["share.more", "", "share", "x" * 500, "server.weights", "../weights", "share.weights "]
    )
    arrays[name] = array(np.zeros(chance.randrange(3)))


def miscounted(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    name = chance.choice(["samples", "steps", "seen"])
    wrong = [-1, -(10**15), True, "7", 2.0, math.nan, math.inf, b"7", [7]]
    facts[name] = chance.choice(wrong)


def mismeasured(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    facts[chance.choice(["loss", "seconds"])] = chance.choice(
        [math.nan, math.inf, -math.inf, "1", 1, [1.0], b"1"]
    )


def impostor(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    name = chance.choice(["client", "round"])
    facts[name] = chance.choice([facts[name] + chance.randrange(1, 99), -1, "0", True, 0.0, [0]])


def unstated(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    del facts[chance.choice(sorted(facts))]


def overstated(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    facts[chance.choice(["admin", "weight", "notes", "error"])] = chance.choice([1, "x", True, 0.5])


def garbled(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    key = some(chance, arrays, filled=False)
    one = arrays[key]
    data = bytes(one.data)
    noise = bytes(chance.randrange(256) for _ in range(64))
    lies = io.BytesIO()
    np.lib.format.write_array_header_1_0(
        lies,
        {"descr": "<f4", "fortran_order": chance.random() < 0.5, "shape": (2 ** chance.randrange(30, 62),)},
    )
    versioned = b"\x93NUMPY" + bytes([chance.choice([0, 2, 3, 9]), 0]) + data[8:]
    long = b"\x93NUMPY\x01\x00" + struct.pack("<H", 65535) + data[10:]
    choices = [
        data[: chance.randrange(len(data))],
        data + noise,
        noise,
        b"",
        lies.getvalue(),
        versioned,
        long,
    ]
    arrays[key] = Array(one.dtype, one.shape, one.stype, chance.choice(choices))


def foreign(chance: random.Random, arrays: Arrays, facts: Facts) -> None:
    key = some(chance, arrays, filled=False)
    one = arrays[key]
    kind = chance.choice(["pickle", "torch", "", "numpy.memmap"])
    arrays[key] = Array(one.dtype, one.shape, kind, bytes(one.data))


MISCHIEF: tuple[Mischief, ...] = (
    poisoned,
    misshapen,
    mistyped,
    missing,
    extra,
    miscounted,
    mismeasured,
    impostor,
    unstated,
    overstated,
    garbled,
    foreign,
)
WITHOUT_ARRAYS: tuple[Mischief, ...] = (extra, miscounted, mismeasured, impostor, unstated, overstated)

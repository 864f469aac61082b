"""Replies that no honest site would send: every one is refused by name, none is folded, none crashes the server."""

import io
import math
import random
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from loopback import SMALL, Loopback, travelled

from fedalloy.flower.post import Lobby, Post
from fedalloy.flower.records import FACTS, ITEMS, reply_record
from fedalloy.flower.terms import read_settings
from fedalloy.folder import RunFolder
from fedalloy.run import Setup
from fedalloy.wire import Mail, Reply

METHODS = ("fedavg", "scaffold", "feddw(mu=1)", "fedsce(p=1, mu=0.1)", "fedpac", "ssf(ratio=0.5)")
CASES_EACH = 400

Facts = dict[str, Any]
Arrays = dict[str, Array]
Mischief = Callable[[random.Random, Arrays, Facts], None]


class Bench:
    """A server after its first round, and the honest replies that it got."""

    def __init__(self, method: str, room: Path) -> None:
        settings = {**SMALL, "method": method}
        config, terms = read_settings(settings)
        self.setup = Setup(config)
        self.grid = Loopback(settings, room / "state", [{}] * 3)
        lobby = Lobby(self.grid, 3)
        lobby.fill(3, 5.0)
        workshop = self.setup.workshop(RunFolder(room))
        self.post = Post(workshop, lobby, "0" * 32, terms)
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


@pytest.fixture(scope="module", params=METHODS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(request.param, tmp_path_factory.mktemp("hostile"))


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


def generated(bench: Bench) -> Iterator[tuple[str, RecordDict, Mail]]:
    for number in range(CASES_EACH):
        chance = random.Random(number)
        place = chance.randrange(3)
        arrays, facts = taken_apart(bench.honest[place])
        does = MISCHIEF[number % len(MISCHIEF)]
        does(chance, arrays, facts)
        content = RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(facts)})
        yield f"{does.__name__} {number}", content, bench.mails[place]


def test_honest_replies_are_read_as_they_were_sent(bench: Bench) -> None:
    """Else refusing would prove nothing."""
    for reply, mail in zip(bench.honest, bench.mails, strict=True):
        read = bench.read(reply_record(reply), mail)
        assert not read.error
        assert read.items.keys() == reply.items.keys()
        assert all(torch.equal(read.items[key], value) for key, value in reply.items.items())


def test_no_hostile_reply_is_taken(bench: Bench) -> None:
    reasons = set()
    for name, content, mail in generated(bench):
        why = bench.judge(content, mail)
        assert why, f"{name} was taken"
        reasons.add(why.split()[0])
    assert len(reasons) > 5


def test_two_thousand_cases() -> None:
    assert CASES_EACH * len(METHODS) >= 2000


def test_a_number_of_samples_that_nobody_has(bench: Bench) -> None:
    for samples in (-1, 10**13, 2**62):
        arrays, facts = taken_apart(bench.honest[0])
        facts["samples"] = samples
        content = RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(facts)})
        assert bench.judge(content, bench.mails[0]) == f"claims {samples} samples"


def test_too_much_is_refused_before_it_is_unpacked(bench: Bench) -> None:
    arrays, facts = taken_apart(bench.honest[0])
    bench.post.most_bytes, most = 1000, bench.post.most_bytes
    arrays["big"] = array(np.zeros(1000))
    content = RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(facts)})
    why = bench.judge(content, bench.mails[0])
    bench.post.most_bytes = most
    assert why is not None
    assert "bytes; at most 1,000 are expected" in why


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({FACTS: ConfigRecord({"client": 0})}),
        RecordDict({ITEMS: MetricRecord({"a": 1}), FACTS: ConfigRecord({})}),
        RecordDict({ITEMS: ArrayRecord(), FACTS: MetricRecord({"client": 0})}),
        RecordDict({"more": ArrayRecord(), ITEMS: ArrayRecord(), FACTS: ConfigRecord({"client": 0})}),
    ],
)
def test_records_of_another_kind(bench: Bench, content: RecordDict) -> None:
    assert bench.judge(content, bench.mails[0])


def test_counts_that_cannot_be(tmp_path: Path) -> None:
    """Class counts weigh rows: negative, absurd or contradictory ones are refused."""
    bench = Bench("feddw(mu=1)", tmp_path)
    key = next(key for key in bench.honest[0].items if key.endswith("counts"))
    for change in (-1, 10**14):
        arrays, facts = taken_apart(bench.honest[0])
        counts = arrays[key].numpy().copy()
        counts[0] = change
        arrays[key] = array(counts)
        content = RecordDict({ITEMS: ArrayRecord(arrays), FACTS: ConfigRecord(facts)})
        assert "impossible counts" in str(bench.judge(content, bench.mails[0]))

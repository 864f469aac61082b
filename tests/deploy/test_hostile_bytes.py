"""Replies as bytes that somebody made up: Flower unpacks them, then our reader; nothing crashes, hangs or swells."""

import random
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from mischief import Bench

from fedalloy.core.wire import Mail, Reply
from fedalloy.deploy.hello import read_hello
from fedalloy.deploy.post import pulled
from fedalloy.deploy.records import FACTS, read_array, reply_record
from fedalloy.errors import FedAlloyError
from fuzzing import dice

METHODS = ("fedavg", "feddw(mu=1)", "scaffold", "ssf(ratio=0.5)")
MOST_MEMORY = 64 * 1024 * 1024  # bytes that reading one of these small replies may take
SCRAPS = (b"", b"\x00", b"\xff" * 8, b"\x93NUMPY", b"\x01\x00v\x00", b"{'descr': '|O'", b"(99999999999,)", b"pickle",
          b"\x80\x04", b"\xff\xff\xff\xff\xff\xff\xff\xff\x7f", b"numpy.ndarray", b"Array", b"\n" * 40)  # fmt: skip


class Stored:
    """A grid with one answer in it, in the form in which sites store it: objects by name, of any bytes."""

    def __init__(self, name: str, objects: dict[str, bytes]) -> None:
        self.name, self.objects = name, objects

    def pull_messages(self, messages: list[str]) -> list[Message]:
        found = cast(Message, inflate_object_from_contents(self.name, dict(self.objects)))
        found.metadata.__dict__["_message_id"] = "reply"
        return [found] if found.metadata.reply_to_message_id in messages else []


def stored(content: RecordDict, node: int) -> tuple[str, dict[str, bytes]]:
    question = Message(RecordDict(), node, "train")
    question.metadata.__dict__["_message_id"] = "question"
    answer = Message(content, reply_to=question)
    return answer.object_id, {name: one.deflate() for name, one in get_all_nested_objects(answer).items()}


def mutated(chance: random.Random, data: bytes) -> bytes:
    for _ in range(chance.choice([1, 1, 1, 2, 5])):
        at = chance.randrange(len(data) + 1)
        span = chance.choice([1, 1, 2, 4, 9, len(data)])
        scrap = chance.choice(SCRAPS)
        data = chance.choice(
            [
                data[:at] + bytes([chance.randrange(256)]) + data[at + 1 :],  # another byte
                data[:at] + data[at + span :],
                data[:at] + scrap + data[at:],
                data[:at] + scrap + data[at + len(scrap) :],
                data[:at] + data[at : at + span] * 2 + data[at + span :],
                data[at:] + data[:at],
            ]
        )
    return data


@pytest.fixture(scope="module", params=METHODS)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    return Bench(request.param, tmp_path_factory.mktemp("bytes"))


def cases(bench: Bench) -> Iterator[tuple[Any, Mail, list[tuple[str, Message | str]]]]:
    """Mutated replies, as the server pulls them."""
    originals = [stored(reply_record(reply), 100 + reply.client) for reply in bench.honest]
    for chance in dice(250, 25_000):
        place = chance.randrange(3)
        name, objects = originals[place]
        hit = chance.choice(sorted(objects))
        changed = objects | {hit: mutated(chance, objects[hit])}
        if chance.random() < 0.05:
            del changed[chance.choice(sorted(changed))]
        yield chance, bench.mails[place], pulled(cast(Any, Stored(name, changed)), ["question"])


def judged(bench: Bench, mail: Mail, found: list[tuple[str, Message | str]]) -> Reply | None:
    """The reply that the server reads, or None where it takes none."""
    if not found or isinstance(found[0][1], str):
        return None
    reply = bench.post._read(found[0][1], mail)
    outcome = bench.server.receive([mail.client], [reply])
    return reply if outcome.accepted else None


@pytest.mark.fuzz
def test_no_bytes_harm_the_server(bench: Bench) -> None:
    """What is taken has the form of an honest reply, to the last name, shape and type: only its numbers are others."""
    forms = [{key: (value.shape, value.dtype) for key, value in one.items.items()} for one in bench.honest]
    taken = 0
    for chance, mail, found in cases(bench):
        reply = judged(bench, mail, found)
        if reply is None:
            continue
        taken += 1
        assert {key: (value.shape, value.dtype) for key, value in reply.items.items()} in forms, chance
        assert all(value.isfinite().all() for value in reply.items.values() if value.is_floating_point()), (
            chance
        )
        assert (reply.client, reply.round) == (mail.client, mail.round), chance
        assert 0 <= reply.samples < 10**12, chance
    assert taken


@pytest.mark.fuzz
def test_no_bytes_fill_the_memory(bench: Bench) -> None:
    tracemalloc.start()
    try:
        for chance, mail, found in cases(bench):
            judged(bench, mail, found)
            assert tracemalloc.get_traced_memory()[1] < MOST_MEMORY, chance
            if chance.case % 250 == 249:
                break  # tracing is slow
    finally:
        tracemalloc.stop()


@pytest.mark.fuzz
def test_no_hello_of_bytes_is_a_guest_of_another_kind(tmp_path: Path) -> None:
    bench = Bench("fedavg", tmp_path)
    desk = bench.grid.desks[100]
    name, objects = stored(RecordDict({FACTS: ConfigRecord({**desk.hello()})}), 100)
    honest = read_hello(100, dict(pulled(cast(Any, Stored(name, objects)), ["question"]))["question"], 3)  # type: ignore[arg-type]
    refused = 0
    for chance in dice(250, 25_000):
        hit = chance.choice(sorted(objects))
        changed = objects | {hit: mutated(chance, objects[hit])}
        for _, answer in pulled(cast(Any, Stored(name, changed)), ["question"]):
            try:
                if isinstance(answer, str):
                    raise FedAlloyError(answer)
                guest = read_hello(100, answer, 3)
            except FedAlloyError:
                refused += 1
                continue
            assert 0 <= guest.client < 3, chance
            assert 0 <= guest.samples < 10**12, chance
            assert guest.inputs.kind == honest.inputs.kind, chance
    assert refused


@pytest.mark.parametrize(
    "header",
    [
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (3,",  # once ended the server: numpy reads Python here
        b"{'descr': '|O', 'fortran_order': False, 'shape': (3,), }\n",
        b"{'descr': '<f4', 'fortran_order': True, 'shape': (3,), }\n",
        b"{'descr': '|f4', 'fortran_order': False, 'shape': (0, 999999999999, 999999999999, 999999999999), }\n",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (-3,), }\n",
        b"{'descr': '<f4', 'fortran_order': False, 'shape': (3L,), }\n",
        b"(" * 400,
        b"",
    ],
)
def test_headers_that_numpy_would_read_as_python(header: bytes) -> None:
    for data in (bytes(12), b""):
        text = b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header + data
        with pytest.raises(FedAlloyError, match="key is no array"):
            read_array("key", text)

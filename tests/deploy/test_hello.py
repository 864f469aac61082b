"""Saying hello: whatever somebody says, the honest sites are let in and the lobby goes on."""

import json
import math
import random
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from loopback import travelled
from test_lobby import hello, prepared

from fedalloy import __version__
from fedalloy.core.net import Inputs
from fedalloy.deploy.hello import agreed_inputs, as_term, read_hello, said_inputs
from fedalloy.deploy.post import Lobby
from fedalloy.deploy.records import FACTS
from fedalloy.errors import FedAlloyError
from fuzzing import dice

DIGITS = Inputs("image", (1, 8, 8), 10)
LIE = '["image", [1, 9, 9], 10, 0]'
BRACKETS = "[" * 100_000


def answered(content: RecordDict) -> Message:
    question = Message(RecordDict(), 100, "query")
    question.metadata.__dict__["_message_id"] = "question"
    return travelled(Message(content, reply_to=question))


def test_what_is_said_is_what_is_heard() -> None:
    for inputs in (DIGITS, Inputs("vector", (30,), 2), Inputs("tokens", (40,), 4, 5000)):
        guest = read_hello(7, answered(hello(inputs=said_inputs(inputs))), 3)
        assert (guest.node, guest.client, guest.samples, guest.inputs) == (7, 0, 5, inputs)
        assert agreed_inputs(as_term(inputs), inputs.classes) == inputs


WORDS: dict[str, list[Any]] = {
    "columns": [
        "",
        "{}",
        "[1]",
        '["a"]',
        '["a", "a"]',
        BRACKETS,
        "[" * 150,
        '["' + "x" * 1000 + '"]',
        7,
        b"[]",
        ["a"],
    ],
    "client": [3, -1, 2**62, True, "0", 0.0, math.nan, b"0", [0], [0, 1]],
    "samples": [-1, 10**12 + 1, 2**62, -(2**62), True, "5", 5.0, math.nan, math.inf, b"5", [5]],
    "version": ["", "0.0.1", "9" * 100_000, __version__ + "\n", "\x1b[2J", 1, 0.1, b"1", [__version__], True],
    "inputs": [
        "",
        "[]",
        "{}",
        "null",
        "0",
        "NaN",
        "[[[[]]]]",
        BRACKETS,
        BRACKETS[:150],
        '{"a":' * 30,
        "x" * 10**6,
        7,
        b"x",
        ["x"],
        '["image", [1, 8, 8], 10]',
        '["image", [1, 8, 8], 10, 0, 0]',
        '["sound", [8], 10, 0]',
        '[["image"], [1, 8, 8], 10, 0]',
        "[null, [1, 8, 8], 10, 0]",
        '["image", [8, 8], 10, 0]',
        '["image", [], 10, 0]',
        '["vector", [0], 10, 0]',
        '["image", "188", 10, 0]',
        '["image", [1, 8, -8], 10, 0]',
        '["image", [1.0, 8, 8], 10, 0]',
        '["image", [1, 8, NaN], 10, 0]',
        '["image", [1, 8, true], 10, 0]',
        '["image", [1, 1e9, 1e9], 10, 0]',
        '["image", [1, 1000000000, 1000000000], 10, 0]',
        '["image", [1, 8, 8], 0, 0]',
        '["image", [1, 8, 8], -1, 0]',
        '["image", [1, 8, 8], 1e400, 0]',
        '["image", [1, 8, 8], "10", 0]',
        '["image", [1, 8, 8], ' + "9" * 150 + ", 0]",
        '["image", [1, 8, 8], 10, 1]',
        '["tokens", [8], 10, 0]',
        '["tokens", [8], 10, -5]',
        '["tokens", [8], 10, 100000000000]',
        '["image", [1, [8], 8], 10, 0]',
        '["image", {"0": 1}, 10, 0]',
        '["vector", [2, 2], 10, 0]',
    ],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, found in WORDS.items() for value in found]
)
def test_odd_words(name: str, value: Any) -> None:
    with pytest.raises(FedAlloyError) as error:
        read_hello(0, answered(hello(**{name: value})), 3)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400


def odd(chance: random.Random) -> RecordDict:
    """A hello with one thing in it that cannot be."""
    facts: dict[str, Any] = dict(hello(client=chance.randrange(3)).config_records[FACTS])
    way = chance.randrange(6)
    if way == 0:
        del facts[chance.choice(sorted(facts))]
    elif way == 1:
        facts[chance.choice(["admin", "", "x" * 1000, "Client"])] = chance.choice([1, "x", 0.5, True])
    elif way == 2:
        facts["inputs"] = garbled(chance)
    elif way == 3:
        shape = [chance.choice([0, -1, 10**9, 2**80, 0.5, None, "8", True, [8]]) for _ in range(3)]
        facts["inputs"] = json.dumps(["image", shape, 10, 0])
    elif way == 4:
        return chance.choice(
            [
                RecordDict(),
                RecordDict({FACTS: ArrayRecord()}),
                RecordDict({"more": ConfigRecord(), FACTS: ConfigRecord(facts)}),
            ]
        )
    else:
        name = chance.choice(sorted(WORDS))
        facts[name] = chance.choice(WORDS[name])
    return RecordDict({FACTS: ConfigRecord(facts)})


def garbled(chance: random.Random) -> str:
    """JSON with a letter more, less or other, that is certainly no description of a sample any more."""
    while True:
        letters = list('["image", [1, 8, 8], 10, 0]')
        for _ in range(chance.randrange(1, 4)):
            place = chance.randrange(len(letters))
            letters[place : place + chance.randrange(2)] = chance.choice(
                list('[]{},:"0159.eE-x \\\x00\u2028')
            )
        text = "".join(letters)
        try:
            json.loads(text)
        except ValueError:
            return text


@pytest.mark.fuzz
def test_generated_hellos() -> None:
    for chance in dice(300, 5000):
        print(chance)  # the case, should it fail
        with pytest.raises(FedAlloyError) as error:
            read_hello(0, answered(odd(chance)), 3)
        assert str(error.value).isprintable()


def liars(*nodes: int, **changes: Any) -> Any:
    def tamper(question: Message, answer: Message) -> Message:
        node = question.metadata.dst_node_id
        said = {"client": node - 100, **changes}
        return Message(hello(**said), reply_to=question) if node in nodes else answer

    return tamper


def test_a_first_liar_makes_nobody_a_stranger(tmp_path: Path) -> None:
    """The lowest node answers first; what it says of its samples is no norm for the others."""
    grid, _ = prepared(tmp_path)
    grid.tamper = liars(100, inputs=LIE)
    lobby = Lobby(grid, 3)
    lobby.fill(2, 5.0)
    assert lobby.norm == DIGITS
    assert lobby.guests.keys() == {1, 2}
    assert "samples of another kind" in lobby.turned_away[100]


def test_the_terms_are_the_norm_however_many_lie(tmp_path: Path) -> None:
    grid, _ = prepared(tmp_path)
    grid.tamper = liars(100, 101, inputs=LIE)
    lobby = Lobby(grid, 3, norm=agreed_inputs("image:1x8x8", 10))
    lobby.fill(1, 5.0)
    lobby.look()
    assert lobby.guests.keys() == {2}
    assert lobby.turned_away.keys() == {100, 101}


def test_everybody_wanted_and_one_lies(tmp_path: Path) -> None:
    """The error names the liar, not the honest."""
    grid, _ = prepared(tmp_path)
    grid.tamper = liars(100, inputs=LIE)
    with pytest.raises(
        FedAlloyError, match=r"2 of 3 sites .* missing: client 0; node 100 has samples of another"
    ):
        Lobby(grid, 3).fill(3, 0.5)


def test_a_single_site_does_not_decide(tmp_path: Path) -> None:
    grid, _ = prepared(tmp_path)
    grid.present = {100}
    with pytest.raises(FedAlloyError, match=r"no more than half of all sites agree .*: set the term inputs"):
        Lobby(grid, 3).fill(1, 0.5)
    lobby = Lobby(grid, 3, norm=DIGITS)
    lobby.fill(1, 0.5)
    assert lobby.guests.keys() == {0}


def test_other_classes_than_agreed(tmp_path: Path) -> None:
    grid, _ = prepared(tmp_path)
    grid.tamper = liars(100, inputs='["image", [1, 8, 8], 11, 0]')
    lobby = Lobby(grid, 3, classes=10)
    lobby.fill(2, 5.0)
    assert lobby.turned_away == {100: "knows 11 classes, 10 are agreed on"}


@pytest.mark.parametrize("inputs", [BRACKETS, LIE[:-1], "[" * 199])
def test_the_lobby_goes_on(tmp_path: Path, inputs: str) -> None:
    grid, _ = prepared(tmp_path)
    grid.tamper = liars(100, inputs=inputs)
    lobby = Lobby(grid, 3)
    lobby.fill(2, 5.0)
    assert lobby.guests.keys() == {1, 2}
    assert "nobody understands" in lobby.turned_away[100]


@pytest.mark.parametrize(
    "term", ["image", "image:8x8", "image:0x8x8", "vector:x", "tokens:5", "tokens:5:0", "vector:" + "9" * 500]
)
def test_terms_that_describe_no_sample(term: str) -> None:
    with pytest.raises(FedAlloyError, match=r"^inputs: "):
        agreed_inputs(term, 10)

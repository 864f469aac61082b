"""A site's hello: which client it is, how much it holds, what its samples look like; believed in nothing."""

import json
import math
import re
from dataclasses import dataclass
from typing import Any, cast, get_args

from flwr.app import ConfigRecord, Message

from fedalloy.core.net import Inputs, Kind
from fedalloy.core.version import VERSION
from fedalloy.core.wire import MOST_SAMPLES
from fedalloy.deploy.records import FACTS
from fedalloy.errors import FedAlloyError, plain

MOST_LETTERS = 200  # of what describes a sample, before anybody reads it
MOST_NUMBERS = 10**8  # of one sample
MOST_CLASSES = MOST_WORDS = 10**7
DIMENSIONS = {"image": 3, "vector": 1, "tokens": 1}
SAID = {"client", "samples", "version", "inputs"}
TERM = re.compile(r"(image:\d+x\d+x\d+|vector:\d+|tokens:\d+:\d+)", re.ASCII)


@dataclass(frozen=True)
class Guest:
    """A site that has said hello."""

    node: int
    client: int
    samples: int
    inputs: Inputs
    columns: tuple[str, ...] = ()  # of a table


def read_hello(node: int, answer: Message, clients: int) -> Guest:
    """Who said hello; a FedAlloyError for anything that no honest site would say."""
    if answer.has_error():
        raise FedAlloyError(f"could not say hello: {plain(answer.error.reason)}")
    facts = answer.content.get(FACTS)
    if (
        not isinstance(facts, ConfigRecord)
        or answer.content.keys() != {FACTS}
        or facts.keys() - {"columns"} != SAID
    ):
        raise FedAlloyError("said hello in words nobody understands")
    client, samples, version = facts["client"], facts["samples"], facts["version"]
    if type(client) is not int or type(samples) is not int or type(version) is not str:
        raise FedAlloyError("said hello in words nobody understands")
    if version != VERSION:
        raise FedAlloyError(plain(f"runs FedAlloy {version!r}, the server {VERSION}"))
    if not 0 <= client < clients:
        raise FedAlloyError(f"claims to be client {client} of {clients}")
    if not 0 <= samples <= MOST_SAMPLES:
        raise FedAlloyError(f"claims {samples} samples")
    inputs = _inputs(facts["inputs"])
    return Guest(node, client, samples, inputs, _columns(facts.get("columns", "[]"), inputs))


def said_inputs(inputs: Inputs) -> str:
    """What a site says of its samples."""
    return json.dumps([inputs.kind, list(inputs.shape), inputs.classes, inputs.vocab])


def _inputs(text: object) -> Inputs:
    """The inverse of `said_inputs`; nested, endless or absurd words are not followed."""
    if not isinstance(text, str) or len(text) > MOST_LETTERS:
        raise FedAlloyError("describes its samples in words nobody understands")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not (isinstance(found, list) and len(found) == 4 and isinstance(found[1], list)):
        raise FedAlloyError("describes its samples in words nobody understands")
    return believable(*found)


def _columns(text: object, inputs: Inputs) -> tuple[str, ...]:
    """The names of a table's columns, each once, or none."""
    most = MOST_LETTERS * (inputs.shape[0] + 1) if inputs.kind == "vector" else MOST_LETTERS
    try:
        found = json.loads(text) if isinstance(text, str) and len(text) <= most else None
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, list) or not all(type(name) is str for name in found):
        raise FedAlloyError("names its columns in words nobody understands")
    if found and ((len(found),) != inputs.shape or len(set(found)) != len(found)):
        raise FedAlloyError(f"names {len(found)} columns of samples of another kind")
    return tuple(found)


def believable(kind: Any, shape: list[Any], classes: Any, vocab: Any) -> Inputs:
    """Inputs that a net can be built for, or a FedAlloyError."""
    whole = all(type(number) is int for number in (*shape, classes, vocab))
    if kind not in get_args(Kind) or not whole:
        raise FedAlloyError("describes its samples in words nobody understands")
    absurd = (
        len(shape) != DIMENSIONS[kind]
        or min(shape) < 1
        or math.prod(shape) > MOST_NUMBERS
        or not 1 <= classes <= MOST_CLASSES
        or not (1 <= vocab <= MOST_WORDS if kind == "tokens" else vocab == 0)
    )
    if absurd:
        raise FedAlloyError(plain(f"claims samples of an impossible kind: {kind} {shape}, {classes} classes"))
    return Inputs(cast(Kind, kind), tuple(shape), classes, vocab)


def agreed_inputs(term: str, classes: int) -> Inputs:
    """The term `inputs`, such as image:3x32x32, vector:30 or tokens:40:5000 (length and vocabulary)."""
    if not TERM.fullmatch(term) or len(term) > MOST_LETTERS:
        raise FedAlloyError(
            f"inputs: expected such as image:3x32x32, vector:30 or tokens:40:5000, not {plain(term)!r}"
        )
    kind, shape, *vocab = term.split(":")
    try:
        return believable(kind, [int(n) for n in shape.split("x")], classes, int(vocab[0]) if vocab else 0)
    except FedAlloyError as error:
        raise FedAlloyError(f"inputs: {term} {error}") from None


def as_term(inputs: Inputs) -> str:
    """Inputs as they stand in the terms."""
    vocab = f":{inputs.vocab}" if inputs.kind == "tokens" else ""
    return f"{inputs.kind}:{'x'.join(map(str, inputs.shape))}{vocab}"

"""The steps of secure aggregation, checked on both sides, for Flower's protocol believes whoever speaks.

The server hands on only answers of the right form; a site refuses questions by which more than a sum could be read.
"""

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ec import SECP384R1, EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import load_pem_public_key
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage

from fedalloy.core.wire import MOST_SAMPLES
from fedalloy.deploy.records import read_array
from fedalloy.errors import FedAlloyError

MODULUS = 2**32  # of Flower's SecAgg+
LONGEST = 8192  # bytes of a key, a share or a share in its envelope
FITRES = ("fitres.parameters", "fitres.num_examples", "fitres.metrics", "fitres.status")

Shape = tuple[int, ...]


def check_answer(question: Message, answer: Message, shapes: list[Shape]) -> None:
    """For the server: refuse an answer that is not of the form that this step asks for."""
    asked = question.content.config_records[RECORD_KEY_CONFIGS]
    stage, node = str(asked[Key.STAGE]), question.metadata.dst_node_id
    if answer.metadata.src_node_id != node:
        raise FedAlloyError("answers in the name of another")
    said = _said(answer, stage)
    if stage == Stage.SETUP:
        _fields(said, Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2)
        for name in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2):
            _public_key(said[name])
    elif stage == Stage.SHARE_KEYS:
        _fields(said, Key.DESTINATION_LIST, Key.CIPHERTEXT_LIST)
        others = [int(name) for name in asked if name not in (Key.STAGE, str(node))]
        _pairs(said[Key.DESTINATION_LIST], said[Key.CIPHERTEXT_LIST], others)
    elif stage == Stage.COLLECT_MASKED_VECTORS:
        _fields(said, Key.MASKED_PARAMETERS)
        _masked_arrays(said[Key.MASKED_PARAMETERS], [(1,), *shapes])
    else:
        _fields(said, Key.NODE_ID_LIST, Key.SHARE_LIST)
        named = [_numbers(asked[name]) for name in (Key.ACTIVE_NODE_ID_LIST, Key.DEAD_NODE_ID_LIST)]
        _pairs(said[Key.NODE_ID_LIST], said[Key.SHARE_LIST], [*named[0], *named[1]])


def public_keys(answer: Message) -> set[bytes]:
    """The public keys in the answer of a site."""
    said = answer.content.config_records[RECORD_KEY_CONFIGS]
    return {key for name in (Key.PUBLIC_KEY_1, Key.PUBLIC_KEY_2) if isinstance(key := said.get(name), bytes)}


def check_question(asked: ConfigRecord) -> None:
    """For sites: refuse a step with which a server could read more than the sum."""
    if asked.get(Key.STAGE) == Stage.SETUP:
        sites, shares, threshold = (
            asked.get(name) for name in (Key.SAMPLE_NUMBER, Key.SHARE_NUMBER, Key.THRESHOLD)
        )
        if not (type(sites) is int and type(shares) is int and type(threshold) is int):
            raise FedAlloyError("secure aggregation was asked for without numbers of sites and shares")
        if sites < 2 or not shares / 2 < threshold <= shares:
            raise FedAlloyError(
                f"secure aggregation with {sites} sites and {threshold} of {shares} shares hides nothing"
            )
    if asked.get(Key.STAGE) == Stage.UNMASK:
        named = [
            *_numbers(asked.get(Key.ACTIVE_NODE_ID_LIST)),
            *_numbers(asked.get(Key.DEAD_NODE_ID_LIST)),
        ]
        if len(set(named)) != len(named):
            raise FedAlloyError("the server asks for both shares of one site, which would unmask it")


def _said(answer: Message, stage: str) -> ConfigRecord:
    """What a site says in a step; with its masked arrays come Flower's four records, which hold next to nothing."""
    content = answer.content
    with_arrays = stage == Stage.COLLECT_MASKED_VECTORS
    if content.keys() != {RECORD_KEY_CONFIGS, *(FITRES if with_arrays else ())}:
        raise FedAlloyError("sent other records")
    said = content[RECORD_KEY_CONFIGS]
    if not isinstance(said, ConfigRecord):
        raise FedAlloyError("sent other records")
    if with_arrays:
        arrays, counts, metrics, status = (content[name] for name in FITRES)
        if not (
            isinstance(arrays, ArrayRecord)
            and not arrays
            and isinstance(counts, MetricRecord)
            and counts.keys() == {"num_examples"}
            and isinstance(metrics, ConfigRecord)
            and not metrics
            and isinstance(status, ConfigRecord)
            and dict(status) == {"code": 0, "message": ""}
        ):
            raise FedAlloyError("sent other records")
        samples = counts["num_examples"]
        if type(samples) is not int or not 0 <= samples <= MOST_SAMPLES:
            raise FedAlloyError(f"claims {samples} samples")
    return said


def _fields(said: ConfigRecord, *names: str) -> None:
    if said.keys() != set(names):
        raise FedAlloyError(f"sent {', '.join(sorted(said)) or 'nothing'} for {', '.join(names)}")


def _public_key(value: object) -> None:
    if not isinstance(value, bytes) or len(value) > LONGEST:
        raise FedAlloyError("sent no public key")
    try:
        found = load_pem_public_key(value)
    except Exception:  # whatever the parser says to bytes that somebody made up
        raise FedAlloyError("sent no public key") from None
    if not isinstance(found, EllipticCurvePublicKey) or not isinstance(found.curve, SECP384R1):
        raise FedAlloyError("sent a public key of another kind")


def _numbers(value: object) -> list[int]:
    if not isinstance(value, list) or any(type(one) is not int for one in value):
        raise FedAlloyError("named no list of nodes")
    return value


def _pairs(nodes: object, texts: object, expected: list[int]) -> None:
    """For each node that was named one short text, and for nobody else."""
    if sorted(_numbers(nodes)) != sorted(expected):
        raise FedAlloyError("names other sites than it was asked about")
    if not isinstance(texts, list) or len(texts) != len(expected):
        raise FedAlloyError("sent another number of shares")
    if any(not isinstance(text, bytes) or not 0 < len(text) <= LONGEST for text in texts):
        raise FedAlloyError("sent what is no share")


def _masked_arrays(value: object, shapes: list[Shape]) -> None:
    if not isinstance(value, list) or len(value) != len(shapes):
        raise FedAlloyError(f"sent another number of arrays than {len(shapes)}")
    for place, (data, shape) in enumerate(zip(value, shapes, strict=True)):
        if not isinstance(data, bytes):
            raise FedAlloyError(f"array {place} is no array")
        found = read_array(f"array {place}", data)
        if found.shape != shape or found.dtype != np.int64:
            raise FedAlloyError(
                f"array {place} is {found.dtype} {found.shape}, declared int64 {tuple(shape)}"
            )
        if found.size and not (int(found.min()) >= 0 and int(found.max()) < MODULUS):
            raise FedAlloyError(f"array {place} holds numbers beyond the modulus")

"""Secure aggregation with a site that does not keep to it: it is left out by name, or no sum comes out; no crash."""

import io
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, x25519
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat
from flwr.app import ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS
from loopback import Loopback
from test_masked import SETTINGS, state

from fedalloy.deploy.server import serve
from fedalloy.deploy.steps import check_question
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.run import Result
from fuzzing import dice

SETUP, SHARE, COLLECT, UNMASK = "setup", "share_keys", "collect_masked_vectors", "unmask"
Twist = Callable[[dict[str, Any]], None]
LEFT_OUT = "breaks secure aggregation"


def pem(key: Any) -> bytes:
    return bytes(key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def saved(value: Any) -> bytes:
    file = io.BytesIO()
    np.save(file, value, allow_pickle=value.dtype == object)
    return file.getvalue()


def setting(**changes: Any) -> Twist:
    return lambda said: said.update(changes)


def without(name: str) -> Twist:
    return lambda said: said.pop(name)


def in_list(name: str, value: Any, place: int = 0) -> Twist:
    return lambda said: said[name].__setitem__(place, value)


def shorter(name: str) -> Twist:
    return lambda said: said[name].pop()


CURVE = pem(ec.generate_private_key(ec.SECP256R1()))
OTHER = pem(x25519.X25519PrivateKey.generate())
BROKEN: list[tuple[str, str, Twist]] = [
    (SETUP, "sent no public key", setting(pk1=b"no key")),
    (SETUP, "sent no public key", setting(pk2=b"\x00" * 10**6)),
    (SETUP, "sent no public key", setting(pk1="text")),
    (SETUP, "another kind", setting(pk1=CURVE)),
    (SETUP, "another kind", setting(pk2=OTHER)),
    (SETUP, "sent pk1 for pk1, pk2", without("pk2")),
    (SETUP, "for pk1, pk2", setting(more=1)),
    (SHARE, "no list of nodes", setting(dsts="all")),
    (SHARE, "names other sites", in_list("dsts", 7)),
    (SHARE, "names other sites", shorter("dsts")),
    (SHARE, "another number of shares", shorter("ctxts")),
    (SHARE, "no share", in_list("ctxts", b"")),
    (SHARE, "no share", in_list("ctxts", b"x" * 10**5)),
    (COLLECT, "another number of arrays", shorter("masked_params")),
    (COLLECT, "array 1 is no array", in_list("masked_params", b"junk", 1)),
    (COLLECT, "array 1 is int64 (3,)", in_list("masked_params", saved(np.zeros(3, np.int64)), 1)),
    (COLLECT, "array 0 is float64 (1,)", in_list("masked_params", saved(np.zeros(1)), 0)),
    (COLLECT, "beyond the modulus", in_list("masked_params", saved(np.full(1, -1)), 0)),
    (COLLECT, "beyond the modulus", in_list("masked_params", saved(np.full(1, 2**40)), 0)),
    (COLLECT, "array 0 is no array", in_list("masked_params", saved(np.array([print], dtype=object)), 0)),
    (UNMASK, "names other sites", in_list("nids", 7)),
    (UNMASK, "names other sites", in_list("nids", 101)),
    (UNMASK, "another number of shares", shorter("shares")),
    (UNMASK, "no share", in_list("shares", b"")),
]


def hostile(room: Path, tamper: Callable[[Message, Message], Message]) -> Result:
    """A run in which site 2 answers something else."""
    settings = {**SETTINGS, "masked": True, "rounds": 1, "run_folder": str(room / "run")}
    grid = Loopback(settings, room / "state", [{}] * 3)

    def by_site_2(question: Message, answer: Message) -> Message:
        masked = RECORD_KEY_CONFIGS in question.content.config_records
        return tamper(question, answer) if masked and question.metadata.dst_node_id == 102 else answer

    grid.tamper = by_site_2
    return serve(grid, settings)


def twisted(stage: str, twist: Twist) -> Callable[[Message, Message], Message]:
    def tamper(question: Message, answer: Message) -> Message:
        if question.content.config_records[RECORD_KEY_CONFIGS]["stage"] != stage:
            return answer
        content = RecordDict(dict(answer.content))
        said: dict[str, Any] = {
            name: list(value) if isinstance(value, list) else value
            for name, value in answer.content.config_records[RECORD_KEY_CONFIGS].items()
        }
        twist(said)
        content[RECORD_KEY_CONFIGS] = ConfigRecord(said)
        return Message(content, reply_to=question)

    return tamper


@pytest.mark.parametrize(("stage", "why", "twist"), BROKEN)
def test_whoever_breaks_the_form_is_left_out_by_name(
    tmp_path: Path, stage: str, why: str, twist: Twist
) -> None:
    result = hostile(tmp_path, twisted(stage, twist))
    (lost,) = [one for one in result.history[0]["refused"] if one["client"] == 2] or [{"why": ""}]
    if stage == UNMASK:  # its update is in the sum already, and others hold its shares
        assert result.history[0]["refused"] in ([], [lost])
    else:
        assert LEFT_OUT in lost["why"]
        assert why in lost["why"]
    assert state(result)["server.weights"].isfinite().all()
    assert state(result)["server.weights"].abs().max() < 8


@pytest.mark.parametrize(
    "records",
    [
        {},
        {RECORD_KEY_CONFIGS: ArrayRecord()},
        {RECORD_KEY_CONFIGS: MetricRecord({"a": 1})},
        {"more": ConfigRecord({"a": 1})},
        {"fitres.num_examples": MetricRecord({"num_examples": -5})},
        {"fitres.num_examples": MetricRecord({"num_examples": 10**15})},
        {"fitres.num_examples": MetricRecord({"num_examples": 1.5})},
        {"fitres.num_examples": MetricRecord({"others": 1})},
        {"fitres.status": ConfigRecord({"code": 5, "message": "x" * 1000})},
        {"fitres.parameters": ConfigRecord({})},
    ],
)
@pytest.mark.parametrize("stage", [SETUP, COLLECT])
def test_records_of_another_kind(tmp_path: Path, stage: str, records: dict[str, Any]) -> None:
    def tamper(question: Message, answer: Message) -> Message:
        if question.content.config_records[RECORD_KEY_CONFIGS]["stage"] != stage:
            return answer
        content = RecordDict({**dict(answer.content), **records} if records else {})
        return Message(content, reply_to=question)

    result = hostile(tmp_path, tamper)
    (lost,) = result.history[0]["refused"]
    assert (lost["client"], LEFT_OUT in lost["why"]) == (2, True)


def test_a_site_that_fails_in_a_step(tmp_path: Path) -> None:
    reason = "\x1b[2J" + "long" * 10**4
    result = hostile(tmp_path, lambda question, answer: Message(Error(0, reason), reply_to=question))
    (lost,) = result.history[0]["refused"]
    assert lost["why"].startswith("failed: ?[2Jlong")
    assert len(lost["why"]) < 400


@pytest.mark.parametrize(
    ("stage", "twist"),
    [
        (UNMASK, lambda said: said.update(shares=[b"\x01\x00\x00\x00" + b"x" * 48 for _ in said["shares"]])),
        (UNMASK, lambda said: said.update(shares=[share[::-1] for share in said["shares"]])),
        (UNMASK, lambda said: said.update(shares=[b"x" for _ in said["shares"]])),
        (SHARE, lambda said: said.update(ctxts=[b"gAAAA" for _ in said["ctxts"]])),
        (
            COLLECT,
            lambda said: said["masked_params"].__setitem__(0, saved(np.full(1, 2**31, np.int64))),
        ),
    ],
)
def test_what_only_shows_when_it_is_put_together(tmp_path: Path, stage: str, twist: Twist) -> None:
    """No sum comes out, or one that cannot be; the run ends with a sentence, for nobody's update is left."""
    with pytest.raises(FedAlloyError, match=r"round 1 brought 0 replies, 1 are needed: client 0"):
        hostile(tmp_path, twisted(stage, twist))


def test_a_weight_that_was_not_told(tmp_path: Path) -> None:
    """The samples told and the masked weight differ: the mean would be too long or too short for everybody."""

    def tamper(question: Message, answer: Message) -> Message:
        if question.content.config_records[RECORD_KEY_CONFIGS]["stage"] == COLLECT:
            answer.content["fitres.num_examples"] = MetricRecord({"num_examples": 3})
        return answer

    with pytest.raises(FedAlloyError, match="a masked sum came out that honest sites cannot have"):
        hostile(tmp_path, tamper)


def test_two_sites_with_one_key(tmp_path: Path) -> None:
    """Else honest sites would refuse to go on with anybody."""
    seen: list[Any] = []

    def tamper(question: Message, answer: Message) -> Message:
        said = dict(answer.content.config_records.get(RECORD_KEY_CONFIGS, {}))
        if "pk1" in said and question.metadata.dst_node_id != 100:
            seen.append(said["pk1"])
            said["pk1"] = seen[0]
            return Message(RecordDict({RECORD_KEY_CONFIGS: ConfigRecord(said)}), reply_to=question)
        return answer

    settings = {**SETTINGS, "masked": True, "rounds": 1, "run_folder": str(tmp_path / "run")}
    grid = Loopback(settings, tmp_path / "state", [{}] * 3)
    grid.tamper = tamper
    with pytest.raises(
        FedAlloyError, match="client 1 breaks secure aggregation: sent a public key that others"
    ):
        serve(grid, settings)


def test_a_key_that_is_taken_out_in_the_middle_of_a_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = {100: 0, 101: 1, 102: 2}
    monkeypatch.setattr("fedalloy.deploy.server.clients_by_node", lambda: dict(keys))

    def tamper(question: Message, answer: Message) -> Message:
        if question.content.config_records[RECORD_KEY_CONFIGS]["stage"] == COLLECT:
            keys.pop(102, None)
        return answer

    result = hostile(tmp_path, tamper)
    assert result.history[0]["refused"] == [{"client": 2, "why": "was let out: its key is no longer in"}]


@pytest.mark.parametrize(
    ("asked", "why"),
    [
        ({"stage": SETUP, "sample_num": 3, "share_num": 3, "threshold": 1}, "1 of 3 shares hides nothing"),
        ({"stage": SETUP, "sample_num": 1, "share_num": 1, "threshold": 1}, "1 sites"),
        ({"stage": SETUP, "sample_num": 4, "share_num": 4, "threshold": 2}, "2 of 4"),
        ({"stage": SETUP, "sample_num": 4, "share_num": 4, "threshold": True}, "without numbers"),
        ({"stage": SETUP}, "without numbers"),
        ({"stage": UNMASK, "active_nids": [100, 101], "dead_nids": [101]}, "both shares of one site"),
        ({"stage": UNMASK, "active_nids": [100, 100], "dead_nids": []}, "both shares of one site"),
        ({"stage": UNMASK, "active_nids": "all", "dead_nids": []}, "no list of nodes"),
    ],
)
def test_a_site_refuses_questions_that_would_unmask_somebody(asked: dict[str, Any], why: str) -> None:
    with pytest.raises(FedAlloyError, match=why):
        check_question(ConfigRecord(asked))


@pytest.mark.fuzz
def test_no_answer_crashes_the_server(tmp_path: Path) -> None:
    """Whatever a site says in whichever step: a result without it or with its mere noise, or a sentence."""
    values: list[Any] = [
        0,
        -1,
        1.5,
        "x",
        b"",
        b"\xff" * 60,
        True,
        [],
        [0],
        [b"a"],
        ["x"],
        [1.5],
        [2**60],
        10**18,
    ]
    names = ["pk1", "pk2", "dsts", "ctxts", "masked_params", "nids", "shares", "stage", ""]
    for number, chance in enumerate(dice(12, 1500)):
        hostile_run(tmp_path / str(number), chance, names, values)


def hostile_run(room: Path, chance: random.Random, names: list[str], values: list[Any]) -> None:
    stage = chance.choice([SETUP, SHARE, COLLECT, UNMASK])

    def twist(said: dict[str, Any]) -> None:
        for _ in range(chance.randrange(1, 4)):
            name = chance.choice([*said, *names])
            held = said.get(name)
            if isinstance(held, list) and held and chance.random() < 0.7:
                place = chance.randrange(len(held))
                old = held[place]
                if isinstance(old, bytes) and old and chance.random() < 0.7:
                    at = chance.randrange(len(old))
                    held[place] = old[:at] + bytes([chance.randrange(256)]) + old[at + 1 :]
                else:
                    said[name] = held[:place] + held[place + 1 :]
            else:
                said[name] = chance.choice(values)

    with suppress(FedAlloyError):
        result = hostile(room, twisted(stage, twist))
        assert state(result)["server.weights"].abs().max() < 16, f"{stage} {chance}"

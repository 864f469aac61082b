"""Nothing leaves a site but by the door: errors say no more than a code, and the audit log holds all that left."""

import getpass
import json
import logging
import os
import platform
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects
from flwr.supercore.task_identity import TaskIdentity
from loopback import SMALL, Loopback

from fedalloy.core.wire import Errand, Mail
from fedalloy.deploy import site, worker
from fedalloy.deploy.audit import Audit, AuditError
from fedalloy.deploy.errors import SENTENCES, SiteError, blamed, site_log, told
from fedalloy.deploy.records import mail_record
from fedalloy.deploy.server import serve

SECRETS = ["zebrafish", "Philips", "gantry", "quokka", "pangolin", "narwhal"]
RUN = "0" * 32


def question(content: RecordDict, kind: str = "train") -> Message:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    message = Message(content, 1, kind, group_id="1")
    message.metadata.__dict__["_message_id"] = "question"
    return message


def mail(errand: Errand = "train", client: int = 0, run: str = RUN, **facts: Any) -> RecordDict:
    return mail_record(Mail(errand, 1, client), run=run, **facts)


def sent(message: Message) -> bytes:
    """Every byte of a message."""
    return b"".join(one.deflate() for one in get_all_nested_objects(message).values())


def innocent(reply: Message) -> None:
    blob = sent(reply).lower()
    for word in [*SECRETS, platform.node(), getpass.getuser()]:
        assert len(word) < 4 or word.lower().encode() not in blob, word


@pytest.fixture
def room(tmp_path: Path) -> Path:
    """A data root whose every name and value is a secret; its table is broken in a cell."""
    folder = tmp_path / "zebrafish-ward"
    folder.mkdir()
    (folder / "pangolin.csv").write_text("gantry,label\n1,quokka\nPhilips,narwhal\n2,quokka\n")
    return folder


def ask(room: Path, message: Message, settings: dict[str, Any] | None = None, **node: Any) -> Message:
    config = {"clients": 3, "data": "scans", "class-names": "quokka,narwhal", **(settings or {})}
    nodes = {"client": 0, "state": str(room / "state"), "data-root": str(room), "data": "pangolin", **node}
    return site.answer(message, Context(1, 1, nodes, RecordDict(), config))


HELLO = RecordDict({"hello": ConfigRecord({"version": "1"})})
STEP = RecordDict({"secaggplus_configs": ConfigRecord({"stage": "setup"})})


@pytest.mark.parametrize("content", [HELLO, mail(), mail("evaluate"), mail("tell"), STEP, RecordDict()])
@pytest.mark.parametrize("kind", ["query", "train", "evaluate"])
def test_a_bad_table_tells_nothing(room: Path, content: RecordDict, kind: str) -> None:
    reply = ask(room, question(content, kind))
    assert reply.error.reason == f"data: {SENTENCES['data']}; its own log says why"
    innocent(reply)


DEALT = {**SMALL, "class-names": ""}


@pytest.mark.parametrize(
    ("content", "settings", "node", "code"),
    [
        (HELLO, {"lr": "quokka"}, {}, "settings"),
        (HELLO, {"zebrafish": 1}, {}, "settings"),
        (HELLO, {}, {"client": "Philips"}, "wrong-client"),
        (HELLO, {**DEALT, "method": "zebrafish:quokka"}, {"data": "digits"}, "refused-code"),
        (HELLO, DEALT, {"data": "digits", "most-epsilon": 1.0}, "privacy-limit"),
        (mail(client=2), DEALT, {"data": "digits"}, "wrong-client"),
        (mail(run="narwhal"), DEALT, {"data": "digits"}, "bad-message"),
        (mail(), DEALT, {"data": "digits", "only-masked": True}, "not-masked"),
        (RecordDict({"facts": ConfigRecord({"errand": "score"})}), DEALT, {"data": "digits"}, "bad-message"),
        (RecordDict({"gantry": ArrayRecord()}), DEALT, {"data": "digits"}, "bad-message"),
        (STEP, DEALT, {"data": "digits"}, "bad-message"),
        (mail(), DEALT, {"data": "digits"}, "internal"),
    ],
)
def test_every_refusal_has_a_code_and_no_more(
    room: Path, content: RecordDict, settings: dict[str, Any], node: dict[str, Any], code: str
) -> None:
    own = {"data-root": "", **node} if settings.get("sites") == "dealt" else node
    reply = ask(room, question(content), settings, **own)
    assert reply.error.reason == f"{code}: {SENTENCES[code]}; its own log says why"  # type: ignore[index]
    innocent(reply)
    (line,) = Audit(room / "state").entries()
    assert (line["kind"], line["bytes"]) == ("error", len(reply.error.reason))


def test_a_masked_step_under_another_kind_of_message_gets_no_update(room: Path) -> None:
    """Flower's own part hands such a message on, and would send what comes back as it is."""
    content = mail()
    content["secaggplus_configs"] = ConfigRecord({"stage": "setup"})
    reply = ask(
        room, question(content, "query"), DEALT, data="digits", **{"data-root": "", "only-masked": True}
    )
    assert reply.has_error()
    assert str(reply.error.reason).startswith("not-masked: ")


def test_any_error_at_all_is_told_by_the_list() -> None:
    for error in (ValueError("Philips"), KeyError("Philips"), OSError(28, "Philips"), MemoryError("Philips")):
        with pytest.raises(SiteError) as caught, blamed("data"):
            raise error
        for found in (error, caught.value):
            assert told(found).partition(": ")[0] in SENTENCES
            assert "Philips" not in told(found)
    assert told(OSError(28, "x")).startswith("no-room: ")
    assert told(MemoryError()).startswith("no-memory: ")
    assert "Philips" in str(caught.value)


def test_the_whole_story_stays_here(room: Path) -> None:
    before = os.umask(0)
    try:
        with site_log(room / "state") as log:
            ask(room, question(HELLO, "query"))
            logging.getLogger("flwr").warning("flower's part")
    finally:
        os.umask(before)
    story = log.read_text()
    assert "Philips" in story
    assert "Traceback" in story
    assert "flower's part" in story
    assert stat.S_IMODE(log.stat().st_mode) == 0o600


def test_the_worker_pushes_nothing_else(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither in the message nor in the words that go with the end of a task."""
    pushed: list[Any] = []
    context = Context(1, 1, {}, RecordDict(), {})
    monkeypatch.setattr(worker, "HeartbeatSender", lambda _: _Heart())
    monkeypatch.setattr(worker, "pull_task_input", lambda _: (question(HELLO, "query"), context, None, None))
    monkeypatch.setattr(worker, "push_message", lambda _, reply, __: pushed.append(sent(reply)))
    monkeypatch.setattr(
        worker, "push_task_output", lambda _, __, *words: pushed.append(" ".join(words).encode())
    )

    def broken(message: Message, context: Context) -> Message:
        raise AuditError("Philips")

    for answer in (lambda message, _: ask(room, message), broken):
        worker._handle("127.0.0.1:1", "token", answer)
    assert len(pushed) == 3  # a reply and its end; of what could not be written down the end alone
    assert not [word for word in SECRETS for blob in pushed if word.encode() in blob]


class _Heart:
    def start(self) -> None: ...

    def stop(self) -> None: ...


# The audit log


def logged(grid: Loopback) -> dict[int, list[dict[str, Any]]]:
    return {node: Audit(desk.state / f"audit-{node}").entries() for node, desk in grid.desks.items()}


def weighed(message: Message) -> dict[str, int]:
    """Bytes by slot, counted anew from what went over the wire."""
    if message.has_error():
        return {"error": len(message.error.reason or "")}
    found: dict[str, int] = {}
    for record in message.content.array_records.values():
        found |= {key: len(array.data) for key, array in record.items()}
    for name, other in [*message.content.config_records.items(), *message.content.metric_records.items()]:
        found[name] = len(other.deflate())
    return found


@pytest.mark.parametrize(
    ("changes", "kinds"),
    [
        ({}, {"hello", "train"}),
        ({"method": "fedper"}, {"hello", "train", "evaluate"}),
        ({"method": "ccvr"}, {"hello", "train", "tell"}),
        (
            {"method": "fedavg", "masked": True},
            {
                "hello",
                *(f"masked {step}" for step in ("setup", "share_keys", "collect_masked_vectors", "unmask")),
            },
        ),
        ({"method": "fedavg+private(noise=2)", "model": "mlp(hidden=4)"}, {"hello", "train"}),
    ],
)
def test_the_log_holds_what_was_sent(tmp_path: Path, changes: dict[str, Any], kinds: set[str]) -> None:
    settings = {**SMALL, "rounds": 2, "run_folder": str(tmp_path / "run"), "join_limit": 2.0, **changes}
    grid = Loopback(settings, tmp_path / "state", [{}] * 3)
    serve(grid, settings)
    found = logged(grid)
    assert {line["kind"] for line in found[100]} == kinds
    for node, lines in found.items():
        left = [weighed(message) for sender, message in grid.left if sender == node]
        assert [line["slots"] for line in lines] == left
        assert [line["bytes"] for line in lines] == [sum(slots.values()) for slots in left]
        assert {line["round"] for line in lines} == {None, 1, 2}
        assert {line["to"] for line in lines} == {"loopback:1"}
        spent = [line["epsilon"] for line in lines if line["epsilon"] is not None]
        assert spent == (pytest.approx([2.17, 3.19], abs=0.01) if "private" in settings["method"] else [])
        assert Audit(tmp_path / "state" / f"audit-{node}").verify() == len(lines)


def book(tmp_path: Path, lines: int = 4) -> Audit:
    audit = Audit(tmp_path / "state")
    for number in range(lines):
        audit.append({"round": number})
    return audit


def taken_away(blob: list[bytes]) -> list[bytes]:
    return [*blob[:1], *blob[2:]]


def changed(blob: list[bytes]) -> list[bytes]:
    return [blob[0].replace(b'"round": 0', b'"round": 7'), *blob[1:]]


def last_changed(blob: list[bytes]) -> list[bytes]:
    return [*blob[:-1], blob[-1].replace(b'"round": 3', b'"round": 7')]


def cut_short(blob: list[bytes]) -> list[bytes]:
    return blob[:-1]


def swapped(blob: list[bytes]) -> list[bytes]:
    return [blob[0], blob[2], blob[1], blob[3]]


def added(blob: list[bytes]) -> list[bytes]:
    return [*blob, b'{"round": 9}\n']


def emptied(blob: list[bytes]) -> list[bytes]:
    return []


@pytest.mark.parametrize("does", [taken_away, changed, last_changed, cut_short, swapped, added, emptied])
def test_damage_to_the_log_is_noticed(tmp_path: Path, does: Callable[[list[bytes]], list[bytes]]) -> None:
    audit = book(tmp_path)
    assert audit.verify() == 4
    audit.path.write_bytes(b"".join(does(audit.path.read_bytes().splitlines(keepends=True))))
    with pytest.raises(AuditError, match="not as it was written"):
        audit.verify()


def test_a_log_without_its_head_is_not_believed(tmp_path: Path) -> None:
    audit = book(tmp_path)
    audit.head.unlink()
    with pytest.raises(AuditError):
        audit.append({})


def test_a_process_that_died_in_the_middle(tmp_path: Path) -> None:
    """A line without its head counts; half a line, whose message never left, does not."""
    audit = book(tmp_path)
    head = audit.head.read_bytes()
    audit.append({"round": 4})
    audit.head.write_bytes(head)
    assert audit.verify() == 5
    with audit.path.open("ab") as file:
        file.write(b'{"round": 5, "prev')
    audit.append({"round": 6})
    assert audit.verify() == 6
    assert [line["round"] for line in audit.entries()] == [0, 1, 2, 3, 4, 6]


def test_the_log_is_its_owners(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        audit = book(tmp_path)
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (audit.path, audit.head)} == {0o600}
    assert stat.S_IMODE(audit.path.parent.stat().st_mode) == 0o700


@pytest.mark.parametrize("way", ["a folder in its place", "a link", "no room", "damaged"])
def test_what_cannot_be_written_down_does_not_leave(
    room: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    audit = Audit(room / "state")
    audit.path.parent.mkdir()
    if way == "a folder in its place":
        audit.path.mkdir()
    elif way == "a link":
        audit.path.symlink_to("/dev/null")
    elif way == "no room":
        monkeypatch.setattr(os, "fsync", _no_room)
    else:
        audit.path.write_bytes(b"{}\n")
    with pytest.raises(AuditError, match=r"nothing leaves this site"):
        ask(room, question(HELLO, "query"))


def _no_room(file: int) -> None:
    raise OSError(28, "No space left on device")


def test_a_worker_that_cannot_write_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that its operator sees the sentence, and the SuperNode does not wait for ever."""

    class Node:
        def AcquireTask(self, request: Any) -> Any:  # noqa: N802
            return self

        def HasField(self, name: str) -> bool:  # noqa: N802
            return True

        token = "token"

        def close(self) -> None: ...

    def broken(message: Message, context: Context) -> Message:
        raise AuditError("nothing leaves this site: no room")

    def handle(address: str, token: str, answer: worker.Answer) -> None:
        with pytest.raises(AuditError):
            answer(question(HELLO), Context(1, 1, {}, RecordDict(), {}))

    monkeypatch.setattr(worker, "_client", lambda *_: Node())
    monkeypatch.setattr(worker, "_handle", handle)
    with pytest.raises(AuditError, match="no room"):
        worker.work("127.0.0.1:1", b"", broken, lambda: True)


def test_what_a_server_says_of_itself_is_not_copied_into_the_log(room: Path) -> None:
    message = question(mail(run="x" * 5000))
    message.metadata.__dict__["_group_id"] = "9" * 5000
    ask(room, message)
    (line,) = Audit(room / "state").entries()
    assert (line["run"], line["round"]) == (None, None)
    assert len(json.dumps(line)) < 600


def test_how_long_private_work_took_stays_here(tmp_path: Path) -> None:
    settings = {**SMALL, "method": "fedavg+private", "rounds": 1, "run_folder": str(tmp_path / "run")}
    grid = Loopback(settings, tmp_path / "state", [{}] * 3)
    serve(grid, settings)
    replies = [message for _, message in grid.left if "items" in message.content]
    assert replies
    assert {reply.content.config_records["facts"]["seconds"] for reply in replies} == {0.0}

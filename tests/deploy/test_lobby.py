"""Who is let in, who is waited for, and for how long."""

import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.run import RunNotRunningException
from flwr.supernode import start_client_internal
from loopback import SMALL, Loopback

from fedalloy import __version__
from fedalloy.core.net import Inputs
from fedalloy.core.wire import Mail
from fedalloy.deploy import node
from fedalloy.deploy.post import Lobby
from fedalloy.deploy.records import FACTS, mail_record
from fedalloy.deploy.server import serve
from fedalloy.deploy.site import Desk, greet_or_answer
from fedalloy.deploy.terms import Terms
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Record, Result

SETTINGS: dict[str, Any] = {**SMALL, "join_limit": 0.5, "round_limit": 0.5}


def prepared(room: Path, **changes: Any) -> tuple[Loopback, dict[str, Any]]:
    settings = {**SETTINGS, "run_folder": str(room / "run"), **changes}
    return Loopback(settings, room / "state", [{}] * 3), settings


def played(room: Path, **changes: Any) -> Result:
    return serve(*prepared(room, **changes))


def test_too_few_sites_end_in_an_error_that_names_them(tmp_path: Path) -> None:
    grid, settings = prepared(tmp_path)
    grid.present = {100, 102}
    with pytest.raises(FedAlloyError, match=r"2 of 3 sites joined within 0.5 s; missing: client 1"):
        serve(grid, settings)
    assert not (tmp_path / "run").exists()


def test_enough_is_enough(tmp_path: Path) -> None:
    grid, settings = prepared(tmp_path, least_sites=2)
    grid.present = {100, 102}
    history = serve(grid, settings).history
    assert [line["refused"] for line in history] == [[{"client": 1, "why": "is not connected"}]] * 3


def second_round_of_client_1(question: Message) -> bool:
    return question.metadata.group_id == "2" and question.metadata.dst_node_id == 101


def test_a_round_goes_on_without_a_silent_site(tmp_path: Path) -> None:
    grid, settings = prepared(tmp_path)
    grid.deaf = second_round_of_client_1
    history = serve(grid, settings).history
    missing = {"client": 1, "why": "did not answer within 0.5 s"}
    assert [line["refused"] for line in history] == [[], [missing], []]


def test_a_site_that_comes_back_has_its_private_state(tmp_path: Path) -> None:
    """Gone in round 2, back in round 3 as a new process: as if the old one had gone on, unless its disk is lost."""

    def outage(name: str, *, restarted: bool, state: str) -> str:
        grid, settings = prepared(tmp_path / name)

        def deaf(question: Message) -> bool:
            gone = second_round_of_client_1(question)
            if gone and restarted:
                grid.desks[101] = Desk(settings, {"client": 1, "state": str(tmp_path / name / state)})
            return gone

        grid.deaf = deaf
        result = serve(grid, settings)
        assert [len(line["refused"]) for line in result.history] == [0, 1, 0]
        return str(result.summary["weights_sha256"])

    never_left = outage("same", restarted=False, state="state")
    assert outage("new", restarted=True, state="state") == never_left
    assert outage("lost", restarted=True, state="elsewhere") != never_left


def test_no_usable_reply_is_an_error(tmp_path: Path) -> None:
    grid, settings = prepared(tmp_path)

    def broken(question: Message, answer: Message) -> Message:
        return Message(RecordDict(), reply_to=question) if question.metadata.group_id == "2" else answer

    grid.tamper = broken
    with pytest.raises(
        FedAlloyError, match=r"round 2 brought 0 replies, 1 are needed: client 0 sent records"
    ):
        serve(grid, settings)
    grid.tamper = lambda question, answer: answer
    carried_on = serve(grid, settings)
    assert carried_on.summary["weights_sha256"] == played(tmp_path / "whole").summary["weights_sha256"]


def test_as_many_replies_as_were_agreed(tmp_path: Path) -> None:
    grid, settings = prepared(tmp_path, least_replies=3)
    grid.tamper = lambda question, answer: (
        Message(RecordDict(), reply_to=question)
        if question.metadata.group_id == "3" and question.metadata.dst_node_id == 100
        else answer
    )
    with pytest.raises(FedAlloyError, match=r"round 3 brought 2 replies, 3 are needed"):
        serve(grid, settings)


@pytest.mark.parametrize("after", [1, 2])
def test_a_server_that_was_killed_carries_on(
    tmp_path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = played(tmp_path / "whole")
    grid, settings = prepared(tmp_path / "cut")

    def kill(record: Record) -> None:
        if record["round"] == after:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("fedalloy.deploy.server._after_round", kill)
        with pytest.raises(KeyboardInterrupt):
            serve(grid, settings)
    result = serve(Loopback(settings, tmp_path / "cut" / "state", [{}] * 3), settings)
    assert result.summary["weights_sha256"] == whole.summary["weights_sha256"]
    assert len(result.history) == 3


def test_other_settings_are_another_run(tmp_path: Path) -> None:
    played(tmp_path)
    grid, settings = prepared(tmp_path, lr=0.5)
    with pytest.raises(FedAlloyError, match="give another run-folder"):
        serve(grid, settings)


# Saying hello


def hello(**changes: Any) -> RecordDict:
    facts: dict[str, Any] = {
        "client": 0,
        "samples": 5,
        "version": __version__,
        "inputs": '["image", [1, 8, 8], 10, 0]',
    }
    return RecordDict({FACTS: ConfigRecord({**facts, **changes})})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"version": "0.0.1"}, "runs FedAlloy '0.0.1'"),
        ({"client": 3}, "claims to be client 3 of 3"),
        ({"client": -1}, "claims to be client -1 of 3"),
        ({"client": "0"}, "nobody understands"),
        ({"samples": -1}, "claims -1 samples"),
        ({"inputs": "[]"}, "nobody understands"),
        ({"inputs": '["image", [1, 9, 9], 10, 0]', "client": 1}, "samples of another kind"),
        ({"client": 0}, "claims to be client 0, which is node 100"),
    ],
)
def test_strange_guests_are_turned_away(tmp_path: Path, changes: dict[str, Any], why: str) -> None:
    grid, _ = prepared(tmp_path)
    grid.present = {100, 101}
    grid.tamper = lambda question, answer: (
        Message(hello(**changes), reply_to=question) if question.metadata.dst_node_id == 101 else answer
    )
    lobby = Lobby(grid, 3, norm=Inputs("image", (1, 8, 8), 10))
    with pytest.raises(FedAlloyError, match=r"1 of 2 sites joined"):
        lobby.fill(2, 0.5)
    assert why in lobby.turned_away[101]
    assert lobby.guests.keys() == {0}


# What a site refuses


def desk(tmp_path: Path, **node: Any) -> Desk:
    return Desk(SETTINGS, {"client": 1, "state": str(tmp_path), **node})


@pytest.mark.parametrize("client", [None, 3, -1, "1", True, 1.0])
def test_a_site_must_know_which_client_it_is(tmp_path: Path, client: Any) -> None:
    with pytest.raises(FedAlloyError, match=r"names no client; they run from 0 to 2"):
        desk(tmp_path, client=client)


CODE = ["os:getcwd", "subprocess:getoutput(cmd='touch made')", "fedavg()+subprocess:getoutput(cmd='touch made')",
        "fedsce(aux='subprocess:getoutput')", "mlp(hidden=4)+os:system(command='touch made')"]  # fmt: skip


@pytest.mark.parametrize("name", ["method", "model", "models"])
@pytest.mark.parametrize("text", CODE)
def test_a_server_cannot_make_a_site_import_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FedAlloyError, match=r"the server names code outside of FedAlloy \("):
        Desk({**SETTINGS, name: text}, {"client": 1, "state": str(tmp_path)})
    assert not list(tmp_path.iterdir())


TEXTS = [
    name
    for name, field in {**Config.model_fields, **Terms.model_fields}.items()
    if "str" in str(field.annotation)
]


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("text", [CODE[2], "../../etc/passwd", "hf:some/set", "a+hf:some/set"])
def test_no_text_of_a_server_runs_fetches_or_leads_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    """It is refused, or it is none of a site's business and nothing comes of it."""
    monkeypatch.chdir(tmp_path)
    known = set(sys.modules)
    with suppress(FedAlloyError):
        made = Desk({**SETTINGS, name: text}, {"client": 1, "state": str(tmp_path)})
        assert made.config.data_root is None
        assert name not in ("method", "model", "models", "data", "skew", "augment")
    assert not list(tmp_path.iterdir())
    assert "datasets" not in set(sys.modules) - known


@pytest.mark.parametrize("name", ["data-root", "data_root"])
def test_where_data_lie_is_the_sites_own_business(tmp_path: Path, name: str) -> None:
    (tmp_path / "mine.csv").write_text("a,label\n1,x\n2,y\n")
    with pytest.raises(FedAlloyError, match="give --data-root"):
        Desk({**SETTINGS, "data": "mine", "data-root": str(tmp_path), name: str(tmp_path)}, {"client": 1})
    with pytest.raises(FedAlloyError, match="this site reads only its own folder, not a\\+hf:x/y"):
        Desk({**SETTINGS, "data": "a+hf:x/y"}, {"client": 1, "data-root": str(tmp_path)})


@pytest.mark.parametrize("run", ["", "..", "a/b", "A" * 32, "0" * 31, "0" * 33])
def test_a_run_is_a_plain_number(tmp_path: Path, run: str) -> None:
    mail = mail_record(Mail("train", 1, 1), run=run, checkpoint=0, clients=3, samples=9)
    with pytest.raises(FedAlloyError, match="names no run"):
        greet_or_answer(desk(tmp_path), asked(mail))
    assert not list(tmp_path.iterdir())


def test_mail_for_somebody_else(tmp_path: Path) -> None:
    mail = mail_record(Mail("train", 1, 2), run="0" * 32, checkpoint=0, clients=3, samples=9)
    with pytest.raises(FedAlloyError, match="this site is client 1, the mail is for client 2"):
        greet_or_answer(desk(tmp_path), asked(mail))


def test_a_site_scores_nothing_for_the_server(tmp_path: Path) -> None:
    mail = mail_record(replace(Mail("train", 1, 1), errand="score"), run="0" * 32)
    with pytest.raises(FedAlloyError, match="no mail of FedAlloy's"):
        greet_or_answer(desk(tmp_path), asked(mail))


def asked(content: RecordDict) -> Message:
    message = Message(content, 1, "train")
    message.metadata.__dict__["_message_id"] = "question"
    return message


def test_what_cannot_be_unpacked_harms_nobody_else(tmp_path: Path) -> None:
    """Flower's own reader raises on a made-up object: its sender is refused, the others are heard."""
    grid, settings = prepared(tmp_path)
    ordinary = grid.pull_messages

    def pull(names: Any) -> Any:
        for name in names:
            question = grid.waiting[name]
            if question.metadata.group_id == "2" and question.metadata.dst_node_id == 100:
                raise RuntimeError("no such object")
        return ordinary(names)

    grid.pull_messages = pull  # type: ignore[method-assign, assignment]
    history = serve(grid, settings).history
    why = "sent what cannot be unpacked: no such object"
    assert [line["refused"] for line in history] == [[], [{"client": 0, "why": why}], []]


def test_a_run_that_was_stopped_stops(tmp_path: Path) -> None:
    """Flower says so by an error of its own, which is nobody's malformed reply."""
    grid, settings = prepared(tmp_path)
    ordinary = grid.pull_messages

    def pull(names: Any) -> Any:
        if any(grid.waiting[name].metadata.group_id == "2" for name in names):
            raise RunNotRunningException
        return ordinary(names)

    grid.pull_messages = pull  # type: ignore[method-assign, assignment]
    with pytest.raises(RunNotRunningException):
        serve(grid, settings)
    assert len(RunFolder(tmp_path / "run").history()) == 1


def test_a_node_looks_for_messages_more_often_than_flower_would(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    monkeypatch.setattr(start_client_internal, "time", time)
    monkeypatch.setattr(node, "flower_supernode", lambda: vars(start_client_internal)["time"].sleep(3))
    monkeypatch.setattr("sys.argv", ["node", "0.5", "--insecure"])
    ended: list[int] = []
    monkeypatch.setattr("os._exit", ended.append)
    node.main()
    assert (slept, ended) == ([0.5], [1])
    assert sys.argv == ["node", "--insecure"]
    assert vars(start_client_internal)["time"].monotonic() > 0

"""A client is its key: who is taken for whom, and what a key that is gone is still good for."""

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord, Message
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from loopback import SMALL, Loopback

from fedalloy.deploy import masked, server
from fedalloy.deploy.credentials import make_site_key
from fedalloy.deploy.deploy import Deployment, free_port
from fedalloy.deploy.post import LET_OUT, Lobby
from fedalloy.deploy.records import FACTS
from fedalloy.deploy.roster import ROSTER, Roster, clients_by_node, keys_in
from fedalloy.deploy.terms import Terms
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config

SETTINGS: dict[str, Any] = {**SMALL, "join_limit": 0.5, "round_limit": 5.0}
ROLL = {100: 0, 101: 1, 102: 2}  # client by node


def grid_in(room: Path, **changes: Any) -> tuple[Loopback, dict[str, Any]]:
    settings = {**SETTINGS, "run_folder": str(room / "run"), **changes}
    return Loopback(settings, room / "state", [{}] * 3), settings


def test_another_key_is_not_client_0_while_site_0_is_down(tmp_path: Path) -> None:
    grid, _ = grid_in(tmp_path)
    grid.present = {101, 102}

    def claims(question: Message, answer: Message) -> Message:
        facts = answer.content[FACTS]
        assert isinstance(facts, ConfigRecord)
        if question.metadata.dst_node_id == 101:
            facts["client"] = 0
        return answer

    grid.tamper = claims
    lobby = Lobby(grid, 3, lambda: ROLL)
    with pytest.raises(FedAlloyError, match="node 101 claims to be client 0, whose key it does not have"):
        lobby.fill(2, 0.5)
    assert lobby.guests.keys() == {2}


def test_a_key_let_out_in_the_middle_of_a_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its reply is not waited for, and not used if it is there; the round and the run go on."""
    grid, settings = grid_in(tmp_path)
    roll = dict(ROLL)
    ordinary = grid.push_messages

    def push(messages: Any) -> Any:
        kept = list(messages)
        if any(one.metadata.group_id == "2" for one in kept):
            roll.pop(101, None)
        return ordinary(kept)

    grid.push_messages = push  # type: ignore[method-assign]
    monkeypatch.setattr(server, "clients_by_node", lambda: roll)
    history = server.serve(grid, settings).history
    gone = {"client": 1, "why": "was let out: its key is no longer in"}
    assert [line["refused"] for line in history] == [
        [],
        [gone],
        [{"client": 1, "why": "is not connected"}],
    ]


def test_a_reply_that_was_there_when_its_key_was_let_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model is the one of a run without it: nothing of the reply was used."""
    rolls: dict[str, dict[int, int]] = {}

    def play(name: str, tamper: Any = None, absent: int | None = None) -> Any:
        grid, settings = grid_in(tmp_path / name, rounds=1, method="fedavg", round_limit=1.0)
        rolls[name] = dict(ROLL)
        monkeypatch.setattr(server, "clients_by_node", lambda: rolls[name])
        grid.tamper = tamper or grid.tamper
        grid.deaf = lambda question: (
            question.metadata.dst_node_id == absent and question.metadata.group_id == "1"
        )
        return server.serve(grid, settings)

    def out(question: Message, answer: Message) -> Message:
        if question.metadata.message_type == "train":
            rolls["out"].pop(101, None)
        return answer

    result = play("out", out)
    assert result.history[0]["refused"] == [{"client": 1, "why": LET_OUT}]
    without = play("without", absent=101)
    assert result.summary["weights_sha256"] == without.summary["weights_sha256"]
    assert result.summary["weights_sha256"] != play("with").summary["weights_sha256"]


@pytest.mark.parametrize("when", ["with its part", "after its part", "when masks are taken off"])
def test_a_key_let_out_is_in_no_masked_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    """Its part is left out; where it is in the sum already there is none: the run ends by name, and can go on."""
    grid, settings = grid_in(tmp_path, method="fedavg", masked=True, rounds=2)
    roll, asked = dict(ROLL), list[str]()
    monkeypatch.setattr(server, "clients_by_node", lambda: roll)
    stage = Stage.UNMASK if when == "when masks are taken off" else Stage.COLLECT_MASKED_VECTORS

    def out(question: Message, answer: Message) -> Message:
        config = question.content.config_records.get(RECORD_KEY_CONFIGS)
        if config is not None and question.metadata.group_id == "2":
            asked.append(str(config[Key.STAGE]))
            if config[Key.STAGE] == stage and when != "after its part":
                roll.pop(101, None)
        return answer

    def late(checked: Any, answers: list[Message]) -> list[Message]:
        if when == "after its part" and asked[-1:] == [Stage.COLLECT_MASKED_VECTORS]:
            roll.pop(101, None)
        return answers

    grid.tamper = out
    monkeypatch.setattr(masked._Checked, "_distinct", late)
    if when == "with its part":
        history = server.serve(grid, settings).history
        assert history[1]["refused"] == [{"client": 1, "why": LET_OUT}]
        return
    why = r"a masked sum with client 1, which was let out: .* cannot be taken out"
    with pytest.raises(FedAlloyError, match=why):
        server.serve(grid, settings)
    assert (Stage.UNMASK in asked) is (stage == Stage.UNMASK)  # else nobody took off a mask
    grid.tamper, grid.present = (lambda question, answer: answer), {100, 102}
    history = server.serve(grid, {**settings, "least_sites": 2}).history
    assert history[1]["refused"] == [{"client": 1, "why": "is not connected"}]


def sites(room: Path, count: int = 2) -> Path:
    for client in range(count):
        make_site_key(room / f"site-{client}")
    return room


def test_the_roster_follows_the_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place, numbers = sites(tmp_path / "sites"), iter(range(7, 99))
    out: list[int] = []
    roster = Roster(tmp_path / "roster.json")

    def follow() -> list[str]:
        return roster.follow(keys_in(place), lambda name, file: next(numbers), out.append)

    assert len(follow()) == 2
    assert follow() == []
    assert roster.clients == {7: 0, 8: 1}
    make_site_key(place / "site-0")  # a rotation
    assert len(follow()) == 2
    assert (roster.clients, out) == ({9: 0, 8: 1}, [7])
    (place / "site-1" / "key.pub").unlink()  # a removal
    follow()
    assert (roster.clients, out) == ({9: 0}, [7, 8])
    assert roster.file.stat().st_mode & 0o077 == 0
    monkeypatch.setenv(ROSTER, str(roster.file))
    assert clients_by_node() == {9: 0}


def test_a_key_is_out_even_if_flower_cannot_be_told(tmp_path: Path) -> None:
    place, roster = sites(tmp_path / "sites"), Roster(tmp_path / "roster.json")
    roster.follow(keys_in(place), lambda name, file: int(name[-1]), lambda node: None)
    (place / "site-0" / "key.pub").unlink()

    def broken(node: int) -> None:
        raise FedAlloyError("nobody listens")

    with pytest.raises(FedAlloyError, match="nobody listens"):
        roster.follow(keys_in(place), lambda name, file: 5, broken)
    assert roster.entries.keys() == {"site-1"}


def test_one_key_for_two_sites(tmp_path: Path) -> None:
    place = sites(tmp_path / "sites")
    (place / "site-1" / "key.pub").write_bytes((place / "site-0" / "key.pub").read_bytes())
    with pytest.raises(FedAlloyError, match="every site needs a key of its own"):
        Roster(tmp_path / "roster.json").follow(keys_in(place), lambda name, file: 1, lambda node: None)


def test_what_is_no_key(tmp_path: Path) -> None:
    place = sites(tmp_path / "sites")
    (place / "site-1" / "key.pub").write_text("ssh-rsa nonsense")
    with pytest.raises(FedAlloyError, match="holds no public key"):
        Roster(tmp_path / "roster.json").follow(keys_in(place), lambda name, file: 1, lambda node: None)


def test_a_server_that_takes_no_run_yet_is_a_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Deployment, "__init__", lambda self, folder: setattr(self, "folder", folder))
    monkeypatch.setattr(Deployment, "flwr", lambda *_: {})
    with pytest.raises(FedAlloyError, match="wait until it says that it is ready"):
        Deployment(tmp_path).start_run()


def test_there_is_no_run_without_a_server(tmp_path: Path) -> None:
    made = Deployment.create(
        tmp_path / "made", Config(clients=2), Terms(sites="dealt"), ["127.0.0.1"], free_port()
    )
    with pytest.raises(FedAlloyError, match="the server does not run; type: fedalloy deploy server"):
        made.start_run()

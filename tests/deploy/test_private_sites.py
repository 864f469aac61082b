"""A site whose method seals what leaves: its own secret, one answer a round, and no numbers beside the update."""

import stat
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity

from fedalloy.core.files import kept_secret
from fedalloy.core.wire import Errand, Mail, Reply
from fedalloy.data.federation import federate
from fedalloy.deploy import server as serving
from fedalloy.deploy.post import Lobby
from fedalloy.deploy.records import mail_record, read_reply
from fedalloy.deploy.server import _refuse_local_tests, serve
from fedalloy.deploy.site import Desk
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.run import Setup, one_thread
from fedalloy.round.client import client_round

RUN, OTHER = "0" * 32, "1" * 32
SETTINGS: dict[str, Any] = {
    "method": "fedavg+private(clip=0.5)",
    "model": "mlp(hidden=8)",
    "clients": 3,
    "skew": "iid",
    "rounds": 2,
    "sites": "dealt",
}


def desk(state: Path, **settings: Any) -> Desk:
    return Desk({**SETTINGS, **settings}, {"client": 1, "state": str(state)})


def mail_of(site: Desk, round: int = 1, errand: Errand = "train") -> Mail:
    server = site.setup.server()
    server.round = round
    return replace(server.send(1), errand=errand)


def asked(site: Desk, mail: Mail, run: str = RUN) -> Reply:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    record = mail_record(mail, run=run, checkpoint=0, clients=3, samples=3)
    question = Message(record, 1, "train")
    question.metadata.__dict__["_message_id"] = "question"
    return read_reply(site.answer(question).content, 1)


def test_noise_comes_from_a_secret_of_this_site_and_run(tmp_path: Path) -> None:
    """A clean reply, plus noise that nobody can guess from the seed; the same again after a restart."""
    one, other = desk(tmp_path / "one"), desk(tmp_path / "other")
    mail = mail_of(one)
    weights = asked(one, mail).items["share.weights"]
    with one_thread():
        guessed, _ = client_round(
            one.setup.method, one.setup.replicas.of(1), one.federation.client(1), one.federation.info,
            one.config.local, {}, mail, 0,
        )  # fmt: skip
    assert not (weights == guessed.items["share.weights"]).any()
    assert not (weights == asked(other, mail).items["share.weights"]).any()
    assert not (weights == asked(one, mail, run=OTHER).items["share.weights"]).any()
    assert torch.equal(weights, asked(desk(tmp_path / "one"), mail).items["share.weights"])
    secret = tmp_path / "one" / "secrets" / RUN
    assert stat.S_IMODE(secret.stat().st_mode) == 0o600
    assert kept_secret(secret) == kept_secret(secret) > 2**128
    assert not list((tmp_path / "one" / "secrets").glob(".*"))


@pytest.mark.parametrize(
    ("method", "most", "why"),
    [
        ("fedavg+private(noise=2)", 3.5, ""),
        ("fedavg+private(noise=2)", 3.0, "may spend epsilon 3.19"),
        ("fedavg+private(noise=2, where=server)", 99.0, "adds the noise itself"),
        ("fedavg", 99.0, "adds the noise itself"),
    ],
)
def test_a_site_says_how_much_it_will_spend(tmp_path: Path, method: str, most: float, why: str) -> None:
    node = {"client": 1, "state": str(tmp_path), "most-epsilon": most}
    if not why:
        Desk({**SETTINGS, "method": method}, node)
        return
    with pytest.raises(FedAlloyError, match=why):
        Desk({**SETTINGS, "method": method}, node)


def limited(state: Path, most: float, **settings: Any) -> Desk:
    node = {"client": 1, "state": str(state), "most-epsilon": most}
    return Desk({**SETTINGS, "method": "fedavg+private(noise=2)", **settings}, node)


def test_many_runs_spend_no_more_than_one(tmp_path: Path) -> None:
    """A limit that a server could get around by beginning anew would be none."""
    site = limited(tmp_path, 4.5)
    first, second = mail_of(site), mail_of(site, round=2)
    for mail in (first, second, first):  # the same again costs nothing
        asked(site, mail)
    asked(site, first, run=OTHER)
    with pytest.raises(FedAlloyError, match=r"2 runs would spend epsilon 4\.[67]\d; this site allows 4.5"):
        asked(site, second, run=OTHER)
    with pytest.raises(FedAlloyError, match="3 runs would spend epsilon"):
        asked(limited(tmp_path, 4.5, seed=1), first, run="2" * 32)
    asked(limited(tmp_path, 5.0), second, run=OTHER)


def test_a_large_delta_hides_nothing_from_the_site(tmp_path: Path) -> None:
    with pytest.raises(FedAlloyError, match=r"may spend epsilon 3\.19"):
        limited(tmp_path, 3.0, method="fedavg+private(noise=2, delta=0.9)")


def test_rounds_of_any_noise_add_up(tmp_path: Path) -> None:
    site, thin = limited(tmp_path, 8.2), limited(tmp_path, 8.2, method="fedavg+private(noise=0.9)")
    for round in (1, 2):
        asked(site, mail_of(site, round=round))
    asked(thin, mail_of(site), run=OTHER)
    with pytest.raises(FedAlloyError, match="2 runs would spend epsilon"):
        asked(thin, mail_of(site, round=2), run=OTHER)


@pytest.mark.parametrize("lost", ["journal", "counts"])
def test_an_earlier_run_is_not_forgotten(tmp_path: Path, lost: str) -> None:
    site = limited(tmp_path, 4.0)
    asked(site, mail_of(site))
    for file in (tmp_path / lost).iterdir():
        file.unlink()
    with pytest.raises(FedAlloyError, match=r"(journal|counts).* is damaged"):
        asked(site, mail_of(site), run=OTHER)


def test_what_is_not_sealed_stays_at_home(tmp_path: Path) -> None:
    site, plain = desk(tmp_path / "p"), desk(tmp_path / "q", method="fedavg")
    reply, open_ = asked(site, mail_of(site)), asked(plain, mail_of(plain))
    assert (reply.samples, reply.steps, reply.seen, reply.loss) == (0, 0, 0, 0.0)
    assert min(open_.samples, open_.steps, open_.seen, open_.loss) > 0
    assert site.hello()["samples"] == 1
    assert int(plain.hello()["samples"]) > 1
    assert not (tmp_path / "q" / "secrets").exists()
    server = site.setup.server()
    server.round = 1
    assert not server.receive([1], [reply]).refused


def test_a_round_is_answered_once(tmp_path: Path) -> None:
    site = desk(tmp_path)
    mail = mail_of(site)
    first = asked(site, mail)
    assert torch.equal(asked(site, mail).items["share.weights"], first.items["share.weights"])
    other = replace(mail, items={**mail.items, "share.weights": mail.items["share.weights"] + 1})
    with pytest.raises(FedAlloyError, match="round 1 was answered already, to another mail"):
        asked(site, other)
    with pytest.raises(FedAlloyError, match="round 1 was answered already, to another mail"):
        asked(desk(tmp_path, method="fedavg+private(clip=5)"), mail)
    asked(site, replace(other, round=2))
    for round in (0, 3):
        with pytest.raises(FedAlloyError, match=f"round {round} is none of the 2 that were agreed on"):
            asked(site, replace(mail, round=round))
    plain = desk(tmp_path, method="fedavg")
    for items in (mail.items, other.items):
        asked(plain, replace(mail, items=items))


def test_models_are_not_tried_at_sites(tmp_path: Path) -> None:
    site = desk(tmp_path)
    with pytest.raises(FedAlloyError, match="does not cover tests at the sites: this one only trains"):
        asked(site, mail_of(site, errand="evaluate"))


@pytest.mark.parametrize(("method", "fine"), [("fedavg", True), ("fedper", False)])
def test_the_server_says_so_before_it_begins(method: str, fine: bool) -> None:
    fed = federate("digits", clients=3, skew="iid")
    setup = Setup(Config.of({**fed.origin, "method": f"{method}+private", "model": "mlp(hidden=8)"}), fed)
    if fine:
        _refuse_local_tests(setup)
    else:
        with pytest.raises(
            FedAlloyError, match=r"^private does not cover tests at the sites: give the server"
        ):
            _refuse_local_tests(setup)
    _refuse_local_tests(Setup(Config.of({**fed.origin, "method": method, "model": "mlp(hidden=8)"}), fed))


def test_the_server_has_a_secret_of_its_own_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Per run, the same after a restart; only where it is needed."""
    monkeypatch.setattr(Lobby, "fill", lambda *_: None)
    monkeypatch.setattr(serving, "play", lambda setup, *_, **__: setup.server().secret)
    grid: Any = None

    def secret(folder: str, method: str = "fedavg+private(where=server)") -> Any:
        return serve(grid, {**SETTINGS, "method": method, "run-folder": str(tmp_path / folder)})

    assert secret("a") == secret("a") > 2**128
    assert secret("b") != secret("a")
    assert stat.S_IMODE((tmp_path / "a" / "secret").stat().st_mode) == 0o600
    assert secret("c", "fedavg") == 0
    assert not (tmp_path / "c" / "secret").exists()
    with pytest.raises(FedAlloyError, match="does not cover tests at the sites"):
        secret("d", "fedper+private")
    assert not (tmp_path / "d").exists()

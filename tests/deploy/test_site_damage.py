"""What a site keeps between rounds is as it wrote it, or it answers no more; what it spent is never forgotten."""

import json
import os
import random
import shutil
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from flwr.app import Message
from flwr.supercore.task_identity import TaskIdentity
from loopback import SMALL, Loopback

from fedalloy.core.wire import Items, Mail
from fedalloy.deploy.errors import SiteError
from fedalloy.deploy.records import mail_record, read_reply
from fedalloy.deploy.server import serve
from fedalloy.deploy.site import Desk
from fedalloy.errors import FedAlloyError
from fedalloy.round.vault import Vault
from fuzzing import dice

RUN, OTHER = "0" * 32, "1" * 32
METHODS = {"stateful": "scaffold", "private": "fedavg+private(clip=0.5)"}
CLIENT, ROUNDS = 1, 4


def question(mail: Mail, run: str = RUN, checkpoint: int = 0) -> Message:
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    asked = Message(mail_record(mail, run=run, checkpoint=checkpoint, clients=3, samples=300), 1, "train")
    asked.metadata.__dict__["_message_id"] = "question"
    return asked


class Site:
    """A site and the mail it gets, whatever it answers."""

    def __init__(self, kind: str, state: Path) -> None:
        settings = {**SMALL, "method": METHODS[kind], "rounds": ROUNDS}
        self.state = state
        self.desk = Desk(settings, {"client": CLIENT, "state": str(state)})
        server = self.desk.setup.server()
        self.mails: list[Mail] = []
        for number in range(1, ROUNDS + 1):
            server.round = number
            self.mails.append(server.send(CLIENT))

    def answer(self, round: int, run: str = RUN, checkpoint: int = 0) -> Items:
        asked = question(self.mails[round - 1], run, checkpoint)
        return read_reply(self.desk.answer(asked).content, CLIENT).items

    def spent(self) -> float:
        return self.desk.spent(question(self.mails[0])) or 0.0


def same(one: Items, other: Items) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


Make = Callable[[str, Path], tuple[Site, Items]]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A site after two rounds of one run and of another, and what it would say in the third round."""
    made: dict[str, tuple[Site, Path, Items]] = {}

    def at(kind: str, place: Path) -> tuple[Site, Items]:
        if kind not in made:
            room = tmp_path_factory.mktemp(kind)
            site = Site(kind, room / "state")
            for run in (RUN, OTHER):
                site.answer(1, run)
            shutil.copytree(room / "state", room / "earlier")
            for run in (RUN, OTHER):
                site.answer(2, run)
            shutil.copytree(room / "earlier", room / "state" / "earlier")  # what a backup may hold
            shutil.copytree(room / "state", room / "before")
            made[kind] = site, room / "before", site.answer(3)
        site, before, expected = made[kind]
        shutil.rmtree(place, ignore_errors=True)
        shutil.copytree(before, place)
        site.desk.state = site.state = place
        return site, expected

    return at


def flip(path: Path) -> None:
    blob = bytearray(path.read_bytes())
    blob[-2] ^= 1
    path.write_bytes(blob)


def as_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_file(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.touch()


def as_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def edited(path: Path, change: Callable[[Any], object]) -> None:
    pages = json.loads(path.read_bytes())
    change(pages["clients"][str(CLIENT)])
    path.write_text(json.dumps(pages))


KEPT, SECRET, JOURNAL = f"{RUN}/000001/000002.safetensors", f"secrets/{RUN}", f"journal/{RUN}.json"
COUNT = f"counts/{RUN}"
DAMAGE: dict[str, tuple[str, Callable[[Path], object], str]] = {
    "state deleted": ("stateful", lambda at: (at / KEPT).unlink(), KEPT),
    "all state deleted": ("stateful", lambda at: shutil.rmtree(at / RUN), KEPT),
    "state changed": ("stateful", lambda at: flip(at / KEPT), KEPT),
    "state cut": ("stateful", lambda at: os.truncate(at / KEPT, 20), KEPT),
    "state emptied": ("stateful", lambda at: os.truncate(at / KEPT, 0), KEPT),
    "state of the round before": (
        "stateful",
        lambda at: shutil.copy(at / KEPT.replace("2.s", "1.s"), at / KEPT),
        KEPT,
    ),
    "state a folder": ("stateful", lambda at: as_folder(at / KEPT), KEPT),
    "state a pipe": ("stateful", lambda at: as_pipe(at / KEPT), KEPT),
    "the folder of a client a file": (
        "stateful",
        lambda at: as_file(at / RUN / "000001"),
        f"{RUN}/000001",
    ),
    "journal deleted": ("stateful", lambda at: (at / JOURNAL).unlink(), JOURNAL),
    "journal emptied": ("stateful", lambda at: (at / JOURNAL).write_text(""), JOURNAL),
    "journal a list": ("stateful", lambda at: (at / JOURNAL).write_text("[]"), JOURNAL),
    "journal of another run": (
        "private",
        lambda at: shutil.copy(at / f"journal/{OTHER}.json", at / JOURNAL),
        JOURNAL,
    ),
    "journal of the round before": (
        "private",
        lambda at: shutil.copy(at / "earlier" / JOURNAL, at / JOURNAL),
        JOURNAL,
    ),
    "count of the round before": (
        "stateful",
        lambda at: (at / COUNT).write_text("1"),
        COUNT,
    ),
    "count garbage": ("private", lambda at: (at / COUNT).write_text("many"), COUNT),
    "count deleted": ("private", lambda at: (at / COUNT).unlink(), COUNT),
    "journal a folder": ("private", lambda at: as_folder(at / JOURNAL), JOURNAL),
    "an answer forgotten": (
        "private",
        lambda at: edited(at / JOURNAL, lambda own: own["answered"].pop("2")),
        JOURNAL,
    ),
    "all answers forgotten": ("private", lambda at: (at / JOURNAL).unlink(), JOURNAL),
    "secret deleted": ("private", lambda at: (at / SECRET).unlink(), SECRET),
    "secret changed": ("private", lambda at: (at / SECRET).write_text("0" * 64), SECRET),
    "secret of another run": (
        "private",
        lambda at: shutil.copy(at / f"secrets/{OTHER}", at / SECRET),
        SECRET,
    ),
    "secret garbage": ("private", lambda at: (at / SECRET).write_text("none"), SECRET),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damage_at_a_site_is_refused(name: str, make: Make, tmp_path: Path) -> None:
    kind, damage, named = DAMAGE[name]
    site, _ = make(kind, tmp_path / "state")
    damage(tmp_path / "state")
    for _ in range(2):  # and goes on being refused
        with pytest.raises(SiteError) as said:
            site.answer(3)
        assert said.value.code == "damaged-state"
        assert str(tmp_path / "state" / named) in str(said.value)


def test_a_site_that_died_before_its_answer_left_forgets_the_round(make: Make, tmp_path: Path) -> None:
    site, expected = make("stateful", tmp_path / "state")
    shutil.copy(tmp_path / "state" / KEPT, tmp_path / "state" / KEPT.replace("2.s", "3.s"))
    assert same(site.answer(3), expected)
    shutil.rmtree(tmp_path / "state" / OTHER)  # another run's trouble
    assert site.answer(4)
    with pytest.raises(SiteError):
        site.answer(3, OTHER)


def test_a_round_that_is_asked_for_again_starts_from_what_was_before_it(make: Make, tmp_path: Path) -> None:
    site, expected = make("stateful", tmp_path / "state")
    site.answer(3)
    site.answer(4)
    assert same(site.answer(3), expected)
    assert sorted(Vault(tmp_path / "state" / RUN).digests([CLIENT], 9)) == [CLIENT]
    assert not same(site.answer(2), expected)
    assert same(site.answer(3, checkpoint=2), expected)


def test_epsilon_does_not_go_down(make: Make, tmp_path: Path) -> None:
    """A mail again costs nothing; what was answered stays answered, or nothing is answered any more."""
    site, expected = make("private", tmp_path / "state")
    two = site.spent()
    assert same(site.answer(3), expected)
    three = site.spent()
    assert same(site.answer(3), expected)
    assert 0 < two < three == site.spent()
    shutil.rmtree(tmp_path / "state" / "journal")
    for ask in (site.spent, lambda: site.answer(3)):
        with pytest.raises(FedAlloyError, match="is damaged: it is missing"):
            ask()


# At random


def harmed(state: Path, chance: random.Random) -> str:
    """One damage to what belongs to the run."""
    files = sorted(path for path in state.rglob("*") if path.is_file() and path.name != ".lock")
    path = chance.choice(
        [path for path in files if RUN in str(name := path.relative_to(state)) and name.parts[0] != "earlier"]
    )
    other = chance.choice(files)
    how = chance.choice(
        ["flip", "cut", "delete", "empty", "append", "folder", "link", "pipe", "copy", "parent", "earlier"]
    )
    blob = bytearray(path.read_bytes())
    if how == "flip":
        blob[chance.randrange(len(blob))] ^= 1 << chance.randrange(8)
        path.write_bytes(blob)
    elif how == "cut":
        os.truncate(path, chance.randrange(len(blob)))
    elif how == "empty":
        os.truncate(path, 0)
    elif how == "append":
        path.write_bytes(blob + chance.randbytes(chance.randint(1, 40)))
    elif how == "copy":
        path.write_bytes(other.read_bytes())
    elif how == "earlier":
        if (state / "earlier" / path.relative_to(state)).exists():
            shutil.copy(state / "earlier" / path.relative_to(state), path)
    elif how == "parent":
        shutil.rmtree(path.parent)
    else:
        path.unlink()
        if how == "folder":
            path.mkdir()
        elif how == "link":
            path.symlink_to(chance.choice([other, state / "nowhere"]))
        elif how == "pipe":
            os.mkfifo(path)
    return f"{path.relative_to(state)} {how} ({other.relative_to(state)})"


@pytest.mark.fuzz
@pytest.mark.timeout(1800)
def test_any_damage_at_a_site_is_refused_or_changes_nothing(make: Make, tmp_path: Path) -> None:
    counts = {"refused": 0, "same": 0}
    for chance in dice(40, 1000):
        kind = chance.choice(list(METHODS))
        site, expected = make(kind, tmp_path / "state")
        before = site.spent()
        done = f"{chance} {kind}: {harmed(tmp_path / 'state', chance)}"
        said, found = "", None
        try:
            found = site.answer(3)
        except SiteError as error:
            said = str(error)
        except Exception as error:
            raise AssertionError(done) from error
        if found is None:
            assert str(tmp_path / "state") in said, f"{done}: {said}"
        else:
            assert same(found, expected), done
            assert site.spent() >= before, done
        counts["refused" if said else "same"] += 1
    print(counts)
    assert min(counts.values()) > 2


# The server


def federation(room: Path, **changes: Any) -> tuple[Loopback, dict[str, Any]]:
    settings = {**SMALL, "run_folder": str(room / "run"), "join_limit": 5.0, **changes}
    return Loopback(settings, room / "state", [{}] * 3), settings


def test_a_site_that_was_damaged_between_rounds_is_missed_by_name(tmp_path: Path) -> None:
    grid, settings = federation(tmp_path)

    def spoil(asked: Message, answer: Message) -> Message:
        if asked.metadata.group_id == "1" and answer.metadata.src_node_id == 101:
            (state,) = (tmp_path / "state").glob("*/000001/000001.safetensors")
            flip(state)
        return answer

    grid.tamper = spoil
    history = serve(grid, settings).history
    assert [[one["client"] for one in line["refused"]] for line in history] == [[], [1], [1]]
    assert history[1]["refused"][0]["why"].endswith(
        "damaged-state: this site's private state is damaged; its own log says why"
    )


@pytest.fixture(scope="module")
def cut_run(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Path], tuple[Loopback, dict[str, Any]]]:
    """A federation whose server died after its second round; a copy for every test."""
    room = tmp_path_factory.mktemp("cut")
    grid, settings = federation(room, method="fedavg+private(clip=0.5)", checkpoint_every=1)

    def stop(asked: Message, answer: Message) -> Message:
        if asked.metadata.group_id == "3":
            raise KeyboardInterrupt
        return answer

    grid.tamper = stop
    with pytest.raises(KeyboardInterrupt):
        serve(grid, settings)

    def at(place: Path) -> tuple[Loopback, dict[str, Any]]:
        for name in ("run", "state"):
            shutil.copytree(room / name, place / name)
        return federation(place, method="fedavg+private(clip=0.5)", checkpoint_every=1)

    return at


SERVER: dict[str, Callable[[Path], object]] = {
    "sites.json": lambda file: file.write_text('{"0": 1}'),
    "sites.json ": lambda file: file.unlink(),
    "sites.json  ": lambda file: file.write_text("["),
    "run-id": lambda file: file.unlink(),
    "run-id ": lambda file: file.write_text("../../elsewhere"),
    "run-id  ": lambda file: file.write_text("f" * 32),
    "secret": lambda file: file.unlink(),
    "secret ": lambda file: file.write_text("f" * 64),
    "secret  ": lambda file: file.write_text("garbage"),
    "history.jsonl": lambda file: file.write_text("".join(file.read_text().splitlines(keepends=True)[1:])),
}


@pytest.mark.parametrize("name", SERVER)
def test_damage_at_the_server_is_refused(
    name: str, cut_run: Callable[[Path], tuple[Loopback, dict[str, Any]]], tmp_path: Path
) -> None:
    grid, settings = cut_run(tmp_path)
    SERVER[name](tmp_path / "run" / name.strip())
    with pytest.raises(FedAlloyError, match=f"{name.strip()} is damaged"):
        serve(grid, settings)


def test_an_undamaged_one_carries_on(
    cut_run: Callable[[Path], tuple[Loopback, dict[str, Any]]], tmp_path: Path
) -> None:
    result = serve(*cut_run(tmp_path))
    assert len(result.history) == 3
    spent = [line["epsilon"] for line in result.history]
    assert spent == sorted(spent)


def test_a_federation_keeps_its_files_to_itself_under_any_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        for kind, method in METHODS.items():
            serve(*federation(tmp_path / kind, method=method))
    finally:
        os.umask(before)
    found = [path for path in tmp_path.rglob("*") if path.parent != tmp_path]
    assert len(found) > 40
    for path in found:
        assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path

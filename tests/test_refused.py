"""A command that is refused leaves nothing behind, wherever it was told to write."""

import os
from pathlib import Path
from typing import Any

import pytest

from disk import disk_with
from fedalloy.core import registry
from fedalloy.core.alloy import Mechanism
from fedalloy.core.views import ServerView
from fedalloy.data.federation import federate
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.run import Setup, train
from fedalloy.research.bench import play as benches
from terminal import INLINE, fedalloy, tree

COMMANDS: dict[str, tuple[str, ...]] = {
    "run": ("run", *INLINE, "--rounds", "2"),
    "compare": ("compare", "fedavg", "local", *INLINE, "--rounds", "2"),
    "tune": ("tune", "fedprox", *INLINE, "--rounds", "2", "--trials", "100"),
}
each = pytest.mark.parametrize("command", COMMANDS)


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refused(*words: str) -> str:
    said = fedalloy(*words)
    assert said.code == 2, said.out
    assert "Traceback" not in said.err
    assert len(said.trouble) == 1
    return said.err


@each
def test_an_out_that_cannot_be_made(command: str, here: Path) -> None:
    (here / "file").write_text("")
    for out in ("file", "file/below", f"new/newer/{'x' * 300}/run", "new/" + "y" * 300):
        refused(*COMMANDS[command], "--out", out)
        assert os.listdir(here) == ["file"]


@each
def test_an_engine_that_does_not_start(command: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def none(*_: object) -> Any:
        raise FedAlloyError("no engine today")

    monkeypatch.setattr(Setup, "engine", none)
    assert "no engine today" in refused(*COMMANDS[command], "--out", "new/newer")
    assert not list(here.iterdir())
    (here / "empty").mkdir()
    refused(*COMMANDS[command], "--out", "empty")
    assert tree(here / "empty") == {}
    (here / "others").mkdir()
    (here / "others" / "notes").write_text("mine")
    refused(*COMMANDS[command], "--out", "others")
    assert (here / "others" / "notes").read_text() == "mine"
    assert not list((here / "others").rglob("config.toml"))


@each
def test_what_a_method_refuses_is_refused_first(
    command: str, here: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def never(*_: object) -> Any:
        raise FedAlloyError("not with these data")

    monkeypatch.setattr(Setup, "server", never)
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("a folder was made"))
    assert "not with these data" in refused(*COMMANDS[command], "--out", "new")


class Picky(Mechanism):
    """Refuses a federation as soon as it sees the server, or in a later round."""

    def __init__(self, round: int) -> None:
        self.round = round

    def init_server(self, server: ServerView, my: Any) -> None:
        if self.round == 0:
            raise FedAlloyError("not with these data")

    def aggregate(self, server: ServerView, my: Any, got: Any) -> None:
        if server.round == self.round:
            raise FedAlloyError(f"not after round {self.round}")


@pytest.mark.parametrize(("round", "left"), [(0, False), (1, True), (2, True)])
def test_a_training_in_python(round: int, left: bool, here: Path) -> None:
    """What has begun is kept, for whoever wants to carry on or to look at it."""
    method = registry.make("fedavg") + Picky(round)
    with pytest.raises(FedAlloyError, match="not "):
        train(federate("digits", 3), method=method, out=here / "new" / "run", engine="inline", rounds=3)
    assert (here / "new" / "run" / "history.jsonl").exists() == left
    assert (here / "new").exists() == left


def test_a_comparison_keeps_what_it_finished(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Setup.engine

    def one_of_two(setup: Setup, runtime: Any) -> Any:
        if setup.config.method == "local":
            raise FedAlloyError("no engine today")
        return made(setup, runtime)

    monkeypatch.setattr(Setup, "engine", one_of_two)
    refused(*COMMANDS["compare"], "--out", "both")
    assert sorted(path.name for path in (here / "both").iterdir() if path.is_dir()) == ["fedavg"]
    monkeypatch.setattr(Setup, "engine", made)
    assert fedalloy(*COMMANDS["compare"], "--out", "both").code == 0


@pytest.mark.parametrize("out", ["nowhere/deep/file.html", "file/below"])
def test_a_single_file(out: str, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "file").write_text("")
    monkeypatch.setattr(benches, "play", lambda *_: pytest.fail("the clock ran"))
    refused("partition", "--clients", "3", "--out", out)
    refused("bench", "--only", "T", "--out", out)
    refused("preprocessing", "digits", "--out", out)
    assert os.listdir(here) == ["file"]


@pytest.mark.parametrize("out", ["new/" + "x" * 300, "file/below", "file"])
def test_a_deployment(out: str, here: Path) -> None:
    (here / "file").write_text("")
    refused("deploy", "init", out, "--clients", "2", "--class-names", "a,b")
    assert os.listdir(here) == ["file"]


def test_a_deployment_that_does_not_fit_on_the_disk(here: Path) -> None:
    with disk_with(10):
        refused("deploy", "init", "new/made", "--clients", "2", "--class-names", "a,b")
    assert not list(here.iterdir())

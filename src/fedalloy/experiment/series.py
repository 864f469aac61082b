"""Runs one after the other: what is finished is not run again, what is half done carries on."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedalloy.core.imports import Imports
from fedalloy.data.federation import Federation
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import OnReply, OnRound, Result, Setup, play, resume


class Series:
    """Runs that may share a federation, which is dealt once for those that follow each other."""

    def __init__(self, imports: Imports | None = None) -> None:
        self._imports = imports
        self._dealt: tuple[dict[str, Any], Federation] | None = None

    def setup(self, config: Config) -> Setup:
        dealing, federation = self._dealt or ({}, None)
        setup = Setup(config, federation if dealing == config.dealing else None, imports=self._imports)
        self._dealt = config.dealing, setup.federation
        return setup

    def play(
        self, path: Path, config: Config, on_round: OnRound | None = None, on_reply: OnReply | None = None
    ) -> Result:
        if (path / "config.toml").exists():
            return resume(path, config, on_round, on_reply, allow_code=self._imports is not None)
        return play(self.setup(config), RunFolder.create(path, config), on_round, on_reply)


@contextmanager
def at_hand(config: Config) -> Iterator[None]:
    """While this lasts, runs share what takes long to start: a connection to Ray, and its actors."""
    if config.engine != "ray":
        yield
        return
    from fedalloy.engines.cluster import Cluster  # an extra, and slow to import

    with Cluster(config.ray_address, config.processes):
        yield


def settled(base: Config, name: Callable[[Config], Path], out: Path | None) -> tuple[Config, Path]:
    """Settings and folder of a series: models have the names that its runs began with, or else their own."""
    spelled = base.spelled()
    folder = out or (found if (found := name(base)).exists() else name(spelled))
    begun = next(iter(sorted(folder.glob("*/seed*/config.toml"))), None)
    return spelled.like(RunFolder(begun.parent).config) if begun else spelled, folder


def check_settings(path: Path, config: Config) -> None:
    """Whether a run that lies here is the one that is meant."""
    if not (path / "config.toml").exists():
        return
    stored = RunFolder(path).config
    if changed := stored.differences(config.like(stored)):
        raise FedAlloyError(f"{path} was run with other settings ({', '.join(changed)}); give another --out")


def rounds_left(path: Path, config: Config) -> int:
    """Rounds that are still to be played, for a progress bar."""
    folder = RunFolder(path)
    return 0 if folder.summary() else config.rounds - len(folder.history())

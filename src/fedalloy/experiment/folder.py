"""What a run leaves behind: config.toml, history.jsonl, summary.json, checkpoint/, report.html."""

import hashlib
import json
import os
import tomllib
import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedalloy.core.files import (
    PRIVATE,
    append_line,
    damaged,
    disk_error,
    is_temporary,
    make_folder,
    private_folder,
    read_whole,
    remove,
    unmake,
    write_whole,
)
from fedalloy.core.wire import Items, dump, restore
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.errors import FedAlloyError, FedAlloyWarning, writing
from fedalloy.experiment.config import Config
from fedalloy.experiment.locks import OWN, lock
from fedalloy.experiment.seals import checkpoint_digest, digest_of, facts_digest, settings_digest
from fedalloy.round.vault import Digests, Vault

MARK = "# settings sha256: "  # opens the config of a run: resume refuses settings that are not these
# Of a real federation: what its sites know the run by, what its noise is drawn from, how samples are prepared.
BESIDE = ("run-id", "secret", "preprocessing.json")


class Busy(FedAlloyError):
    """Another process writes the run."""


class RunFolder:
    """One run on disk. At every moment it holds one whole checkpoint and the history up to it.

    The checkpoint holds digests of everything it belongs to: of itself, the settings, the history up to its round and
    each client's private state. What does not fit is refused.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.vault = Vault(path / "checkpoint" / "clients")
        self._kept: Digests = {}  # as of the last checkpoint
        self._told: Any = None  # sha256 of the history so far
        self.made: list[Path] | None = (
            None  # the folders that were made for a new run; None of one that was there
        )

    @property
    def _server(self) -> Path:
        return self.path / "checkpoint" / "server.safetensors"

    @property
    def _history(self) -> Path:
        return self.path / "history.jsonl"

    @classmethod
    def create(cls, path: Path, config: Config) -> "RunFolder":
        """A new run; a folder with anything in it is never written over."""
        if path.exists() and not (path.is_dir() and all(is_temporary(found) for found in path.iterdir())):
            raise FedAlloyError(
                f"{path} exists already; carry on with '--resume {path}', or give another --out"
            )
        folder, text = cls(path), config.toml()
        try:
            folder.made = make_folder(path)
        except OSError as error:
            if isinstance(known := disk_error(error, path), FedAlloyError):
                raise known from None
            raise FedAlloyError(f"cannot make {path}: {error.strerror}; give another --out") from None
        try:
            with writing(path):
                write_whole(
                    path / "config.toml", f"{MARK}{settings_digest(tomllib.loads(text))}\n{text}".encode()
                )
        except FedAlloyError:
            unmake(path, folder.made)
            raise
        return folder

    @classmethod
    def existing(cls, path: Path) -> "RunFolder":
        if not (path / "config.toml").is_file():
            raise FedAlloyError(
                f"{path} is not a run folder (it has no config.toml); start one with 'fedalloy run'"
            )
        return cls(path)

    @property
    def config(self) -> Config:
        """The settings of the run, as they were when it began."""
        file = self.path / "config.toml"
        values = Config.read(file)
        if (mark := self._mark()) and mark != settings_digest(values):
            raise damaged(file, "it holds other settings than the run began with")
        return Config.of(values, str(file))

    def _mark(self) -> str | None:
        """The digest of the settings that the config opens with; None in a folder of an earlier version."""
        first = read_whole(self.path / "config.toml").decode(errors="replace").partition("\n")[0]
        return first.removeprefix(MARK).strip() if first.startswith(MARK) else None

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process may write a run; the lock goes with the process, however it ends."""
        private_folder(self.path / "checkpoint")
        path = self.path / "checkpoint" / ".lock"
        try:
            made = os.open(path, OWN, PRIVATE)
        except OSError as error:
            if isinstance(known := disk_error(error, path), FedAlloyError):
                raise known from None
            raise FedAlloyError(f"cannot lock {path}: {error.strerror}; move it out of the way") from None
        with open(made, "wb") as file:
            try:
                lock(file.fileno(), wait=False)
            except BlockingIOError:
                raise Busy(f"another process is writing {self.path}; wait for it or stop it") from None
            yield

    def history(self) -> list[dict[str, Any]]:
        """Every whole line of the history."""
        file = self._history
        return [
            _parsed(line, f"line {n} of {file}", "start a new run") for n, line in enumerate(self._lines(), 1)
        ]

    def _lines(self) -> list[bytes]:
        """The history as it lies there; what follows the last newline is a line half written."""
        return read_whole(self._history).split(b"\n")[:-1] if self._history.exists() else []

    def record(self, line: dict[str, Any]) -> None:
        text = json.dumps(line)
        if self._told is None:
            self._told = digest_of(self._lines())
        append_line(self._history, text)
        self._told.update(text.encode() + b"\n")

    def save(
        self, round: int, state: Items, data: str | None = None, clients: Iterable[int] | None = None
    ) -> None:
        """The server's state after a round on these data; the history of that round is on disk already.

        Clients are those whose private state may have changed since the last checkpoint; all by default.
        """
        told = digest_of(self._lines()[:round]) if self._told is None else self._told
        self._kept |= self.vault.digests(clients, round)
        facts: dict[str, object] = {
            "round": round,
            **({"data": data} if data else {}),
            "config": settings_digest(Config.read(self.path / "config.toml")),
            "history": told.hexdigest(),
            "private": " ".join(f"{client}:{at}:{sha}" for client, (at, sha) in sorted(self._kept.items())),
            "beside": self._beside(),
        }
        private_folder(self._server.parent)
        write_whole(self._server, dump(state, facts | {"sha256": checkpoint_digest(state, facts)}), PRIVATE)

    def checkpoint(self, data: str | None = None) -> tuple[int, Items]:
        """The round of the last checkpoint and the server's state after it; round 0 if there is none.

        Refuses a checkpoint that was made of other data than these, if they are given, and everything that is not as
        it was when the checkpoint was made.
        """
        file = self._server
        if not os.path.lexists(file):
            self._refuse_lost()
            return 0, {}
        try:
            state, facts = restore(read_whole(file))
            round = int(str(facts["round"]))
        except (FedAlloyError, KeyError, TypeError, ValueError):
            raise damaged(file, "it is no checkpoint") from None
        seal = facts.pop("sha256", None)
        if seal is None and self._mark() is None:
            self._warn(round)
        elif seal != checkpoint_digest(state, facts):
            raise damaged(file, "it is not what the run wrote")
        if data and facts.get("data", data) != data:
            raise FedAlloyError(
                f"{self.path} was started on other data; give the --data-root where those are, or start a new run"
            )
        if seal is not None:
            self._verify(round, facts)
        return round, state

    def _verify(self, round: int, facts: dict[str, Any]) -> None:
        """Whether settings, history and private state are those of a checkpoint."""
        config = self.path / "config.toml"
        if settings_digest(Config.read(config)) != facts["config"]:
            raise damaged(config, "it holds other settings than the run began with")
        lines = self._lines()
        if len(lines) < round:
            raise damaged(self._history, f"{len(lines)} of {round} rounds are left")
        told = digest_of(lines[:round])
        if told.hexdigest() != facts["history"]:
            raise damaged(self._history, "it is not what the run wrote")
        kept = [entry.split(":") for entry in facts["private"].split()]
        self._kept = {int(client): (int(at), sha) for client, at, sha in kept}
        self.vault.verify(self._kept, round)
        now = self._beside()
        for name, then in facts["beside"].items():
            if now.get(name) != then:
                raise damaged(self.path / name, "it is not what the run wrote")

    def needs_from_its_start(self, name: str) -> None:
        """A file that is made before the first round cannot be made anew after it."""
        if self._lines() and not (self.path / name).exists():
            raise damaged(self.path / name, "it is missing")

    def _refuse_lost(self) -> None:
        """Where more rounds are on record than one checkpoint lets pass, there was a checkpoint."""
        if self._mark() and len(self._lines()) > self.config.checkpoint_every:
            raise damaged(self._server, "it is missing")

    def _warn(self, round: int) -> None:
        warnings.warn(
            f"{self.path} was begun by an earlier version, without digests: "
            f"whether anything was changed since round {round} cannot be verified",
            FedAlloyWarning,
            stacklevel=4,
        )

    def _beside(self) -> dict[str, str]:
        found = [self.path / name for name in BESIDE if (self.path / name).exists()]
        return {file.name: hashlib.sha256(read_whole(file)).hexdigest() for file in found}

    def restore(self, data: str | None = None) -> tuple[int, Items]:
        """The last checkpoint, with history and private state cut back to it."""
        round, state = self.checkpoint(data)
        lines = self._lines()[:round]
        for number, line in enumerate(self.history()[:round], 1):
            if line.get("round") != number:
                raise damaged(self._history, f"round {number} is not where it belongs")
        if len(lines) < round:
            raise damaged(self._history, f"{len(lines)} of {round} rounds are left")
        write_whole(self._history, b"".join(line + b"\n" for line in lines))
        self._told = digest_of(lines)
        self.vault.rewind(round)
        for left in (*self.path.glob(".*"), *self._server.parent.glob(".*")):
            if is_temporary(left):
                remove(left)
        return round, state

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None; refused if it is not of these settings and this history."""
        file = self.path / "summary.json"
        if not file.exists():
            return None
        found = _parsed(read_whole(file), str(file), f"delete it, then 'fedalloy run --resume {self.path}'")
        seal = found.get("sha256")
        if seal is None:
            if self._mark():
                raise damaged(file, "it lacks its digest")
            return found
        if seal != facts_digest(found):
            raise damaged(file, "it is not what the run wrote")
        if found["config_sha256"] != settings_digest(Config.read(self.path / "config.toml")):
            raise damaged(self.path / "config.toml", "it holds other settings than the run began with")
        if found["history_sha256"] != digest_of(self._lines()).hexdigest():
            raise damaged(self._history, "it is not what the run wrote")
        return found

    def features(self, round: int) -> Path:
        """Where features are stored that were looked at after a round."""
        return self.path / "features" / f"{round:06d}.safetensors"

    def describe_partition(self, class_names: list[str], counts: list[list[int]]) -> None:
        """Training samples per client and class, for the report."""
        blob = json.dumps({"class_names": class_names, "counts": counts}).encode()
        write_whole(self.path / "partition.json", blob)

    def preprocess(self, how: Preprocessing) -> None:
        """Keep how samples are prepared, as the run began: the model can be used where the data are not."""
        file = self.path / "preprocessing.json"
        if not file.exists():
            write_whole(file, how.to_json().encode())
        elif read_whole(file) != how.to_json().encode():
            raise damaged(file, "it is not what the run began with")

    def preprocessing(self) -> Preprocessing | None:
        """How samples are prepared, or None in a folder that does not say."""
        file = self.path / "preprocessing.json"
        return Preprocessing.from_json(read_whole(file), str(file)) if os.path.lexists(file) else None

    def finish(self, summary: dict[str, Any]) -> dict[str, Any]:
        """Write the summary, with digests of what it sums up; return it as written."""
        digests = {
            "config_sha256": settings_digest(Config.read(self.path / "config.toml")),
            "history_sha256": digest_of(self._lines()).hexdigest(),
        }
        whole = json.loads(json.dumps(summary | digests))
        whole["sha256"] = facts_digest(whole)
        write_whole(self.path / "summary.json", (json.dumps(whole, indent=2) + "\n").encode())
        return summary | digests | {"sha256": whole["sha256"]}


def _parsed(text: bytes, where: str, way_out: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise FedAlloyError(f"{where} is damaged; {way_out}")
    return found

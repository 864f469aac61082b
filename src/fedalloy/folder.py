"""What a run leaves behind: config.toml, history.jsonl, summary.json, checkpoint/, report.html."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedalloy.config import Config
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.errors import FedAlloyError
from fedalloy.storage import Vault, append_line, disk_error, is_temporary, write_whole
from fedalloy.wire import Items, dump, restore


class RunFolder:
    """One run on disk. At every moment it holds one whole checkpoint and the history up to it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.vault = Vault(path / "checkpoint" / "clients")

    @classmethod
    def create(cls, path: Path, config: Config) -> "RunFolder":
        """A new run; a folder with anything in it is never written over."""
        if path.exists() and not (path.is_dir() and all(is_temporary(found) for found in path.iterdir())):
            raise FedAlloyError(
                f"{path} exists already; carry on with '--resume {path}', or give another --out"
            )
        try:
            path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            if isinstance(known := disk_error(error, path), FedAlloyError):
                raise known from None
            raise FedAlloyError(f"cannot make {path}: {error.strerror}; give another --out") from None
        write_whole(path / "config.toml", config.toml().encode())
        return cls(path)

    @classmethod
    def existing(cls, path: Path) -> "RunFolder":
        if not (path / "config.toml").is_file():
            raise FedAlloyError(
                f"{path} is not a run folder (it has no config.toml); start one with 'fedalloy run'"
            )
        return cls(path)

    @property
    def config(self) -> Config:
        file = self.path / "config.toml"
        return Config.of(Config.read(file), str(file))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Only one process may write a run; the lock goes with the process, however it ends."""
        (self.path / "checkpoint").mkdir(exist_ok=True)
        with (self.path / "checkpoint" / ".lock").open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise FedAlloyError(
                    f"another process is writing {self.path}; wait for it or stop it"
                ) from None
            yield

    def history(self) -> list[dict[str, Any]]:
        """Every whole line of the history."""
        file = self.path / "history.jsonl"
        if not file.exists():
            return []
        lines = file.read_bytes().split(b"\n")[:-1]  # what follows the last newline is a line half written
        return [_parsed(line, f"line {n} of {file}", "start a new run") for n, line in enumerate(lines, 1)]

    def record(self, line: dict[str, Any]) -> None:
        append_line(self.path / "history.jsonl", json.dumps(line))

    def save(self, round: int, state: Items, data: str | None = None) -> None:
        """The server's state after a round on these data; the history of that round is on disk already."""
        facts = {"round": round} | ({"data": data} if data else {})
        write_whole(self.path / "checkpoint" / "server.safetensors", dump(state, facts))

    def checkpoint(self, data: str | None = None) -> tuple[int, Items]:
        """The round of the last checkpoint and the server's state after it; round 0 if there is none.

        With the fingerprint of the data at hand, a checkpoint that was made of others is refused.
        """
        file = self.path / "checkpoint" / "server.safetensors"
        state, facts = restore(file.read_bytes()) if file.exists() else ({}, {"round": 0})
        if data and facts.get("data", data) != data:
            raise FedAlloyError(
                f"{self.path} was started on other data; give the --data-root where those are, or start a new run"
            )
        return int(str(facts["round"])), state

    def restore(self, data: str | None = None) -> tuple[int, Items]:
        """The last checkpoint, with history and private state cut back to it."""
        round, state = self.checkpoint(data)
        lines = [line for line in self.history() if line["round"] <= round]
        write_whole(
            self.path / "history.jsonl", b"".join(json.dumps(line).encode() + b"\n" for line in lines)
        )
        self.vault.rewind(round)
        for left in (*self.path.glob(".*"), *(self.path / "checkpoint").glob(".*")):
            if is_temporary(left):
                left.unlink(missing_ok=True)
        return round, state

    def summary(self) -> dict[str, Any] | None:
        """The summary of a finished run, or None."""
        file = self.path / "summary.json"
        if not file.exists():
            return None
        return _parsed(file.read_bytes(), str(file), f"delete it, then 'fedalloy run --resume {self.path}'")

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

    def preprocessing(self) -> Preprocessing | None:
        """How samples are prepared, or None in a folder that does not say."""
        file = self.path / "preprocessing.json"
        return Preprocessing.from_json(file.read_bytes(), str(file)) if file.exists() else None

    def finish(self, summary: dict[str, Any]) -> None:
        write_whole(self.path / "summary.json", (json.dumps(summary, indent=2) + "\n").encode())


def _parsed(text: bytes, where: str, way_out: str) -> dict[str, Any]:
    try:
        found = json.loads(text)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        raise FedAlloyError(f"{where} is damaged; {way_out}")
    return found

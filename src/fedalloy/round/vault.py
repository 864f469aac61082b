"""The clients' private state on disk."""

import hashlib
import re
import shutil
from collections.abc import Container, Iterable
from pathlib import Path

from fedalloy.core.files import (
    PRIVATE,
    damaged,
    is_temporary,
    private_folder,
    read_whole,
    remove,
    write_whole,
)
from fedalloy.core.wire import Items, dump, restore

STATE = re.compile(r"([0-9]{6}|[1-9][0-9]{6,})\.safetensors")
Digests = dict[int, tuple[int, str]]  # by client: the round it took part in, the sha256 of what it kept


class Vault:
    """Private state of clients on disk, one file for each client and round it took part in.

    A client in round r reads the newest version before r and writes version r, so a round that is run again, after a
    worker died or a run was killed, reads what it read the first time. Cost depends on who takes part, never on how
    many clients there are.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def load(self, client: int, before: int) -> Items:
        """The state after the newest round before this one; empty for a client never seen."""
        blob = self.read(client, before)
        return restore(blob)[0] if blob else {}

    def save(self, client: int, round: int, keep: Items) -> None:
        if keep:
            self.write(client, round, dump(keep))

    def read(self, client: int, before: int) -> bytes:
        """What `load` loads, as it lies in its file; empty for a client never seen."""
        versions = [version for version in self._versions(client) if version < before]
        return self._path(client, max(versions)).read_bytes() if versions else b""

    def write(self, client: int, round: int, blob: bytes) -> None:
        """What `read` has read, or another process has made of it."""
        path = self._path(client, round)
        private_folder(path.parent)
        write_whole(path, blob, PRIVATE)

    def trim(self, clients: Iterable[int], checkpoint: int) -> None:
        """Drop versions that no resume from this checkpoint or a later one can ask for."""
        for client in clients:
            old = sorted(version for version in self._versions(client) if version <= checkpoint)
            for version in old[:-1]:
                self._path(client, version).unlink(missing_ok=True)

    def rewind(self, checkpoint: int) -> None:
        """Forget rounds after a checkpoint."""
        for folder in self._folders():
            for path in folder.iterdir():
                if is_temporary(path) or (STATE.fullmatch(path.name) and int(path.stem) > checkpoint):
                    remove(path)

    def digests(self, clients: Iterable[int] | None, upto: int) -> Digests:
        """The round and the sha256 of each client's newest state up to a round; of all clients by default."""
        found: Digests = {}
        for client in self._clients() if clients is None else clients:
            if versions := [version for version in self._versions(client) if version <= upto]:
                blob = read_whole(self._path(client, max(versions)))
                found[client] = (max(versions), hashlib.sha256(blob).hexdigest())
        return found

    def verify(self, known: Digests, upto: int) -> None:
        """Refuse if what a client would be given after this round is not what these digests are of."""
        for client, (version, digest) in known.items():
            self.check(client, version, digest)
        for client in self._clients():
            newest = max((version for version in self._versions(client) if version <= upto), default=0)
            if newest != known.get(client, (0, ""))[0]:
                raise damaged(self._path(client, newest), "the run has not written it")

    def check(self, client: int, version: int, digest: str) -> None:
        """Refuse a client's state after a round if it is not what this digest is of."""
        path = self._path(client, version)
        if hashlib.sha256(read_whole(path)).hexdigest() != digest:
            raise damaged(path, "it is not what the client left there")

    def forget(self, client: int, but: Container[int]) -> None:
        """Drop every state of a client but those after these rounds."""
        for version in self._versions(client):
            if version not in but:
                remove(self._path(client, version))

    def fingerprint(self) -> str | None:
        """sha256 over every client's newest state, or None where no client keeps any."""
        if not self.folder.exists():
            return None
        digest = hashlib.sha256()
        for client in self._clients():
            newest = max(self._versions(client), default=None)
            if newest is not None:
                digest.update(f"{client:06d}".encode())
                digest.update(self._path(client, newest).read_bytes())
        return digest.hexdigest()

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, client: int, round: int) -> Path:
        return self.folder / f"{client:06d}" / f"{round:06d}.safetensors"

    def _folders(self) -> list[Path]:
        """One for each client, in a fixed order."""
        if not self.folder.exists():
            return []
        if not self.folder.is_dir():
            raise damaged(self.folder, "it is no folder")
        found = sorted(self.folder.iterdir())
        for path in found:
            if not (path.is_dir() and path.name.isdecimal() and path.name == f"{int(path.name):06d}"):
                raise damaged(path, "it is not the folder of a client")
        return found

    def _clients(self) -> list[int]:
        return [int(folder.name) for folder in self._folders()]

    def _versions(self, client: int) -> list[int]:
        folder = self.folder / f"{client:06d}"
        if not folder.exists():
            return []
        if not folder.is_dir():
            raise damaged(folder, "it is no folder")
        return [int(path.stem) for path in folder.iterdir() if STATE.fullmatch(path.name)]

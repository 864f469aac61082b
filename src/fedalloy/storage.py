"""Files that are always whole, and the vault of the clients' private state."""

import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path

from fedalloy.errors import FedAlloyError
from fedalloy.wire import Items, dump, restore

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


def write_whole(path: Path, blob: bytes, mode: int | None = None) -> None:
    """Write to a temporary file, flush, rename: at every moment a whole file exists, the old one or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("wb") as file:
            if mode is not None:
                temporary.chmod(mode)
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise disk_error(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def kept_secret(path: Path) -> int:
    """256 bits that only the owner of this file can read, drawn when they are first asked for."""
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, secrets.token_hex(32).encode(), mode=0o600)
    return int(path.read_text(), 16)


def is_temporary(path: Path) -> bool:
    """Whether this is what a process killed inside `write_whole` leaves behind."""
    return path.name.startswith(".") and path.suffix[1:].isdigit()


def append_line(path: Path, line: str) -> None:
    """Append one line and flush it; a failed write leaves the file as it was."""
    before = path.stat().st_size if path.exists() else 0
    try:
        with path.open("ab") as file:
            file.write(line.encode() + b"\n")
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:  # only now: closing the file tries to write once more
        if path.exists():
            os.truncate(path, before)
        raise disk_error(error, path) from error


def disk_error(error: OSError, path: Path) -> OSError | FedAlloyError:
    """A full disk is something the user can mend."""
    if error.errno in _NO_ROOM:
        return FedAlloyError(
            f"no room left to write {path}; free some space, then carry on with 'fedalloy run --resume DIR'"
        )
    return error


def fingerprint(items: Items) -> str:
    """sha256 over names, shapes, types and bits."""
    return hashlib.sha256(dump(items)).hexdigest()


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
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, blob)

    def trim(self, clients: Iterable[int], checkpoint: int) -> None:
        """Drop versions that no resume from this checkpoint or a later one can ask for."""
        for client in clients:
            old = sorted(version for version in self._versions(client) if version <= checkpoint)
            for version in old[:-1]:
                self._path(client, version).unlink(missing_ok=True)

    def rewind(self, checkpoint: int) -> None:
        """Forget rounds after a checkpoint."""
        if not self.folder.exists():
            return
        for folder in self.folder.iterdir():
            for path in folder.iterdir():
                if not path.stem.isdigit() or int(path.stem) > checkpoint:
                    path.unlink(missing_ok=True)

    def fingerprint(self) -> str | None:
        """sha256 over every client's newest state, or None where no client keeps any."""
        if not self.folder.exists():
            return None
        digest = hashlib.sha256()
        for folder in sorted(self.folder.iterdir()):
            newest = max(self._versions(int(folder.name)), default=None)
            if newest is not None:
                digest.update(folder.name.encode())
                digest.update(self._path(int(folder.name), newest).read_bytes())
        return digest.hexdigest()

    def clear(self) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)

    def _path(self, client: int, round: int) -> Path:
        return self.folder / f"{client:06d}" / f"{round:06d}.safetensors"

    def _versions(self, client: int) -> list[int]:
        folder = self.folder / f"{client:06d}"
        if not folder.exists():
            return []
        return [int(path.stem) for path in folder.iterdir() if path.stem.isdigit()]

"""A site's audit log: one line of JSON for everything that leaves, written before it leaves.

Every line holds the hash of the line before it, and a second file holds how many there are and the hash of the last
one, so that a line that was changed or taken away is noticed. Whoever may write both files could write them anew:
the log shows its owner what left, it does not convict its owner.
"""

import hashlib
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from fedalloy.core.files import write_whole
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.locks import lock

LOG, HEAD = "audit.jsonl", "audit.head"
FIRST = "0" * 64  # what stands for the hash before the first line
SECRET = 0o600

Entry = dict[str, Any]


class AuditError(FedAlloyError):
    """The log cannot be written or believed; nothing leaves then."""


@dataclass(frozen=True)
class _Head:
    """Up to where the log is known: so many lines, so many bytes, and the hash of the last one."""

    lines: int = 0
    size: int = 0
    hash: str = FIRST

    def after(self, line: bytes) -> "_Head":
        return _Head(self.lines + 1, self.size + len(line), hashlib.sha256(line).hexdigest())


class Audit:
    """The log in a site's state folder."""

    def __init__(self, state: Path) -> None:
        self.path, self.head = state / LOG, state / HEAD

    def append(self, entry: Entry) -> None:
        """One line more, on the disk when this returns."""
        try:
            with self._locked() as file:
                head = self._caught_up(file)
                line = json.dumps({**entry, "previous": head.hash}).encode() + b"\n"
                try:
                    _write(file, line)
                    os.fsync(file)
                except OSError:
                    os.ftruncate(file, head.size)
                    raise
                self._keep(head.after(line))
        except OSError as error:
            why = (error.strerror or str(error)).lower()
            raise AuditError(f"nothing leaves this site: {self.path} cannot be written ({why})") from error

    def entries(self) -> list[Entry]:
        """All that left, oldest first."""
        return [json.loads(line) for line in self._blob().splitlines()]

    def verify(self) -> int:
        """The number of lines, if every one is as it was written."""
        if not self.path.exists() and not self.head.exists():
            return 0
        with self._locked() as file:
            known = self._caught_up(file)
            head = _Head()
            for line in self._blob().splitlines(keepends=True):
                if _previous(line) != head.hash:
                    raise self._damaged(f"line {head.lines + 1} does not follow the one before it")
                head = head.after(line)
        if head != known:
            raise self._damaged(f"line {head.lines} was changed, or lines after it are gone")
        return head.lines

    @contextmanager
    def _locked(self) -> Iterator[int]:
        self.path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, SECRET)
        try:
            os.fchmod(file, SECRET)
            lock(file, wait=True)
            yield file
        finally:
            os.close(file)

    def _caught_up(self, file: int) -> _Head:
        """Where the log ends: a process that died between line and head left a line that may have been sent."""
        head = self._known()
        size = os.fstat(file).st_size
        rest = os.pread(file, max(size - head.size, 0), head.size)
        if size < head.size:
            raise self._damaged("lines are gone")
        if rest and not rest.endswith(b"\n"):  # torn while it was written: its message never left
            os.ftruncate(file, head.size + rest.rfind(b"\n") + 1)
            rest = rest[: rest.rfind(b"\n") + 1]
        if rest:
            if rest.count(b"\n") != 1 or _previous(rest) != head.hash:
                raise self._damaged(f"what stands after line {head.lines} was not written by this site")
            head = head.after(rest)
            self._keep(head)
        return head

    def _known(self) -> _Head:
        if not self.head.exists():
            return _Head()
        try:
            return _Head(**json.loads(self.head.read_bytes()))
        except (ValueError, TypeError):
            raise self._damaged(f"{HEAD} cannot be read") from None

    def _keep(self, head: _Head) -> None:
        write_whole(self.head, json.dumps(asdict(head)).encode(), mode=SECRET)

    def _blob(self) -> bytes:
        return self.path.read_bytes() if self.path.exists() else b""

    def _damaged(self, what: str) -> AuditError:
        return AuditError(
            f"{self.path} is not as it was written: {what}; nothing leaves this site until you have looked into it "
            f"and moved {LOG} and {HEAD} elsewhere"
        )


def _write(file: int, line: bytes) -> None:
    while line:
        line = line[os.write(file, line) :]


def _previous(line: bytes) -> str | None:
    try:
        found = json.loads(line)
    except ValueError:
        return None
    return found.get("previous") if isinstance(found, dict) else None

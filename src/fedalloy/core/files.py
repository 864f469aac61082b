"""Files that are always whole."""

import errno
import os
import re
import secrets
import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from fedalloy.errors import FedAlloyError

PRIVATE = 0o600
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


class NoRoom(FedAlloyError):
    """The disk is full."""


def write_whole(path: Path, blob: bytes, mode: int = 0o666) -> None:
    """Write to a temporary file, flush, rename: at every moment a whole file exists, the old one or the new one.

    With mode PRIVATE nobody else can read it, not even while it is written.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        temporary.unlink(missing_ok=True)  # of a killed process that had the same number
        made = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, mode)
        with open(made, "wb") as file:
            file.write(blob)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        raise disk_error(error, path) from error
    finally:
        temporary.unlink(missing_ok=True)


def make_folder(path: Path) -> list[Path]:
    """Make a folder and the folders above it, all or none; those that were made, the innermost first."""
    made: list[Path] = []
    missing = [folder for folder in (path, *path.parents) if not folder.is_dir()]
    try:
        for folder in reversed(missing):
            folder.mkdir()
            made.insert(0, folder)
    except OSError:
        for folder in made:
            folder.rmdir()
        raise
    return made


def claim(path: Path) -> list[Path] | None:
    """As `make_folder`; None if there is something in the folder already."""
    made = make_folder(path)
    return None if any(path.iterdir()) else made


def unmake(path: Path, made: Iterable[Path]) -> None:
    """Empty a folder, and remove it with those above it as far as `make_folder` made them."""
    for found in path.iterdir() if path.is_dir() else []:
        if found.is_dir() and not found.is_symlink():
            shutil.rmtree(found, ignore_errors=True)
        else:
            found.unlink(missing_ok=True)
    for folder in made:
        with suppress(OSError):  # somebody else uses it by now
            folder.rmdir()


@contextmanager
def unless_refused(path: Path, made: Sequence[Path] | None) -> Iterator[None]:
    """What is refused leaves nothing of what it wrote here, unless runs below have begun.

    `made` is what `make_folder` made; None if the folder was there and holds something of others. A full disk refuses
    nothing: whoever has made room carries on.
    """
    try:
        yield
    except NoRoom:
        raise
    except FedAlloyError:
        if made is not None and not any(path.glob("*/**/config.toml")):
            unmake(path, made)
        raise


def private_folder(path: Path) -> None:
    """Make a folder that only its owner can look into; close one that lies open."""
    if not path.is_dir():
        if not path.parent.is_dir():
            private_folder(path.parent)
        try:
            path.mkdir(mode=0o700, exist_ok=True)
        except FileExistsError:
            raise damaged(path, "it is no folder") from None
    elif path.stat().st_mode & 0o077:
        with suppress(PermissionError):  # somebody else's, who has let us in
            path.chmod(0o700)


def kept_secret(path: Path) -> int:
    """256 bits that only the owner of this file can read, drawn when they are first asked for."""
    if not path.exists():
        if not path.parent.is_dir():
            private_folder(path.parent)
        write_whole(path, secrets.token_hex(32).encode(), PRIVATE)
    text = read_whole(path)
    if not re.fullmatch(rb"[0-9a-f]{64}", text):
        raise damaged(path, "it holds no secret")
    return int(text, 16)


def read_whole(path: Path) -> bytes:
    """What is in a file, or a sentence that names it."""
    if not path.exists():
        raise damaged(path, "it is missing")
    if not path.is_file():  # a pipe would be read for ever
        raise damaged(path, "it is no file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise FedAlloyError(f"cannot read {path}: {(error.strerror or str(error)).lower()}") from None


def remove(path: Path) -> None:
    """Delete a file; a folder in its place was not put there by us."""
    try:
        path.unlink(missing_ok=True)
    except OSError:
        raise damaged(path, "it is no file") from None


def damaged(path: Path, how: str) -> FedAlloyError:
    """What to say of a file that is not as it was written."""
    return FedAlloyError(f"{path} is damaged: {how}; put back the one that was there, or start a new run")


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
        return NoRoom(
            f"no room left to write {path}; free some space, then carry on with 'fedalloy run --resume DIR'"
        )
    return error

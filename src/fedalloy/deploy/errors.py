"""What a server is told when something goes wrong at a site: a code and a sentence from one closed list.

The whole story, with values, paths and traceback, stays in the site's own log and on its terminal.
"""

import errno
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from logging.handlers import RotatingFileHandler
from pathlib import Path
from typing import Literal, get_args

from fedalloy.errors import FedAlloyError

Code = Literal[
    "data",
    "settings",
    "refused-code",
    "unfit",
    "privacy-limit",
    "not-masked",
    "wrong-client",
    "answered",
    "bad-message",
    "damaged-state",
    "no-room",
    "no-memory",
    "undeclared",
    "internal",
]
SENTENCES: dict[Code, str] = {
    "data": "this site's data cannot be used",
    "settings": "this site cannot use the settings of this run",
    "refused-code": "this site runs no code from outside of FedAlloy",
    "unfit": "this site's data, method and model do not fit together",
    "privacy-limit": "this would tell more of this site than it allows",
    "not-masked": "this site sends updates only by secure aggregation",
    "wrong-client": "this site is not the client that was asked",
    "answered": "this site has answered this round already, to another mail",
    "bad-message": "this site does not understand the message",
    "damaged-state": "this site's private state is damaged",
    "no-room": "this site's disk is full",
    "no-memory": "this site ran out of memory",
    "undeclared": "this site would have sent something that was not declared",
    "internal": "something went wrong at this site",
}
assert set(SENTENCES) == set(get_args(Code))
LOG, LOG_BYTES, LOG_FILES = "site.log", 2**20, 5


class SiteError(FedAlloyError):
    """An error whose code may leave a site; its words may not."""

    def __init__(self, code: Code, story: str) -> None:
        super().__init__(story)
        self.code = code


@contextmanager
def blamed(code: Code) -> Iterator[None]:
    """Whatever goes wrong in here has this code, unless it has one already."""
    try:
        yield
    except SiteError:
        raise
    except Exception as error:
        story = str(error) if isinstance(error, FedAlloyError) else f"{type(error).__name__}: {error}"
        raise SiteError(_machine(error) or code, story) from error


def told(error: BaseException) -> str:
    """What the server may know of an error, word for word from the list."""
    code = error.code if isinstance(error, SiteError) else _machine(error) or "internal"
    return f"{code}: {SENTENCES[code]}; its own log says why"


def _machine(error: BaseException | None) -> Code | None:
    """A full disk or memory is nobody's bad data."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            return "no-room"
        if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":  # torch's
            return "no-memory"
        error = error.__cause__
    return None


class _OwnersOnly(RotatingFileHandler):
    """A log that nobody else on the machine reads, whatever the umask."""

    def _open(self):  # type: ignore[no-untyped-def]
        os.close(os.open(self.baseFilename, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600))
        os.chmod(self.baseFilename, 0o600)
        return super()._open()


@contextmanager
def site_log(state: Path) -> Iterator[Path]:
    """Keep what this process says, Flower's part and warnings included, in the site's own log."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    handler = _OwnersOnly(state / LOG, maxBytes=LOG_BYTES, backupCount=LOG_FILES, encoding="utf-8")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    names = ("fedalloy", "flwr", "py.warnings")
    logging.captureWarnings(True)
    for name in names:
        logging.getLogger(name).addHandler(handler)
    try:
        yield state / LOG
    finally:
        for name in names:
            logging.getLogger(name).removeHandler(handler)
        logging.captureWarnings(False)
        handler.close()

"""An engine carries mail to where clients are and brings their replies back. It knows no method."""

import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NoReturn, Protocol

from fedalloy.core.wire import Mail, Reply
from fedalloy.errors import FedAlloyError

TRIES = 3  # a client that kills its worker this often is not asked again


class Engine(Protocol):
    """One reply for each mail, in any order; the same bits whatever the engine."""

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]: ...

    def close(self) -> None: ...


def failure(error: Exception, who: str) -> dict[str, Any]:
    """An exception as plain values, to be raised again by `fail` in the main process."""
    user = isinstance(error, FedAlloyError)
    return {"error": str(error) if user else traceback.format_exc(), "user": user, "who": who}


def fail(note: Mapping[str, Any]) -> NoReturn:
    if note["user"]:
        raise FedAlloyError(note["error"])
    raise RuntimeError(f"{note['who']} failed in a worker process:\n{note['error']}")


def died(client: int, how: str) -> FedAlloyError:
    return FedAlloyError(
        f"the worker process died {TRIES} times on client {client} ({how}); "
        "out of memory? try fewer --workers or --engine inline"
    )


def late(client: int, timeout: float) -> FedAlloyError:
    return FedAlloyError(
        f"client {client} did not answer within {timeout:g} s; raise --timeout if it needs longer"
    )

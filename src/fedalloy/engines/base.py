"""An engine carries mail to where clients are and brings their replies back. It knows no method."""

from collections.abc import Iterator, Sequence
from typing import Protocol

from fedalloy.wire import Mail, Reply


class Engine(Protocol):
    """One reply for each mail, in any order; the same bits whatever the engine."""

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]: ...

    def close(self) -> None: ...

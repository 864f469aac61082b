"""The inline engine: everything in this process, one client after another. Errors show the whole stack."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fedalloy.core.wire import Mail, Reply
from fedalloy.round.runtime import ClientRuntime


@dataclass
class Inline:
    runtime: ClientRuntime

    def carry(self, mails: Sequence[Mail]) -> Iterator[Reply]:
        return map(self.runtime.handle, mails)

    def close(self) -> None:
        """Nothing to close."""

"""Connections from outside: those of strangers end soon and are never many, whatever they do; those of sites stay."""

import asyncio
import contextlib
import socket
import ssl
from typing import Any

import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol
from uvicorn.protocols.utils import get_local_addr, get_remote_addr

PATIENCE = 10.0  # seconds for the greeting (TLS) and the first call that a site signed
MOST_STRANGERS = 256  # connections without such a call; when one more comes, the oldest of them ends
MOST_OF_ONE = 64  # connections of one site

Ends = tuple[Any, Any]  # the addresses of both sides, which name a connection


class Visitors:
    """Who is connected, and for how long still."""

    def __init__(
        self, patience: float = PATIENCE, strangers: int = MOST_STRANGERS, of_one: int = MOST_OF_ONE
    ) -> None:
        self.patience, self.most_strangers, self.most_of_one = patience, strangers, of_one
        self._strangers: dict[Ends, tuple[asyncio.Transport, asyncio.TimerHandle]] = {}  # the oldest first
        self._sites: dict[bytes, dict[Ends, asyncio.Transport]] = {}

    def arrive(self, transport: asyncio.Transport) -> Ends:
        """Somebody is there, of whom nothing is known."""
        ends = get_remote_addr(transport), get_local_addr(transport)
        end = asyncio.get_running_loop().call_later(self.patience, transport.abort)
        self._strangers[ends] = transport, end
        if len(self._strangers) > self.most_strangers:
            self.end(next(iter(self._strangers)))
        return ends

    def know(self, ends: Ends, key: bytes) -> None:
        """This connection brought a call that the holder of this key signed."""
        if found := self._strangers.pop(ends, None):
            transport, end = found
            end.cancel()
            mine = self._sites.setdefault(key, {})
            mine[ends] = transport
            if len(mine) > self.most_of_one:
                self.end(next(iter(mine)))

    def end(self, ends: Ends) -> None:
        """Hang up, at once."""
        found = self._strangers.get(ends)
        for transport in [found[0]] if found else [one[ends] for one in self._sites.values() if ends in one]:
            transport.abort()
        self.leave(ends)

    def leave(self, ends: Ends) -> None:
        """This connection is over."""
        if found := self._strangers.pop(ends, None):
            found[1].cancel()
        for key, mine in list(self._sites.items()):
            mine.pop(ends, None)
            if not mine:
                del self._sites[key]


class Doorstep(asyncio.Protocol):
    """A connection before its greeting, which may be as slow as the visitor likes."""

    def __init__(self, server: "Outside", visitors: Visitors) -> None:
        self.server, self.visitors = server, visitors

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        transport.pause_reading()  # until there is somebody to read
        greeting = asyncio.get_running_loop().create_task(self._greet(transport))
        self.server.greetings.add(greeting)
        greeting.add_done_callback(self.server.greetings.discard)

    async def _greet(self, transport: asyncio.Transport) -> None:
        ends = self.visitors.arrive(transport)
        speaker = Speaker(self.server, self.visitors, ends)
        context = self.server.config.ssl
        assert context
        secure = None
        with contextlib.suppress(OSError, ssl.SSLError, asyncio.CancelledError):
            secure = await asyncio.get_running_loop().start_tls(
                transport, speaker, context, server_side=True, ssl_handshake_timeout=self.visitors.patience
            )
        if secure is None:
            self.visitors.leave(ends)
        else:
            speaker.connection_made(secure)


class Speaker(H11Protocol):
    """A connection that was greeted: HTTP, as uvicorn speaks it."""

    def __init__(self, server: "Outside", visitors: Visitors, ends: Ends) -> None:
        super().__init__(server.config, server.server_state, {})
        self.visitors, self.ends = visitors, ends
        self.early: bytes | None = b""  # what came in the same breath as the greeting

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        early, self.early = self.early, None
        if early:
            self.data_received(early)

    def data_received(self, data: bytes) -> None:
        if self.early is None:
            super().data_received(data)
        else:
            self.early += data

    def connection_lost(self, exc: Exception | None) -> None:
        self.visitors.leave(self.ends)
        if self.early is None:
            super().connection_lost(exc)


class Outside(uvicorn.Server):
    """The server at the outer door; signals are left to the other one."""

    def __init__(self, config: uvicorn.Config, visitors: Visitors) -> None:
        super().__init__(config)
        self.visitors = visitors
        self.greetings: set[asyncio.Task[None]] = set()

    @contextlib.contextmanager
    def capture_signals(self) -> Any:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await self.lifespan.startup()
        loop = asyncio.get_running_loop()
        self.servers = [
            await loop.create_server(lambda: Doorstep(self, self.visitors), sock=one, backlog=2048)
            for one in sockets or []
        ]
        self.started = True

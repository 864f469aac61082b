"""Strangers cannot keep the sites out, however slow, however many: the outer door alone, with a small app behind it."""

import asyncio
import contextlib
import json
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from signing import signed

from fedalloy.deploy.credentials import make_certificates, make_site_key
from fedalloy.deploy.gate import Gate, Roster
from fedalloy.deploy.link import outer
from fedalloy.deploy.roster import read_key
from fedalloy.deploy.visitors import Outside, Visitors

CALL = "/v1/fleet/pull-messages"
LIMIT = 30.0  # seconds for anything, on a busy machine too


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Reads the whole body, and says how long it was."""
    size, more = 0, True
    while more:
        message = await receive()
        if message["type"] != "http.request":
            return
        size, more = size + len(message["body"]), message["more_body"]
    headers = [(b"content-length", str(len(str(size))).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": str(size).encode()})


class Door:
    """An outer door on a free port, in a thread of its own."""

    def __init__(self, room: Path, silence: float, **limits: Any) -> None:
        self.room = room
        make_certificates(room, ["127.0.0.1"])
        for name in ("site-0", "site-1"):
            make_site_key(room / name)
        pems = {name: {"pem": read_key(room / name / "key.pub")} for name in ("site-0", "site-1")}
        (room / "roster.json").write_text(json.dumps(pems))
        self.socket = socket.create_server(("127.0.0.1", 0))
        self.port = int(self.socket.getsockname()[1])
        self.limits, self.silence = limits, silence
        self.thread = threading.Thread(target=lambda: asyncio.run(self._serve()))
        self.server: Outside | None = None

    async def _serve(self) -> None:
        visitors = Visitors(**self.limits)
        gate = Gate(app, Roster(self.room / "roster.json"), visitors, self.silence)
        config = outer(gate, self.room / "server.pem", self.room / "server.key")
        config.load()
        config.timeout_graceful_shutdown = 1
        self.server = Outside(config, visitors)
        await self.server.serve([self.socket])

    @property
    def context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.room / "ca.pem")

    def plain(self) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout=LIMIT)

    def greeted(self) -> socket.socket:
        return self.context.wrap_socket(self.plain(), server_hostname="127.0.0.1")

    def client(self) -> httpx.Client:
        return httpx.Client(base_url=f"https://127.0.0.1:{self.port}", verify=self.context, timeout=LIMIT)

    def ask(self, client: httpx.Client, site: str = "site-0") -> str:
        """A call as a SuperNode makes it: tried again until it is answered."""
        end = time.monotonic() + LIMIT
        while True:
            with contextlib.suppress(httpx.TransportError):
                answer = client.post(CALL, headers=signed(self.room / site), content=b"1234")
                if answer.status_code == 200:
                    return answer.text
            assert time.monotonic() < end, "a site was kept out"


@contextlib.contextmanager
def door(room: Path, *, silence: float = 60.0, **limits: Any) -> Iterator[Door]:
    found = Door(room, silence, **limits)
    found.thread.start()
    try:
        yield found
    finally:
        while found.server is None or not found.server.started:
            time.sleep(0.01)
        found.server.should_exit = True
        found.thread.join(LIMIT)
        assert not found.thread.is_alive()


def is_over(line: socket.socket, limit: float = LIMIT) -> bool:
    """Whether the other side hung up."""
    line.settimeout(limit)
    try:
        while line.recv(4096):
            pass
        return True
    except TimeoutError:
        return False
    except OSError:
        return True


def trickled(line: socket.socket, text: bytes, over: Callable[[], bool]) -> bool:
    """One byte after the other, never all of it; whether the other side hung up."""
    end = time.monotonic() + LIMIT
    while time.monotonic() < end:
        for byte in text:
            try:
                line.sendall(bytes([byte]))
            except OSError:
                return True
            if over():
                return True
    return False


def hung_up(line: socket.socket) -> Callable[[], bool]:
    return lambda: is_over(line, 0.02)


@pytest.mark.parametrize("how", ["silent", "slow greeting", "silent after it", "slow headers"])
def test_a_strangers_connection_ends_soon(tmp_path: Path, how: str) -> None:
    with door(tmp_path, patience=0.5) as found:
        if how in ("silent", "slow greeting"):
            line = found.plain()
        else:
            with contextlib.suppress(OSError):  # on a very busy machine it may be over before
                line = found.greeted()
        if how == "slow greeting":
            line.sendall(b"\x16\x03\x01\x02\x00\x01")
            assert trickled(line, b"\x00\x01", hung_up(line))
        elif how == "slow headers":
            assert trickled(line, b"POST " + CALL.encode() + b" HTTP/1.1\r\nx: " + b"y" * 999, hung_up(line))
        else:
            assert is_over(line)
        line.close()


def test_many_strangers_keep_nobody_out(tmp_path: Path) -> None:
    """Of those who say nothing the oldest has to go, and no clock is needed for that."""
    with door(tmp_path, patience=600.0, strangers=8) as found:
        lines = [found.plain() for _ in range(30)]
        with found.client() as client:
            assert found.ask(client) == "4"
            lines += [found.plain() for _ in range(30)]
            assert found.ask(client, "site-1") == "4"  # and the sites' own connections stay
        gone = sum(is_over(line, 5.0) for line in lines[:-8])
        assert gone == len(lines) - 8
        for line in lines:
            line.close()


def test_a_sites_connection_stays(tmp_path: Path) -> None:
    """Longer than the patience with strangers; one more than a site may have, and its oldest ends."""
    with door(tmp_path, patience=2.0, of_one=3) as found, found.client() as client:
        found.ask(client)
        stayed = client._transport._pool.connections[0]  # type: ignore[attr-defined]
        time.sleep(2.5)
        assert found.ask(client) == "4"
        assert client._transport._pool.connections == [stayed]  # type: ignore[attr-defined]
        lines = [found.greeted() for _ in range(4)]
        for line in lines:
            call = [f"POST {CALL} HTTP/1.1", "host: x", "content-length: 0"]
            call += [f"{name}: {value}" for name, value in signed(tmp_path / "site-1").items()]
            line.sendall(("\r\n".join(call) + "\r\n\r\n").encode())
            assert line.recv(4096).startswith(b"HTTP/1.1 200")
        assert is_over(lines[0])
        assert not is_over(lines[3], 0.2)
        for line in lines:
            line.close()


def test_a_body_that_stops_coming(tmp_path: Path) -> None:
    """Of a stranger none is read; of a site it is waited for, but not for ever."""
    with door(tmp_path, silence=0.5) as found:
        for keyed, first in ((False, b"HTTP/1.1 401"), (True, b"")):
            call = [f"POST {CALL} HTTP/1.1", "host: x", "content-length: 1000000000"]
            call += [f"{name}: {value}" for name, value in signed(tmp_path / "site-0").items() if keyed]
            with found.greeted() as line:
                line.sendall(("\r\n".join(call) + "\r\n\r\nabc").encode())
                line.settimeout(LIMIT)
                with contextlib.suppress(OSError):
                    assert line.recv(4096).startswith(first)
                assert is_over(line)


@pytest.mark.parametrize(
    ("lines", "status"),
    [
        (["content-length: 2147483649"], b"413"),
        (["transfer-encoding: chunked"], b"413"),
        (["content-length: 4", "transfer-encoding: chunked"], b"413"),  # the chunks would win
    ],
)
def test_bodies_without_end(tmp_path: Path, lines: list[str], status: bytes) -> None:
    """Not even of a site."""
    with door(tmp_path) as found, found.greeted() as line:
        call = [f"POST {CALL} HTTP/1.1", "host: x", *lines]
        call += [f"{name}: {value}" for name, value in signed(tmp_path / "site-0").items()]
        line.settimeout(LIMIT)
        line.sendall(("\r\n".join(call) + "\r\n\r\n").encode())
        assert line.recv(4096).startswith(b"HTTP/1.1 " + status)


def test_headers_without_end(tmp_path: Path) -> None:
    with door(tmp_path, patience=600.0) as found, found.greeted() as line:
        with contextlib.suppress(OSError):  # it is hung up on before all is sent
            line.sendall(b"POST / HTTP/1.1\r\nx: " + b"y" * 600_000)
        assert is_over(line)


def test_one_site_cannot_use_up_the_memory(tmp_path: Path) -> None:
    """What it declares at the same time is bounded together; others are answered meanwhile."""
    with door(tmp_path) as found, found.greeted() as first, found.greeted() as second:

        def declare(line: socket.socket, site: str, size: int) -> None:
            call = [f"POST {CALL} HTTP/1.1", "host: x", f"content-length: {size}"]
            call += [f"{name}: {value}" for name, value in signed(tmp_path / site).items()]
            line.sendall(("\r\n".join(call) + "\r\n\r\n").encode())

        declare(first, "site-0", 2 * 1024**3)
        first.sendall(b"x")
        time.sleep(0.3)
        declare(second, "site-0", 4)
        second.settimeout(LIMIT)
        assert second.recv(4096).startswith(b"HTTP/1.1 503")
        with found.client() as client:
            assert found.ask(client, "site-1") == "4"

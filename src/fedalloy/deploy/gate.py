"""What the world may ask of a SuperLink: Fleet calls, signed by the key of a site. All else is refused unread."""

import asyncio
import base64
import datetime
import json
from collections import Counter
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.superlink.routers.fleet.router import router

from fedalloy.deploy.knock import DOOR
from fedalloy.deploy.visitors import Visitors

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BYTES = (
    2 * 1024**3
)  # of one site at the same time; a protobuf message, and so a part of an array, ends there too
MOST_CALLS = 64  # of one site at the same time
SILENCE = 60.0  # seconds between two pieces of a body
CLOSED = {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}  # who is in, the operator alone decides
OPEN = {str(vars(route)["path"]) for route in router.routes} - CLOSED | {DOOR}


class Roster:
    """The keys that are let in now, as the operator's process writes them down."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self._seen: tuple[int, int] | None = None
        self._keys: frozenset[str] = frozenset()

    def __contains__(self, key: bytes) -> bool:
        try:
            now = self.file.stat()
            if self._seen != (now.st_mtime_ns, now.st_ino):
                found = json.loads(self.file.read_text()).values()
                self._keys = frozenset(one["pem"] for one in found)
                self._seen = (now.st_mtime_ns, now.st_ino)
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
        ):  # nobody is let in by a list that cannot be read
            self._seen, self._keys = None, frozenset()
        return key.decode("ascii", "replace") in self._keys


class Gate:
    """Flower's app behind a list of what is allowed; the socket that leads here decides, nothing in the request."""

    def __init__(
        self, app: App, roster: Roster, visitors: Visitors | None = None, silence: float = SILENCE
    ) -> None:
        self.app, self.roster, self.silence = app, roster, silence
        self.visitors = visitors or Visitors()
        self.calls: Counter[bytes] = Counter()  # now, by key
        self.bytes: Counter[bytes] = Counter()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # neither websockets nor anything else
        path = scope["path"]
        first = dict(reversed(scope["headers"]))  # of two, Flower reads the first
        if path not in OPEN or scope["raw_path"] != path.encode() or scope["method"] != "POST":
            await refuse(send, 404)
        elif (key := self._signer(first)) is None:
            await refuse(send, 401)
        elif path == DOOR:
            await refuse(send, 204)
        elif not 0 <= (length := _length(first)) <= MOST_BYTES:
            await refuse(send, 413)
        elif self.calls[key] >= MOST_CALLS or self.bytes[key] + length > MOST_BYTES:
            await refuse(send, 503)  # a SuperNode tries again later
        else:
            self.visitors.know((scope["client"], scope["server"]), key)
            self.calls[key] += 1
            self.bytes[key] += length
            try:
                await self._let_in(scope, receive, send)
            finally:
                self.calls[key] -= 1
                self.bytes[key] -= length

    async def _let_in(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def received() -> MutableMapping[str, Any]:
            try:
                async with asyncio.timeout(self.silence):
                    return await receive()
            except TimeoutError:
                self.visitors.end((scope["client"], scope["server"]))
                return {"type": "http.disconnect"}

        # Flower's middlewares find their path by way of the Host header: it must not be the sender's
        headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
        await self.app(
            {**scope, "query_string": b"", "headers": [*headers, (b"host", b"fleet")]}, received, send
        )

    def _signer(self, headers: dict[bytes, bytes]) -> bytes | None:
        """The key of the site that signed a moment that is now; None if there is no such site."""
        try:
            key = base64.b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.encode()], validate=True)
            if key not in self.roster:
                return None
            signature = base64.b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.encode()], validate=True)
            moment = headers[TIMESTAMP_HEADER.encode()]
            signed = datetime.datetime.fromisoformat(moment.decode("ascii"))
            age = (datetime.datetime.now(datetime.UTC) - signed).total_seconds()
            fresh = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
            return key if fresh and verify_signature(bytes_to_public_key(key), moment, signature) else None
        except (KeyError, ValueError, TypeError, OverflowError):
            return None


def _length(headers: dict[bytes, bytes]) -> int:
    """The declared size of a body; -1 if there is none, as in chunks without end, which win over a declared size."""
    if b"transfer-encoding" in headers:
        return -1
    try:
        return int(headers[b"content-length"])
    except (KeyError, ValueError):
        return -1


async def refuse(send: Send, status: int) -> None:
    """Answer and hang up: what follows is not read."""
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})

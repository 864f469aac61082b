"""What the world may ask of a SuperLink: Fleet calls, signed by the key of a site. All else is refused unread."""

import base64
import datetime
import json
from collections.abc import Awaitable, Callable, MutableMapping
from pathlib import Path
from typing import Any

from flwr.common.constant import SYSTEM_TIME_TOLERANCE, TIMESTAMP_HEADER, TIMESTAMP_TOLERANCE
from flwr.proto.fleet_pb2 import PushMessagesRequest, PushMessagesResponse
from flwr.supercore.constant import FLEET_HTTP_PUBLIC_KEY_HEADER, FLEET_HTTP_SIGNATURE_HEADER
from flwr.supercore.error import ApiErrorCode, FlowerError
from flwr.supercore.primitives.asymmetric import bytes_to_public_key, verify_signature
from flwr.superlink.routers.fleet.router import router
from flwr.superlink.servicer.fleet import fleet_handlers

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
App = Callable[[Scope, Receive, Send], Awaitable[None]]

MOST_BYTES = 2 * 1024**3  # of one request, which carries one array at most; a protobuf message ends there too
CLOSED = {"/v1/fleet/register-node", "/v1/fleet/unregister-node"}  # who is in, the operator alone decides
OPEN = {str(vars(route)["path"]) for route in router.routes} - CLOSED


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
        except (OSError, ValueError, KeyError):  # nobody is let in by a list that cannot be read
            self._seen, self._keys = None, frozenset()
        return key.decode("ascii", "replace") in self._keys


class Gate:
    """Flower's app behind a list of what is allowed; the socket that leads here decides, nothing in the request."""

    def __init__(self, app: App, roster: Roster) -> None:
        self.app, self.roster = app, roster

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return  # neither websockets nor anything else
        path = scope["path"]
        if path not in OPEN or scope["raw_path"] != path.encode() or scope["method"] != "POST":
            await refuse(send, 404)
        elif not self._signed(first := dict(reversed(scope["headers"]))):  # of two, Flower reads the first
            await refuse(send, 401)
        elif not 0 <= _length(first) <= MOST_BYTES:
            await refuse(send, 413)
        else:  # Flower's middlewares find their path by way of the Host header: it must not be the sender's
            headers = [(name, value) for name, value in scope["headers"] if name != b"host"]
            await self.app(
                {**scope, "query_string": b"", "headers": [*headers, (b"host", b"fleet")]}, receive, send
            )

    def _signed(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a site signed a moment that is now."""
        try:
            key = base64.b64decode(headers[FLEET_HTTP_PUBLIC_KEY_HEADER.encode()], validate=True)
            if key not in self.roster:
                return False
            signature = base64.b64decode(headers[FLEET_HTTP_SIGNATURE_HEADER.encode()], validate=True)
            moment = headers[TIMESTAMP_HEADER.encode()]
            signed = datetime.datetime.fromisoformat(moment.decode("ascii"))
            age = (datetime.datetime.now(datetime.UTC) - signed).total_seconds()
            fresh = -SYSTEM_TIME_TOLERANCE < age < TIMESTAMP_TOLERANCE + SYSTEM_TIME_TOLERANCE
            return fresh and verify_signature(bytes_to_public_key(key), moment, signature)
        except (KeyError, ValueError, TypeError):
            return False


def bind_replies_to_senders() -> None:
    """Flower checks who sends, but not in whose name the messages inside speak: refuse those in another's."""
    flowers: Callable[..., PushMessagesResponse] = fleet_handlers.push_messages

    def push_messages(request: PushMessagesRequest, **rest: Any) -> PushMessagesResponse:
        sender = request.node.node_id
        if any(message.metadata.src_node_id != sender for message in request.messages_list):
            raise FlowerError(ApiErrorCode.FLEET_RUN_STATUS_NOT_ALLOWED, f"{sender} speaks as another node")
        return flowers(request=request, **rest)

    vars(fleet_handlers)["push_messages"] = push_messages


def _length(headers: dict[bytes, bytes]) -> int:
    """The declared size of a body; -1 if there is none, as in chunks without end."""
    try:
        return int(headers[b"content-length"])
    except (KeyError, ValueError):
        return -1


async def refuse(send: Send, status: int) -> None:
    """Answer and hang up: what follows is not read."""
    headers = [(b"content-length", b"0"), (b"connection", b"close")]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": b""})

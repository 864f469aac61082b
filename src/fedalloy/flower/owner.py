"""The door for this machine opens to one user: the one whose server it is. Linux knows who holds a connection."""

import os
from pathlib import Path

from fedalloy.flower.gate import App, Receive, Scope, Send, refuse

TABLE = Path("/proc/net/tcp")
ESTABLISHED = "01"  # one that its owner has closed is nobody's, and shown as root's


class OwnerOnly:
    """Flower's app for connections of the user that runs it; where the system does not tell, for all here."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        free = scope["type"] == "lifespan" or not TABLE.exists()
        if free or holder(scope["client"][1], scope["server"][1]) == os.getuid():
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, 403)


def holder(port: int, server: int) -> int | None:
    """The user at the other end of a connection from 127.0.0.1:port to 127.0.0.1:server."""
    for line in TABLE.read_text().splitlines()[1:]:
        _, near, far, state, _, _, _, user, *_ = line.split()
        if (near[9:], far[9:], state) == (f"{port:04X}", f"{server:04X}", ESTABLISHED):
            return int(user)
    return None

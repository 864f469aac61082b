"""The door for this machine opens to one user: the one whose server it is. Linux knows who holds a connection."""

import os
import socket
import struct
from pathlib import Path

from fedalloy.deploy.gate import App, Receive, Scope, Send, refuse

TABLE = Path("/proc/net/tcp")
ESTABLISHED = "01"  # one that its owner has closed is nobody's, and shown as root's


class OwnerOnly:
    """Flower's app for connections of the user that runs it; where the system does not tell, for all here."""

    def __init__(self, app: App) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        free = scope["type"] == "lifespan" or not TABLE.exists()
        if free or holder(tuple(scope["client"]), tuple(scope["server"])) == os.getuid():
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            await refuse(send, 403)


def holder(near: tuple[str, int], far: tuple[str, int]) -> int | None:
    """The user at the near end of a connection; addresses count too: others may use the same port of another one."""
    wanted = _named(near), _named(far), ESTABLISHED
    for line in TABLE.read_text().splitlines()[1:]:
        _, here, there, state, _, _, _, user, *_ = line.split()
        if (here, there, state) == wanted:
            return int(user)
    return None


def _named(end: tuple[str, int]) -> str:
    """An address as Linux writes it: in the machine's order of bytes."""
    (number,) = struct.unpack("=I", socket.inet_aton(end[0]))
    return f"{number:08X}:{end[1]:04X}"

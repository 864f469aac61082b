"""Flower's SuperLink with two doors: Fleet calls of known sites from outside, everything for its owner on this machine.

python -m fedalloy.deploy.link FLEET-FD CONTROL-FD ROSTER CERTIFICATE KEY ARGUMENTS-OF-FLOWER-SUPERLINK

Both sockets come bound from the process that starts this one.
"""

import asyncio
import os
import resource
import socket
import sys
from pathlib import Path
from typing import Any

import uvicorn
from flwr.superlink.cli import flower_superlink

from fedalloy.deploy.apps import LINK
from fedalloy.deploy.bound import bind_calls
from fedalloy.deploy.gate import Gate, Roster
from fedalloy.deploy.owner import OwnerOnly
from fedalloy.deploy.visitors import Outside, Visitors

LOOK = 1.0  # seconds between two looks for a new certificate
IDLE = 30  # seconds that a connection may be silent between two requests
MOST_HEADERS = 64 * 1024  # bytes
MOST_FILES = 65536  # open at the same time, connections included, if the system allows it


class Doors:
    """Stands in for the module `uvicorn` in Flower's command: one app, two sockets."""

    def __init__(
        self, fleet: socket.socket, control: socket.socket, roster: Path, certificate: Path, key: Path
    ) -> None:
        self.fleet, self.control, self.roster = fleet, control, Roster(roster)
        self.certificate, self.key = certificate, key

    def run(self, app: Any, **settings: Any) -> None:
        asyncio.run(self._serve(app, settings))

    async def _serve(self, app: Any, settings: dict[str, Any]) -> None:
        for name in ("reload", "workers"):
            settings.pop(name)
        inside = uvicorn.Server(uvicorn.Config(OwnerOnly(app), **settings))
        visitors = Visitors()
        outside = Outside(outer(Gate(app, self.roster, visitors), self.certificate, self.key), visitors)
        outside.config.load()
        tasks = [
            asyncio.create_task(outside.serve([self.fleet])),
            asyncio.create_task(self._renew(outside.config)),
        ]
        try:
            await inside.serve([self.control])
        finally:
            outside.should_exit = True
            await tasks[0]
            tasks[1].cancel()

    async def _renew(self, config: uvicorn.Config) -> None:
        """Greet new connections with the certificate that lies there now."""
        seen = self._times()
        while True:
            await asyncio.sleep(LOOK)
            now = self._times()
            if now != seen and config.ssl:
                try:
                    config.ssl.load_cert_chain(self.certificate, self.key)
                    print("the new certificate is in use", flush=True)
                    seen = now
                except OSError as error:  # half of it is there: the old one goes on
                    print(f"the new certificate cannot be used yet: {error}", flush=True)

    def _times(self) -> list[int]:
        return [file.stat().st_mtime_ns if file.exists() else 0 for file in (self.certificate, self.key)]


def outer(app: Any, certificate: Path, key: Path) -> uvicorn.Config:
    """How the world is spoken to."""
    return uvicorn.Config(
        app,
        lifespan="off",
        http="h11",  # the strict one
        ws="none",
        h11_max_incomplete_event_size=MOST_HEADERS,
        timeout_keep_alive=IDLE,
        proxy_headers=False,
        server_header=False,
        access_log=False,
        log_config=None,
        ssl_certfile=certificate,
        ssl_keyfile=key,
    )


def main() -> None:
    os.umask(0o077)
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, MOST_FILES)), hard))
    fleet, control = (socket.socket(fileno=int(sys.argv.pop(1))) for _ in range(2))
    roster, certificate, key = (Path(sys.argv.pop(1)) for _ in range(3))
    bind_calls()
    os.environ[LINK] = str(os.getpid())  # what starts from here inherits it
    flower_superlink.__globals__["uvicorn"] = Doors(fleet, control, roster, certificate, key)
    flower_superlink()


if __name__ == "__main__":
    main()

"""A connection to Ray: to one of our own on this machine, quiet and for nobody else, or to a cluster that is there."""

import os
import secrets
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from logging import ERROR
from pathlib import Path
from tempfile import TemporaryDirectory, gettempdir
from types import ModuleType
from typing import Any, ClassVar

from fedalloy.errors import FedAlloyError

os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # else it warns
try:
    import ray
except ImportError:
    raise FedAlloyError("the ray engine needs Ray; type: pip install 'fedalloy[ray]'") from None

__all__ = ["Cluster", "ray"]

SHORT = 25  # letters; the path of a socket, which Ray makes 80 longer, may not have more than 107
REACH = 10.0  # seconds until a cluster must answer
TOKEN = secrets.token_hex(32)  # nobody else may use a Ray that is started here


class Cluster:
    """A connection to Ray, and the actors that wait there for another run.

    Runs inside `with Cluster(...)` share both, from the first one on; any other run has its own. A Ray that this
    process is connected to already is joined, and left as it was.
    """

    current: ClassVar["Cluster | None"] = None

    def __init__(self, address: str | None = None, cpus: int = 1) -> None:
        self.idle: dict[float, list[Any]] = {}  # by the share of a GPU that they hold
        self._address, self._cpus = address, cpus
        self._stack = ExitStack()
        self._outer: Cluster | None = None

    def connect(self) -> None:
        if ray.is_initialized():
            return
        try:
            self._init()
        except FedAlloyError:
            raise
        except (OSError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
            what = f"use Ray at {self._address}" if self._address else "start Ray"
            raise FedAlloyError(f"cannot {what}: {error}") from error

    def close(self) -> None:
        for handle in [handle for handles in self.idle.values() for handle in handles]:
            ray.kill(handle)
        self.idle.clear()
        self._stack.close()

    def __enter__(self) -> "Cluster":
        self._outer = Cluster.current
        Cluster.current = self._outer or self
        return Cluster.current

    def __exit__(self, *_: object) -> None:
        Cluster.current = self._outer
        self.close()

    def room(self, workers: int | None, gpus: float, clients: int) -> int:
        """How many actors there will be."""
        there = ray.cluster_resources()
        most = int(there.get("CPU", 0))
        if gpus:
            most = min(most, int(there.get("GPU", 0)) * int(1 / gpus))
        if most < (workers or 1):
            held = f"{there.get('CPU', 0):g} CPUs and {there.get('GPU', 0):g} GPUs"
            wanted = f" with {gpus:g} of a GPU each" if gpus else ""
            raise FedAlloyError(f"Ray has {held}: too few for {workers or 1} actors{wanted}")
        return min(workers or most, max(1, clients))

    def _init(self) -> None:
        settings: dict[str, Any] = {"address": self._address}
        if self._address is None:
            short = None if len(gettempdir()) < SHORT else "/tmp"
            folder = TemporaryDirectory(prefix="ray-", dir=short, ignore_cleanup_errors=True)
            self._stack.enter_context(_alone())
            settings = {"address": "local", "num_cpus": self._cpus, "include_dashboard": False}
            settings["_temp_dir"] = self._stack.enter_context(folder)
        else:
            _reach(self._address)
        self._stack.enter_context(_silent())
        self._stack.callback(ray.shutdown)
        ray.init(**settings, log_to_driver=False, logging_level=ERROR)


def _reach(address: str) -> None:
    """Ray itself would try for minutes."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdigit()):
        if address == "auto":
            return
        raise FedAlloyError(f"--ray-address must be HOST:PORT, such as 10.0.0.1:6379, or auto, not {address}")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=REACH).close()
    except OSError as error:
        raise FedAlloyError(
            f"no Ray answers at {address} ({error}); start one with: ray start --head"
        ) from None


@contextmanager
def _alone() -> Iterator[None]:
    """For a Ray of our own: on the loopback device, and with a token, unless the user has one."""
    from ray._private import ray_constants

    before = dict(os.environ)
    own = any(name.startswith("RAY_AUTH_") for name in before) or (Path.home() / ".ray/auth_token").exists()
    if not own:
        os.environ["RAY_AUTH_TOKEN"] = TOKEN
    with _swapped(ray_constants, "ENABLE_RAY_CLUSTER", False):
        try:
            yield
        finally:
            for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN"):
                os.environ.pop(name, None)
                os.environ.update({name: before[name]} if name in before else {})
            with suppress(ImportError, AttributeError):  # it remembers what the environment said
                from ray._raylet import AuthenticationTokenLoader
                from ray._raylet import Config as Memory

                Memory.initialize("")
                AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _silent() -> Iterator[None]:
    """Ray prints to standard output when an actor dies, whatever it is told; errors reach us another way."""
    from ray._private import worker

    with _swapped(worker, "print_to_stdstream", lambda *_, **__: None):
        yield


@contextmanager
def _swapped(module: ModuleType, name: str, value: object) -> Iterator[None]:
    before = getattr(module, name, None)
    setattr(module, name, value)
    try:
        yield
    finally:
        setattr(module, name, before)

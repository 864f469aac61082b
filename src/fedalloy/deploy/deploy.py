"""A deployment's folder and its processes: the SuperLink, the SuperNodes, a run."""

import contextlib
import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable, Iterator, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import tomli_w

from fedalloy.core.files import make_folder, unmake, write_whole
from fedalloy.core.version import VERSION
from fedalloy.deploy.credentials import for_owner_only, make_certificates, make_site_key
from fedalloy.deploy.guide import guide
from fedalloy.deploy.roster import ROSTER, ROSTER_FILE, Roster, keys_in, readable
from fedalloy.deploy.terms import Terms
from fedalloy.engines.processes import die_with
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import FREE, Config

LINK = "fedalloy"  # the name of the connection in Flower's own config
START_LIMIT = 60.0  # seconds
NODE = Path(__file__).with_name(
    "node.py"
)  # run as a file: it needs nothing of FedAlloy, and torch takes long to import
OWN = frozenset(
    {"pyproject.toml", "README.md", ".gitignore", "LICENSE"}
)  # what an app of FedAlloy's may hold
COMPONENTS = {
    "serverapp": "fedalloy.deploy.apps:server_app",
    "clientapp": "fedalloy.deploy.apps:client_app",
}


class Deployment:
    """What `fedalloy deploy init` wrote: app/, credentials/, sites/, and server/ once it runs."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder.resolve()
        if not (self.folder / "app" / "pyproject.toml").is_file():
            raise FedAlloyError(f"{folder} is no deployment; make one with 'fedalloy deploy init {folder}'")

    @classmethod
    def create(cls, folder: Path, config: Config, terms: Terms, hosts: list[str], port: int) -> "Deployment":
        if folder.exists() and any(folder.iterdir()):
            raise FedAlloyError(f"{folder} exists already; give another folder")
        with for_owner_only():
            made = make_folder(folder)
            try:
                cls._write(folder, config, terms, hosts, port)
            except (FedAlloyError, OSError):
                unmake(folder, made)
                raise
        return cls(folder)

    @staticmethod
    def _write(folder: Path, config: Config, terms: Terms, hosts: list[str], port: int) -> None:
        (folder / "app").mkdir()
        make_certificates(folder / "credentials", hosts)
        address = f"{hosts[0]}:{port}"
        for client in range(config.clients):
            site = folder / "sites" / f"site-{client}"
            make_site_key(site)
            shutil.copy(folder / "credentials" / "ca.pem", site / "ca.pem")
            (site / "site.toml").write_text(tomli_w.dumps({"client": client, "superlink": address}))
            (site / "plan.toml").write_text(tomli_w.dumps(_settings(config, terms)))
        (folder / "app" / "pyproject.toml").write_text(_app(config, terms))
        (folder / "README.md").write_text(guide(config, terms, address))
        (folder / "credentials" / "server.toml").write_text(tomli_w.dumps({"address": address}))
        (folder / ".gitignore").write_text("credentials/\nsites/\nserver/\n.flwr/\n")

    @property
    def settings(self) -> dict[str, Any]:
        """What the app is configured to do."""
        found = tomllib.loads((self.folder / "app" / "pyproject.toml").read_text())
        settings: dict[str, Any] = found["tool"]["flwr"]["app"]["config"]
        return settings

    @property
    def foreign(self) -> list[str]:
        """What Flower would run of this app that is not FedAlloy's: other components, or files of its own."""
        app = self.folder / "app"
        found = tomllib.loads((app / "pyproject.toml").read_text())["tool"]["flwr"]["app"]["components"]
        named = [f"{kind} = {found[kind]}" for kind in found if found[kind] != COMPONENTS.get(kind)]
        return named + sorted(entry.name for entry in app.iterdir() if entry.name not in OWN)

    def settings_with(self, overrides: Sequence[str]) -> dict[str, Any]:
        """The same with some changed, such as 'rounds=5 lr=0.1'."""
        from flwr.common.config import parse_config_args

        return {**self.settings, **parse_config_args(list(overrides))}

    @property
    def run_folder(self) -> Path:
        """Where the server writes the run; a relative path begins in server/."""
        return self.folder / "server" / str(self.settings["run-folder"])

    @property
    def environment(self) -> dict[str, str]:
        return {**environment(self.folder / ".flwr"), ROSTER: str(self.folder / "server" / ROSTER_FILE)}

    @property
    def address(self) -> str:
        """Where sites find the server."""
        file = self.folder / "credentials" / "server.toml"
        try:
            return str(tomllib.loads(file.read_text())["address"])
        except (OSError, ValueError, KeyError):
            told = self._told_to_sites() or "HOST:PORT"
            raise FedAlloyError(
                f"{file} does not say where sites find the server (older deployments had no such file); "
                f"type: echo 'address = \"{told}\"' > {file}"
            ) from None

    def _told_to_sites(self) -> str | None:
        for file in sorted((self.folder / "sites").glob("site-*/site.toml")):
            with contextlib.suppress(OSError, ValueError, KeyError):
                return str(tomllib.loads(file.read_text())["superlink"])
        return None

    @property
    def control(self) -> str:
        """Where the operator's commands find it: an address of this machine alone, another at every start."""
        file = self.folder / ".flwr" / "config.toml"
        if not file.exists():
            raise FedAlloyError(f"the server does not run; type: fedalloy deploy server {self.folder}")
        return str(tomllib.loads(file.read_text())["superlink"][LINK]["address"])

    def start_server(self, host: str) -> subprocess.Popen[bytes]:
        """The SuperLink, with TLS and keys required; what it knows survives on disk."""
        here, made = self.folder / "server", self.folder / "credentials"
        self._check_memory(here / "superlink.db")
        fleet = _listener(host, int(self.address.rpartition(":")[2]))
        with fleet, _listener("127.0.0.1", 0) as control, for_owner_only():
            for folder in (here, self.folder / ".flwr"):
                folder.mkdir(exist_ok=True)
                folder.chmod(0o700)
            make_certificates(here / "control", ["127.0.0.1"])  # nobody outside has a use for these
            port = control.getsockname()[1]
            self._write_link(f"127.0.0.1:{port}", here / "control" / "ca.pem")
            command = [
                *(sys.executable, "-P", "-m", "fedalloy.deploy.link"),
                *(str(fleet.fileno()), str(control.fileno()), str(here / ROSTER_FILE)),
                *(str(made / "server.pem"), str(made / "server.key")),
                *("--host", "127.0.0.1", "--port", str(port)),
                *("--ssl-ca-certfile", str(here / "control" / "ca.pem")),
                *("--ssl-certfile", str(here / "control" / "server.pem")),
                *("--ssl-keyfile", str(here / "control" / "server.key")),
                *("--database", str(here / "superlink.db")),
                "--enable-supernode-auth",
                "--disable-runtime-dependency-installation",
            ]
            return start(command, self.environment, here, (fleet.fileno(), control.fileno()))

    def _check_memory(self, database: Path) -> None:
        """What Flower remembers and the roster belong together: nodes are known by both or by none."""
        if not database.exists():
            self.roster.file.unlink(missing_ok=True)
        elif not self.roster.file.exists():
            raise FedAlloyError(
                f"{self.roster.file} is not there, which says whose keys {database} knows; type: "
                f"rm {database}*; then start the server again: it makes both anew from sites/, and runs carry on"
            )
        else:
            self.roster.check()

    def _write_link(self, address: str, authority: Path) -> None:
        link = {"address": address, "root-certificates": str(authority)}
        file = self.folder / ".flwr" / "config.toml"
        file.write_text(tomli_w.dumps({"superlink": {"default": LINK, LINK: link}}))
        file.chmod(0o600)

    @cached_property
    def roster(self) -> Roster:
        return Roster(self.folder / "server" / ROSTER_FILE)

    def register_sites(self, process: subprocess.Popen[bytes]) -> list[str]:
        """Let in the sites whose public keys lie in sites/; the names of those."""
        wait_for(self.control, process)
        try:
            self.follow_keys()
        except FedAlloyError as error:  # one bad key keeps nobody else out
            print(error, flush=True)
        return sorted(self.roster.entries)

    def follow_keys(self) -> list[str]:
        """Let in the keys that are new in sites/, and out at once those that are gone; what was done."""
        return self.roster.follow(
            keys_in(self.folder / "sites"),
            lambda name, file: int(
                self.flwr("supernode", "register", str(file), LINK, "--name", name, "--format", "json")[
                    "node-id"
                ]
            ),
            lambda node: self.flwr("supernode", "unregister", str(node), LINK, "--format", "json"),
        )

    def refuse_key(self, site: str, pem: str) -> None:
        """An error if this key cannot be the one of this site: it is another's, or was let out."""
        for name, other in readable(keys_in(self.folder / "sites")).items():
            if name != site and other == pem:
                raise FedAlloyError(f"this is the key of {name}; every site needs a key of its own")
        self.roster.removed.refuse(pem)

    def keep(self, name: str, text: str) -> None:
        """Write a file to server/."""
        here = self.folder / "server"
        with for_owner_only():
            here.mkdir(exist_ok=True)
            write_whole(here / name, text.encode(), 0o600)

    def start_run(self, overrides: Sequence[str] = ()) -> int:
        """Hand the app to the SuperLink; the number of the run."""
        words = [word for one in overrides for word in ("--run-config", one)]
        answer = self.flwr("run", str(self.folder / "app"), LINK, "--format", "json", *words)
        if "run-id" not in answer:
            raise FedAlloyError("the server has not taken the run; wait until it says that it is ready")
        return int(answer["run-id"])

    def status(self, run: int) -> tuple[str, str]:
        """Flower's word on a run, such as finished:completed, and its reason if it failed."""
        answer = self.flwr("ls", LINK, "--run-id", str(run), "--format", "json")
        (found,) = answer["runs"]
        return str(found["status"]), str(found["status-details"])

    def stop_run(self, run: int) -> None:
        self.flwr("stop", str(run), LINK, "--format", "json")

    def flwr(self, *words: str) -> dict[str, Any]:
        """Flower's own command line, in JSON where it speaks that."""
        assert self.control  # an error if there was never a server
        done = subprocess.run(
            [tool("flwr"), *words],
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            umask=0o077,
        )
        told = (done.stdout + done.stderr).strip()
        if done.returncode:
            raise FedAlloyError(f"flwr {' '.join(words[:2])} failed: {told}")
        with contextlib.suppress(ValueError):
            found: dict[str, Any] = json.loads(done.stdout)
            if found.get("success") is False:
                raise FedAlloyError(f"flwr {' '.join(words[:2])} failed: {found.get('error-message', told)}")
            return found
        return {}


def environment(home: Path) -> dict[str, str]:
    """No telemetry, no look for updates, one thread for each process, and quick to see a new task.

    Of Flower's variables none is taken over: some open further ports, without any key.
    """
    return {
        **{name: value for name, value in os.environ.items() if not name.startswith("FLWR_")},
        "FLWR_HOME": str(home),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1",
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}",
    }


def tool(name: str) -> str:
    """Flower's commands are installed next to this Python."""
    found = shutil.which(name, path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")
    if found is None:
        raise FedAlloyError("Flower is not installed; type: pip install 'fedalloy[flower]'")
    return found


@contextlib.contextmanager
def site_process(
    bundle: Path,
    superlink: str,
    node: dict[str, Any],
    state: Path,
    *,
    keyed: bool = True,
    trusted: bool = True,
    look_every: float = 0.5,
    extra: Sequence[str] = (),
) -> Iterator[tuple[subprocess.Popen[bytes], str, bytes]]:
    """A SuperNode in process isolation: the process, its local address, and the secret for asking there."""
    for name, value in node.items():
        if isinstance(value, str) and not set(value).isdisjoint('"\\\n\r'):  # would begin another setting
            raise FedAlloyError(f"{name} {value!r} must hold neither quotes nor backslashes nor line breaks")
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    state.chmod(0o700)
    secret, port = secrets.token_bytes(32), free_port()
    file = state / "worker.secret"
    file.unlink(missing_ok=True)
    file.touch(mode=0o600, exist_ok=False)
    file.write_bytes(secret)
    command = [
        *(sys.executable, "-P", str(NODE), str(look_every)),
        *("--superlink", superlink),
        *(("--root-certificates", str(bundle / "ca.pem")) if trusted else ("--insecure",)),
        *(("--auth-supernode-private-key", str(bundle / "key")) if keyed else ()),
        *("--isolation", "process", "--host", "127.0.0.1", "--port", str(port)),
        *("--superexec-auth-secret-file", str(file)),
        *("--node-config", " ".join(f"{name}={json.dumps(value)}" for name, value in node.items())),
        *extra,
    ]
    process = start(command, environment(state / ".flwr"), state)
    try:
        yield process, f"127.0.0.1:{port}", secret
    finally:
        stop(process)
        file.unlink(missing_ok=True)


def start(
    command: list[str], env: dict[str, str], folder: Path, sockets: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """A process that ends when this one does, however that happens, and whose files are its owner's alone."""
    return subprocess.Popen(
        command, env=env, cwd=folder, preexec_fn=dies_with_us(), umask=0o077, pass_fds=sockets
    )


def dies_with_us() -> Callable[[], None]:
    """What a new process has to call to end, politely asked, when this one is gone."""
    return partial(die_with, os.getpid(), signal.SIGTERM)


def stop(process: subprocess.Popen[bytes], patience: float = 10.0) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(patience)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(address: str, process: subprocess.Popen[bytes], limit: float = START_LIMIT) -> None:
    """Until somebody listens there."""
    host, _, port = address.rpartition(":")
    deadline = time.monotonic() + limit
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise FedAlloyError(
                f"the process for {address} ended at once with code {process.returncode}; see above"
            )
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=1):
            return
        time.sleep(0.1)
    raise FedAlloyError(f"nobody listens at {address} after {limit:g} s")


def _listener(host: str, port: int) -> socket.socket:
    """A socket that is bound; one with a port of its own choice does not listen yet."""
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
        if port:  # taken from now on, also before anybody answers
            found.listen()
    except OSError as error:
        found.close()
        raise FedAlloyError(
            f"cannot listen on {host}:{port}: {error.strerror}; is a server running there?"
        ) from None
    return found


def free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def _settings(config: Config, terms: Terms) -> dict[str, Any]:
    chosen = {**config.model_dump(exclude_none=True), **terms.model_dump(exclude_none=True)}
    return {
        name.replace("_", "-"): value for name, value in chosen.items() if name not in FREE - {"data_root"}
    }


def _app(config: Config, terms: Terms) -> str:
    """The Flower app: its configuration is a FedAlloy config and the terms of the deployment."""
    app = {
        "publisher": "fedalloy",
        "components": COMPONENTS,
        "config": _settings(config, terms),
    }
    return tomli_w.dumps(
        {
            "project": {
                "name": "fedalloy-federation",
                "version": "1.0.0",
                "description": "A FedAlloy federation.",
                "license": "Apache-2.0",
                "dependencies": [f"fedalloy[flower]=={VERSION}"],
            },
            "tool": {"flwr": {"app": app}},
        }
    )

"""What a deployment is refused for before anything of it is written or started."""

import ipaddress
import re
from pathlib import PurePosixPath

from fedalloy.core import registry
from fedalloy.core.imports import Imports
from fedalloy.deploy.terms import Terms
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config

MOST_SITES = 1000
LABEL = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)")


def hosts_of(text: str) -> list[str]:
    """The names and addresses in a list parted by commas, each of which a certificate can hold."""
    hosts = [word.strip() for word in text.split(",")]
    for host in hosts:
        if not _is_host(host):
            raise FedAlloyError(
                f"--host {host!r} is no name or address; type such as --host example.org,10.0.0.5, "
                "without scheme, and the port as --port"
            )
    return hosts


def address_of(text: str) -> str:
    """HOST:PORT, and nothing that could be taken for anything else."""
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]") if ":" in host else host
    if not (port.isascii() and port.isdigit() and 1 <= int(port[:6]) <= 65535 and _is_host(host)):
        raise FedAlloyError(
            f"{text[:80]!r} is no address of a server; type such as --superlink example.org:9092"
        )
    return text


def check_plan(config: Config, terms: Terms, imports: Imports | None, port: int | None = None) -> None:
    """Refuse what could not run: a port, a list of classes, a run folder, a method that cannot do what is asked."""
    if port is not None and not 1 <= port <= 65535:
        raise FedAlloyError(f"--port {port} is none; they run from 1 to 65535")
    if config.clients > MOST_SITES:
        raise FedAlloyError(
            f"--clients {config.clients} would be as many sites with a key each; a deployment has {MOST_SITES} at most"
        )
    if terms.sites == "own":
        _check_classes(terms)
    path = PurePosixPath(terms.run_folder)
    if path.is_absolute() or ".." in path.parts or not path.parts:
        raise FedAlloyError(
            f"run-folder {terms.run_folder!r} would lie outside of server/; type a plain name such as second"
        )
    method = registry.make(config.method, imports)
    config.spelled()  # an error where there is no such model
    if terms.masked:
        from fedalloy.deploy.masked import check_maskable

        check_maskable(method)


def _check_classes(terms: Terms) -> None:
    names = [name.strip() for name in terms.class_names.split(",")]
    twice = sorted({name for name in names if names.count(name) > 1})
    if "" in names or twice or len(names) < 2:
        wrong = "an empty name" if "" in names else f"{twice[0]!r} twice" if twice else "one class alone"
        raise FedAlloyError(f"class-names holds {wrong}; type two or more that differ, such as 'cat,dog'")


def _is_host(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        labels = text.split(".")
        numbers = all(label.isdigit() for label in labels)  # 10.0.0.300 is no name either
        return len(text) <= 253 and not numbers and all(LABEL.fullmatch(label) for label in labels)
    return True

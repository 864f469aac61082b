"""A client is its key: which client, which public key and which of Flower's nodes belong together."""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from fedalloy.errors import FedAlloyError
from fedalloy.storage import write_whole

ROSTER, ROSTER_FILE = "FEDALLOY_ROSTER", "roster.json"  # the variable that tells a server's app where it lies
SITE = re.compile(r"site-(\d{1,9})")

Entry = dict[str, Any]  # client, node, key (its SHA-256) and pem


def keys_in(sites: Path) -> dict[str, Path]:
    """The public keys in the folders site-0, site-1 ..., by the name of the folder."""
    found = {one.name: one / "key.pub" for one in sorted(sites.iterdir())} if sites.is_dir() else {}
    return {name: file for name, file in found.items() if SITE.fullmatch(name) and file.is_file()}


def read_key(file: Path) -> str:
    """A public key as Flower sends it; an error if it is none that Flower takes."""
    try:
        key = serialization.load_ssh_public_key(file.read_bytes())
    except (OSError, ValueError, UnsupportedAlgorithm):
        key = None
    if not isinstance(key, ec.EllipticCurvePublicKey):
        raise FedAlloyError(
            f"{file} holds no public key; make a pair with: ssh-keygen -t ecdsa -b 384 -N '' -f key"
        )
    form = serialization.PublicFormat.SubjectPublicKeyInfo
    return key.public_bytes(serialization.Encoding.PEM, form).decode()


class Roster:
    """Who is let in. The gate of the SuperLink and the server's app read it; the operator's process writes it."""

    def __init__(self, file: Path) -> None:
        self.file = file

    @property
    def entries(self) -> dict[str, Entry]:
        found: dict[str, Entry] = json.loads(self.file.read_text()) if self.file.exists() else {}
        return found

    @property
    def clients(self) -> dict[int, int]:
        """Which client each of Flower's nodes is."""
        return {entry["node"]: entry["client"] for entry in self.entries.values()}

    def follow(
        self,
        keys: Mapping[str, Path],
        register: Callable[[str, Path], int],
        unregister: Callable[[int], object],
    ) -> list[str]:
        """Let in the keys that are new, let out those that are gone or replaced; what was done, in words."""
        entries, done = self.entries, []
        wanted = {name: read_key(file) for name, file in keys.items()}
        if len(set(wanted.values())) < len(wanted):
            raise FedAlloyError("two sites have the same key.pub; every site needs a key of its own")
        gone = {name: one for name, one in entries.items() if wanted.get(name) != one["pem"]}
        entries = {name: one for name, one in entries.items() if name not in gone}
        if gone:
            self._write(entries)  # from here on the gate is closed to them, whatever comes next
        for name, one in gone.items():
            unregister(one["node"])
            done.append(f"{name}: key {one['key'][:16]} is out")
        for name in sorted(wanted.keys() - entries.keys()):
            digest = hashlib.sha256(wanted[name].encode()).hexdigest()
            client = int(name.partition("-")[2])
            entries[name] = {
                "client": client,
                "node": register(name, keys[name]),
                "key": digest,
                "pem": wanted[name],
            }
            self._write(entries)
            done.append(f"{name}: key {digest[:16]} is in")
        return done

    def _write(self, entries: dict[str, Entry]) -> None:
        write_whole(self.file, json.dumps(entries, indent=1, sort_keys=True).encode(), 0o600)


def clients_by_node() -> dict[int, int] | None:
    """What the server's app may believe; None where no deployment started it."""
    file = os.environ.get(ROSTER)
    return Roster(Path(file)).clients if file else None

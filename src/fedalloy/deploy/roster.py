"""A client is its key: which client, which public key and which of Flower's nodes belong together."""

import contextlib
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

from fedalloy.core.files import write_whole
from fedalloy.errors import FedAlloyError

ROSTER, ROSTER_FILE = "FEDALLOY_ROSTER", "roster.json"  # the variable that tells a server's app where it lies
SITE = re.compile(r"site-(\d{1,9})")

REMOVED = "removed.json"  # beside it

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


def readable(keys: Mapping[str, Path]) -> dict[str, str]:
    """The keys in these files; of those that hold none the server tells when it reads them."""
    found: dict[str, str] = {}
    for name, file in keys.items():
        with contextlib.suppress(FedAlloyError):
            found[name] = read_key(file)
    return found


def key_digest(pem: str) -> str:
    """What a key is called."""
    return hashlib.sha256(pem.encode()).hexdigest()


class Removed:
    """The keys that were let out: for good, whatever became of them meanwhile."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def add(self, digest: str) -> None:
        write_whole(self.file, json.dumps(sorted(self._all() | {digest})).encode(), 0o600)

    def refuse(self, pem: str) -> None:
        """An error if this is one of them."""
        digest = key_digest(pem)
        if digest in self._all():
            raise FedAlloyError(
                f"key {digest[:16]} was let out before and cannot come back; "
                "make a new pair with: ssh-keygen -t ecdsa -b 384 -N '' -f key"
            )

    def _all(self) -> set[str]:
        if not self.file.exists():
            return set()
        try:
            return set(json.loads(self.file.read_text()))
        except (OSError, ValueError, TypeError):
            raise FedAlloyError(
                f"{self.file} is damaged, which lists the keys that were let out; put its backup back, "
                "or remove it if no key was ever let out"
            ) from None


class Roster:
    """Who is let in. The gate of the SuperLink and the server's app read it; the operator's process writes it."""

    def __init__(self, file: Path) -> None:
        self.file = file
        self.removed = Removed(file.with_name(REMOVED))
        self._refused: dict[str, str] = {}  # keys that Flower did not take, by site: not offered again

    @property
    def entries(self) -> dict[str, Entry]:
        if not self.file.exists():
            return {}
        try:
            found: dict[str, Entry] = json.loads(self.file.read_text())
            for name, one in found.items():
                if not SITE.fullmatch(name) or {"client", "node", "key", "pem"} - one.keys():
                    raise ValueError(name)
        except (OSError, ValueError, TypeError, AttributeError):
            raise FedAlloyError(
                f"{self.file} is damaged, and nobody is let in by it; stop the server, type: "
                f"rm {self.file} {self.file.with_name('superlink.db')}*; and start it again: "
                "it makes both anew from sites/, and runs carry on"
            ) from None
        return found

    def check(self) -> None:
        """An error if it cannot be read."""
        assert self.entries is not None

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
        """Let in the keys that are new, let out those that are gone or replaced; what was done, in words.

        What is wrong with one site's key is told when all else is done.
        """
        entries, done, wrong = self.entries, list[str](), list[str]()
        wanted = self._wanted(keys, entries, wrong)
        gone = {name: one for name, one in entries.items() if wanted.get(name) != one["pem"]}
        entries = {name: one for name, one in entries.items() if name not in gone}
        if gone:
            self._write(entries)  # from here on the gate is closed to them, whatever comes next
        for name, one in gone.items():
            done.append(f"{name}: key {one['key'][:16]} is out")
            try:
                self.removed.add(one["key"])
                unregister(one["node"])
            except FedAlloyError as error:
                wrong.append(f"{name}: its old key is out, but: {error}")
        for name in sorted(wanted.keys() - entries.keys()):
            if self._refused.get(name) == wanted[name]:
                continue
            try:
                node = register(name, keys[name])
            except FedAlloyError as error:
                if "in use" in str(error):  # so it is with a key that was let out, too
                    self._refused[name] = wanted[name]
                wrong.append(f"{name}: its key could not be let in, try a new one: {error}")
                continue
            digest = key_digest(wanted[name])
            client = int(name.partition("-")[2])
            entries[name] = {"client": client, "node": node, "key": digest, "pem": wanted[name]}
            self._write(entries)
            done.append(f"{name}: key {digest[:16]} is in")
        if wrong:
            raise FedAlloyError("; ".join([*done, *wrong]))
        return done

    def _wanted(
        self, keys: Mapping[str, Path], entries: Mapping[str, Entry], wrong: list[str]
    ) -> dict[str, str]:
        """The keys in sites/ that can be let in; what is wrong with the others is added to the list."""
        found: dict[str, str] = {}
        for name, file in keys.items():
            try:
                found[name] = read_key(file)
            except FedAlloyError as error:
                wrong.append(f"{name}: {error}")
        stays = [name for name, pem in found.items() if name in entries and entries[name]["pem"] == pem]
        wanted = {name: found[name] for name in stays}
        for name in sorted(found.keys() - wanted.keys()):
            pem = found[name]
            other = next((one for one, key in wanted.items() if key == pem), None)
            try:
                if other:
                    raise FedAlloyError(f"this is the key of {other}; every site needs a key of its own")
                self.removed.refuse(pem)
            except FedAlloyError as error:
                wrong.append(f"{name}: {error}")
            else:
                wanted[name] = pem
        return wanted

    def _write(self, entries: dict[str, Entry]) -> None:
        write_whole(self.file, json.dumps(entries, indent=1, sort_keys=True).encode(), 0o600)


def clients_by_node() -> dict[int, int] | None:
    """What the server's app may believe; None where no deployment started it."""
    file = os.environ.get(ROSTER)
    return Roster(Path(file)).clients if file else None

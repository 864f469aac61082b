"""What a site has answered in a run and what it keeps of it, as digests: one file per run, apart from what it is about.

Private state that was lost or changed would train another model, and a site that forgot what it answered would answer
again and count less epsilon than it spent. Both are noticed here, before anything is read or leaves.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from fedalloy.core.files import PRIVATE, damaged, private_folder, read_whole, write_whole
from fedalloy.experiment.locks import OWN, lock
from fedalloy.round.vault import Vault

Pages = dict[str, Any]


class Journal:
    """The journal of one run at one client; clients that share a state folder share the file."""

    def __init__(self, state: Path, run: str, client: int) -> None:
        self.state, self.run, self.client = state, run, client
        self.path = state / "journal" / f"{run}.json"
        self.count = state / "counts" / run  # how often it was written: an earlier one is noticed
        self.vault = Vault(state / run)

    def check(self, before: int | None) -> None:
        """Refuse what is not as this site wrote it; `before` is the round whose mail asks for private state.

        State that is not in the journal was written just before this site died: its answer never left, so it is
        forgotten.
        """
        with self._pages() as pages:
            for name, digest in pages["files"].items():
                if _sha(read_whole(self.state / name)) != digest:
                    raise damaged(self.state / name, "it is not what this site wrote")
            if before is None:
                return
            kept = {int(round): sha for round, sha in self._own(pages)["kept"].items()}
            self.vault.forget(self.client, but=kept)
            if earlier := [round for round in kept if round < before]:
                self.vault.check(self.client, max(earlier), kept[max(earlier)])

    def begin(self, round: int) -> None:
        """A round is trained, perhaps once more: what was kept of it and of later ones is void."""
        with self._pages() as pages:
            own = self._own(pages)
            own["kept"] = {at: sha for at, sha in own["kept"].items() if int(at) < round}

    def keep(self, round: int, checkpoint: int) -> None:
        """The round is trained: note the private state after it, and drop what no restart can ask for."""
        with self._pages() as pages:
            own = self._own(pages)
            for at, sha in self.vault.digests([self.client], round).values():
                own["kept"][str(at)] = sha
            old = sorted(int(at) for at in own["kept"] if int(at) <= checkpoint)
            for at in old[:-1]:
                del own["kept"][str(at)]

    def answer(self, round: int, digest: str, noise: float) -> bool:
        """Whether this mail may be answered: none of its round was, or it is the same one again."""
        with self._pages() as pages:
            first, _ = self._own(pages)["answered"].setdefault(str(round), [digest, noise])
            return bool(first == digest)

    def noises(self) -> dict[str, float]:
        """The noise of every round that was answered."""
        with self._pages() as pages:
            return {round: noise for round, (_, noise) in self._own(pages)["answered"].items()}

    def hold(self, file: Path) -> None:
        """A file that stays as it is until the end of the run."""
        with self._pages() as pages:
            pages["files"][str(file.relative_to(self.state))] = _sha(read_whole(file))

    def _own(self, pages: Pages) -> Pages:
        own: Pages = pages["clients"].setdefault(str(self.client), {"answered": {}, "kept": {}})
        return own

    @contextmanager
    def _pages(self) -> Iterator[Pages]:
        """What the file says; what was changed is written when the block ends well."""
        private_folder(self.path.parent)
        file = os.open(self.path.parent / ".lock", OWN, PRIVATE)
        try:
            lock(file, wait=True)
            pages = self._read()
            before = json.dumps(pages, sort_keys=True)
            yield pages
            after = json.dumps(pages, sort_keys=True)
            if after != before or not self.path.exists():
                pages["count"] += 1
                seal = _sha(json.dumps(pages, sort_keys=True).encode())
                write_whole(self.path, json.dumps({"sha256": seal, **pages}).encode(), PRIVATE)
                private_folder(self.count.parent)
                write_whole(self.count, str(pages["count"]).encode(), PRIVATE)
        finally:
            os.close(file)

    def _read(self) -> Pages:
        if not os.path.lexists(self.path):
            self._refuse_orphans()
            return {"run": self.run, "count": 0, "files": {}, "clients": {}}
        try:
            pages = json.loads(read_whole(self.path))
            seal = pages.pop("sha256")
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
            seal = pages = None
        if (
            pages is None
            or seal != _sha(json.dumps(pages, sort_keys=True).encode())
            or pages.get("run") != self.run
        ):
            raise damaged(self.path, "it is not what this site wrote")
        told = read_whole(self.count) if os.path.lexists(self.count) else b"0"
        if not re.fullmatch(rb"[0-9]{1,18}", told) or not 0 <= pages["count"] - int(told) <= 1:
            older = self.path if told.isdigit() and int(told) > pages["count"] else self.count
            raise damaged(older, "it is not the last one that this site wrote")
        found: Pages = pages
        return found

    def _refuse_orphans(self) -> None:
        """The journal comes first: where anything of its run is there without it, it was lost."""
        for name in (self.run, f"counts/{self.run}", f"secrets/{self.run}", f"preprocessing/{self.run}.json"):
            if os.path.lexists(self.state / name):
                raise damaged(self.path, f"it is missing, and {self.state / name} is there")


def runs_of(state: Path) -> list[str]:
    """All runs that a site took part in."""
    journals = {file.stem for file in (state / "journal").glob("*.json")}
    return sorted(journals | {file.name for file in (state / "counts").glob("*")})


def _sha(blob: bytes) -> str:
    return hashlib.sha256(blob).hexdigest()

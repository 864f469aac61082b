"""Digests by which the parts of a run folder know each other."""

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from fedalloy.core.wire import Items, dump
from fedalloy.experiment.config import FREE


def digest_of(lines: Iterable[bytes]) -> Any:
    """sha256 over whole lines, to which more can be added."""
    digest = hashlib.sha256()
    for line in lines:
        digest.update(line + b"\n")
    return digest


def settings_digest(values: dict[str, Any]) -> str:
    """sha256 over the settings that change the numbers, as they stand in a config."""
    found = {name: value for name, value in values.items() if name not in FREE}
    return hashlib.sha256(json.dumps(found, sort_keys=True, default=str).encode()).hexdigest()


def facts_digest(facts: dict[str, Any]) -> str:
    """sha256 over all fields but the one it stands in, `sha256`."""
    rest = {name: value for name, value in facts.items() if name != "sha256"}
    return hashlib.sha256(json.dumps(rest, sort_keys=True).encode()).hexdigest()


def checkpoint_digest(state: Items, facts: dict[str, object]) -> str:
    """sha256 over a checkpoint, but for itself."""
    return hashlib.sha256(dump(state, facts)).hexdigest()

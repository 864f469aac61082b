"""Code outside of FedAlloy: who may import it, and what of it may be called.

A name such as `my.module:recipe` is imported by who holds an `Imports`, and by nobody else. Whoever runs what somebody
else wrote, a site of a federation or the reader of a folder, holds none unless its user says so.
"""

import importlib
import inspect
import os
import sys
import typing
from collections.abc import Callable, Iterable
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from fedalloy.core.expression import Foreign, foreign, split
from fedalloy.errors import FedAlloyError, unknown

NAMING = ("method", "model", "models")  # the settings of a run that may name code


class Imports:
    """The permission to import code outside of FedAlloy; it is handed down to whoever needs it."""

    def find(self, term: Foreign) -> Any:
        """What `package.module:name` stands for; it is not called."""
        if (here := os.getcwd()) not in sys.path:  # a console script does not see the working directory
            sys.path.insert(0, here)
        try:
            module = importlib.import_module(term.module)
        except ModuleNotFoundError as error:
            if not f"{term.module}.".startswith(f"{error.name}."):
                raise  # it is the user's module that imports something missing: show where
            raise FedAlloyError(
                f"cannot import {str(term)!r}: no module {error.name!r} in this folder or installed"
            ) from None
        if not hasattr(module, term.name):
            callables = [key for key, value in vars(module).items() if callable(value)]
            raise unknown(f"name in module {term.module}", term.name, callables)
        return getattr(module, term.name)


def found(term: Foreign, imports: Imports | None) -> Any:
    """What a foreign name stands for, or an error where nobody allowed to import it."""
    if imports is None:
        raise outside([f"{term.module}:{term.name}"])
    return imports.find(term)


def outside(names: Iterable[str], source: str = "") -> FedAlloyError:
    """The sentence about code that nobody allowed."""
    said = ", ".join(names)
    if source:
        return FedAlloyError(
            f"{source} names code outside of FedAlloy ({said}); if you trust it, add --allow-code"
        )
    return FedAlloyError(f"{said} is code outside of FedAlloy, which is not allowed here (--allow-code)")


def allowed(
    source: str, settings: dict[str, Any], typed: Iterable[str] = (), *, allow_code: bool = False
) -> Imports | None:
    """The permission for settings that were read from somewhere; an error if they name code that nobody allowed.

    What a user typed is the user's own word, and needs no other.
    """
    if allow_code:
        return Imports()
    texts = {name: settings[name] for name in NAMING if isinstance(settings.get(name), str)}
    if names := foreign_in({name: text for name, text in texts.items() if name not in set(typed)}):
        raise outside(names, source)
    return Imports() if set(texts) & set(typed) else None


def refuse_cluster(source: str, settings: dict[str, Any], typed: Iterable[str] = ()) -> None:
    """Refuse to work on a Ray cluster that a file names: its head can run code on this machine."""
    cluster = settings.get("ray_address")
    if isinstance(cluster, str) and cluster != "auto" and "ray_address" not in set(typed):
        raise FedAlloyError(
            f"{source} names a Ray cluster ({cluster}), which can run code here; if you trust it, add --allow-code, "
            "or type --ray-address yourself"
        )


def foreign_in(settings: dict[str, Any]) -> list[str]:
    """The foreign names in the settings of a run."""
    texts = [settings[name] for name in NAMING if name != "models" and settings.get(name)]
    return foreign([*texts, *split(str(settings.get("models") or ""))])


@cache
def _installed(group: str) -> dict[str, EntryPoint]:
    return {
        point.name.lower().replace("-", "").replace("_", ""): point for point in entry_points(group=group)
    }


def installed(group: str, name: str) -> Any | None:
    """What an installed package offers under a plain name, or None: whoever installed it trusts it."""
    point = _installed(group).get(name)
    return None if point is None else point.load()


def promised(function: Callable[..., Any]) -> Any:
    """What a function says it returns, or a class makes; None where it says nothing."""
    if inspect.isclass(function):
        return function
    if not inspect.isfunction(function):
        return None
    try:
        return typing.get_type_hints(inspect.unwrap(function)).get("return")
    except (NameError, TypeError, AttributeError):
        return None

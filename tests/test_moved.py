"""What old module names held can still be imported, with a warning, and is the very same."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import fedalloy
from fedalloy.errors import FedAlloyWarning
from fedalloy.moved import MOVED, names

HOME = Path(fedalloy.__file__).parent


@pytest.mark.parametrize("old", sorted(MOVED.keys() - {"bench", "flower"}))  # these hold modules only
def test_an_old_name_leads_to_the_new_module(old: str) -> None:
    new = import_module(f"fedalloy.{MOVED[old]}")
    name = next(name for name in vars(new) if not name.startswith("__"))
    with pytest.warns(
        FedAlloyWarning, match=rf"fedalloy\.{old} is now {new.__name__}; import {name} from there"
    ):
        assert getattr(import_module(f"fedalloy.{old}"), name) is getattr(new, name)


def imported(line: str) -> dict[str, Any]:
    """What a line imports; mypy would not let us write it down."""
    names: dict[str, Any] = {}
    exec(line, names)
    return names


def test_the_ways_to_import() -> None:
    with pytest.warns(FedAlloyWarning, match=r"fedalloy\.alloy is now fedalloy\.core\.alloy"):
        assert imported("from fedalloy.alloy import Mechanism")["Mechanism"] is fedalloy.Mechanism
    with pytest.warns(FedAlloyWarning, match=r"is now fedalloy\.deploy\.apps"):
        found = imported("from fedalloy.flower.apps import server_app")["server_app"]
    assert found is import_module("fedalloy.deploy.apps").server_app
    assert callable(fedalloy.alloy), "an old module has taken the place of a function"


def test_nothing_is_imported_twice() -> None:
    """A second copy of a class would not be an instance of the first."""
    assert "fedalloy.nets.resnet" in names()
    with pytest.warns(FedAlloyWarning):
        assert (
            sys.modules["fedalloy.nets.resnet"].Residual is import_module("fedalloy.models.resnet").Residual
        )


def test_what_never_was_is_not_found() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"fedalloy\.nonsense"):
        import_module("fedalloy.nonsense")
    with pytest.raises(ImportError, match="nonsense"):
        imported("from fedalloy.alloy import nonsense")


def test_no_old_name_is_taken_again() -> None:
    """A new module under an old name would never be seen."""
    for old in names():
        place = HOME.parent / old.replace(".", "/")
        assert not place.with_suffix(".py").exists()
        assert not (place / "__init__.py").exists()

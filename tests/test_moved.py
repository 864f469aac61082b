"""Old names still work, with a warning: of modules, and of the hooks of a method that somebody wrote."""

import os
import re
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import fedalloy
from fedalloy.core.alloy import RENAMED
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


# Hooks of a mechanism that was written before they were renamed


BOTH = """
import sys, warnings
import fedalloy as fa
fed = fa.federate("digits", clients=3, skew="iid")
for module in ("written_before", "examples.own_method"):
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        result = fa.train(fed, method=f"{module}:fedcm(alpha=0.3)", rounds=2, lr=0.1, engine="inline")
    print(result.summary["weights_sha256"], *sorted({str(one.message) for one in said}), sep="|")
"""


def test_a_method_written_before(tmp_path: Path) -> None:
    """The example of version 0.1, as it was, gives the bits of today's; in a process of its own: both are recipes."""
    here = Path(__file__).parent
    (tmp_path / "written_before.py").write_text((here / "old" / "own_method.txt").read_text())
    places = [str(tmp_path), str(here.parent), str(HOME.parent)]
    done = subprocess.run(
        [sys.executable, "-c", BOTH],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
        check=True,
    )
    before, today = (line.split("|") for line in done.stdout.splitlines())
    assert before[0] == today[0]
    assert "Direction.receive is now called aggregate; rename it" in before
    assert "State.keep is now called persistent; rename it" in before
    assert "fedalloy.Box is now called fedalloy.State; rename it" in before
    assert "fedalloy.alloy is now fedalloy.core.alloy; import Oracle from there" in before
    assert today[1:] == []


def test_every_old_hook_stands_for_a_new_one() -> None:
    for old, new in RENAMED.items():
        assert hasattr(fedalloy.Mechanism, new)
        assert not hasattr(fedalloy.Mechanism, old)
        hook = vars(fedalloy.Mechanism)[new]
        with pytest.warns(FedAlloyWarning, match=f"_Old.{old} is now called {new}; rename it"):
            made = type("_Old", (fedalloy.Mechanism,), {old: hook})
        assert vars(made)[new] is hook


def test_parameters_and_helpers_may_have_these_names() -> None:
    """Without a warning, which would be an error here."""

    def load(self: object) -> int:
        return 1

    made = type("_Own", (fedalloy.Mechanism,), {"start": 3, "load": load, "everyone": True})
    assert made.install is fedalloy.Mechanism.install  # type: ignore[attr-defined]


def test_the_glossary_lists_hooks_that_there_are() -> None:
    page = (Path(__file__).parent.parent / "docs" / "glossary.md").read_text()
    table = page.partition("## Hooks, in the order of a round")[2].partition("\n## ")[0]
    named = re.findall(r"`(\w+)(?:\(\w+\))?`", table)
    assert len(named) > 20
    assert [name for name in named if not hasattr(fedalloy.Mechanism, name)] == []

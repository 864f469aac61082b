"""The documentation site builds strictly: notebooks run, methods have cards, no link is broken, nothing is fetched."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import cards
import fedalloy
import links
from fedalloy.core import registry

ROOT = Path(__file__).parent.parent
NOTEBOOKS = sorted((ROOT / "examples/notebooks").glob("*.ipynb"))


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built once; building it executes the notebooks and fails on any warning."""
    folder = tmp_path_factory.mktemp("site") / "built"
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)],
        cwd=ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.mark.xdist_group("site")
def test_no_link_is_broken_and_nothing_is_fetched(site: Path) -> None:
    assert links.faults(site) == []


@pytest.mark.xdist_group("site")
def test_every_method_has_a_card(site: Path) -> None:
    for name, recipe in registry.RECIPES.items():
        text = (site / "methods" / f"{name}.html").read_text()
        assert cards.idea(recipe.title), f"docs/papers.md: {recipe.title} says nothing in plain words"
        assert all(f"<code>{parameter}</code>" in text for parameter in recipe.parameters), name
        assert f'href="{name}.html"' in (site / "methods/index.html").read_text()


@pytest.mark.xdist_group("site")
def test_the_reference_shows_every_public_name(site: Path) -> None:
    text = (site / "reference.html").read_text()
    assert [name for name in fedalloy.__all__ if f"fa.{name}" not in text] == []


@pytest.mark.xdist_group("site")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: str(path.stem))
def test_a_notebook_is_shown_with_its_outputs(site: Path, notebook: Path) -> None:
    stored = [cell for cell in json.loads(notebook.read_text())["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in stored), (
        "clear the outputs"
    )
    text = (site / "notebooks" / f"{notebook.stem}.html").read_text()
    assert text.count('class="output"') >= 3
    assert (site / "notebooks" / notebook.name).is_file()


@pytest.mark.parametrize(
    ("page", "said"),
    [
        ('<a href="b.html">', "a.html: the link b.html leads nowhere"),
        ('<a href="#there">', "a.html: the link #there names an anchor that is not there"),
        ('<a href="c.html#there">', "a.html: the link c.html#there names an anchor that is not there"),
        ('<img src="x.svg">', "a.html: the link x.svg leads nowhere"),
        ('<script src="https://host/x.js">', "a.html would fetch https://host/x.js from another host"),
        ('<link rel="stylesheet" href="//host/x.css">', "a.html would fetch //host/x.css from another host"),
        ('<a href="../outside.html">', "a.html: the link ../outside.html leads nowhere"),
        ('<a href="https://host/">', None),
        ('<a href="c.html#here">', None),
        ('<a href="c%2Ehtml">', None),
    ],
)
def test_what_is_wrong_with_a_page_is_named(page: str, said: str | None, tmp_path: Path) -> None:
    site = tmp_path / "site"
    site.mkdir()
    (tmp_path / "outside.html").touch()
    (site / "a.html").write_text(page)
    (site / "c.html").write_text('<p id="here">')
    assert links.faults(site) == ([said] if said else [])


def test_a_style_sheet_that_fetches_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.css").write_text("@import url('https://host/font.css')")
    assert links.faults(tmp_path) == ["x.css would fetch from another host"]


@pytest.mark.parametrize(("text", "good"), [("fedavg+prox", True), ("local+prox", False)])
def test_a_card_lists_what_the_program_accepts(text: str, good: bool) -> None:
    assert cards.accepted(text) == good

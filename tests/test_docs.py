"""The documentation is true: its code and commands run, its links lead somewhere, its tables match the program.

Run as a script with a page as its argument, this file plays that page: python blocks and commands in order, in one
working folder, as a reader would.
"""

import doctest
import importlib
import os
import pkgutil
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Literal, get_args, get_origin

import pytest

import fedalloy
from fedalloy import models
from fedalloy.analysis.papers import pages
from fedalloy.cli import app as cli
from fedalloy.core import registry
from fedalloy.experiment.config import Config

ROOT = Path(__file__).parent.parent
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("results/**/*.md")])
NEEDS_DATA = "# needs your data"
SETTINGS = re.compile(r"(?<=<!-- settings -->\n)(.*)(?=<!-- /settings -->)", re.DOTALL)


def blocks(page: Path) -> list[tuple[str, str]]:
    """The language and text of every fenced block."""
    return re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[str]:
    """The lines of a block that are typed, without a prompt."""
    joined = text.replace("\\\n", " ")
    return [line.removeprefix("$ ") for line in joined.splitlines() if line and not line.startswith("#")]


def ours(command: str) -> bool:
    return command.startswith("fedalloy ")


def play(page: Path) -> None:
    """Run everything that a page tells its reader to type."""
    names: dict[str, object] = {}
    for language, text in blocks(page):
        if language == "python":
            exec(compile(text, str(page), "exec"), names)
        elif language in ("sh", "console"):
            for command in filter(ours, commands(text)):
                if not command.endswith(NEEDS_DATA):
                    print("$", command, flush=True)
                    cli.main(shlex.split(command, comments=True)[1:])


def understood(command: str) -> None:
    """Read a command line as the program does, without running it."""
    cli.app.parse_args(shlex.split(command, comments=True)[1:], exit_on_error=False, print_error=False)


def named(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


PLAYED = [page for page in PAGES if any(kind in ("python", "sh", "console") for kind, _ in blocks(page))]


@pytest.mark.parametrize("page", PLAYED, ids=named(PLAYED))
def test_code_and_commands_run(page: Path, tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-W", "error", __file__, str(page)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("page", PAGES, ids=named(PAGES))
def test_every_command_named_is_understood(page: Path) -> None:
    fenced = [line for kind, text in blocks(page) if kind in ("sh", "console") for line in commands(text)]
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    for command in [*filter(ours, fenced), *re.findall(r"`(fedalloy [^`]*)`", prose)]:
        understood(command)
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    assert set(re.findall(r"(?:`|^)make ([a-z]+)", page.read_text(), re.MULTILINE)) <= targets
    for script in re.findall(r"\bpython ([\w/]+\.py)", page.read_text()):
        assert (ROOT / script).is_file(), f"{page.name} names {script}"


@pytest.mark.parametrize("page", PAGES, ids=named(PAGES))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in link:
            assert (page.parent / link).exists(), f"{page.name} links to {link}"


def test_every_page_can_be_reached() -> None:
    seen, todo = set(), [ROOT / "README.md"]
    while todo:
        page = todo.pop()
        if page not in seen:
            seen.add(page)
            links = re.findall(r"\]\(([^)#]+\.md)", page.read_text())
            todo += [(page.parent / link).resolve() for link in links if "://" not in link]
    assert set(PAGES) == seen


PRIVATE_WORDS = re.compile(
    r"\b(plays?|played|playing|carr(y|ies|ied) on|workshops?|errands?|lobby|guests?|desks?|born|over and over"
    r"|leave \S+ away|deals?|dealt)\b",
    re.IGNORECASE,
)
WRITTEN = [
    page for page in PAGES if page.name not in ("CHANGELOG.md", "table.md") and page.parent.name != "adr"
]


@pytest.mark.parametrize("page", WRITTEN, ids=named(WRITTEN))
def test_pages_speak_the_words_of_the_field(page: Path) -> None:
    """Sentences, that is, not code and tables; docs/glossary.md has the words to use."""
    prose = re.sub(
        r"^```.*?^```$|^\|.*?$|`[^`]*`|\]\([^)]*\)", "", page.read_text(), flags=re.MULTILINE | re.DOTALL
    )
    assert [found.group() for found in PRIVATE_WORDS.finditer(prose)] == []


def settings_table() -> str:
    """The settings as `Config` declares them."""
    rows = ["| setting | default | what it is |", "|---|---|---|"]
    for name, field in Config.model_fields.items():
        default = "" if field.default is None else f"`{str(field.default).lower()}`"
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        listed = f" One of {', '.join(choices)}." if choices else ""
        rows.append(f"| `{name}` | {default} | {field.description}{listed} |")
    return "\n".join(rows) + "\n"


def test_the_settings_table_is_that_of_the_program() -> None:
    found = SETTINGS.search((ROOT / "docs/run-folder.md").read_text())
    assert found, "docs/run-folder.md has lost its settings"
    assert found.group() == settings_table(), "paste what `python tests/test_docs.py settings` prints"


def test_the_paper_index_knows_every_method_and_parameter() -> None:
    table = (ROOT / "docs/papers.md").read_text().partition("\n## ")[0]
    for recipe in registry.RECIPES.values():
        assert recipe.title in pages(), f"docs/papers.md has no section {recipe.title!r}"
        assert f"`{recipe.name}`" in table, f"docs/papers.md does not list {recipe.name}"
        page = pages()[recipe.title]
        assert page.values.keys() == recipe.parameters.keys(), f"docs/papers.md: the table of {recipe.title}"
        assert all(page.values.values())
        assert all(page.meanings.values())
        assert any(note.startswith("Differs") for note in page.notes), f"docs/papers.md: {recipe.title}"


def test_every_model_is_named() -> None:
    text = (ROOT / "docs/data.md").read_text()
    assert [model.name for model in models.names() if f"`{model.name}`" not in text] == []


def test_the_guide_shows_the_example_that_runs() -> None:
    example = (ROOT / "examples/own_method.py").read_text()
    shown = [text for language, text in blocks(ROOT / "CONTRIBUTING.md") if language == "python"]
    assert any(text.strip() and text in example for text in shown), (
        "CONTRIBUTING.md differs from examples/own_method.py"
    )


MODULES = sorted(module.name for module in pkgutil.walk_packages(fedalloy.__path__, "fedalloy."))


@pytest.mark.parametrize("name", ["fedalloy", *MODULES])
def test_examples_in_docstrings(name: str) -> None:
    assert doctest.testmod(importlib.import_module(name)).failed == 0


if __name__ == "__main__":
    if sys.argv[1] == "settings":
        print(settings_table(), end="")
    else:
        play(Path(sys.argv[1]))

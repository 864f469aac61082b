"""The paper index, docs/papers.md, as data: what each method says about its paper."""

import re
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

INSTALLED = Path(__file__).parent / "papers.md"  # a wheel carries a copy of the docs' page
IN_THE_REPOSITORY = Path(__file__).parents[3] / "docs" / "papers.md"


@dataclass(frozen=True)
class Page:
    """One section: bullets such as "Differs from the paper. ..." and, by parameter, what the paper takes."""

    notes: tuple[str, ...] = ()
    values: dict[str, str] = field(default_factory=dict)
    meanings: dict[str, str] = field(default_factory=dict)


@cache
def pages() -> dict[str, Page]:
    """Every section by its title."""
    path = INSTALLED if INSTALLED.exists() else IN_THE_REPOSITORY
    sections = path.read_text(encoding="utf-8").split("\n## ")[1:]
    return {section.partition("\n")[0]: _read(section) for section in sections}


def page(title: str) -> Page:
    """The section of a method; an empty one for methods that are not in the index."""
    return pages().get(title, Page())


def _read(section: str) -> Page:
    bullets = re.findall(r"^- (.+(?:\n  .+)*)", section, re.MULTILINE)
    rows = re.findall(r"^\| `(\w+)` \| (.*?) \| (.*?) \|$", section, re.MULTILINE)
    notes = tuple(re.sub(r"\s+", " ", bullet).replace("*", "") for bullet in bullets)
    plain = [tuple(cell.replace("`", "") for cell in row) for row in rows]
    return Page(notes, {name: value for name, value, _ in plain}, {name: says for name, _, says in plain})

"""The files around a release agree with each other."""

import datetime
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

import fedalloy

ROOT = Path(__file__).parents[1]
SECTION = re.compile(r"^## (\S+)(?: - (\d{4}-\d\d-\d\d))?$", re.MULTILINE)


def read(name: str) -> Any:
    return yaml.safe_load((ROOT / name).read_text(encoding="utf-8"))


def releases() -> list[tuple[str, str]]:
    return SECTION.findall((ROOT / "CHANGELOG.md").read_text(encoding="utf-8"))


def test_the_changelog_has_a_dated_section_for_this_version() -> None:
    (first, undated), (newest, date), *_ = releases()
    assert (first, undated) == ("Unreleased", "")
    assert newest == fedalloy.__version__
    assert datetime.date.fromisoformat(date)


def test_the_citation_is_of_this_version() -> None:
    """What the Citation File Format 1.2.0 requires, and when and what was released."""
    cited = read("CITATION.cff")
    assert cited["cff-version"] == "1.2.0"
    assert cited["type"] == "software"
    for field in ("message", "title", "license"):
        assert isinstance(cited[field], str)
        assert cited[field]
    assert cited["authors"]
    assert all(set(author) <= {"name", "family-names", "given-names", "orcid"} for author in cited["authors"])
    assert (cited["version"], str(cited["date-released"])) == releases()[1]


@pytest.mark.parametrize(
    "workflow", sorted((ROOT / ".github" / "workflows").glob("*.yml")), ids=lambda p: p.name
)
def test_hosted_ci_runs_targets_that_are_there_with_few_rights(workflow: Path) -> None:
    plan = read(str(workflow.relative_to(ROOT)))
    assert plan["permissions"] == {"contents": "read"}
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    steps = [step for job in plan["jobs"].values() for step in job["steps"]]
    asked = {run.split()[1] for step in steps if (run := step.get("run", "")).startswith("make ")}
    assert {"check", "package", "docs"} <= asked <= targets
    assert all(
        re.fullmatch(r"actions/[a-z-]+@[0-9a-f]{40}", step["uses"]) for step in steps if "uses" in step
    )
    assert plan["jobs"]["check"]["strategy"]["matrix"]["python"] == ["3.11", "3.12", "3.13"]

"""SECURITY.md names a test for every promise, and each of them is there."""

import re
from pathlib import Path

ROOT = Path(__file__).parent.parent
TEXT = (ROOT / "SECURITY.md").read_text()
NAMED = re.findall(r"`(tests/[\w/]+\.py)::(\w+)`", TEXT)


def test_every_promise_has_a_test_that_exists() -> None:
    promised = TEXT.partition("## What is promised")[2].partition("## What is not promised")[0]
    rows = [line for line in promised.splitlines() if line.startswith("|") and not set(line) <= set("|- ")]
    rows = [line for line in rows if line != "| promise | test |"]
    assert len(rows) > 20
    for row in rows:
        assert re.search(r"`tests/[\w/]+\.py::test_\w+`", row), row
    for file, name in NAMED:
        assert re.search(rf"^def {name}\(", (ROOT / file).read_text(), re.MULTILINE), f"{file}::{name}"


def test_readme_and_deployments_lead_here() -> None:
    assert "(SECURITY.md)" in (ROOT / "README.md").read_text()
    assert "(../SECURITY.md)" in (ROOT / "docs" / "deploy.md").read_text()

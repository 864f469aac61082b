"""Published tables say what the published runs say: the command under a table draws it again from them."""

import re
import shlex
from pathlib import Path

import pytest

from fedalloy.experiment.config import Config
from fedalloy.report.runs import read_run
from fedalloy.research.reproduce.grid import place
from terminal import fedalloy, tree

PUBLISHED = Path(__file__).parents[1] / "results"
RUNS = PUBLISHED / "runs"
TABLES = sorted(PUBLISHED.glob("*/table.md"))
WITHOUT_RUNS = {  # whose runs were not kept
    "feddw-table1-cpu",
    "fedsce-table2-cpu",
    "fedsce-table2-resnets",
    "fedsce-table4-cpu",
}
DRAWN = [path for path in TABLES if path.parent.name not in WITHOUT_RUNS]


def without_images(text: str) -> str:
    return "".join(line for line in text.splitlines(keepends=True) if not line.startswith("![")).rstrip()


@pytest.mark.parametrize("table", DRAWN, ids=[path.parent.name for path in DRAWN])
def test_a_table_comes_from_its_runs(table: Path, tmp_path: Path) -> None:
    said = table.read_text()
    (command,) = re.findall(r"^fedalloy reproduce .*$", said, re.MULTILINE)
    (tmp_path / "runs").symlink_to(RUNS)
    before = tree(RUNS)
    done = fedalloy(*shlex.split(command)[1:], "--out", str(tmp_path), "--no-play", "--json").json
    assert tree(RUNS) == before
    assert without_images(Path(done["files"]["table"]).read_text()) == without_images(said)
    shown = re.findall(r"^!\[.*\]\((.*)\)$", said, re.MULTILINE)
    assert {path.name for path in table.parent.glob("*.svg")} == set(shown)


@pytest.mark.parametrize("run", sorted(RUNS.iterdir()), ids=lambda run: str(run.name))
def test_a_run_is_whole_and_says_nothing_of_a_machine(run: Path) -> None:
    record = read_run(run)
    assert record.counts
    assert record.config["data_root"] == "data"
    assert run.name == place(Config.of(dict(record.config)))

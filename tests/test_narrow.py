"""A terminal of 80 columns, which is what a newcomer has: nothing is cut, nothing is wrapped within a value."""

import re
import subprocess
from collections.abc import Iterator
from contextlib import redirect_stderr
from io import StringIO
from pathlib import Path

import pytest

from fedalloy.cli import show
from fedalloy.cli.console import console, progress
from fedalloy.report import read_comparison
from fedalloy.report.verdict import verdict
from test_report_runs import curve_run, fake_comparison

ROOT = Path(__file__).parents[1]
METHODS = (
    "fedavg",
    "feddw(mu=1)",
    "fedsce(p=1, mu=0.1)",
    "moon(projection=penultimate)+subspace(rank=64)+prox(mu=0.1)",
)


def drawn(monkeypatch: pytest.MonkeyPatch, width: int, method: str) -> Iterator[str]:
    """Every line of the bar while one method runs."""
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("FORCE_COLOR", "1")  # else there is no bar where there is no terminal
    monkeypatch.setattr("fedalloy.cli.console.PAUSE", -1.0)
    with redirect_stderr(StringIO()) as err, progress(console(), 360) as bar:
        bar.run(method, 10)
        for number in range(1, 21):
            bar.reply(number, 10, 10)
            bar.round({"round": number, "metrics": {"global_acc": 1.0}})
    for line in re.split(r"[\r\n]+", re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", err.getvalue())):
        if "round" in line:
            yield line


@pytest.mark.parametrize("width", [72, 80, 99, 100, 120])
@pytest.mark.parametrize("method", METHODS)
def test_the_bar_cuts_a_long_method_and_nothing_else(
    method: str, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = list(drawn(monkeypatch, width, method))
    assert len(lines) >= 20
    for line in lines:
        assert len(line) <= width
        assert re.search(
            r", seed 10, round \d+(, 10 of 10 clients)? [━╸╺ ]+ \d+/360 .*\d:\d\d:\d\d|-:--:--$", line
        )
        assert line.count("…") == (0 if line.startswith(method) else 1)
    assert "accuracy 100.0 %" in lines[-1]


def test_a_comparison_ends_with_what_was_seen(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")

    def make(place: Path, method: str, seed: int) -> Path:
        return curve_run(
            place, {1: 0.5, 2: 0.81 + 0.01 * seed}, method=method, title=method.partition("(")[0]
        )

    fake_comparison(Path("c"), METHODS[:3], [0, 1, 2], make, target=0.8)
    show.comparison(console(), Path("c"))
    said = capsys.readouterr().out
    assert max(map(len, said.splitlines())) <= 80
    assert "80\u00a0%" in said  # a heading in several lines keeps its unit
    end = " ".join(said.partition("table.tex\n")[2].split())
    assert end == verdict(read_comparison(Path("c")))


def test_what_make_run_prints_itself() -> None:
    """The commands that make shows before it runs them."""
    said = subprocess.run(["make", "-n", "run"], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    shown = said[said.index("/fedalloy compare") :].splitlines()
    assert max(map(len, shown)) <= 78
    recipe = (ROOT / "Makefile").read_text(encoding="utf-8").partition("$(CORE): ")[2].partition("\n\n")[0]
    assert all(line.startswith("\t@") for line in recipe.splitlines()[1:])  # the longer ones are not shown

"""Figures as files for a paper, and what is said where they cannot be drawn."""

from pathlib import Path

import pytest

from browser import needs_browser
from fedalloy.errors import FedAlloyError
from fedalloy.report import files, write_figures
from terminal import fedalloy
from test_report_runs import fake_comparison, fake_run


@needs_browser
def test_report_writes_figures_as_pdf(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run")
    written = fedalloy("report", str(folder), "--figures", "pdf", "--json").json["written"]
    drawn = sorted((folder / "figures").iterdir())
    assert [path.name for path in drawn][:2] == ["accuracy.pdf", "classes.pdf"]
    assert set(map(str, drawn)) == {name for name in written if name.endswith(".pdf")}
    assert all(path.read_bytes().startswith(b"%PDF-") for path in drawn)


@needs_browser
def test_compare_writes_figures_as_svg(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    small = ("--rounds", "2", "--clients", "3", "--engine", "inline", "--out", "both")
    said = fedalloy("compare", "fedavg", "fedprox", *small, "--figures", "svg")
    assert "figures" in said.out
    drawn = {path.name: path.read_text() for path in Path("both/figures").iterdir()}
    assert {"accuracy-global_acc.svg", "traffic-global_acc.svg", "slots.svg"} <= drawn.keys()
    assert "FedProx" in drawn["accuracy-global_acc.svg"]


def test_nothing_is_run_that_could_not_be_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    said = fedalloy("compare", "fedavg", "--rounds", "1", "--out", "both", "--figures", "svg")
    assert said.code == 2
    assert "pip install 'fedalloy[images]'" in said.err
    assert not Path("both").exists()


def test_a_report_without_the_library_says_what_to_type(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(files, "find_spec", lambda name: None)
    with pytest.raises(FedAlloyError, match=r"pip install 'fedalloy\[images\]'"):
        write_figures(fake_comparison(tmp_path), "svg")
    assert not (tmp_path / "figures").exists()


def test_another_form_is_refused(tmp_path: Path) -> None:
    said = fedalloy("report", str(fake_run(tmp_path / "run")), "--figures", "gif")
    assert said.code == 2
    assert "svg" in said.err
    assert "pdf" in said.err

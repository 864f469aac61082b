"""The pages: what they hold, what they escape, and how they are written."""

import json
import os
from pathlib import Path

import pytest

from fedalloy.report import (
    read_run,
    write_comparison_report,
    write_run_report,
    write_tables,
)
from fedalloy.report.figures import (
    MOST_BARS,
    accuracy_by_traffic,
    class_accuracy,
    client_spread,
    curves,
    partition_picture,
)
from fedalloy.report.inside import feature_map
from fedalloy.report.runs import Map, Partition
from test_report_runs import fake_comparison, fake_run, write_history

HOSTILE = "</script><script>window.hacked = 1</script><img src=x onerror='window.hacked = 1'>"


def page_of(folder: Path) -> str:
    return write_run_report(folder).read_text()


def test_a_run_report_holds_everything(tmp_path: Path) -> None:
    text = page_of(fake_run(tmp_path / "run"))
    for slug in ("accuracy", "loss", "traffic", "partition", "clients", "classes", "time", "slots"):
        assert f'<div class="plot" id="{slug}"' in text
    assert "<h1>FedAvg on digits</h1>" in text
    assert "fedalloy run --config config.toml" in text
    assert "skew = &quot;dirichlet(0.3)&quot;" in text
    assert "<td>client 3</td><td>its update is not finite</td><td>1</td><td>4</td>" in text
    assert "Not drawn" not in text
    assert "src=" not in text


def test_a_page_is_the_same_when_written_again(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run")
    assert page_of(folder) == page_of(folder)


def test_figures_without_data_are_named(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run")
    (folder / "partition.json").unlink()
    write_history(folder, [{"round": 1, "train_loss": 1.0}])
    text = page_of(folder)
    missing = "Accuracy by round, Accuracy by traffic, Data of the clients,"
    assert f"Not drawn, because there are no data for them: {missing}" in text
    assert '<div class="plot" id="loss"' in text
    assert '<div class="plot" id="accuracy"' not in text


def test_a_run_that_has_only_begun_has_a_page(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "config.toml").write_text('method = "fedavg"\n')
    assert "This run is not finished: 0 rounds so far." in page_of(folder)


def test_a_diverged_run_says_so(tmp_path: Path) -> None:
    text = page_of(fake_run(tmp_path / "run", rounds=6, status="diverged"))
    assert "This run diverged in round 6." in text
    assert "NaN" not in text


def test_a_private_run_says_what_it_spent(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run")
    assert "Privacy" not in page_of(folder)
    summary = folder / "summary.json"
    summary.write_text(json.dumps({**json.loads(summary.read_text()), "epsilon": 4.7284, "delta": 1e-5}))
    assert "<dt>Privacy</dt><dd>epsilon 4.73 at delta 1e-05</dd>" in page_of(folder)


def test_hostile_names_are_inert(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", method=HOSTILE, title=HOSTILE, class_names=[HOSTILE] * 5)
    entry = {"round": 1, "refused": [{"client": 1, "why": HOSTILE}], "bytes_up": {HOSTILE: 9}}
    write_history(folder, [entry])
    text = page_of(folder)
    assert "<script>window.hacked" not in text
    assert "<img" not in text


def test_a_comparison_report_holds_everything(tmp_path: Path) -> None:
    folder = fake_comparison(tmp_path / "all", command="fedalloy compare fedavg fedper --target 0.6")
    write_run_report(folder / "fedper/seed1")
    (folder / "fedavg/seed2/summary.json").unlink()
    text = write_comparison_report(folder).read_text()
    for slug in (
        "accuracy-global_acc",
        "traffic-personal_local_acc",
        "clients",
        "classes-global_acc",
        "time",
    ):
        assert f'<div class="plot" id="{slug}"' in text
    assert "<h1>FedAvg, FedProx and FedPer on digits</h1>" in text
    assert "fedalloy compare fedavg fedper --target 0.6" in text
    assert "<li>FedAvg, seed 2 is not finished: 20 rounds so far</li>" in text
    assert '<a href="fedper/seed1/report.html">seed 1</a>' in text
    assert "FedPer, seed 0, client 3" in text


def test_a_comparison_that_has_not_begun_has_a_page(tmp_path: Path) -> None:
    folder = fake_comparison(tmp_path, ["fedavg"], [0], lambda place, method, seed: place)
    assert "<li>fedavg, seed 0 has not begun</li>" in write_comparison_report(folder).read_text()


def test_without_a_command_every_run_is_named(tmp_path: Path) -> None:
    folder = fake_comparison(tmp_path, ["fedprox(mu=0.01)"], [0])
    command = "fedalloy run --config &#x27;fedprox(mu=0.01)/seed0/config.toml&#x27;"
    assert command in write_comparison_report(folder).read_text()


def test_tables_for_a_paper(tmp_path: Path) -> None:
    markdown, latex = write_tables(fake_comparison(tmp_path))
    assert (markdown.name, latex.name) == ("table.md", "table.tex")
    assert markdown.read_text().count("### ") == latex.read_text().count(r"\toprule") == 4


def test_a_report_is_small(tmp_path: Path) -> None:
    """One file that opens offline, and that can be sent by mail."""
    folder = fake_comparison(tmp_path)
    assert write_comparison_report(folder).stat().st_size < 100_000
    assert len(page_of(folder / "fedavg/seed0")) < 100_000


def test_a_failed_write_leaves_the_old_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = fake_run(tmp_path / "run")
    (folder / "report.html").write_text("old")

    def fail(*_: object) -> None:
        raise OSError("disk full")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="disk full"):
        page_of(folder)
    assert (folder / "report.html").read_text() == "old"
    assert [path.name for path in folder.iterdir() if path.name.startswith(".")] == []


def test_many_clients_are_drawn_as_a_heat_map() -> None:
    few = partition_picture(Partition(class_names=("a", "b"), counts=((1, 2),) * MOST_BARS))
    many = partition_picture(Partition(counts=((1, 2),) * (MOST_BARS + 1)))
    assert [trace.type for trace in few.data] == ["bar", "bar"]  # type: ignore[union-attr]
    assert [trace.type for trace in many.data] == ["heatmap"]  # type: ignore[union-attr]


def test_a_line_ends_where_a_seed_ends(tmp_path: Path) -> None:
    runs = [read_run(fake_run(tmp_path / str(rounds), rounds=rounds)) for rounds in (3, 8)]
    figure = curves({"FedAvg": runs}, "global_acc")
    assert figure is not None
    band, line = figure.data
    assert list(line.x) == [1, 2, 3]
    assert list(band.x) == [1, 2, 3, 3, 2, 1]
    assert curves({"FedAvg": runs}, "personal_local_acc") is None
    assert client_spread({}) is None


def test_a_method_that_sends_nothing_has_no_line_against_bytes(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run")
    write_history(folder, [{"round": 1, "metrics": {"global_acc": 0.5}}])
    run = read_run(folder)
    assert accuracy_by_traffic({"Local": [run]}, "global_acc") is None
    assert curves({"Local": [run]}, "global_acc") is not None


def test_classes_are_compared_between_models_of_one_kind(tmp_path: Path) -> None:
    shared = read_run(fake_run(tmp_path / "shared"))
    own = read_run(fake_run(tmp_path / "own", measures=["personal_local_acc"]))
    figure = class_accuracy({"FedAvg": [shared], "Local": [own]}, "personal_local_acc")
    assert figure is not None
    assert [trace.name for trace in figure.data] == ["Local"]


def test_every_class_of_a_feature_map_has_its_own_colour() -> None:
    spots = [float(number) for number in range(12)]
    drawn = Map.model_validate({"x": spots, "y": spots, "client": [0] * 12, "class": list(range(12))})
    figure = feature_map(drawn, "label")
    assert figure is not None
    assert len({trace.marker.color for trace in figure.data}) == 12

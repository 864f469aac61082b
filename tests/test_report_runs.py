"""Run folders made up for the report tests, and how they are read back."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tomli_w

from fedalloy.errors import FedAlloyError
from fedalloy.report import read_comparison, read_run

CLIENTS, CLASSES = 12, 5
MEASURED = ("global_acc", "personal_local_acc", "personal_local_acc_clients")


def fake_run(
    folder: Path,
    *,
    method: str = "fedavg",
    title: str = "FedAvg",
    seed: int = 0,
    rounds: int = 20,
    measures: Sequence[str] = ("global_acc",),
    height: float = 0.8,
    status: str = "finished",
    clients: int = CLIENTS,
    class_names: Sequence[str] = ("cat", "dog", "owl", "fox", "bee"),
) -> Path:
    """A run folder as `fedalloy run` leaves it, its curve rising towards ``height``."""
    rng = np.random.default_rng([seed, *method.encode()])
    folder.mkdir(parents=True)
    history = [_round(number, rng, measures, height, clients) for number in range(1, rounds + 1)]
    if status == "diverged":
        history[-1] |= {"diverged": True, "train_loss": float("nan"), "metrics": None}
    config = {
        "method": method,
        "data": "digits",
        "model": "mlp",
        "clients": clients,
        "skew": "dirichlet(0.3)",
        "participation": 0.5,
        "rounds": rounds,
        "epochs": 2,
        "batch": 32,
        "lr": 0.05,
        "seed": seed,
    }
    (folder / "config.toml").write_text(tomli_w.dumps(config))
    write_history(folder, history)
    summary = {
        "method": method,
        "title": title,
        "seed": seed,
        "rounds": rounds,
        "metric": measures[0],
        "samples_per_second": 5400.0,
        "weights_sha256": "5f" * 32,
        "status": status,
        "diverged_round": rounds if status == "diverged" else None,
        "parameters": 50890,
        "model": "mlp",
    }
    (folder / "summary.json").write_text(json.dumps(summary))
    counts = rng.dirichlet([0.3] * CLASSES, clients) * 120
    partition = {"class_names": list(class_names), "counts": counts.astype(int).tolist()}
    (folder / "partition.json").write_text(json.dumps(partition))
    return folder


def curve_run(folder: Path, accuracies: Mapping[int, float], **options: Any) -> Path:
    """A run whose global accuracy is given, and which sends 60 bytes up and 40 down in every round."""
    fake_run(folder, rounds=max(accuracies), **options)
    history = [
        {
            "round": number,
            "bytes_up": {"share.weights": 50, "samples": 10},
            "bytes_down": {"share.weights": 40},
            "seconds": {"train": 0.5},
            "metrics": {"global_acc": accuracies[number]} if number in accuracies else None,
        }
        for number in range(1, max(accuracies) + 1)
    ]
    write_history(folder, history)
    return folder


def write_history(folder: Path, history: Sequence[Mapping[str, Any]]) -> None:
    (folder / "history.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in history))


def fake_comparison(
    folder: Path,
    methods: Sequence[str] = ("fedavg", "fedprox(mu=0.01)", "fedper"),
    seeds: Sequence[int] = (0, 1, 2),
    make: Callable[[Path, str, int], Path] | None = None,
    **fields: Any,
) -> Path:
    """A comparison folder; ``make`` writes the run of one method and seed."""
    folder.mkdir(parents=True, exist_ok=True)
    for method in methods:
        for seed in seeds:
            place = folder / method / f"seed{seed}"
            make(place, method, seed) if make else _usual_run(place, method, seed)
    runs = {method: {str(seed): f"{method}/seed{seed}" for seed in seeds} for method in methods}
    compare = {"methods": list(methods), "seeds": list(seeds), "target": 0.6, "runs": runs} | fields
    (folder / "compare.json").write_text(json.dumps(compare))
    return folder


def _usual_run(folder: Path, method: str, seed: int) -> Path:
    title = {"fedavg": "FedAvg", "fedprox(mu=0.01)": "FedProx", "fedper": "FedPer"}[method]
    measures = MEASURED[1:] if method == "fedper" else MEASURED
    return fake_run(folder, method=method, title=title, seed=seed, measures=measures)


def _round(
    number: int, rng: np.random.Generator, measures: Sequence[str], height: float, clients: int
) -> dict[str, Any]:
    level = height * (1 - np.exp(-number / 5))
    accuracies = {measure: float(level + rng.normal(0, 0.01)) for measure in measures}
    per_client = [None, *np.clip(level + rng.normal(0, 0.1, clients - 1), 0, 1).tolist()]
    per_class = np.clip(level + rng.normal(0, 0.08, CLASSES), 0, 1).tolist()
    weights = 50890 * 4 * clients // 2
    return {
        "round": number,
        "participants": list(range(0, clients, 2)),
        "refused": [{"client": 3, "why": "its update is not finite"}] if number == 4 else [],
        "train_loss": float(2.3 * np.exp(-number / 6) + rng.uniform(0, 0.1)),
        "samples": 1400,
        "steps": 50,
        "bytes_up": {"share.weights": weights, "share.buffers": 0, "samples": 8 * clients},
        "bytes_down": {"share.weights": weights},
        "seconds": {"train": 0.5, "evaluate": 0.1, "aggregate": 0.02, "other": 0.01},
        "metrics": accuracies | {"global_loss": 0.9, "per_client": per_client, "per_class": per_class},
    }


def test_a_run_is_read_back(tmp_path: Path) -> None:
    run = read_run(fake_run(tmp_path / "run", rounds=7))
    assert (run.title, run.status, run.counts, len(run.history)) == ("FedAvg", "finished", True, 7)
    assert list(run.curve("global_acc")) == list(range(1, 8))
    assert run.curve("personal_local_acc") == {}
    assert run.traffic[2] == 2 * run.traffic[1] > 0


def test_a_half_written_last_line_is_left_out(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", rounds=3)
    with (folder / "history.jsonl").open("a") as history:
        history.write('{"round": 4, "metrics": {"global_acc": 0.')
    assert [entry.round for entry in read_run(folder).history] == [1, 2, 3]


def test_a_whole_last_line_counts_without_its_newline(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", rounds=3)
    path = folder / "history.jsonl"
    path.write_text(path.read_text().rstrip("\n"))
    assert len(read_run(folder).history) == 3


def test_a_broken_line_is_named(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", rounds=1)
    with (folder / "history.jsonl").open("a") as history:
        history.write('{"round": \n{"round": 3}\n')
    with pytest.raises(FedAlloyError, match=r"history\.jsonl, line 2: Invalid JSON"):
        read_run(folder)


def test_a_line_that_is_no_round_is_named(tmp_path: Path) -> None:
    folder = fake_run(tmp_path / "run", rounds=1)
    (folder / "history.jsonl").write_text('{"train_loss": 1.0}\n')
    with pytest.raises(FedAlloyError, match="line 1: round: Field required"):
        read_run(folder)


@pytest.mark.parametrize(("read", "kind"), [(read_run, "run"), (read_comparison, "comparison")])
def test_another_folder_is_refused(tmp_path: Path, read: Callable[[Path], object], kind: str) -> None:
    with pytest.raises(FedAlloyError, match=f"is not a {kind} folder"):
        read(tmp_path)


def test_a_comparison_of_nothing_is_refused(tmp_path: Path) -> None:
    (tmp_path / "compare.json").write_text('{"methods": [], "seeds": [0], "runs": {}}')
    with pytest.raises(FedAlloyError, match=r"compare\.json: methods: Tuple should have at least 1 item"):
        read_comparison(tmp_path)


@pytest.mark.parametrize("text", ["method = ", "x = " + "[" * 100_000])
def test_broken_settings_are_named(tmp_path: Path, text: str) -> None:
    folder = fake_run(tmp_path / "run")
    (folder / "config.toml").write_text(text)
    with pytest.raises(FedAlloyError, match=r"config\.toml is not valid TOML"):
        read_run(folder)


def test_a_diverged_run_keeps_its_finite_values(tmp_path: Path) -> None:
    run = read_run(fake_run(tmp_path / "run", rounds=6, status="diverged"))
    assert (run.diverged_round, run.counts) == (6, True)
    assert list(run.curve("train_loss")) == [1, 2, 3, 4, 5]


def test_runs_not_finished_are_read_but_do_not_count(tmp_path: Path) -> None:
    folder = fake_comparison(tmp_path / "compare", methods=["fedavg", "fedper"], seeds=[0, 1])
    (folder / "fedper/seed0/summary.json").unlink()
    (folder / "fedper/seed1").rename(folder / "elsewhere")
    comparison = read_comparison(folder)
    assert comparison.runs["fedper"][0].status == "unfinished"
    assert list(comparison.runs["fedper"]) == [0]
    assert comparison.complete("fedper") == {}
    assert sorted(comparison.complete("fedavg")) == [0, 1]


def test_methods_that_share_a_title_keep_their_typed_names(tmp_path: Path) -> None:
    folder = fake_comparison(
        tmp_path / "compare",
        methods=["fedavg", "fedprox(mu=0.1)", "fedprox(mu=1)"],
        make=lambda place, method, seed: fake_run(
            place, method=method, title=method.split("(")[0].capitalize(), rounds=2
        ),
    )
    comparison = read_comparison(folder)
    assert [comparison.label(m) for m in comparison.methods] == ["Fedavg", "fedprox(mu=0.1)", "fedprox(mu=1)"]

"""Federations at the edge, through the command line: empty clients, single samples, crowds, other kinds of data."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import fedalloy as fa
from fedalloy.experiment.run import reopen
from terminal import fedalloy, history, save_npz

ONE = ("--engine", "inline", "--rounds", "1")


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def ran(*flags: str, out: str = "r") -> dict[str, Any]:
    found: dict[str, Any] = fedalloy("run", *flags, "--out", out, "--json").json
    assert found["status"] == "finished"
    return found


def random_images(count: int, classes: int = 4) -> dict[str, Any]:
    dice = np.random.default_rng(0)
    return {
        "x_train": dice.integers(0, 256, (count, 8, 8), np.uint8),
        "y_train": np.arange(count) % classes,
        "x_test": dice.integers(0, 256, (40, 8, 8), np.uint8),
        "y_test": np.arange(40) % classes,
    }


def test_clients_without_samples_are_never_asked() -> None:
    flags = ("--clients", "60", "--skew", "dirichlet:0.005")
    counts = fedalloy("partition", *flags, "--json").json["counts"]
    holders = {client for client, row in enumerate(counts) if sum(row)}
    assert len(holders) < 60
    ran(*flags, "--engine", "inline", "--rounds", "3", "--participation", "0.2")
    asked = [set(line["participants"]) for line in history(Path("r"))]
    assert all(clients <= holders for clients in asked)
    assert len(set().union(*asked)) > min(map(len, asked))  # not the same ones every time


@pytest.mark.parametrize("method", ["fedavg", "scaffold", "local"])
def test_one_sample_is_enough_even_under_batch_norm(method: str) -> None:
    save_npz(Path("data/few.npz"), random_images(12))
    flags = ("--data", "few", "--data-root", "data", "--clients", "12", "--skew", "iid")
    assert {sum(row) for row in fedalloy("partition", *flags, "--json").json["counts"]} == {1}
    ran(*flags, *ONE, "--model", "mlp(norm=batch)", "--method", method)
    (line,) = history(Path("r"))
    assert line["refused"] == []
    assert len(line["participants"]) == 12
    normless = ran(*flags, *ONE, "--model", "mlp", "--method", method, out="plain")
    assert normless["samples_per_second"] > 0


def test_clients_of_a_single_class() -> None:
    flags = ("--clients", "10", "--skew", "pathological:1")
    assert all(np.count_nonzero(row) == 1 for row in fedalloy("partition", *flags, "--json").json["counts"])
    ran(*flags, *ONE)
    assert history(Path("r"))[0]["refused"] == []


def test_more_workers_than_clients() -> None:
    flags = ("--clients", "2", "--rounds", "2")
    many = ran(*flags, "--engine", "workers", "--workers", "6", out="many")
    one = ran(*flags, "--engine", "inline", out="one")
    assert many["weights_sha256"] == one["weights_sha256"]


def test_one_client_alone() -> None:
    ran(*ONE, "--clients", "1", "--skew", "iid")
    assert history(Path("r"))[0]["participants"] == [0]


def test_ten_thousand_clients() -> None:
    save_npz(Path("data/crowd.npz"), random_images(20_000))
    flags = ("--data", "crowd", "--data-root", "data", "--clients", "10000", "--skew", "iid")
    ran(*flags, "--participation", "0.002", "--rounds", "2", "--engine", "inline", "--method", "scaffold")
    for line in history(Path("r")):
        assert len(line["participants"]) == 20
        assert "per_client" not in line["metrics"]
    assert len(list(Path("r/checkpoint/clients").iterdir())) <= 40


def test_different_models_need_a_method_for_them() -> None:
    flags = ("--models", "mlp,cnn-fedrda", "--clients", "4")
    said = fedalloy("run", *flags, *ONE, "--out", "r")
    assert said.code == 2
    assert "FedAvg averages whole models, but this federation mixes mlp, cnn-fedrda" in said.err
    assert not Path("r").exists()
    said = fedalloy("run", *flags, *ONE, "--method", "share(part=':-1')", "--out", "r")
    assert (said.code, "averages layers of models, but this federation mixes" in said.err) == (2, True)
    found = ran(*flags, *ONE, "--method", "local")
    assert found["model"] == "mlp, cnn-fedrda"
    assert 0 <= found["accuracy"]["final"] <= 1


def test_a_test_share_is_held_out_of_each_clients_own_data() -> None:
    plain = fedalloy("partition", "--clients", "5", "--json").json
    held = fedalloy("partition", "--clients", "5", "--test-share", "0.25", "--json").json
    for before, after, tested in zip(plain["counts"], held["counts"], held["test_samples"], strict=True):
        assert sum(after) < sum(before)
        assert tested == pytest.approx(0.25 * sum(before), abs=len(before))
    ran(*ONE, "--clients", "5", "--test-share", "0.25", "--method", "local")
    assert len(history(Path("r"))[0]["metrics"]["per_client"]) == 5


def test_a_limit_draws_so_many_training_samples() -> None:
    whole = fedalloy("partition", "--clients", "5", "--json").json
    some = fedalloy("partition", "--clients", "5", "--limit", "300", "--json").json
    other = fedalloy("partition", "--clients", "5", "--limit", "300", "--seed", "1", "--json").json
    assert sum(map(sum, some["counts"])) == 300 != sum(map(sum, whole["counts"]))
    assert sum(some["test_samples"]) == sum(whole["test_samples"])
    assert np.sum(some["counts"], 0).tolist() != np.sum(other["counts"], 0).tolist()
    ran(*ONE, "--limit", "300", "--clients", "5")
    assert "limit = 300" in Path("r/config.toml").read_text()
    said = fedalloy("partition", "--limit", "99999")
    assert said.code == 2
    assert "--limit 99999: 'digits' has 1 to 1438 samples to train on" in said.err


def test_vectors_from_a_csv_file() -> None:
    dice = np.random.default_rng(0)
    Path("data").mkdir()
    rows = [f"{a:.3f},{b:.3f},{'far' if a + b > 1 else 'near'}" for a, b in dice.random((200, 2))]
    Path("data/points.csv").write_text("a,b,label\n" + "\n".join(rows))
    flags = (
        "--data",
        "points",
        "--data-root",
        "data",
        "--skew",
        "iid",
        "--clients",
        "4",
        "--engine",
        "inline",
    )
    found = ran(*flags, "--rounds", "30", "--lr", "0.5", "--eval-every", "30")
    assert found["accuracy"]["final"] > 0.9
    assert "use mlp instead" in fedalloy("run", *flags, "--model", "cnn").err


def test_tokens_from_an_npz_file() -> None:
    dice = np.random.default_rng(0)
    y = np.arange(80) % 2
    x = dice.integers(1, 20, (80, 6)) + 20 * y[:, None]  # each class has words of its own
    save_npz(Path("data/words.npz"), {"x": x, "y": y})
    flags = ("--data", "words", "--data-root", "data", "--skew", "iid", "--clients", "2")
    found = ran(*flags, *ONE, "--model", "bilstm", "--optimizer", "adam", "--lr", "0.05", "--epochs", "5")
    assert found["accuracy"]["final"] > 0.9
    assert [row["name"] for row in fedalloy("models", *flags[:4], "--json").json["models"]] == ["bilstm"]
    assert "use bilstm instead" in fedalloy("run", *flags, "--model", "mlp").err


def test_a_global_model_is_tried_on_test_splits_that_clients_hold_out(tmp_path: Path) -> None:
    """With --test-share the local tests lie outside the global test set; each client still gets its accuracy."""
    federation = fa.federate("digits", clients=4, skew="iid", test_share=0.25)
    result = fa.train(federation, rounds=1, out=tmp_path / "run")
    server, _, _ = reopen(result.folder)
    server.replica.weights.load(server.weights, server.buffers)
    server.replica.net.eval()
    expected = []
    for k in range(4):
        data = federation.client(k)
        said = server.replica.net(data.prepare(data.x_test, None)).logits.argmax(1)
        expected.append(float((said == data.y_test).double().mean()))
    assert result.history[-1]["metrics"]["per_client"] == pytest.approx(expected)
    assert len(federation.scored) == len(federation.split.global_test) + len(federation.split.test_index)


def test_settings_of_the_federation_are_not_settings_of_the_training(tmp_path: Path) -> None:
    federation = fa.federate("digits", clients=4, skew="iid")
    with pytest.raises(fa.FedAlloyError, match="seed belong to the federation"):
        fa.train(federation, rounds=1, seed=1, out=tmp_path / "run")


def test_resume_takes_a_string(tmp_path: Path) -> None:
    result = fa.train(fa.federate("digits", clients=2, skew="iid"), rounds=1, out=str(tmp_path / "run"))
    assert fa.resume(str(tmp_path / "run")).summary == result.summary

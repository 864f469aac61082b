"""Benchmarks measure what they say; how fast, no test asks."""

import json
from pathlib import Path

import pytest
import torch

from fedalloy import models
from fedalloy.core.net import Inputs
from fedalloy.core.weights import Weights
from fedalloy.research.bench.bare import textbook
from fedalloy.research.bench.cases import CASES, FEW, MANY
from fedalloy.research.bench.steps import INPUTS, flops
from terminal import fedalloy


def test_the_bare_loop_trains_the_same_function() -> None:
    """ReLU before the pool in the default layout, or after it and channels last: the same numbers."""
    inputs = Inputs("image", (1, 28, 28), 10)
    ours, plain = models.build("cnn", inputs), textbook("cnn", inputs)
    with torch.no_grad():
        for mine, other in zip(plain.parameters(), ours.parameters(), strict=True):
            mine.copy_(other)
    x = torch.randn(4, 1, 28, 28)
    assert torch.allclose(plain(x), ours(x).logits, atol=1e-5)
    assert Weights(ours).layout.size == 582_026


def test_a_bench_prints_its_ratios(tmp_path: Path) -> None:
    out = tmp_path / "bench.json"
    found = fedalloy(
        "bench", "--only", "T", "--rounds", "2", "--repeats", "1", "--out", str(out), "--json"
    ).json
    bench = found["T"]
    speed = {row: run["samples_per_second"] for row, run in bench["rows"].items()}
    assert bench["ratio_fp32"] == pytest.approx(speed["fp32"] / speed["bare"])
    assert bench["ratio_bf16"] == pytest.approx(speed["bf16"] / speed["bare"])
    assert bench["ratio_fp32_channels_last"] == pytest.approx(speed["fp32"] / speed["bare_channels_last"])
    row = bench["rows"]["fp32"]
    assert set(row["seconds"]) == {"train", "evaluate", "aggregate", "other"}
    assert row["peak_mib"] > 100
    assert row["start_up"] > 0
    assert json.loads(out.read_text()) == found
    assert "bench 'x'" in fedalloy("bench", "--only", "x").err


def test_many_clients_hold_as_much_each_as_few() -> None:
    assert MANY.train / MANY.clients == FEW.train / FEW.clients
    assert MANY.clients * MANY.participation == FEW.clients * FEW.participation == 20


def test_the_big_benches_are_those_that_are_promised(tmp_path: Path) -> None:
    config = CASES["B"].prepare(tmp_path, None).config(tmp_path, rounds=2)
    assert (config.clients, config.participation, config.batch, config.momentum) == (100, 0.2, 64, 0.9)
    assert config.data == "noise28x28x1-20000"


def test_operations_are_counted() -> None:
    """A frozen model's pass over the data is a third of a step; MOON has two, once in a round."""
    plain, model = flops("fedavg", "cnn-bn", 1), "cnn-bn"
    assert flops("fedavg", model, 2) == 2 * plain
    assert flops("fedprox", model, 2) == 2 * plain
    passes = 2 * 8 * models.size_of(model, INPUTS).flops
    assert flops("moon", model, 2) - 2 * plain == pytest.approx(passes, rel=0.1)  # and its projector
    assert flops("fedavg", model, 1, samples=16) == 2 * plain

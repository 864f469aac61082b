"""bfloat16 for the body in training, float32 for everything else."""

from pathlib import Path
from typing import Any

import pytest
import torch

import fedalloy as fa
from fedalloy.core.net import Inputs
from fedalloy.models import build

INPUTS = Inputs("image", (1, 8, 8), 10)


def test_only_training_passes_of_the_body_are_coarse() -> None:
    net, x = build("lenet", INPUTS), torch.randn(8, 1, 8, 8)
    exact = net.eval()(x)
    net.bf16 = True
    assert torch.equal(net.eval()(x).logits, exact.logits)
    coarse = net.train()(x)
    assert not torch.equal(coarse.features, exact.features)
    assert torch.allclose(coarse.features, exact.features, atol=0.05, rtol=0.05)
    assert {part.dtype for part in coarse} == {torch.float32}
    coarse.logits.sum().backward()
    assert all(p.grad is not None and p.grad.dtype == torch.float32 for p in net.parameters())


def test_the_same_bits_on_any_number_of_workers(tmp_path: Path) -> None:
    federation = fa.federate("digits", clients=4, skew="iid")
    engines: dict[str, dict[str, Any]] = {
        "inline": {"engine": "inline"},
        "two": {"workers": 2},
        "three": {"workers": 3},
    }
    prints = {
        engine: fa.train(
            federation, model="lenet", rounds=2, precision="bf16", **settings, out=tmp_path / engine
        ).summary["weights_sha256"]
        for engine, settings in engines.items()
    }
    assert len(set(prints.values())) == 1
    plain = fa.train(federation, model="lenet", rounds=2, out=tmp_path / "fp32")
    assert plain.summary["weights_sha256"] not in prints.values()


@pytest.mark.parametrize("method", ["fedblade", "fedsce(p=1, mu=0.1)", "scaffold"])
def test_methods_train_in_bfloat16(method: str, tmp_path: Path) -> None:
    federation = fa.federate("digits", clients=3, skew="iid", limit=600)
    settings: dict[str, Any] = {"model": "cnn-bn", "rounds": 3, "epochs": 3, "batch": 16, "lr": 0.1}
    found = [
        fa.train(
            federation, method=method, precision=precision, out=tmp_path / precision, **settings
        ).accuracy
        for precision in ("fp32", "bf16")
    ]
    assert found[0] is not None
    assert found[1] == pytest.approx(found[0], abs=0.1)
    assert found[0] > 0.3

"""Which accuracy is whose: the global model's, and those of personal models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fedalloy as fa
from fedalloy.client import Client

FED = fa.federate("digits", clients=3, skew="dirichlet:0.5", seed=0)


@dataclass(frozen=True)
class _Blank(fa.Mechanism):
    """Before a personal evaluation everybody forgets everything."""

    def adapt(self, client: Client, my: fa.Box) -> None:
        client.weights.flat.zero_()


def test_a_method_with_both_kinds_of_model_is_judged_by_the_personal_ones(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"model": "mlp(hidden=8)", "rounds": 2, "lr": 0.1, "engine": "inline"}
    plain = fa.train(FED, method="fedavg", out=tmp_path / "plain", **settings)
    both = fa.train(FED, method=fa.methods.fedavg() + _Blank(), out=tmp_path / "both", **settings)
    first, last = plain.history[-1]["metrics"], both.history[-1]["metrics"]
    assert last["global_acc"] == first["global_acc"]  # an evaluation leaves no trace
    assert both.summary["weights_sha256"] == plain.summary["weights_sha256"]
    assert "personal_local_acc" not in first
    zeros = float((FED.dataset.y[FED.split.global_test] == 0).double().mean())  # all scores equal: class 0
    assert last["personal_on_global_acc"] == zeros
    assert plain.summary["metric"] == "global_acc"
    assert both.summary["metric"] == "personal_local_acc"
    assert both.accuracy == last["personal_local_acc"]

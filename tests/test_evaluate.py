"""Which accuracy is whose: the global model's, and those of personal models."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

import fedalloy as fa
from fedalloy.core.views import ClientView, ServerView

FED = fa.federate("digits", clients=3, skew="dirichlet:0.5", seed=0)


@dataclass(frozen=True)
class _Blank(fa.Mechanism):
    """Before a personal evaluation everybody forgets everything."""

    def adapt(self, client: ClientView, my: fa.State) -> None:
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


@dataclass(frozen=True)
class _Shows(fa.Mechanism):
    """A whole model that clients never see: the common body under the initial head."""

    def eval_models(self, server: ServerView, my: fa.State) -> dict[str, tuple[Tensor, Tensor]]:
        return {"global": server.replica.whole(":-1", server.weights, server.buffers)}


def test_a_method_without_a_global_model_may_show_one(tmp_path: Path) -> None:
    """It is recorded; the headline remains that of the personal models."""
    settings: dict[str, Any] = {
        "model": "mlp(hidden=8, norm=batch)",
        "rounds": 2,
        "lr": 0.1,
        "engine": "inline",
    }
    plain = fa.train(FED, method="fedper", out=tmp_path / "plain", **settings)
    shown = fa.train(FED, method=fa.methods.fedper() + _Shows(), out=tmp_path / "shown", **settings)
    first, last = plain.history[-1]["metrics"], shown.history[-1]["metrics"]
    assert "global_acc" not in first
    assert last.keys() - first.keys() == {"global_acc", "global_loss"}
    assert {name: last[name] for name in first} == first
    assert shown.summary["metric"] == "personal_local_acc"

"""Methods for different models on federations that mix architectures: same bits on every engine and after a stop."""

from pathlib import Path
from typing import Any

import pytest
from laboratory import digits

from fedalloy.core.registry import RECIPES, make
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Record, Result, Setup, play, resume

MODELS = "mlp(hidden=8, norm=batch),lenet,mlp(hidden=12, depth=2)"
METHODS = [name for name, recipe in RECIPES.items() if recipe.family == "different models"]
QUICK = {
    "fedsce": "fedsce(p=1, mu=0.1)",
    "fedtgp": "fedtgp(server_epochs=5)",
    "fedgh": "fedgh(server_epochs=5)",
    "feddistill": "feddistill(leave_one_out=True)",
}


class _Stopped(Exception):
    """Stands for whatever may stop a run."""


def played(folder: Path, method: str, stop: bool = False, **settings: Any) -> Result:
    federation = digits(5, "dirichlet:0.5", 0.25)
    values = {**federation.origin, "method": method, "models": MODELS, "rounds": 3, "participation": 0.8}
    setup = Setup(Config.of({**values, "lr": 0.05, "engine": "inline", **settings}), federation)

    def on_round(record: Record) -> None:
        if stop and record["round"] == 2:
            raise _Stopped

    return play(setup, RunFolder.create(folder, setup.config), on_round)


def bits(result: Result) -> list[Any]:
    lines = [{key: value for key, value in line.items() if key != "seconds"} for line in result.history]
    return [result.summary["weights_sha256"], result.summary["private_sha256"], lines]


def test_there_are_some() -> None:
    assert {"fedsce", "fedproto", "feddistill", "fml", "fedkd", "fedtgp", "fedgh"} <= set(METHODS)


@pytest.mark.filterwarnings("ignore::fedalloy.errors.FedAlloyWarning")
@pytest.mark.parametrize("name", METHODS)
def test_mixed_architectures(name: str, tmp_path: Path) -> None:
    method = QUICK.get(name, name)
    whole = played(tmp_path / "inline", method)
    assert whole.summary["status"] == "finished"
    assert not any(line["refused"] for line in whole.history)
    assert len({str(line["metrics"]) for line in whole.history}) == 3
    assert "global model" not in make(method).gives
    assert bits(played(tmp_path / "workers", method, engine="workers", workers=2)) == bits(whole)
    with pytest.raises(_Stopped):
        played(tmp_path / "stopped", method, stop=True)
    assert bits(resume(tmp_path / "stopped")) == bits(whole)

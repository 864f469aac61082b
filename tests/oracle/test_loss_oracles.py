"""Methods that change the local loss against plain loops: the same weights and statistics after three rounds."""

from pathlib import Path

import loss_oracles
import pytest
from oracles import World
from test_oracles import MODELS, agree, digits, played


@pytest.fixture(params=zip(MODELS, (0.9, 0.0), strict=True), ids=str)
def world(request: pytest.FixtureRequest) -> World:
    model, momentum = request.param
    return World(digits(), model, momentum=momentum, lr=0.01 if momentum else 0.05)


def test_feduv(world: World, tmp_path: Path) -> None:
    state = played(world, "feduv(lambda_v=5,lambda_u=2)", tmp_path / "run")
    agree(state, loss_oracles.feduv(world, lambda_v=5.0, lambda_u=2.0))


@pytest.mark.parametrize("settings", ["tau=5", "tau=1,form=pairwise", "tau=5,absent=floor"])
def test_fedlc(world: World, tmp_path: Path, settings: str) -> None:
    state = played(world, f"fedlc({settings})", tmp_path / "run")
    tau = 1.0 if "tau=1" in settings else 5.0
    agree(state, loss_oracles.fedlc(world, tau, "pairwise" in settings, "floor" in settings))

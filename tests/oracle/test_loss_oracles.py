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

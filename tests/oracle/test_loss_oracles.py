"""Methods that change the local loss against plain loops: the same weights and statistics after three rounds."""

from pathlib import Path

import loss_oracles
import pytest
from oracles import World
from test_oracles import CLOSE, MODELS, agree, digits, gap, played


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


def test_fedrcl(world: World, tmp_path: Path) -> None:
    state = played(world, "fedrcl(w_s=0.5,w_p=2,tau=0.2,kappa=0.3,grad_clip=1)", tmp_path / "run")
    agree(state, loss_oracles.fedrcl(world, 0.5, 2.0, tau=0.2, kappa=0.3, clip=1.0))


def test_fedrcl_at_two_levels(tmp_path: Path) -> None:
    world = World(digits(), "mlp(hidden=16, depth=3)", epochs=1)
    settings = "tau=0.2,kappa=0.3,form=full,grad_clip=none,agg_weights=uniform"
    state = played(world, f"fedrcl({settings})", tmp_path / "run")
    agree(state, loss_oracles.fedrcl(world, 1.0, 1.0, 0.2, 0.3, most=(99, 99), clip=None, uniform=True))


@pytest.mark.parametrize("settings", ["lam=3", "lam=9,matching=l2,one_trip=True", "lam=3,equal_avg=True"])
def test_fedfm(world: World, tmp_path: Path, settings: str) -> None:
    state = played(world, f"fedfm(tau=0.3,{settings})", tmp_path / "run")
    lam = 9.0 if "l2" in settings else 3.0
    model, anchors = loss_oracles.fedfm(
        world, lam, 0.3, "l2" in settings, 1, "one_trip" in settings, "equal" in settings
    )
    agree(state, model)
    assert state["classanchors.seen"].nonzero().flatten().tolist() == sorted(anchors)
    for c, anchor in anchors.items():
        assert gap(state["classanchors.means"][c], anchor) < CLOSE

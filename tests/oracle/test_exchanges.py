"""Methods for different models against plain loops: the same nets at the clients, the same rows at the server."""

from pathlib import Path

import exchanges
import pytest
import torch
from exchanges import Ends, Pair
from oracles import Model, World
from test_oracles import CLOSE, MODELS, digits, gap, played
from torch import Tensor

from fedalloy.core.wire import Items
from fedalloy.experiment.folder import RunFolder


@pytest.fixture(params=[(MODELS[0], 0.0), (MODELS[1], 0.9)], ids=str)
def world(request: pytest.FixtureRequest) -> World:
    model, momentum = request.param
    return World(digits(), model, momentum=momentum, lr=0.01 if momentum else 0.05)


def own_agree(folder: Path, own: dict[int, Model]) -> None:
    """Every client's private net; those never asked have none."""
    vault = RunFolder(folder).vault
    assert own
    for client in range(6):
        kept = vault.load(client, before=99)
        assert (client in own) == bool(kept)
        if kept:
            assert gap(kept["own.weights"], own[client].weights) < CLOSE
            assert gap(kept["own.buffers"], own[client].buffers) < CLOSE


def rows_agree(found: Tensor, seen: Tensor, rows: dict[int, Tensor]) -> None:
    assert seen.nonzero().flatten().tolist() == sorted(rows)
    assert gap(found[seen].double(), torch.stack([rows[c] for c in sorted(rows)])) < CLOSE


def agree(state: Items, folder: Path, ends: Ends, label: str) -> None:
    own_agree(folder, ends.own)
    rows_agree(state[f"{label}.means"], state[f"{label}.seen"], ends.rows)


@pytest.mark.parametrize("settings", ["", "weighted=True", "proto_pass=train"])
def test_fedproto(world: World, tmp_path: Path, settings: str) -> None:
    state = played(world, f"fedproto(lam=2,{settings})", tmp_path / "run")
    ends = exchanges.fedproto(world, 2.0, "weighted" in settings, "train" in settings)
    agree(state, tmp_path / "run", ends, "features-means")


@pytest.mark.parametrize("settings", ["", "output=prob", "leave_one_out=True"])
def test_feddistill(world: World, tmp_path: Path, settings: str) -> None:
    state = played(world, f"feddistill(lam=2,{settings})", tmp_path / "run")
    ends = exchanges.feddistill(world, 2.0, "prob" not in settings, "leave" in settings)
    vault = RunFolder(tmp_path / "run").vault
    assert all(
        ("outputdistillation.own" in vault.load(k, before=99)) == ("leave" in settings) for k in ends.own
    )
    agree(state, tmp_path / "run", ends, "probabilities-means" if "prob" in settings else "logits-means")


@pytest.mark.parametrize("old", [0.0, 0.5])
def test_feddistillplus(world: World, tmp_path: Path, old: float) -> None:
    state = played(world, f"feddistillplus(lam=2,sl_momentum={old})", tmp_path / "run")
    model, omega = exchanges.feddistillplus(world, 2.0, old)
    assert gap(state["server.weights"], model.weights) < CLOSE
    assert gap(state["server.buffers"], model.buffers) < CLOSE
    assert gap(state["probabilities-means.means"].double(), omega) < CLOSE


def pair_agrees(state: Items, folder: Path, ends: Pair) -> None:
    own_agree(folder, ends.own)
    assert gap(state["server.weights"], ends.common.weights) < CLOSE
    assert gap(state["server.buffers"], ends.common.buffers) < CLOSE


@pytest.mark.parametrize("settings", ["alpha=0.5, beta=0.5", "alpha=0.8, beta=0.3, agg_weights=size"])
def test_fml(world: World, tmp_path: Path, settings: str) -> None:
    state = played(world, f"fml({settings})", tmp_path / "run")
    strengths = (0.8, 0.3) if "size" in settings else (0.5, 0.5)
    pair_agrees(state, tmp_path / "run", exchanges.fml(world, *strengths, "size" in settings))


@pytest.mark.parametrize("settings", ["", "t_start=0.6, t_end=0.9", "compress=False", "hidden=False"])
def test_fedkd(world: World, tmp_path: Path, settings: str) -> None:
    state = played(world, f"fedkd({settings})", tmp_path / "run")
    t_start, t_end = (0.6, 0.9) if "0.6" in settings else (0.95, 0.98)
    ends = exchanges.fedkd(
        world, None if "compress" in settings else t_start, t_end, "hidden" not in settings
    )
    pair_agrees(state, tmp_path / "run", ends)


@pytest.mark.parametrize("tau", [0.5, 100.0])
def test_fedtgp(world: World, tmp_path: Path, tau: float) -> None:
    state = played(world, f"fedtgp(lam=2, tau={tau}, server_epochs=6)", tmp_path / "run")
    ends = exchanges.fedtgp(world, 2.0, tau, 6)
    own_agree(tmp_path / "run", ends.own)
    rows_agree(state["trainedprototypes.P"], state["trainedprototypes.seen"], ends.rows)


def test_fedgh(world: World, tmp_path: Path) -> None:
    state = played(world, "fedgh(server_epochs=6, server_lr=0.2)", tmp_path / "run")
    pair_agrees(state, tmp_path / "run", exchanges.fedgh(world, 6, 0.2))

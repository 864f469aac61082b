"""The library's methods against plain loops: the same weights and statistics after three rounds."""

from functools import cache
from pathlib import Path
from typing import Any

import oracles
import pytest
from oracles import Model, World
from torch import Tensor

from fedalloy.core.wire import Items
from fedalloy.data.federation import Federation, federate
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import train

CLOSE = 1e-5
MODELS = ("mlp(hidden=16)", "mlp(hidden=16, norm=batch)")


@cache
def digits() -> Federation:
    federation = federate("digits", clients=6, skew="dirichlet:0.5", seed=World.seed)
    assert federation.eligible == list(range(6))
    return federation


@pytest.fixture(params=[(model, momentum) for model in MODELS for momentum in (0.0, 0.9)], ids=str)
def world(request: pytest.FixtureRequest) -> World:
    model, momentum = request.param
    return World(digits(), model, momentum=momentum, lr=0.01 if momentum else 0.05)


def played(world: World, method: str, folder: Path) -> Items:
    """The server's state at the end of a run with the library."""
    settings: dict[str, Any] = {
        name: getattr(world, name)
        for name in ("rounds", "participation", "epochs", "batch", "lr", "lr_decay", "momentum")
    }
    train(world.federation, world.model, method, out=folder, engine="inline", eval_every=3, **settings)
    return RunFolder(folder).restore()[1]


def gap(a: Tensor, b: Tensor) -> float:
    assert a.shape == b.shape
    return float((a - b).abs().max()) if a.numel() else 0.0


def agree(state: Items, model: Model) -> None:
    assert gap(state["server.weights"], model.weights) < CLOSE
    assert gap(state["server.buffers"], model.buffers) < CLOSE


def test_participants_come_back() -> None:
    """The comparison is worth something only if private states are used again, and rest in between."""
    world = World(digits(), MODELS[0])
    drawn = [set(world.sampled(round)) for round in (1, 2, 3)]
    assert drawn[0] & drawn[1] & drawn[2]  # a memory of two models is filled and used
    assert drawn[0] - drawn[1]


def test_local(world: World, tmp_path: Path) -> None:
    played(world, "local", tmp_path / "run")
    vault = RunFolder(tmp_path / "run").vault
    for client, model in enumerate(oracles.local(world)):
        own = vault.load(client, before=99)
        assert gap(own["own.weights"], model.weights) < CLOSE
        assert gap(own["own.buffers"], model.buffers) < CLOSE


@pytest.mark.parametrize("uniform", [False, True])
def test_fedavg(world: World, tmp_path: Path, uniform: bool) -> None:
    method = "fedavg(agg_weights=uniform)" if uniform else "fedavg"
    agree(played(world, method, tmp_path / "run"), oracles.fedavg(world, uniform))


def test_fedprox(world: World, tmp_path: Path) -> None:
    agree(played(world, "fedprox(mu=1.5)", tmp_path / "run"), oracles.fedavg(world, mu=1.5))


@pytest.mark.parametrize(("mu", "server_momentum"), [(0.0, 0.0), (1.5, 0.0), (0.0, 0.4)])
def test_fednova(world: World, tmp_path: Path, mu: float, server_momentum: float) -> None:
    method = f"fednova(mu={mu},server_momentum={server_momentum})"
    agree(played(world, method, tmp_path / "run"), oracles.fednova(world, mu, server_momentum))


@pytest.mark.parametrize("settings", ["", "c_update=option1", "agg_weights=size", "server_lr=0.7"])
def test_scaffold(world: World, tmp_path: Path, settings: str) -> None:
    state = played(world, f"scaffold({settings})", tmp_path / "run")
    rule = "option1" if "option1" in settings else "mean_grad" if world.momentum else "option2"
    model = oracles.scaffold(world, rule, "size" in settings, 0.7 if "server_lr" in settings else 1.0)
    agree(state, model)


@pytest.mark.parametrize("rule", ["mean_grad", "lean"])
def test_scaffold_without_momentum(tmp_path: Path, rule: str) -> None:
    """For plain SGD all of option II, the mean gradient and the lean upload are one method."""
    world = World(digits(), MODELS[0])
    settings = "lean_upload=True" if rule == "lean" else "c_update=mean_grad"
    agree(played(world, f"scaffold({settings})", tmp_path / "run"), oracles.scaffold(world, "option2"))


@pytest.mark.parametrize(("clip", "size_scaled"), [(10.0, False), (0.5, False), (None, False), (10.0, True)])
def test_feddyn(world: World, tmp_path: Path, clip: float | None, size_scaled: bool) -> None:
    method = f"feddyn(alpha=0.2,max_grad_norm={clip},size_scaled={size_scaled})"
    state = played(world, method, tmp_path / "run")
    model, average = oracles.feddyn(world, 0.2, clip, size_scaled)
    agree(state, model)
    assert gap(state["dynamic.mean"], average) < CLOSE


@pytest.mark.parametrize(("projector", "memory"), [(12, 1), (None, 1), (12, 2)])
def test_moon(world: World, tmp_path: Path, projector: int | None, memory: int) -> None:
    neck = "projection=penultimate" if projector is None else f"proj_dim={projector}"
    method = f"moon(mu=2,temperature=0.7,buffer_size={memory},{neck})"
    agree(played(world, method, tmp_path / "run"), oracles.moon(world, 2.0, 0.7, projector, memory))


@pytest.mark.parametrize(
    ("variant", "head", "body"), [("adaptive", 1, 1), ("fixed", 1, 1), ("adaptive", 1, 0), ("fixed", 0, 1)]
)
def test_fedsol(world: World, tmp_path: Path, variant: str, head: int, body: int) -> None:
    parts = f"perturb_head={bool(head)},perturb_body={bool(body)}"
    state = played(world, f"fedsol(rho=0.5,variant={variant},temperature=2,{parts})", tmp_path / "run")
    agree(state, oracles.fedsol(world, 0.5, variant == "adaptive", bool(head), bool(body), 2.0))


@pytest.mark.parametrize(
    ("schedule", "official", "by_class"),
    [("batch", False, False), ("before", True, False), ("epoch", False, True), ("after", True, True)],
)
def test_fedfa(world: World, tmp_path: Path, schedule: str, official: bool, by_class: bool) -> None:
    flags = f"official_mean={official},class_weighted={by_class}"
    tuner = "" if schedule == "batch" else "calib_optimizer=sgd,calib_lr=0.5,"
    method = f"fedfa(lam=0.3,momentum=0.4,calibration={schedule},{tuner}{flags})"
    state = played(world, method, tmp_path / "run")
    model, anchors = oracles.fedfa(world, 0.3, 0.4, schedule, official, by_class)
    agree(state, model)
    assert gap(state["anchors.anchors"], anchors) < CLOSE


def test_fedfa_aug(tmp_path: Path) -> None:
    world = World(digits(), "cnn-fedrda", momentum=0.5, lr=0.05)
    state = played(world, "fedfa_aug(prob=0.6,momentum=0.8)", tmp_path / "run")
    agree(state, oracles.fedfa_aug(world, 0.6, 0.8))


@pytest.mark.parametrize("cov", ["full", "diag"])
def test_ccvr(world: World, tmp_path: Path, cov: str) -> None:
    training = "head_lr=0.05,head_momentum=0.5,head_epochs=2,head_batch=16"
    state = played(world, f"ccvr(samples=30,cov={cov},jitter=0.01,{training})", tmp_path / "run")
    calibrated = oracles.ccvr(world, 30, cov == "diag", 0.01, 0.05, 0.5)
    assert gap(state["virtualfeatures.calibrated"], calibrated.weights) < CLOSE
    agree(state, oracles.fedavg(world))

"""Methods with personal models against plain loops: the server's state and that of every client."""

from pathlib import Path
from typing import Any

import personal
import pytest
import torch
from oracles import World
from personal import State
from test_oracles import CLOSE, MODELS, gap, played, world
from torch import Tensor

from fedalloy.core.wire import Items
from fedalloy.experiment.folder import RunFolder

__all__ = ["world"]  # the fixture
STATISTICS = ("running_mean", "running_var")


def vector(state: State, statistics: bool = False) -> Tensor:
    """The weights of a state as one vector, or its statistics."""
    chosen = [value for name, value in state.items() if name.endswith(STATISTICS) == statistics]
    return torch.cat([torch.empty(0), *(value.flatten() for value in chosen)])


def agree(state: Items, base: State) -> None:
    assert gap(state["server.weights"], vector(base)) < CLOSE
    assert gap(state["server.buffers"], vector(base, statistics=True)) < CLOSE


def private(folder: Path, client: int) -> Items:
    return RunFolder(folder).vault.load(client, before=99)


def agree_on_heads(folder: Path, heads: dict[int, State], drawn: set[int]) -> None:
    for k, head in heads.items():
        kept = private(folder, k)
        assert bool(kept) == (k in drawn)
        if kept:
            assert gap(kept["own.weights"], vector(head)) < CLOSE
            assert gap(kept["own.buffers"], vector(head, statistics=True)) < CLOSE


def drawn(world: World) -> set[int]:
    return {k for round in range(1, world.rounds + 1) for k in world.sampled(round)}


@pytest.mark.parametrize("layers", [1, 2])
def test_fedper(world: World, tmp_path: Path, layers: int) -> None:
    own = (
        ("head",) if layers == 1 else (("body.1", "head") if world.model == MODELS[0] else ("body.2", "head"))
    )
    state = played(world, f"fedper(num_personal_layers={layers})", tmp_path / "run")
    base, heads = personal.fedper(world, own)
    agree(state, base)
    agree_on_heads(tmp_path / "run", heads, drawn(world))


@pytest.mark.parametrize(
    ("settings", "options"),
    [
        ("", {"head_epochs": 1, "body_epochs": 1}),
        ("head_epochs=2,body_epochs=3,head_lr=0.08", {"head_epochs": 2, "body_epochs": 3, "head_lr": 0.08}),
        ("agg_weights=uniform", {"head_epochs": 1, "body_epochs": 1, "uniform": True}),
    ],
)
def test_fedrep(world: World, tmp_path: Path, settings: str, options: dict[str, Any]) -> None:
    state = played(world, f"fedrep({settings})", tmp_path / "run")
    base, heads = personal.fedrep(world, **options)
    agree(state, base)
    agree_on_heads(tmp_path / "run", heads, drawn(world))


@pytest.mark.parametrize("uniform", [False, True])
def test_fedbabu(world: World, tmp_path: Path, uniform: bool) -> None:
    method = f"fedbabu(agg_weights={'uniform' if uniform else 'size'}, ft_epochs=2)"
    state = played(world, method, tmp_path / "run")
    base = personal.fedbabu(world, uniform)
    agree(state, base)
    metrics = RunFolder(tmp_path / "run").history()[-1]["metrics"]
    tested = len(world.federation.split.global_test)
    assert metrics["global_acc"] == pytest.approx(personal.right(world, base) / tested)
    models = personal.tuned(world, base, 2, world.rate(world.rounds))
    own = [personal.right(world, model, k) for k, model in models.items()]
    sizes = [len(world.federation.client(k).y_test) for k in models]
    assert metrics["personal_local_acc"] == pytest.approx(sum(own) / sum(sizes))
    shares = [r / n for r, n in zip(own, sizes, strict=True)]
    assert metrics["personal_local_acc_clients"] == pytest.approx(sum(shares) / len(shares))
    everywhere = [personal.right(world, model) / tested for model in models.values()]
    assert metrics["personal_on_global_acc"] == pytest.approx(sum(everywhere) / len(everywhere))


@pytest.mark.parametrize(
    ("settings", "lam", "epochs", "factor"),
    [("", 1.0, 2, 1.0), ("lam=3,personal_epochs=3,personal_lr={},agg_weights=uniform", 3.0, 3, 0.5)],
)
def test_ditto(world: World, tmp_path: Path, settings: str, lam: float, epochs: int, factor: float) -> None:
    lr = factor * world.lr
    state = played(world, f"ditto({settings.format(lr)})", tmp_path / "run")
    w, v = personal.ditto(world, lam, epochs, lr, "uniform" in settings)
    agree(state, w)
    for k, model in v.items():
        kept = private(tmp_path / "run", k)
        assert bool(kept) == (k in drawn(world))
        if kept:
            assert gap(kept["personalmodel.v"], vector(model)) < CLOSE
            assert gap(kept["personalmodel.statistics"], vector(model, statistics=True)) < CLOSE

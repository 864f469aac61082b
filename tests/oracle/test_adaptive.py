"""Personal methods against plain loops: the same weights, statistics and private state after three rounds."""

from dataclasses import replace
from pathlib import Path

import adaptive
import pytest
import torch
from oracles import Model, World
from test_oracles import CLOSE, MODELS, agree, digits, gap, played

from fedalloy.core.wire import Items
from fedalloy.experiment.folder import RunFolder


def kept(folder: Path, client: int) -> Items:
    """What a client keeps to itself at the end of a run."""
    return RunFolder(folder).vault.load(client, before=99)


@pytest.fixture(params=MODELS)
def place(request: pytest.FixtureRequest) -> World:
    return World(digits(), request.param)


@pytest.mark.parametrize(("layers", "tensors"), [(1, 2), (0, 99)])
@pytest.mark.parametrize("converged", [True, False])
def test_fedala(place: World, tmp_path: Path, layers: int, tensors: int, converged: bool) -> None:
    percent = 80.0 if converged else 100.0
    settings = f"rand_percent={percent}, start_until_converged={converged}"
    state = played(place, f"fedala(num_ala_layers={layers}, {settings})", tmp_path / "run")
    server, own, weights = adaptive.fedala(place, tensors, 1.0, percent, converged)
    agree(state, server)
    assert len(weights) > 1
    for client, model in own.items():
        keep = kept(tmp_path / "run", client)
        assert gap(keep["ala.w_k"], model.weights) < CLOSE
        assert gap(keep["ala.buffers"], model.buffers) < CLOSE
        if client in weights:
            W = torch.cat([w.flatten() for w in weights[client].values()])
            assert gap(keep["ala.W"], W) < CLOSE
            assert float(W.mean()) < 1


@pytest.mark.parametrize(("same", "uniform"), [(False, False), (True, True)])
@pytest.mark.parametrize("delta", [None, 0.1])
def test_perfedavg(place: World, tmp_path: Path, delta: float | None, same: bool, uniform: bool) -> None:
    """Also under momentum, which it does not use. A large delta, as the noise of the difference is divided by it."""
    place = replace(place, momentum=0.9)
    variant = "fo" if delta is None else f"hf, delta={delta}"
    inner, weights = "same" if same else "independent", "uniform" if uniform else "size"
    settings = f"alpha=0.1, beta=0.05, variant={variant}, inner_batch={inner}, agg_weights={weights}"
    state = played(place, f"perfedavg({settings})", tmp_path / "run")
    agree(state, adaptive.perfedavg(place, 0.1, 0.05, delta, same, uniform))


@pytest.mark.parametrize(("lam", "combine"), [(1.0, True), (0.5, False), (0.0, True)])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_fedpac(place: World, tmp_path: Path, momentum: float, lam: float, combine: bool) -> None:
    place = replace(place, momentum=momentum)
    state = played(place, f"fedpac(lam={lam}, head_lr=0.1, combine={combine})", tmp_path / "run")
    server, heads, centroids, seen = adaptive.fedpac(place, lam, 0.1, combine)
    size = len(next(iter(heads.values())))
    agree(state, Model(server.weights[:-size], server.buffers))
    assert len(heads) > 3
    for client, head in heads.items():
        found = (
            state[f"headcombination.head{client}"]
            if combine
            else kept(tmp_path / "run", client)["own.weights"]
        )
        assert gap(found, head) < CLOSE
    if lam:
        assert torch.equal(state["features-means.seen"], seen)
        assert gap(state["features-means.means"], centroids) < CLOSE

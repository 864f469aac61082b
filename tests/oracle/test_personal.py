"""Personal methods against plain loops: the same weights, statistics and private state after three rounds."""

from pathlib import Path

import personal
import pytest
import torch
from oracles import World
from test_oracles import CLOSE, MODELS, agree, digits, gap, played

from fedalloy.folder import RunFolder
from fedalloy.wire import Items


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
    server, own, weights = personal.fedala(place, tensors, 1.0, percent, converged)
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

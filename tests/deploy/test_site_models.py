"""A site keeps its client's own model, as it was tested, on its own disk; the server cannot take it."""

import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import SMALL, Loopback

import fedalloy as fa
from fedalloy.deploy.server import serve
from fedalloy.trained.take import Opened

OWN: dict[str, Any] = {
    "clients": 2,
    "rounds": 4,
    "batch": 8,
    "model": "mlp(hidden=4)",
    "data": "cells",
    "class_names": "well,ill",
    "test_share": 0.5,
    "join_limit": 1.0,
    "lr": 0.2,
}


@pytest.mark.parametrize("method", ["fedper", "fedproto", "ditto", "perfedavg"])
def test_it_is_the_one_that_was_tested(tmp_path: Path, method: str) -> None:
    """Sites whose scales differ: the agreed normalisation goes into the file."""
    draw = np.random.default_rng(0)
    for site in range(2):
        y = draw.integers(0, 2, 60)
        x = draw.normal(0, 1, (60, 3)) + y[:, None] * 2 + 5 * site
        (tmp_path / f"site-{site}").mkdir()
        np.savez(tmp_path / f"site-{site}" / "cells.npz", x=x.astype(np.float32), y=y)
    settings = {**OWN, "method": method, "run_folder": str(tmp_path / "run")}
    bundles = [tmp_path / f"site-{site}" for site in range(2)]
    nodes = [{"data-root": str(place), "state": str(place / "state")} for place in bundles]
    grid = Loopback(settings, tmp_path, nodes)
    result = serve(grid, settings)
    assert result.history[-1]["metrics"]["personal_local_acc"] > 0.5
    for client, place in enumerate(bundles):
        kept = list((place / "state" / "models").iterdir())
        assert len(kept) == 1
        assert stat.S_IMODE(kept[0].stat().st_mode) == 0o600
        assert stat.S_IMODE(kept[0].parent.stat().st_mode) == 0o700
        model = fa.load_model(fa.export(place, tmp_path / f"{client}.safetensors"))
        assert (model.card.which, model.card.client, model.card.round) == ("personal", client, 4)
        data = next(desk for desk in grid.desks.values() if desk.client == client).federation.client(client)
        said = model(data.x_test).argmax(1)
        assert (
            float((said == data.y_test).double().mean())
            == result.history[-1]["metrics"]["per_client"][client]
        )
        assert model.preprocessing.sha256 == fa.load_model(kept[0]).preprocessing.sha256
        assert (tmp_path / "run" / "preprocessing.json").read_text() == model.preprocessing.to_json()
        program = torch.export.load(fa.export(place, tmp_path / f"{client}.pt2", client)).module()
        assert torch.allclose(program(data.x_test), model(data.x_test), atol=1e-5)
    with pytest.raises(fa.FedAlloyError, match="client 1's own model is at its site"):
        Opened.of(result.folder, None).personal(1)
    with pytest.raises(fa.FedAlloyError, match="is not the model of client 1"):
        fa.export(bundles[0], tmp_path / "other.pt2", 1)


def test_who_has_none_keeps_none(tmp_path: Path) -> None:
    settings = {**SMALL, "rounds": 1, "method": "fedavg", "run_folder": str(tmp_path / "run")}
    result = serve(Loopback(settings, tmp_path / "state", [{}] * 3), settings)
    assert not (tmp_path / "state" / "models").exists()
    with pytest.raises(fa.FedAlloyError, match="is not a run folder"):
        fa.export(tmp_path / "state", tmp_path / "m.safetensors")
    model = fa.load_model(fa.export(result.folder, tmp_path / "m.safetensors"))
    assert torch.equal(
        model(torch.zeros(1, 1, 8, 8)), Opened.of(result.folder, None).model()(torch.zeros(1, 1, 8, 8))
    )


def test_same_model_as_in_a_simulation(tmp_path: Path) -> None:
    settings = {**SMALL, "method": "fedper", "test_share": 0.2, "run_folder": str(tmp_path / "run")}
    serve(Loopback(settings, tmp_path / "state", [{}] * 3), settings)  # three clients of one state folder
    dealt = {name: settings[name] for name in ("clients", "skew", "test_share")}
    trained = {name: settings[name] for name in ("method", "model", "rounds", "batch")}
    simulated = fa.train(fa.federate("digits", **dealt), engine="inline", **trained)
    x = fa.federate("digits", **dealt).dataset.x[:20]
    for client in range(3):
        kept = fa.load_model(fa.export(tmp_path / "state", tmp_path / f"{client}.safetensors", client))
        assert torch.equal(kept(x), simulated.personal(client)(x))

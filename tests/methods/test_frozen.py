"""Frozen models look at a sample once, whoever asks, and say the same as if they looked again."""

from typing import Any

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, far
from torch import Tensor

from fedalloy.core import frozen
from fedalloy.core.alloy import Alloy
from fedalloy.core.frozen import Frozen
from fedalloy.data.federation import federate
from fedalloy.methods import fedsol, moon

EPOCHS, SAMPLES = 3, 72
METHODS = {"MOON": (moon(proj_dim=12), 2), "FedSOL": (fedsol(), 1)}  # and how many models it looks at


def second_round(method: Alloy, model: str, augment: str = "none") -> Lab:
    """MOON needs a previous participation. Batches of 32, 32 and 8 samples."""
    federation = federate("digits", 20, "iid", augment=augment)
    lab = Lab(method, federation, model, lr=0.05, epochs=EPOCHS, batch=32)
    assert len(lab.federation.client(0).y) == SAMPLES
    lab.round([0, 1])
    return lab


@pytest.fixture
def looks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many samples each forward pass of a frozen net is about."""
    seen: list[int] = []
    look = Frozen.__call__

    def counted(self: Frozen, x: Tensor) -> Any:
        seen.append(len(x))
        return look(self, x)

    monkeypatch.setattr(Frozen, "__call__", counted)
    return seen


@pytest.mark.parametrize(("augment", "times"), [("none", 1), ("flip", EPOCHS)])
@pytest.mark.parametrize("name", METHODS)
def test_a_sample_is_looked_at_once_unless_it_is_augmented(
    name: str, augment: str, times: int, looks: list[int]
) -> None:
    method, models = METHODS[name]
    lab = second_round(method, MLP, augment)
    for client in (0, 1):  # nothing is left of client 0 when client 1 has its turn
        looks.clear()
        lab.trained(client)
        assert sum(looks) == times * models * SAMPLES


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("name", METHODS)
def test_it_makes_no_difference(
    name: str, model: str, looks: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With no room to remember anything, every batch is looked at again."""
    method, models = METHODS[name]
    lab = second_round(method, model)
    flat = lab.trained(0).weights.flat.clone()
    looks.clear()
    lab.server.round -= 1  # once more
    monkeypatch.setattr(frozen, "REMEMBERED", 0)
    again = lab.trained(0).weights.flat
    assert sum(looks) == EPOCHS * models * SAMPLES
    assert far(flat, again) < 1e-5
    assert far(flat, lab.weights) > 1e-3
    assert torch.isfinite(flat).all()

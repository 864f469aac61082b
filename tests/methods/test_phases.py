"""Phases of local training, and training beside it: what moves, what stays, which batches."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, digits, far
from torch import nn

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.state import Phase, State
from fedalloy.core.views import ClientView
from fedalloy.core.weights import BASE, HEAD
from fedalloy.mechanisms.share import Share
from fedalloy.methods import fedavg, local

MOVING: tuple[dict[str, Any], ...] = (
    {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.1},
    {"lr": 0.01, "optimizer": "adam", "weight_decay": 0.1},
    {"lr": 0.01, "optimizer": "adamw", "weight_decay": 0.1},
)


@dataclass(frozen=True)
class _Plan(Mechanism):
    """Phases as given."""

    plan: tuple[Phase, ...] = ()

    def phases(self, client: ClientView, my: State, epochs: int) -> Sequence[Phase] | None:
        return self.plan


def planned(*plan: Phase) -> Alloy:
    return alloy("planned", Share(), _Plan(plan))


@pytest.mark.parametrize("settings", MOVING)
@pytest.mark.parametrize(("part", "rest"), [(HEAD, BASE), (BASE, HEAD), ("body.1", "body.2")])
def test_only_the_part_moves(settings: dict[str, Any], part: str, rest: str) -> None:
    client = Lab(planned(Phase(2, part)), digits(), BATCHNORM, **settings).trained(0)
    here, there = client.weights.span(part), client.weights.span(rest)
    assert torch.equal(client.weights.flat[there], client.received[there])
    assert far(client.weights.flat[here], client.received[here]) > 1e-3
    assert all(parameter.requires_grad for parameter in client.net.parameters())
    assert not client.net.training


@pytest.mark.parametrize("plan", [(), (Phase(2, "nothing"),), (Phase(2, ":-99"),), (Phase(0),)])
def test_nothing_to_train(plan: tuple[Phase, ...]) -> None:
    client = Lab(planned(*plan), digits(), BATCHNORM, lr=0.1).trained(0)
    assert torch.equal(client.weights.flat, client.received)
    assert torch.equal(client.weights.buffers, client.received_buffers)
    assert client.steps == 0
    assert not client.net.training


@pytest.mark.parametrize("held", [False, True])
def test_statistics_of_the_frozen_rest(held: bool) -> None:
    """They move with the batches, unless they are frozen too; then the next phase moves them again."""
    still = Lab(planned(Phase(1, HEAD, freeze_bn=held)), digits(), BATCHNORM, lr=0.1).trained(0)
    assert torch.equal(still.weights.buffers, still.received_buffers) == held
    plan = Phase(1, HEAD, freeze_bn=held), Phase(1, BASE)
    both = Lab(planned(*plan), digits(), BATCHNORM, lr=0.1).trained(0)
    assert far(both.weights.buffers, both.received_buffers) > 1e-3
    inside = Lab(planned(Phase(1, "-2:", freeze_bn=held)), digits(), BATCHNORM, lr=0.1).trained(0)
    assert far(inside.weights.buffers, inside.received_buffers) > 1e-3  # that of the part itself is trained


def test_a_phase_counts_epochs_or_steps() -> None:
    """A number of steps is that of the phase; local work in steps is the default, not a bound for all phases."""
    lab = Lab(planned(Phase(99, steps=5), Phase(2)), digits(), lr=0.1, steps=3)
    passes = 2 * -(-lab.sizes[0] // lab.local.batch)
    assert lab.trained(0).steps == 5 + passes
    assert Lab(fedavg(), digits(), lr=0.1, steps=3).trained(0).steps == 3


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_fitting_is_plain_training_that_is_not_counted(model: str) -> None:
    """On stream 0 it repeats, bit for bit, what local training does; another stream deals other batches."""
    settings: dict[str, Any] = {"lr": 0.1, "momentum": 0.9, "epochs": 2}
    expected = Lab(local(), digits(), model, **settings).trained(0)
    weights, buffers = expected.weights.flat.clone(), expected.weights.buffers.clone()
    client = Lab(planned(), digits(), model, **settings).trained(0)
    client.fit(0, Phase(2))
    assert torch.equal(client.weights.flat, weights)
    assert torch.equal(client.weights.buffers, buffers)
    assert (client.steps, client.seen, client.net.training) == (0, 0, False)
    other = Lab(planned(), digits(), model, **settings).trained(0)
    other.fit("other", Phase(2))
    assert far(other.weights.flat, weights) > 1e-4


def test_fitting_on_a_part_of_the_data() -> None:
    client = Lab(planned(), digits(), lr=0.1).trained(0)
    few = replace(client.data, x=client.data.x[:7], y=client.data.y[:7])
    seen: list[int] = []

    def oracle(step: Any) -> torch.Tensor:
        seen.append(len(step.y))
        return client.plain_gradient(step)

    client.fit(0, Phase(3), oracle, few)
    assert seen == [7, 7, 7]
    assert isinstance(client.net.head, nn.Linear)
    assert far(client.weights.flat, client.received) > 1e-3

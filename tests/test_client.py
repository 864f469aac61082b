"""What a client offers to mechanisms beside its hooks."""

from collections.abc import Sequence
from dataclasses import dataclass

import pytest
import torch

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.registry import make
from fedalloy.core.state import Phase, State
from fedalloy.core.training import Local
from fedalloy.core.views import ClientView, Oracle, StepView
from fedalloy.data.federation import federate
from fedalloy.mechanisms.share import Share
from fedalloy.round.client import client_round
from fedalloy.round.replica import Replica
from fedalloy.round.server import Server

FED = federate("digits", clients=3, skew="iid", seed=0)
MODEL = "mlp(hidden=8, norm=batch)"


@dataclass(frozen=True)
class _Plain(Mechanism):
    """All phases in plain SGD."""

    plain: bool = True

    def phases(self, client: ClientView, my: State, epochs: int) -> Sequence[Phase]:
        return [Phase(epochs, lr=0.05, plain=self.plain)]


def sent(method: Alloy, local: Local) -> torch.Tensor:
    """What client 0 uploads in the first round."""
    replica = Replica(method, MODEL, FED.dataset.inputs, seed=0)
    server = Server(method, replica, FED.info, local, seed=0)
    server.round = 1
    data = FED.client(0)
    reply, _ = client_round(method, replica, data, FED.info, local, {}, server.send(0), seed=0)
    return reply.items["share.weights"]


@pytest.mark.parametrize(
    "local",
    [
        Local(momentum=0.9, lr=0.5),
        Local(weight_decay=0.1, lr=0.5),
        Local(optimizer="adam", lr=0.5),
        Local(optimizer="adamw", weight_decay=0.1, lr=0.5),
    ],
    ids=str,
)
def test_a_plain_phase_is_plain_sgd_whatever_the_optimiser(local: Local) -> None:
    simple = sent(make("fedavg"), Local(lr=0.05))
    assert torch.equal(sent(alloy("plain", Share(), _Plain()), local), simple)
    assert not torch.equal(sent(alloy("usual", Share(), _Plain(plain=False)), local), simple)


@dataclass(frozen=True)
class _Twice(Mechanism):
    """Takes the gradient by hand from the objective, and compares."""

    differences = list[float]()

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> torch.Tensor:
        net = step.client.net
        with torch.enable_grad():
            step.out = net(step.x)
            slopes = torch.autograd.grad(
                step.client.objective(step), list(net.parameters()), allow_unused=True
            )
        by_hand = torch.cat([slope.flatten() for slope in slopes if slope is not None])
        g = oracle(step)
        self.differences.append(float((by_hand - g).abs().max()))
        return g


def test_the_objective_is_task_and_losses() -> None:
    """With another task loss and with a term: what the steps descend on."""
    _Twice.differences.clear()
    sent(alloy("sum", make("balancedsoftmax+decorr(beta=1)"), _Twice()), Local(lr=0.1, batch=128))
    assert len(_Twice.differences) > 2
    assert max(_Twice.differences) < 1e-6

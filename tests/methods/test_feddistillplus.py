"""FedDistill+: FedAvg with distillation towards the mean soft label of the true class."""

from pathlib import Path

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, digits, far, run
from torch import Tensor

from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.registry import make
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.run import train
from fedalloy.methods import fedavg, feddistillplus, feddw
from fedalloy.methods.feddw import DW
from fedalloy.round.client import Step

MEANS = "probabilities-means"


def soft_labels(lab: Lab) -> Tensor:
    return lab.server.states[MEANS].persistent["means"]


def term(lab: Lab) -> tuple[Tensor, Tensor, Tensor]:
    client = lab.trained(0)
    x, y = client.data.prepare(client.data.x[:12], None), client.data.y[:12]
    step = Step(client, x, y, torch.arange(12), 0)
    step.out = client.net(x)
    piece = lab.method.pieces[-1]
    loss = piece.loss(step, client.state_of(piece))
    assert loss is not None
    return loss, step.out.logits, y


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_without_distillation_it_is_fedavg(model: str) -> None:
    labs = [
        Lab(method, digits(), model, lr=0.05, momentum=0.5) for method in (fedavg(), feddistillplus(lam=0.0))
    ]
    for lab in labs:
        lab.rounds([0, 1, 5], [0, 1], [1, 5])
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)


def test_the_term_is_a_kl_divergence() -> None:
    """KL(Omega_y || softmax(a)) with logarithms of probabilities, batch mean; never negative."""
    lab = Lab(feddistillplus(lam=2.0), digits(), lr=0.1).rounds([0, 1])
    omega = soft_labels(lab).clone()
    assert far(omega, torch.eye(10)) > 0.1
    loss, a, y = term(lab)
    p, t = a.softmax(1), omega[y]
    by_hand = (t * (t.clamp(min=1e-30) / p).log()).sum(1).mean()
    assert loss.item() == pytest.approx(2 * by_hand.item(), rel=1e-4)
    assert loss.item() > 0


def test_the_first_soft_labels_are_one_hot() -> None:
    """Omega_1 = I: the term is then cross-entropy once more, and finite at the zeros."""
    lab = Lab(feddistillplus(), digits(), lr=0.1)
    assert torch.equal(soft_labels(lab), torch.eye(10))
    loss, a, y = term(lab)
    assert loss.item() == pytest.approx(torch.nn.functional.cross_entropy(a, y).item(), rel=1e-5)


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_soft_labels_are_measured_as_in_feddw(model: str) -> None:
    """Mean softmax of the trained model in eval mode, weighted by class counts; half old, half new if asked for."""
    for momentum in (0.0, 0.5):
        lab = Lab(feddistillplus(lam=0.0, sl_momentum=momentum), digits(), model, lr=0.1)
        dw = Lab(feddw(mu=0.0, sl_momentum=momentum), digits(), model, lr=0.1)
        sums, counts = torch.zeros(10, 10, dtype=torch.float64), torch.zeros(10)
        lab.round([0, 3])
        dw.round([0, 3])
        for k in (0, 3):
            data = lab.federation.client(k)
            net = lab.replica.frozen(lab.sent(k, "share.weights"), lab.sent(k, "share.buffers"))
            said = net(data.prepare(data.x, None)).logits.softmax(1)
            sums.index_add_(0, data.y, said.double())
            counts += data.counts
        held = counts > 0
        expected = (sums[held] / counts[held, None]).float()
        expected = (1 - momentum) * expected + momentum * torch.eye(10)[held]
        assert far(soft_labels(lab)[held], expected) < 1e-6
        assert torch.equal(soft_labels(lab)[~held], torch.eye(10)[~held])
        specs = [{key: spec.slot for key, spec in one.replica.specs("up").items()} for one in (lab, dw)]
        assert specs[0] == specs[1]  # theta, soft labels of held classes, counts: FedDW's wire


def test_it_learns_a_global_model(tmp_path: Path) -> None:
    result = run(tmp_path, digits(), "feddistillplus", rounds=5, epochs=2, lr=0.1)
    assert result.summary["metric"] == "global_acc"
    assert result.history[-1]["metrics"]["global_acc"] > 0.8


def test_it_averages_one_architecture() -> None:
    with pytest.raises(FedAlloyError, match=r"FedDistill\+ averages whole models"):
        train(digits(), method="feddistillplus", models="mlp,lenet", rounds=1)


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_dw_on_top(tmp_path: Path, momentum: float) -> None:
    """FedDW's compatibility table: the DW term shares the soft labels with its host, and mu = 0 leaves it alone."""
    host = f"feddistillplus(sl_momentum={momentum})"
    method = make(f"{host}+dw(mu=10, sl_momentum={momentum})")
    assert [piece.label for piece in method] == [
        "share",
        MEANS,
        "softlabeldistillation",
        "headwithoutbias",
        "dw",
    ]
    bare, zero, full = (
        Lab(make(text), digits(), lr=0.05).rounds([0, 1], [0, 2])
        for text in (f"{host}+headwithoutbias", f"{host}+dw(mu=0, sl_momentum={momentum})", method.expression)
    )
    assert torch.equal(bare.weights, zero.weights)
    assert far(zero.weights, full.weights) > 1e-3
    result = run(tmp_path, digits(), method.expression, rounds=5, epochs=2, lr=0.1)
    assert not any(line["refused"] for line in result.history)
    assert result.history[-1]["metrics"]["global_acc"] > 0.8


def test_different_soft_labels_are_refused() -> None:
    with pytest.raises(AlloyConflict, match="are the same part with different settings"):
        make("feddistillplus(sl_momentum=0.5)+dw")
    assert make("feddw(mu=2)+softlabeldistillation").find(DW) == DW(2.0)

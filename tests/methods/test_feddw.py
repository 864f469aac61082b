"""FedDW: the class relations of the head, the soft labels of the federation, and the term between them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, by_class, dealt, digits, double, far
from torch import Tensor

from fedalloy.core.alloy import Alloy, AlloyConflict, alloy
from fedalloy.core.registry import make
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.head import HeadWithoutBias
from fedalloy.mechanisms.share import Share
from fedalloy.methods import fedavg, feddw
from fedalloy.methods.feddw import DW, class_relations
from fedalloy.round.client import Client, Step

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
MEANS = "probabilities-means"


def bare() -> Alloy:
    """FedAvg on the same model without bias."""
    return alloy("FedAvg", Share(), HeadWithoutBias())


def soft_labels(lab: Lab) -> Tensor:
    return lab.server.states[MEANS].persistent["means"]


def relations(lab: Lab) -> Tensor:
    """softmax(omega omega^T) of the global model."""
    weight = lab.replica.weights.views(lab.weights)["head.weight"]
    return class_relations(weight)


def step_of(client: Client, cut: slice) -> Step:
    index = torch.arange(client.data.samples)[cut]
    step = Step(client, client.data.prepare(client.data.x[cut], None), client.data.y[cut], index, 0)
    step.out = client.net(step.x)
    return step


def dw_loss(client: Client, cut: slice = slice(16)) -> Tensor:
    piece = client.method.find(DW)
    assert piece is not None
    loss = piece.loss(step_of(client, cut), client.state_of(piece))
    assert loss is not None
    return loss


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("mu", [0.0, 1e-30])
def test_without_mu_it_is_fedavg(model: str, mu: float) -> None:
    """Check: mu = 0 equals FedAvg on the same bias-free model bit for bit; so does a mu below rounding."""
    labs = [
        Lab(method, digits(), model, lr=0.05, epochs=2, momentum=0.9) for method in (bare(), feddw(mu=mu))
    ]
    for chosen in PARTICIPANTS:
        for lab in labs:
            lab.round(chosen)
        assert torch.equal(labs[0].weights, labs[1].weights)
        assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)


def test_the_head_has_no_bias_and_the_body_the_draw_of_fedavg() -> None:
    lab, plain = Lab(feddw(), digits()), Lab(fedavg(), digits())
    assert lab.weights.numel() == plain.weights.numel() - 10
    assert torch.equal(lab.weights, plain.weights[:-10])


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_all_rows_are_distributions(model: str) -> None:
    """Check: rows of Omega, Omega_n (present classes) and A sum to 1; Omega_1 = I."""
    lab = Lab(feddw(mu=1.0), digits(skew="dirichlet:0.1"), model, lr=0.1)
    assert torch.equal(soft_labels(lab), torch.eye(10))
    for chosen in PARTICIPANTS:
        lab.round(chosen)
        for matrix in (soft_labels(lab), relations(lab), *(lab.sent(k, f"{MEANS}.means") for k in chosen)):
            assert bool((matrix >= 0).all())
            assert matrix.sum(1) == pytest.approx(torch.ones(len(matrix)), abs=1e-6)


@double()
def test_the_term_is_bounded() -> None:
    """Check: 0 <= L_reg <= 2/C; both ends are reached."""
    draw = torch.Generator().manual_seed(0)
    for scale in (0.01, 1.0, 100.0):
        for _ in range(20):
            omega = torch.randn(6, 4, generator=draw) * scale
            target = (torch.randn(6, 6, generator=draw) * scale).softmax(1)
            assert 0 <= float(F.mse_loss(class_relations(omega), target)) <= 2 / 6
    sharp = 100 * torch.eye(6)
    assert float(F.mse_loss(class_relations(sharp), torch.eye(6))) == pytest.approx(0, abs=1e-12)
    wrong = torch.eye(6).roll(1, 0)
    assert float(F.mse_loss(class_relations(sharp), wrong)) == pytest.approx(2 / 6, abs=1e-12)


@double()
def test_class_relations_by_hand() -> None:
    """A_ij = exp(omega_i omega_j) / sum_k exp(omega_i omega_k): rows, not columns (Eq 3)."""
    omega = torch.randn(4, 3, generator=torch.Generator().manual_seed(0))
    a = class_relations(omega)
    for i in range(4):
        scores = [float(omega[i] @ omega[j]) for j in range(4)]
        total = sum(torch.tensor(scores).exp())
        for j in range(4):
            assert float(a[i, j]) == pytest.approx(float(torch.tensor(scores[j]).exp() / total), rel=1e-12)


def test_the_term_reaches_the_class_weights_alone() -> None:
    """Check: L_reg has zero gradient on every parameter but omega, and does not depend on the batch."""
    client = Lab(feddw(mu=3.0), digits(), BATCHNORM, lr=0.05).rounds([0, 1]).trained(0)
    loss = dw_loss(client)
    names = [name for name, _ in client.net.named_parameters()]
    gradients = torch.autograd.grad(loss, list(client.net.parameters()), allow_unused=True)
    touched = [name for name, g in zip(names, gradients, strict=True) if g is not None]
    assert touched == ["head.weight"]
    assert torch.equal(dw_loss(client, slice(16, 20)), loss)
    omega = client.net.head.weight
    assert isinstance(omega, Tensor)
    target = client.states[MEANS].received["means"]
    by_hand = 3.0 * (target - class_relations(omega)).square().sum() / 10**2
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-6)
    assert far(target, torch.eye(10)) > 0.1  # the soft labels of the federation, no longer the identity


def test_pooled_data_have_the_same_soft_labels() -> None:
    """Check: Omega from two clients equals Omega of the pooled data when both use the same model."""
    a, b = [*range(40), 90], list(range(40, 65))
    apart, pooled = (
        Lab(feddw(), dealt(parts), lr=0.0).rounds(list(range(len(parts)))) for parts in ([a, b], [a + b])
    )
    assert soft_labels(apart) == pytest.approx(soft_labels(pooled), abs=1e-6)
    assert far(soft_labels(apart), torch.eye(10)) > 0.5


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_soft_labels_come_from_the_trained_model_in_eval_mode(model: str) -> None:
    """Eqs 4 to 6: mean softmax of local samples of each class; Eq 7: weighted by class counts."""
    lab = Lab(feddw(mu=1.0), digits(), model, lr=0.1).rounds([0, 3])
    sums, counts = torch.zeros(10, 10), torch.zeros(10)
    for k in (0, 3):
        data = lab.federation.client(k)
        net = lab.replica.frozen(lab.sent(k, "share.weights"), lab.sent(k, "share.buffers"))
        said = net(data.prepare(data.x, None)).logits.softmax(1)
        rows = {c: said[data.y == c].mean(0) for c in set(data.y.tolist())}
        assert lab.sent(k, f"{MEANS}.means") == pytest.approx(
            torch.stack([rows[c] for c in sorted(rows)]), abs=1e-6
        )
        for c, row in rows.items():
            sums[c] += row * data.counts[c]
        counts += data.counts
    held = counts > 0
    assert soft_labels(lab)[held] == pytest.approx(sums[held] / counts[held, None], abs=1e-6)


def test_classes_that_nobody_holds_keep_their_row() -> None:
    """Pitfall: Eq 7 is 0/0 when no participant has the class; the previous row stays, bit for bit."""
    lab = Lab(feddw(mu=1.0), by_class([0, 1], [1, 2], [8]), lr=0.1)
    lab.round([0, 1])
    first = soft_labels(lab).clone()
    assert torch.equal(first[3:], torch.eye(10)[3:])
    lab.round([2])
    second = soft_labels(lab)
    others = [c for c in range(10) if c != 8]
    assert torch.equal(second[others], first[others])
    assert far(second[8], first[8]) > 0.1


def test_the_wire() -> None:
    """Down: theta, C^2 floats and a mask; up: a row for each class that is held, C counts."""
    lab = Lab(feddw(), by_class([0, 1, 5], [2]), lr=0.1)
    mail = lab.server.send(0).items
    assert mail.keys() == {"share.weights", "share.buffers", f"{MEANS}.means", f"{MEANS}.seen"}
    assert mail[f"{MEANS}.means"].shape == (10, 10)
    lab.round()
    assert lab.sent(0, f"{MEANS}.means").shape == (3, 10)
    assert lab.sent(1, f"{MEANS}.means").shape == (1, 10)
    assert lab.sent(0, f"{MEANS}.counts").tolist() == [20, 20, 0, 0, 0, 20, 0, 0, 0, 0]
    assert lab.keeps == {0: {}, 1: {}}  # nothing between rounds


def test_momentum_of_soft_labels() -> None:
    """sl_momentum = 0.5 (released code): Omega <- 0.5 new + 0.5 old, the identity included; the rest keeps its row."""
    labs = [Lab(feddw(mu=1.0, sl_momentum=m), by_class([0, 1], [1, 2]), lr=0.1) for m in (0.0, 0.5)]
    for lab in labs:
        lab.round()
    new, mixed = map(soft_labels, labs)
    assert mixed[:3] == pytest.approx((0.5 * new + 0.5 * torch.eye(10))[:3], abs=1e-6)
    assert torch.equal(mixed[3:], torch.eye(10)[3:])


def test_decay_of_mu() -> None:
    """mu_decay (released code): mu is divided every so many rounds; by default it is constant."""

    def strengths(**settings: Any) -> list[float]:
        lab = Lab(feddw(mu=8.0, **settings), digits(), steps=1)
        return [lab.trained(0).states["dw"].scratch["mu"] for _ in range(6)]

    assert strengths() == [8.0] * 6
    assert strengths(mu_decay=10.0, mu_decay_every=2) == pytest.approx([8, 8, 0.8, 0.8, 0.08, 0.08])


def test_under_label_skew_the_relations_meet_the_soft_labels() -> None:
    """Check, behaviour: ||Omega - softmax(omega omega^T)||_F of the global model is lower with mu > 0."""
    gaps = []
    for mu in (0.0, 10.0):
        lab = Lab(feddw(mu=mu), digits(skew="dirichlet:0.1"), optimizer="adam", lr=0.01, epochs=2)
        for _ in range(4):
            lab.round()
        gaps.append(float((soft_labels(lab) - relations(lab)).norm()))
    assert gaps[1] < 0.8 * gaps[0]


@pytest.mark.parametrize("host", ["fedavg", "fedprox(mu=0.1)", "moon(proj_dim=12)"])
def test_hosts(host: str) -> None:
    """DW is a plug-in: mu = 0 leaves the host on the bias-free model as it was, mu > 0 changes it."""
    methods = [f"{host}+headwithoutbias", f"{host}+dw(mu=0)", f"{host}+dw(mu=100)"]
    labs = [Lab(make(method), digits(), lr=0.05) for method in methods]
    for lab in labs:
        lab.rounds([0, 1], [0, 2])
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert far(labs[1].weights, labs[2].weights) > 1e-3
    assert lab.replica.net.head.bias is None


@pytest.mark.parametrize("method", ["moon(proj_dim=12)+dw(mu=1)", "feddw(mu=1)+moon(proj_dim=12)"])
def test_the_head_is_free_of_bias_whatever_the_order(method: str) -> None:
    assert Lab(make(method), digits()).replica.net.head.bias is None


@pytest.mark.parametrize("method", ["fedetf+dw", "dw+fedetf", "fedblade+dw"])
def test_an_etf_head_has_no_class_weights_to_train(method: str) -> None:
    with pytest.raises(AlloyConflict, match="etfhead spoils class weights, which dw needs"):
        make(method)


def test_a_head_that_is_not_linear_is_refused() -> None:
    with pytest.raises(FedAlloyError, match=r"headwithoutbias needs a linear head; mlp\(hidden=16\) has ETF"):
        Lab(make("fedetf+headwithoutbias"), digits())

"""FedUV: probabilities that vary, representations that spread, and what neither may do."""

import math
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, dealt, digits, double, far
from torch import Tensor

from fedalloy.core.registry import make
from fedalloy.core.state import State
from fedalloy.data import load
from fedalloy.methods import fedavg, feduv
from fedalloy.methods.feduv import Uniformity, Variance, uniformity, variance_gap
from fedalloy.round.client import Step

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def logits_of(q: Tensor) -> Tensor:
    """Logits whose softmax is q, zeros included."""
    return q.clamp(min=1e-30).log()


def spread(z: Tensor) -> Tensor:
    found = uniformity(z)
    assert found is not None
    return found


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_without_weights_it_is_fedavg(model: str) -> None:
    """Check 1: lambda_v = lambda_u = 0 equals FedAvg bit for bit; each of them changes something."""
    methods = (fedavg(), feduv(lambda_v=0.0, lambda_u=0.0), feduv(lambda_u=0.0), feduv(lambda_v=0.0), feduv())
    labs = [Lab(method, digits(), model, lr=0.05, momentum=0.9).rounds(*PARTICIPANTS) for method in methods]
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)
    for one, other in [(0, 2), (0, 3), (2, 4), (3, 4)]:
        assert far(labs[one].weights, labs[other].weights) > 1e-4
    assert labs[4].replies[1].items.keys() == labs[0].replies[1].items.keys()  # no extra tensors
    assert labs[4].keeps == {0: {}, 1: {}, 5: {}}


@double()
@pytest.mark.parametrize("classes", [2, 10, 100])
def test_the_target_is_the_deviation_of_a_column_of_the_identity(classes: int) -> None:
    """Check 2: g = 1/sqrt(C); L_V = 0 for one-hot rows that cover all classes once; L_V = g for constant q."""
    eye = torch.eye(classes)
    assert float(eye.std(0)[0]) == pytest.approx(1 / math.sqrt(classes), abs=1e-12)
    assert float(variance_gap(logits_of(eye))) == pytest.approx(0, abs=1e-12)
    constant = draws(classes).expand(classes, -1)
    assert float(variance_gap(constant)) == pytest.approx(1 / math.sqrt(classes), abs=1e-12)


@double()
def test_the_variance_term_by_hand() -> None:
    """Unbiased deviations over the batch; a class that varies more than g owes nothing and lends nothing."""
    logits = 2 * draws(6, 4)
    logits[:, 0] += torch.tensor([9.0, -9, 9, -9, 9, -9])
    q = logits.softmax(1)
    deviations = [math.sqrt(sum((v - q[:, c].mean()) ** 2 for v in q[:, c]) / 5) for c in range(4)]
    assert deviations[0] > 0.5
    assert min(deviations) < 0.5
    by_hand = sum(max(0.0, 0.5 - float(s)) for s in deviations) / 4
    assert float(variance_gap(logits)) == pytest.approx(by_hand, rel=1e-12)


@double()
@pytest.mark.parametrize("batch", [3, 4, 7])
def test_the_uniformity_term_by_hand(batch: int) -> None:
    """Mean of exp(-D/sigma) over pairs, without a logarithm; sigma the lower median of the distances that are not 0."""
    z = draws(batch, 5)
    z[-1] = z[0]  # a pair without distance counts in the mean and not in the median
    pairs = [(i, j) for i in range(batch) for j in range(i)]
    d = [float((z[i] - z[j]).square().sum()) for i, j in pairs]
    nonzero = sorted(value for value in d if value)
    sigma = nonzero[(len(nonzero) - 1) // 2]
    by_hand = sum(math.exp(-value / sigma) for value in d) / len(d)
    assert float(spread(z)) == pytest.approx(by_hand, rel=1e-12)


@double()
@pytest.mark.parametrize("shape", [(3, 4), (8, 3), (9, 20)])
def test_scale_does_not_matter(shape: tuple[int, int]) -> None:
    """Check 3: L_U(z) = L_U(a z) and sum z dL_U/dz = 0 (1e-10): sigma is in the graph."""
    z = draws(*shape).requires_grad_()
    loss = spread(z)
    for a in (0.01, 3.0, 100.0):
        assert spread(a * z).item() == pytest.approx(loss.item(), abs=1e-10)
    (gradient,) = torch.autograd.grad(loss, z)
    assert (z * gradient).sum().item() == pytest.approx(0, abs=1e-10)
    assert float(gradient.norm()) > 1e-3


def test_degenerate_batches() -> None:
    """Check 4: identical rows, B = 1, B = 2: finite loss and gradient, or no term at all."""
    for rows in (1, 2):
        assert uniformity(draws(rows, 4)) is None
    assert uniformity(torch.ones(5, 4)) is None
    z = draws(6, 4)
    z[2] = z[3] = z[4]
    z.requires_grad_()
    (gradient,) = torch.autograd.grad(spread(z), z)
    assert bool(torch.isfinite(gradient).all())
    assert torch.equal(gradient[2], gradient[3])
    same = torch.ones(5, 3).requires_grad_()
    loss = variance_gap(same)
    (gradient,) = torch.autograd.grad(loss, same)
    assert bool(torch.isfinite(gradient).all())

    def step(rows: int) -> Step:
        out = SimpleNamespace(embedding=draws(rows, 4), logits=draws(rows, 3))
        return cast(Step, SimpleNamespace(out=out, y=torch.zeros(rows)))

    assert Variance().loss(step(1), State()) is None
    assert Variance().loss(step(2), State()) is not None
    assert Uniformity().loss(step(2), State()) is None
    assert Uniformity().loss(step(3), State()) is not None


@pytest.mark.parametrize("batch", [1, 2])
def test_tiny_batches_train(batch: int) -> None:
    """Check 4: B = 1 is FedAvg bit for bit, B = 2 is finite; one-class clients with equal samples as well."""
    federation = dealt([[3, 3, 3, 3], list(range(5))])
    plain, both = (Lab(m, federation, lr=0.05, batch=batch).rounds([0, 1]) for m in (fedavg(), feduv()))
    assert torch.equal(plain.weights, both.weights) == (batch == 1)
    assert bool(torch.isfinite(both.weights).all())


def test_the_classifier_s_input_is_spread() -> None:
    """z is the input of the last layer: behind a projector the embedding, not the features."""
    z = draws(6, 4)
    out = SimpleNamespace(features=2 * z + 1, embedding=z[:, :2], logits=z[:, :3])
    step = cast(Step, SimpleNamespace(out=out, y=torch.zeros(6)))
    assert Uniformity(0.25).loss(step, State()) == pytest.approx(0.25 * spread(z[:, :2]))
    assert Variance(3.0).loss(step, State()) == pytest.approx(3 * variance_gap(z[:, :3]))


def test_a_one_class_client_still_tells_classes_apart() -> None:
    """Check 5: mean deviation of class probabilities over mixed test data after local training, above FedAvg's."""
    y = load("digits", None).y
    federation = dealt([range(600), torch.where(y[:900] == 1)[0].tolist()])
    mixed = federation.prepare(federation.dataset.x[federation.split.global_test], None)
    start = Lab(fedavg(), federation, lr=0.2, epochs=5).rounds([0])  # it knows all classes
    deviations = []
    for method in (fedavg(), feduv(), feduv(lambda_u=0.0)):
        found = []
        for seed in range(3):
            lab = Lab(method, federation, lr=0.1, epochs=10, seed=seed)
            lab.server.weights = start.weights
            found.append(lab.trained(1).net(mixed).logits.detach().softmax(1).std(0).mean().item())
        deviations.append(sum(found) / 3)
    assert deviations[1] > 1.05 * deviations[0]
    assert deviations[2] > 1.05 * deviations[0]


def test_dw_on_top() -> None:
    """FedDW's table: feduv+dw. Without mu it is FedUV on the bias-free model; with mu it learns, and has both terms."""
    texts = ("feduv+headwithoutbias", "feduv+dw(mu=0)", "feduv+dw(mu=100)", "feddw(mu=100)")
    labs = [Lab(make(text), digits(), lr=0.1).rounds(*PARTICIPANTS) for text in texts]
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert far(labs[2].weights, labs[0].weights) > 1e-3  # DW acts
    assert far(labs[2].weights, labs[3].weights) > 1e-3  # and so does FedUV
    before = sum(reply.loss for reply in labs[2].replies.values())
    labs[2].rounds(*PARTICIPANTS)
    assert sum(reply.loss for reply in labs[2].replies.values()) < before


def test_both_terms_go_on_any_host() -> None:
    host, both = (
        Lab(make(text), digits(), lr=0.05).rounds(*PARTICIPANTS)
        for text in ("moon(proj_dim=12)", "moon(proj_dim=12)+variance+uniformity")
    )
    assert far(host.weights, both.weights) > 1e-3

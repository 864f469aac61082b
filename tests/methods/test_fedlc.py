"""FedLC: margins from the client's own counts, the two denominators, and classes that a client lacks."""

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, dealt, digits, double, far
from torch import Tensor

from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.registry import make
from fedalloy.core.state import State
from fedalloy.data import load
from fedalloy.data.federation import Federation
from fedalloy.methods import fedavg, fedlc
from fedalloy.methods.fedlc import Calibration, margins, pairwise
from fedalloy.round.client import Client, Step, client_model

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])


def batch(counts: list[int], rows: int = 12) -> tuple[Tensor, Tensor]:
    """Logits and labels of classes that occur."""
    draw = torch.Generator().manual_seed(0)
    logits = 3 * torch.randn(rows, len(counts), generator=draw)
    present = torch.tensor(counts).nonzero().flatten()
    return logits, present[torch.randint(len(present), (rows,), generator=draw)]


def loss_of(counts: list[int], logits: Tensor, y: Tensor, **settings: Any) -> tuple[Tensor, Tensor]:
    """The task loss of a client with these class counts, and its gradient with respect to the logits."""
    piece, my = Calibration(**settings), State()
    piece.before_training(
        cast(Client, SimpleNamespace(data=SimpleNamespace(counts=torch.tensor(counts)))), my
    )
    leaf = logits.clone().requires_grad_()
    loss = piece.task(cast(Step, SimpleNamespace(out=SimpleNamespace(logits=leaf), y=y)), my)
    assert loss is not None
    return loss.detach(), torch.autograd.grad(loss, leaf)[0]


@pytest.mark.parametrize("count", [1, 7, 1000])
def test_equal_counts_are_cross_entropy(count: int) -> None:
    """Check 1: equal counts in all classes: loss and gradients equal plain CE (1e-6)."""
    logits, y = batch([count] * 5)
    loss, gradient = loss_of([count] * 5, logits, y)
    assert float(loss) == pytest.approx(float(F.cross_entropy(logits, y)), abs=1e-6)
    assert far(gradient, (logits.softmax(1) - F.one_hot(y, 5)) / len(y)) < 1e-6


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_without_tau_it_is_fedavg(model: str) -> None:
    """Check 1: tau = 0 with all classes present is bit-identical to FedAvg; so is a floor under absent ones."""
    everything = dealt([range(60), range(60, 150)])
    assert all(bool((everything.client(k).counts > 0).all()) for k in (0, 1))
    plain, without, full = (
        Lab(method, everything, model, lr=0.05, momentum=0.9).rounds([0, 1], [0], [1])
        for method in (fedavg(), fedlc(tau=0.0), fedlc())
    )
    assert torch.equal(plain.weights, without.weights)
    assert torch.equal(plain.server.buffers, without.server.buffers)
    assert far(plain.weights, full.weights) > 1e-4
    skewed, floor, mask = (
        Lab(method, digits(skew="dirichlet:0.1"), model, lr=0.05).rounds(*PARTICIPANTS).weights
        for method in (fedavg(), fedlc(tau=0.0, absent="floor"), fedlc(tau=0.0))
    )
    assert torch.equal(skewed, floor)
    assert far(skewed, mask) > 1e-4


@double()
def test_margins_by_hand() -> None:
    """tau n^(-1/4): at tau = 10 a shift of 10, 5.6, 3.2, 1.8 for 1, 10, 100, 1000 samples."""
    counts = torch.tensor([1, 10, 100, 1000, 0])
    by_hand = [10.0, 5.6234132519, 3.1622776602, 1.7782794100]
    assert margins(counts, 10.0).tolist() == pytest.approx([*by_hand, torch.inf])
    assert margins(counts, 10.0, "floor").tolist() == pytest.approx([*by_hand, 10.0])
    assert margins(counts, 0.0).tolist() == [0, 0, 0, 0, torch.inf]


@double()
@pytest.mark.parametrize("absent", ["mask", "floor"])
@pytest.mark.parametrize("form", ["softmax", "pairwise"])
def test_loss_and_gradient_by_hand(form: str, absent: str) -> None:
    """Both forms, written as fractions of exponentials."""
    counts, tau = [5, 0, 1, 30], 2.0
    logits, y = batch(counts)
    leaf = logits.clone().requires_grad_()
    absent_factor = 0.0 if absent == "mask" else torch.e**-tau
    factors = torch.tensor([torch.e ** (-tau * n**-0.25) if n else absent_factor for n in counts])
    scores = factors * leaf.exp()
    true = scores[torch.arange(len(y)), y]
    below = scores.sum(1) - (true if form == "pairwise" else 0)
    by_hand = -(true / below).log().mean()
    loss, gradient = loss_of(counts, logits, y, tau=tau, form=form, absent=absent)
    assert loss.item() == pytest.approx(by_hand.item(), rel=1e-10)
    assert far(gradient, torch.autograd.grad(by_hand, leaf)[0]) < 1e-10


@pytest.mark.parametrize("form", ["softmax", "pairwise"])
def test_absent_classes(form: str) -> None:
    """Check 2: logit gradients of absent classes are exactly 0, everything is finite; a floor pushes them down."""
    counts = [5, 0, 1, 0]
    logits, y = batch(counts)
    loss, gradient = loss_of(counts, logits, y, form=form)
    assert bool(torch.isfinite(loss))
    assert bool(torch.isfinite(gradient).all())
    assert bool((gradient[:, [1, 3]] == 0).all())
    assert bool((gradient[:, [0, 2]] != 0).any(0).all())
    _, floored = loss_of(counts, logits, y, form=form, absent="floor")
    assert bool((floored[:, [1, 3]] > 0).all())


@pytest.mark.parametrize("form", ["softmax", "pairwise"])
def test_a_one_class_client(form: str) -> None:
    """Check 2: its loss is finite: 0 in the softmax form, which stands in for the pairwise one."""
    counts = [0, 9, 0]
    logits, y = batch(counts)
    loss, gradient = loss_of(counts, logits, y, form=form)
    assert float(loss) == 0
    assert bool((gradient == 0).all())
    floored = loss_of(counts, logits, y, form=form, absent="floor")[0]
    assert float(floored) == float(loss_of(counts, logits, y, absent="floor")[0])
    assert float(floored) > 0


def test_pairwise_has_no_floor() -> None:
    """Pitfall: the printed denominator leaves out the true class: the loss falls below zero without end."""
    y = torch.tensor([0, 1])
    values = [pairwise(scale * torch.eye(3)[y], y).item() for scale in (1.0, 10.0, 100.0)]
    assert values[0] > values[1] > values[2]
    assert values[2] < -90


def test_the_rarer_class_is_pulled_harder() -> None:
    """Check 3: equal raw logits: the rarer class gets the lower calibrated logit and the larger gradient pull."""
    counts = [100, 3]
    shift = margins(torch.tensor(counts), 10.0)
    assert shift[1] > shift[0]
    pulls = [float(loss_of(counts, torch.zeros(1, 2), torch.tensor([c]))[1][0, c]) for c in (0, 1)]
    assert pulls[1] < pulls[0] < 0  # descent raises the true logit


def halves() -> Federation:
    """A client with all classes, one with the lower and one with the upper five."""
    y = load("digits", None).y.tolist()
    rest = range(600, 1300)
    return dealt([range(600), [i for i in rest if y[i] < 5], [i for i in rest if y[i] >= 5]])


def test_a_client_forgets_less_of_what_it_lacks() -> None:
    """Check 4: disjoint classes: the drop on classes a client lacks, right after local training, is below FedAvg's."""
    federation = halves()
    index = federation.split.global_test
    x, y = federation.prepare(federation.dataset.x[index], None), federation.dataset.y[index]
    start = Lab(fedavg(), federation, lr=0.2, epochs=10).rounds([0]).weights
    for k, lacking in ((1, y >= 5), (2, y < 5)):
        left = []
        for method in (fedavg(), fedlc(), fedlc(absent="floor")):
            lab = Lab(method, federation, lr=0.1, epochs=5)
            lab.server.weights = start
            right = lab.trained(k).net(x).logits.argmax(1) == y
            left.append(float(right[lacking].float().mean()))
        assert left[1] > left[0] + 0.1
        assert left[2] > left[0] + 0.1


def test_absent_classes_keep_their_class_weights() -> None:
    """Masked classes: a client moves no row of the head that it holds no sample of."""
    for method, still in ((fedlc(), True), (fedlc(absent="floor"), False)):
        lab = Lab(method, digits(skew="dirichlet:0.1"), lr=0.1)
        missing = lab.federation.client(0).counts == 0
        assert bool(missing.any())
        before = lab.replica.weights.views(lab.weights.clone())["head.weight"][missing]
        lab.round([0])
        assert torch.equal(lab.replica.weights.views(lab.weights)["head.weight"][missing], before) == still


def test_counts_are_the_client_s_own_and_stay_at_home() -> None:
    """Pitfall: one calibration by everybody's counts would be a constant shift, which is FedAvg."""
    lab = Lab(fedlc(tau=3.0), digits(test_share=0.4), steps=1)
    for k in (0, 1):
        client = lab.trained(k)
        expected = margins(torch.bincount(client.data.y, minlength=10), 3.0)
        assert torch.equal(client.states["calibration"].scratch["margins"], expected)
        assert len(client.data.y_test) > 0  # the training split alone
    lab.round([0, 1])
    assert lab.replies[0].items.keys() == {"share.weights", "share.buffers"}
    assert lab.server.send(0).items.keys() == {"share.weights", "share.buffers"}
    assert lab.keeps == {0: {}, 1: {}}


def test_prediction_is_by_raw_logits() -> None:
    """Pitfall: the shift is not added at test time, nor into the net's output."""
    lab = Lab(fedlc(), digits(skew="dirichlet:0.1"), lr=0.1).rounds([0])
    data = lab.federation.client(0)
    scores = client_model(
        lab.method,
        lab.replica,
        data,
        lab.federation.info,
        lab.local,
        lab.keeps[0],
        lab.server.send(0),
        lab.seed,
    )(data.x)
    net = lab.replica.frozen(lab.weights, lab.server.buffers)
    assert torch.equal(scores, net(data.prepare(data.x, None)).logits)
    logits, y = batch([5, 0, 1])
    before = logits.clone()
    loss_of([5, 0, 1], logits, y)
    assert torch.equal(logits, before)


def test_settings_reach_the_loss() -> None:
    texts = ("fedlc", "fedlc(tau=1)", "fedlc(form=pairwise)", "fedlc(tau=1, absent=floor)", "fedavg")
    ends = [Lab(make(text), digits(skew="dirichlet:0.1"), lr=0.05).rounds([0, 1]).weights for text in texts]
    assert all(far(ends[i], ends[j]) > 1e-4 for i in range(5) for j in range(i))


def test_one_calibration_at_a_time() -> None:
    with pytest.raises(AlloyConflict, match="calibration and balancedsoftmax both claim the task loss"):
        make("fedlc+balancedsoftmax")

"""FedFA: the anchors and how they move, the distance to them, and the classifier's own steps."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, batches, dealt, digits, double, far, probed, shards
from torch import Tensor

from fedalloy.core.alloy import AlloyConflict, Mechanism, alloy
from fedalloy.core.registry import make
from fedalloy.core.state import Phase, State
from fedalloy.core.views import ClientView
from fedalloy.methods import fedavg, fedfa
from fedalloy.methods.fedfa import Anchors, distance, first_anchors

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
SKEWED = "pathological:3"


def anchors(lab: Lab) -> Tensor:
    """The server's."""
    return lab.server.states["anchors"].persistent["anchors"]


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("class_weighted", [False, True])
def test_without_loss_and_calibration_it_is_fedavg(model: str, class_weighted: bool) -> None:
    """Check 1: bit for bit; anchors still move but do not matter."""
    plain = fedfa(lam=0, calibration="none", class_weighted=class_weighted)
    labs = [Lab(method, digits(), model, lr=0.05, epochs=2, momentum=0.9) for method in (fedavg(), plain)]
    for chosen in PARTICIPANTS:
        before = anchors(labs[1]).clone()
        for lab in labs:
            lab.round(chosen)
        assert torch.equal(labs[0].weights, labs[1].weights)
        assert torch.equal(labs[0].server.buffers, labs[1].server.buffers)
        assert far(anchors(labs[1]), before) > 0.01


@pytest.mark.parametrize(("classes", "width"), [(10, 16), (5, 5), (8, 3)])
def test_the_first_anchors(classes: int, width: int) -> None:
    """Check 2: orthonormal rows for C <= d, taken from the identity at random; else unit rows."""
    rows = [first_anchors(classes, width, torch.Generator().manual_seed(seed)) for seed in range(3)]
    assert len({str(one.tolist()) for one in rows}) > 1
    for one in rows:
        assert one.shape == (classes, width)
        if classes <= width:
            assert torch.equal(one @ one.T, torch.eye(classes))
            assert set(one.flatten().tolist()) <= {0.0, 1.0}
        else:
            assert far(one.norm(dim=1), torch.ones(classes)) < 1e-6


def test_seeds_have_anchors_of_their_own() -> None:
    found = [anchors(Lab(fedfa(), digits(), seed=seed)) for seed in (0, 0, 1)]
    assert torch.equal(found[0], found[1])
    assert not torch.equal(found[0], found[2])


@pytest.mark.parametrize("host", ["fedavg", "moon(mu=0, proj_dim=12)"])
def test_calibration_moves_the_classifier_alone(host: str) -> None:
    """Check 3: with a learning rate of 0 all that moves is the classifier: neck and head."""
    lab = Lab(make(f"{host}+anchors+anchoredhead"), digits(), lr=0.0, epochs=2)
    start = lab.weights.clone()
    lab.round([0, 1])
    moved = (lab.weights != start).nonzero().flatten()
    spans = [lab.replica.weights.span(part) for part in ("body", "neck", "head")]
    assert int(moved[0]) >= spans[0].stop
    for span in spans[1:]:
        assert torch.equal(lab.weights[span], start[span]) == (span.start == span.stop)


def test_anchors_are_constants() -> None:
    """Check 3: neither loss sends a gradient into the anchors, and what was received stays as it is."""
    lab = Lab(fedfa(), digits(), lr=0.05, epochs=2)
    before = anchors(lab).clone()
    client = lab.trained(0)
    got = client.states["anchors"].received["anchors"]
    assert not got.requires_grad
    assert torch.equal(got, before)


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_anchors_of_missing_classes_come_back_as_they_were(model: str) -> None:
    """Check 3: bit for bit; the others have moved."""
    lab = Lab(fedfa(), digits(6, SKEWED), model, lr=0.05, epochs=2)
    for _ in range(3):
        received = anchors(lab).clone()
        lab.round()
        for k in range(6):
            held = lab.federation.client(k).counts > 0
            assert not held.all()
            assert torch.equal(lab.sent(k, "anchors.anchors")[~held], received[~held])
            assert bool((lab.sent(k, "anchors.anchors") != received)[held].any(1).all())


@double()
def test_the_distance() -> None:
    """Check 4: of one sample per class (1/C) sum ||z - A||^2; the same when a class has all its samples twice."""
    draw = torch.Generator().manual_seed(0)
    z, given = torch.randn(4, 6, generator=draw), torch.randn(10, 6, generator=draw)
    y = torch.tensor([7, 0, 3, 9])
    once = float(distance(z, y, given))
    assert once == pytest.approx(float((z - given[y]).square().sum() / 10), rel=1e-12)
    z, y = torch.cat([z, z[:1] + 1]), torch.cat([y, y[:1]])  # two samples of class 7
    both = float(distance(z, y, given))
    assert both != pytest.approx(once)
    twice = y == 7
    repeated = distance(torch.cat([z, z[twice]]), torch.cat([y, y[twice]]), given)
    assert float(repeated) == pytest.approx(both, rel=1e-12)
    by_class = [(z[y == c] - given[c]).square().sum(1).mean() for c in set(y.tolist())]
    assert both == pytest.approx(float(torch.stack(by_class).sum() / 10), rel=1e-12)


@pytest.mark.parametrize("lam", [0.0, 0.1, 2.0])
def test_the_gradient_of_the_distance_is_added(lam: float) -> None:
    method, inner, _ = probed(fedfa(lam=lam, calibration="none"))
    lab = Lab(method, shards(40), lr=0.1, batch=10_000)
    start, given = lab.weights.clone(), anchors(lab).clone()
    lab.round()
    data, net = lab.federation.client(0), lab.replica.net
    lab.replica.weights.load(start, lab.replica.initial_buffers)
    out = net(data.prepare(data.x, None))
    loss = F.cross_entropy(out.logits, data.y) + lam * distance(out.features, data.y, given)
    gradients = torch.autograd.grad(loss, list(net.parameters()))
    assert far(inner.gradients[0], torch.cat([g.flatten() for g in gradients])) < 1e-6


@pytest.mark.parametrize("official_mean", [False, True])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 1.0])
def test_how_anchors_move(official_mean: bool, momentum: float) -> None:
    """After each epoch towards the mean of its batch means, features taken before each step.

    Pitfall: the authors divide by all batches, which draws rare classes to 0; we divide by those with the class.
    """
    method, _, outer = probed(fedfa(lam=1.0, momentum=momentum, official_mean=official_mean))
    lab = Lab(method, digits(6, SKEWED), lr=0.05, epochs=3, batch=8)
    moving = anchors(lab).clone()
    lab.round([0])
    net, data = lab.replica.net, lab.federation.client(0)
    seen = list(zip(batches(lab, 0, 1), outer.points, strict=True))
    rare = False
    for epoch in range(3):
        steps = len(seen) // 3
        means: dict[int, list[Tensor]] = {}
        for (x, y), point in seen[epoch * steps : (epoch + 1) * steps]:
            lab.replica.weights.load(point, lab.replica.initial_buffers)
            z = net(x).features.detach()
            for c in set(y.tolist()):
                means.setdefault(c, []).append(z[y == c].mean(0))
        for c, found in means.items():
            rare |= len(found) < steps
            mean = torch.stack(found).sum(0) / (steps if official_mean else len(found))
            moving[c] = momentum * moving[c] + (1 - momentum) * mean
    assert rare
    assert far(lab.sent(0, "anchors.anchors"), moving) < 1e-5
    assert set(means) == set(data.y.tolist())


def test_the_server_weighs_anchors_like_the_weights() -> None:
    """Pitfall: by n_k for every class, so that clients without a class hold its anchor back."""
    lab = Lab(fedfa(), digits(6, SKEWED), lr=0.05)
    lab.round([0, 2, 3])
    sizes = [lab.sizes[k] for k in (0, 2, 3)]
    sent = [lab.sent(k, "anchors.anchors") for k in (0, 2, 3)]
    expected = sum(n / sum(sizes) * a for n, a in zip(sizes, sent, strict=True))
    assert isinstance(expected, Tensor)
    assert far(anchors(lab), expected) < 1e-6


def test_class_weighted() -> None:
    """The option: each anchor is the mean over its holders, by their class counts; nobody's anchor stays."""
    lab = Lab(fedfa(class_weighted=True), digits(6, SKEWED), lr=0.05)
    before = anchors(lab).clone()
    lab.round([0, 2])
    counts = torch.stack([lab.federation.client(k).counts for k in (0, 2)])
    both = torch.zeros(2, *before.shape)
    for row, k in enumerate((0, 2)):
        assert len(lab.sent(k, "anchors.anchors")) == int((counts[row] > 0).sum())
        both[row, counts[row] > 0] = lab.sent(k, "anchors.anchors")
    total = counts.sum(0)
    held = total > 0
    assert not held.all()
    expected = (counts[:, :, None] * both).sum(0) / total[:, None]
    assert far(anchors(lab)[held], expected[held]) < 1e-6
    assert torch.equal(anchors(lab)[~held], before[~held])


Schedule = Literal["none", "batch", "before", "epoch", "after"]


@pytest.mark.parametrize(
    ("schedule", "steps"), [("none", 0), ("batch", 6), ("before", 6), ("epoch", 3), ("after", 1)]
)
def test_the_schedule_of_calibration(schedule: Schedule, steps: int) -> None:
    """3 epochs of 2 batches; with a learning rate of 0 the classifier moves by its own steps alone."""
    lab = Lab(
        fedfa(calibration=schedule, calib_optimizer="sgd", calib_lr=0.5),
        shards(40),
        lr=0.0,
        epochs=3,
        batch=20,
    )
    head = torch.nn.Linear(16, 10)
    span = lab.replica.weights.span("head")
    torch.nn.utils.vector_to_parameters(lab.weights[span].clone(), head.parameters())
    optimiser = torch.optim.SGD(head.parameters(), lr=0.5)
    for _ in range(steps):
        optimiser.zero_grad()
        F.cross_entropy(head(anchors(lab)), torch.arange(10)).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
    expected = torch.nn.utils.parameters_to_vector(head.parameters()).detach()
    lab.round()
    assert far(lab.weights[span], expected) < 1e-6


def test_before_is_not_after() -> None:
    """The two differ by a step at either end, and between them the classifier is another one."""
    ends = []
    for schedule in ("batch", "before"):
        method, inner, _ = probed(fedfa(calibration=schedule, calib_lr=0.1))
        lab = Lab(method, shards(40), lr=0.05, epochs=1, batch=20)
        start = lab.weights.clone()
        lab.round()
        assert torch.equal(inner.points[0], start) == (schedule == "batch")
        ends.append(lab.weights)
    assert far(*ends) > 1e-4


def test_the_calibrating_optimiser() -> None:
    """Adam, with a state that lasts one round; the first step is then lr wherever there is a gradient."""
    lab = Lab(fedfa(calibration="after", calib_lr=0.01), shards(40), lr=0.0)
    span = lab.replica.weights.span("head")
    for _ in range(2):
        before = lab.weights.clone()
        lab.round()
        moved = (lab.weights - before)[span].abs()
        assert float(moved.max()) == pytest.approx(0.01, rel=1e-3)
    ends = [
        Lab(fedfa(calib_optimizer=kind), digits(), lr=0.05).rounds([0]).weights for kind in ("adam", "sgd")
    ]
    assert far(*ends) > 1e-4


@pytest.mark.parametrize("text", ["fedfa+perturbed(rho=1e-30)", "fedsol(rho=1e-30)+anchors+anchoredhead"])
def test_other_wrappers_do_not_undo_the_calibration(text: str) -> None:
    """A wrapper that puts the weights back after its look must be inside."""
    labs = [
        Lab(method, digits(), lr=0.05, epochs=2).rounds([0, 1], [1, 2]) for method in (fedfa(), make(text))
    ]
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(anchors(labs[0]), anchors(labs[1]))


@dataclass(frozen=True)
class _Body(Mechanism):
    """Trains the body alone."""

    def phases(self, client: ClientView, my: State, epochs: int) -> Sequence[Phase]:
        return [Phase(epochs, "body")]


@pytest.mark.parametrize("schedule", ["batch", "before"])
def test_a_frozen_classifier_stays_frozen(schedule: Schedule) -> None:
    """Only once the phase is over does the last calibration reach it."""
    lab = Lab(alloy("body", fedfa(calibration=schedule), _Body()), digits(), lr=0.05, epochs=2)
    start, span = lab.weights.clone(), lab.replica.weights.span("head")
    lab.round([0])
    moved = float((lab.weights - start)[span].abs().max())
    assert moved == pytest.approx(1e-3 if schedule == "batch" else 0.0, rel=1e-2)  # at most one step of Adam
    assert far(lab.weights, start) > 0.01


def test_a_class_that_is_never_trained_on_keeps_its_anchor() -> None:
    """A last batch of one is skipped under BatchNorm: its class is held, and was not seen."""
    y = digits().dataset.y
    positions = [*(y == 0).nonzero().flatten()[:16].tolist(), *(y == 1).nonzero().flatten()[:1].tolist()]
    lab = Lab(fedfa(), dealt([positions]), BATCHNORM, lr=0.05, batch=16)
    before = anchors(lab).clone()
    lab.round()
    skipped = {int(y_b) for _, batch in batches(lab, 0, 1) if len(batch) == 1 for y_b in batch}
    for c in (0, 1):
        seen = any(c in batch for _, batch in batches(lab, 0, 1) if len(batch) > 1)
        assert torch.equal(anchors(lab)[c], before[c]) != seen
    assert skipped


@pytest.mark.parametrize(
    "settings", [{"lam": 1.0}, {"momentum": 0.9}, {"calib_lr": 0.01}, {"class_weighted": True}]
)
def test_settings_reach_the_training(settings: dict[str, Any]) -> None:
    labs = [
        Lab(fedfa(**chosen), digits(6, SKEWED), lr=0.05).rounds([0, 1], [0, 1]) for chosen in ({}, settings)
    ]
    assert far(labs[0].weights, labs[1].weights) > 1e-5


def test_the_wire() -> None:
    lab, plain = Lab(fedfa(), digits(), lr=0.05), Lab(fedavg(), digits(), lr=0.05)
    extra = {"anchors.anchors": 2 * 4 * 10 * 16}
    assert lab.round([0, 1]).bytes_up == plain.round([0, 1]).bytes_up | extra
    assert lab.server.send(0).items.keys() == {"share.weights", "share.buffers", "anchors.anchors"}
    assert all(keep == {} for keep in lab.keeps.values())


def test_what_it_needs() -> None:
    with pytest.raises(AlloyConflict, match="start from 'fedfa'"):
        make("fedavg+anchoredhead")
    with pytest.raises(AlloyConflict, match="shared weights"):
        alloy("alone", Anchors())


def test_classifiers_agree() -> None:
    """Check 5, behaviour: every client tells all anchors apart, and classifiers move more alike than FedAvg's."""
    alike = []
    for method in (fedavg(), fedfa()):
        lab = Lab(method, digits(6, SKEWED), lr=0.05, epochs=3)
        span = lab.replica.weights.span("head")
        for _ in range(6):
            start, given = lab.weights, anchors(lab) if method.find(Anchors) else None
            lab.round()
        updates = torch.stack([lab.sent(k, "share.weights")[span] - start[span] for k in range(6)])
        cosines = F.cosine_similarity(updates[:, None], updates[None], dim=2)
        alike.append(float(cosines[~torch.eye(6, dtype=torch.bool)].mean()))
    assert given is not None
    for k in range(6):
        lab.replica.weights.load(lab.sent(k, "share.weights"), lab.sent(k, "share.buffers"))
        assert torch.equal(lab.replica.net.head(given).argmax(1), torch.arange(10))
    assert alike[1] > alike[0] + 0.2

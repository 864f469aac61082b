"""FedFM: anchors of the new global model, and features matched to them."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, dealt, digits, double, far
from torch import Tensor

from fedalloy.core.registry import make
from fedalloy.data import load
from fedalloy.data.federation import Federation
from fedalloy.methods import fedavg, fedfm
from fedalloy.methods.fedfm import Matching, contrastive_guiding, l2_matching
from fedalloy.round.client import Client, Step

PARTICIPANTS = ([0, 1, 5], [0, 1], [1, 5])
ANCHORS = "classanchors"


def draws(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def by_class(*held: list[int], each: int = 20) -> Federation:
    """Clients that hold so many samples of exactly these classes."""
    y = load("digits", None).y
    places = {c: torch.where(y == c)[0].tolist() for c in range(10)}
    return dealt([[places[c].pop(0) for c in classes for _ in range(each)] for classes in held])


def anchors(lab: Lab) -> Tensor:
    return lab.server.states[ANCHORS].persistent["means"]


def seen(lab: Lab) -> list[int]:
    return lab.server.states[ANCHORS].persistent["seen"].nonzero().flatten().tolist()


def features(lab: Lab, client: int, *, own: bool = False) -> tuple[Tensor, Tensor]:
    """A client's features under the server's model as it stands, or under the model it sent, and its labels."""
    data = lab.federation.client(client)
    state = (
        (lab.sent(client, "share.weights"), lab.sent(client, "share.buffers"))
        if own
        else (lab.weights, lab.server.buffers)
    )
    net = lab.replica.frozen(*state)
    lab.replica._lent = 0
    return net(data.prepare(data.x, None)).features, data.y


def loss_of(client: Client, cut: slice = slice(16)) -> Tensor | None:
    piece = client.method.find(Matching)
    assert piece is not None
    index = torch.arange(client.data.samples)[cut]
    step = Step(client, client.data.prepare(client.data.x[cut], None), client.data.y[cut], index, 0)
    step.out = client.net(step.x)
    return piece.loss(step, client.state_of(piece))


@pytest.mark.parametrize("settings", [{}, {"one_trip": True}, {"equal_avg": True}])
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_without_lambda_it_is_fedavg(model: str, settings: dict[str, Any]) -> None:
    """Check 1: lam = 0 equals FedAvg bit for bit: the anchor pass touches no weights, statistics or draws."""
    plain, without, full = (
        Lab(method, digits(), model, lr=0.05, momentum=0.9, epochs=2).rounds(*PARTICIPANTS)
        for method in (fedavg(), fedfm(lam=0.0, **settings), fedfm(lam=5.0, **settings))
    )
    assert torch.equal(plain.weights, without.weights)
    assert torch.equal(plain.server.buffers, without.server.buffers)
    assert far(plain.weights, full.weights) > 1e-3
    assert len(seen(without)) == 10
    assert full.keeps == {0: {}, 1: {}, 5: {}}  # stateless between rounds


@pytest.mark.parametrize("own", [False, True])
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_anchors_are_pooled_class_means(model: str, own: bool) -> None:
    """Check 2: the per-class mean over the union of the participants' data (1e-5), under the NEW global model.

    With one_trip, under the model each of them sent.
    """
    lab = Lab(fedfm(one_trip=own), digits(), model, lr=0.1, epochs=2)
    for chosen in PARTICIPANTS:
        lab.round(chosen)
    pairs = [features(lab, k, own=own) for k in PARTICIPANTS[-1]]
    z, y = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    for c in sorted(set(y.tolist())):
        assert anchors(lab)[c] == pytest.approx(z[y == c].mean(0), abs=1e-5)
    other = torch.cat([features(lab, k, own=not own)[0] for k in PARTICIPANTS[-1]])
    assert far(z, other) > 1e-3  # else the two would prove the same


def test_the_order_of_clients_does_not_matter() -> None:
    """Check 2: independent of client order."""
    labs = [Lab(fedfm(), digits(), BATCHNORM, lr=0.1) for _ in range(2)]
    labs[0].round([0, 1, 5])
    labs[1].round([0, 1, 5], answer_in=[5, 0, 1])
    assert torch.equal(anchors(labs[0]), anchors(labs[1]))
    assert torch.equal(labs[0].weights, labs[1].weights)


@double()
def test_contrastive_guiding_by_hand() -> None:
    """CE over cosines to the classes that have an anchor."""
    z, a = draws(6, 4), draws(5, 4, seed=1)
    mask, y = torch.tensor([True, True, False, True, False]), torch.tensor([0, 1, 3, 3, 0, 1])
    total = 0.0
    for i, c in enumerate(y.tolist()):
        score = [
            math.exp(float(F.cosine_similarity(z[i], a[k], dim=0)) / 0.3) for k in range(5) if bool(mask[k])
        ]
        total -= math.log(score[[0, 1, 3].index(c)] / sum(score))
    assert float(contrastive_guiding(z, y, a, mask, 0.3)) == pytest.approx(total / 6, rel=1e-10)


@double()
def test_scale_does_not_matter() -> None:
    """Check 3: invariant to scaling z and A, row by row; log(#anchors) when all cosines are equal."""
    z, a, y = draws(6, 4), draws(5, 4, seed=1), torch.tensor([0, 1, 3, 3, 0, 1])
    mask = torch.tensor([True, True, False, True, True])
    stretch_z, stretch_a = draws(6, 1, seed=2).exp(), draws(5, 1, seed=3).exp()
    longer = stretch_z * z, stretch_a * a
    guided = contrastive_guiding(z, y, a, mask, 0.1)
    assert far(contrastive_guiding(longer[0], y, longer[1], mask, 0.1), guided) < 1e-10
    assert far(l2_matching(longer[0], y, longer[1]), l2_matching(z, y, a)) < 1e-10
    same = draws(1, 4).expand(5, 4) * stretch_a
    assert float(contrastive_guiding(z, y, same, mask, 0.1)) == pytest.approx(math.log(4), abs=1e-10)


@double()
def test_l2_matching_by_hand() -> None:
    z, a, y = draws(3, 4), draws(2, 4, seed=1), torch.tensor([0, 1, 1])
    by_hand = sum(
        float((z[i] / z[i].norm() - a[c] / a[c].norm()).square().sum()) for i, c in enumerate(y.tolist())
    )
    assert float(l2_matching(z, y, a)) == pytest.approx(by_hand / 12, rel=1e-10)
    assert float(l2_matching(2 * a[y], y, a)) == pytest.approx(0, abs=1e-12)


def test_absent_classes_keep_their_anchor() -> None:
    """Check 4: bit for bit; no NaN with one-class clients."""
    lab = Lab(fedfm(lam=5.0), by_class([0, 1], [1, 2], [8]), lr=0.1)
    lab.round([0, 1])
    assert seen(lab) == [0, 1, 2]
    first = anchors(lab).clone()
    lab.round([2])
    assert seen(lab) == [0, 1, 2, 8]
    assert torch.equal(anchors(lab)[:8], first[:8])
    assert far(anchors(lab)[8], first[8]) > 0.01
    lab.rounds([2], [0], [0, 2])
    assert bool(torch.isfinite(lab.weights).all())
    assert bool(torch.isfinite(anchors(lab)).all())


@pytest.mark.parametrize("matching", ["cg", "l2"])
def test_samples_without_an_anchor_are_left_out(matching: str) -> None:
    """Only samples whose class has an anchor are matched, to existing anchors alone."""
    settings: dict[str, Any] = {"matching": matching, "lam": 2.0, "tau": 0.4}
    lab = Lab(fedfm(**settings), by_class([0, 1], [1, 7], [7]), lr=0.05)
    lab.round([0])
    client = lab.trained(1)
    loss = loss_of(client, slice(40))
    assert loss is not None
    z = client.net(client.data.prepare(client.data.x, None)).features[client.data.y == 1]
    targets = torch.ones(20, dtype=torch.long)
    unit, a = F.normalize(z, dim=1), F.normalize(anchors(lab)[:2], dim=1)
    expected = (
        F.cross_entropy(unit @ a.T / 0.4, targets) if matching == "cg" else (unit - a[1]).square().mean()
    )
    assert loss.item() == pytest.approx(2 * expected.item(), rel=1e-5)
    assert loss_of(lab.trained(2)) is None  # it holds nothing but class 7


def test_gradients_reach_the_body_alone() -> None:
    """Anchors are constants; the classifier does not feel the term."""
    client = Lab(fedfm(), digits(), BATCHNORM, lr=0.1).rounds([0, 1]).trained(0)
    loss = loss_of(client)
    assert loss is not None
    names = [name for name, _ in client.net.named_parameters()]
    gradients = torch.autograd.grad(loss, list(client.net.parameters()), allow_unused=True)
    reached = [name for name, g in zip(names, gradients, strict=True) if g is not None]
    assert reached == [name for name in names if name.startswith("body.")]


def cosines(method: str, model: str) -> tuple[float, float]:
    """Of test features after 5 rounds: the mean cosine to the anchor of their class, and to those of others."""
    federation = digits(skew="dirichlet:0.1")
    index = federation.split.global_test
    x, y = federation.prepare(federation.dataset.x[index], None), federation.dataset.y[index]
    lab = Lab(make(method), federation, model, lr=0.1, epochs=3).rounds(*[range(6)] * 5)
    z = lab.replica.frozen(lab.weights, lab.server.buffers)(x).features
    scores = F.normalize(z, dim=1) @ F.normalize(anchors(lab), dim=1).T
    own = F.one_hot(y, 10).bool()
    return float(scores[own].mean()), float(scores[~own].mean())


def test_features_meet_their_anchors() -> None:
    """Check 5: after 5 rounds, mean cos(z, A_y) on test data exceeds that of lam = 0; so it does with l2 matching."""
    methods = ("fedfm(lam=0)", "fedfm", "fedfm(lam=50, matching=l2)")
    without, guided, matched = (cosines(method, BATCHNORM)[0] for method in methods)
    assert guided > without + 0.01
    assert matched > without + 0.01


def test_classes_come_apart() -> None:
    """Where nothing normalises the features, they share a direction; what grows is the gap to other anchors."""
    without, guided = (cosines(method, MLP) for method in ("fedfm(lam=0)", "fedfm"))
    assert guided[0] - guided[1] > without[0] - without[1] + 0.2


def test_when_it_starts() -> None:
    """Rounds are counted from 0: at 1 the second round matches, the first has no anchors yet."""

    def matched(start_round: int) -> list[bool]:
        lab = Lab(fedfm(start_round=start_round), digits(), steps=1)
        found = []
        for _ in range(4):
            client = lab.trained(0)
            found.append(loss_of(client) is not None)
            lab.server.round -= 1
            lab.round([0, 1])
        return found

    assert matched(1) == [False, True, True, True]
    assert matched(3) == [False, False, False, True]


@pytest.mark.parametrize("one_trip", [False, True])
def test_equal_average(one_trip: bool) -> None:
    """The plain mean over participants; who lacks a class stands for the old anchor, if there is one."""
    shards = by_class([0, 1, 1, 1], [1, 2], [0, 8])
    lab = Lab(fedfm(one_trip=one_trip, equal_avg=True), shards, lr=0.1)

    def mean_of(client: int, c: int) -> Tensor:
        z, y = features(lab, client, own=one_trip)
        return z[y == c].mean(0)

    lab.round([0, 1])
    assert seen(lab) == [0, 1, 2]
    assert anchors(lab)[1] == pytest.approx((mean_of(0, 1) + mean_of(1, 1)) / 2, abs=1e-6)
    assert anchors(lab)[0] == pytest.approx(mean_of(0, 0), abs=1e-6)  # nothing older to stand in
    old = anchors(lab).clone()
    lab.round([0, 2])
    assert anchors(lab)[1] == pytest.approx((mean_of(0, 1) + old[1]) / 2, abs=1e-6)
    assert anchors(lab)[0] == pytest.approx((mean_of(0, 0) + mean_of(2, 0)) / 2, abs=1e-6)
    assert anchors(lab)[8] == pytest.approx(mean_of(2, 8), abs=1e-6)
    assert torch.equal(anchors(lab)[2], old[2])


def test_the_wire() -> None:
    """Two exchanges: model and anchors down, model up; new model down, rows of held classes and counts up."""
    lab = Lab(fedfm(), by_class([0, 1, 5], [2]), lr=0.1)
    mail = lab.server.send(0).items
    assert mail.keys() == {"share.weights", "share.buffers", f"{ANCHORS}.means", f"{ANCHORS}.seen"}
    assert mail[f"{ANCHORS}.means"].shape == (10, 16)
    lab.round()
    assert lab.replies[0].items.keys() == {"share.weights", "share.buffers"}
    assert lab.told[0].items.keys() == {f"{ANCHORS}.means", f"{ANCHORS}.counts"}
    assert lab.told[0].items[f"{ANCHORS}.means"].shape == (3, 16)
    assert lab.told[1].items[f"{ANCHORS}.means"].shape == (1, 16)
    assert lab.told[0].items[f"{ANCHORS}.counts"].tolist() == [20, 20, 0, 0, 0, 20, 0, 0, 0, 0]
    trip = Lab(fedfm(one_trip=True), by_class([0, 1, 5], [2]), lr=0.1)
    trip.round()
    assert not trip.told
    assert trip.sent(0, f"{ANCHORS}.means").shape == (3, 16)


def test_anchors_are_made_of_all_samples_without_augmentation() -> None:
    """Pitfall: a full pass over stored samples; a batch size that does not divide them leaves nobody out."""
    lab = Lab(fedfm(), by_class([0, 1], each=23), lr=0.1, batch=16)
    lab.round()
    z, y = features(lab, 0)
    assert anchors(lab)[:2] == pytest.approx(torch.stack([z[y == c].mean(0) for c in (0, 1)]), abs=1e-5)


@pytest.mark.parametrize("text", ["fedprox(mu=0.1)", "scaffold", "moon(proj_dim=12)", "fedblade", "ssf"])
def test_hosts(text: str) -> None:
    """`+matching` goes on any method with a global model."""
    labs = [
        Lab(make(method), digits(), BATCHNORM, lr=0.05).rounds(*PARTICIPANTS)
        for method in (text, f"{text}+matching(lam=0)", f"{text}+matching(lam=5)")
    ]
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert far(labs[1].weights, labs[2].weights) > 1e-4


def test_settings_reach_the_loss() -> None:
    texts = (
        "fedfm(lam=5)",
        "fedfm(lam=50)",
        "fedfm(lam=5, tau=1)",
        "fedfm(lam=5, matching=l2)",
        "fedfm(lam=5, one_trip=True)",
        "fedfm(lam=5, start_round=2)",
    )
    ends = [Lab(make(text), digits(), lr=0.05).rounds([0, 1], [0, 1], [0, 1]).weights for text in texts]
    assert all(far(ends[i], ends[j]) > 1e-5 for i in range(len(texts)) for j in range(i))

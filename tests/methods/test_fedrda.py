"""FedRDA: the compact head, the principal spaces, and the loss on leaving them."""

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, dealt, digits, double, far, run, shards
from torch import Tensor, nn

from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.frozen import Frozen
from fedalloy.core.net import Net
from fedalloy.core.random import generator
from fedalloy.core.views import StepView
from fedalloy.data.federation import Federation, federate
from fedalloy.errors import FedAlloyError
from fedalloy.methods import fedavg, fedrda, moon, scaffold
from fedalloy.methods.fedrda import (
    Compact,
    Decomposition,
    Deviation,
    Orthogonal,
    compact_of,
    consistency,
    deviation,
    distance,
    origin,
    residual_space,
)
from fedalloy.round.client import Client, Step

DECOMPOSITIONS: tuple[Decomposition, ...] = ("svd", "qr", "pca")
D, CLASSES = 16, 10  # the width of the features of MLP


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def piece(lab: Lab) -> Deviation:
    found = lab.method.find(Deviation)
    assert found is not None
    return found


# The main path


@pytest.mark.parametrize("model", [MLP, BATCHNORM, "lenet"])
@pytest.mark.parametrize("gamma", [0.0, 1e-30])
def test_without_alpha_and_gamma_it_is_fedavg(model: str, gamma: float) -> None:
    """Check: alpha = gamma = 0: the main path equals FedAvg bit for bit; so does a gamma below rounding.

    The second does all passes over frozen and local features: they must not touch random streams or buffers.
    """
    federation = shards(40, 33)
    settings: dict[str, Any] = {"lr": 0.05, "epochs": 2, "momentum": 0.9, "batch": 16}
    plain = Lab(fedavg(), federation, model, **settings)
    lab = Lab(fedrda(alpha=0, gamma=gamma), federation, model, **settings)
    for _ in range(2):
        plain.round()
        lab.round()
        both = [each.replica.weights.layout.views(each.weights) for each in (plain, lab)]
        assert set(both[0]) < set(both[1])
        assert all(torch.equal(value, both[1][name]) for name, value in both[0].items())
        assert torch.equal(plain.server.buffers, lab.server.buffers)


def test_the_main_head_predicts() -> None:
    """Evaluation: a_o of the main head, whatever the compact one says."""
    lab = Lab(fedrda(), digits(), lr=0.05)
    plain = Lab(fedavg(), digits(), lr=0.05)
    x = draw(5, 1, 8, 8)
    assert torch.equal(lab.replica.net(x).logits, plain.replica.net(x).logits)


@pytest.mark.parametrize(("width", "r1"), [(0.25, 4), (0.5, 8), (0.75, 12), (1.0, 16), (0.01, 2)])
def test_bytes(width: float, r1: int) -> None:
    """Extra over FedAvg, each way: d r1 + r1 + r1 p + p floats; nothing else travels and nothing is kept."""
    assert 512 * 384 + 384 + 384 * 10 + 10 == 200_842  # the count that the formula stands for
    lab, plain = Lab(fedrda(width=width), digits(), lr=0.05), Lab(fedavg(), digits(), lr=0.05)
    extra = D * r1 + r1 + r1 * CLASSES + CLASSES
    assert lab.weights.numel() == plain.weights.numel() + extra
    down = [sum(v.numel() for v in each.server.send(0).items.values()) for each in (lab, plain)]
    assert down[0] - down[1] == extra
    up = [sum(each.round([0, 1]).bytes_up.values()) for each in (lab, plain)]
    assert up[0] - up[1] == 2 * 4 * extra
    assert lab.replies[0].items.keys() == {"share.weights", "share.buffers"}
    assert lab.keeps == {0: {}, 1: {}}


# The spaces


@double()
@pytest.mark.parametrize(("r1", "classes"), [(8, 10), (10, 10), (12, 3)])
def test_origin(r1: int, classes: int) -> None:
    """Check: o W_c + b_c = 0 when p <= r1 and W_c has full column rank, else in least squares."""
    head = nn.Linear(r1, classes)
    with torch.no_grad():
        head.weight.copy_(draw(classes, r1))
        head.bias.copy_(draw(classes, seed=1))
    o, z = origin(head), draw(5, r1, seed=2)
    assert not o.requires_grad
    head.requires_grad_(False)
    left = o @ head.weight.T + head.bias
    if classes <= r1:
        assert float(left.abs().max()) < 1e-12
        assert far((z - o) @ head.weight.T, head(z)) < 1e-12  # seen from there, scores have no bias
    else:
        assert float(left.abs().max()) > 0.1
        assert float((left @ head.weight).abs().max()) < 1e-12
        head.weight.data[1:3] = head.weight.data[0]  # rank deficient
        assert bool(torch.isfinite(origin(head)).all())


@double()
@pytest.mark.parametrize("by", DECOMPOSITIONS)
@pytest.mark.parametrize("samples", [50, 5])
def test_orthonormal(by: Decomposition, samples: int) -> None:
    """Check: Q^T Q = I and ||P^T z||^2 + ||S^T z||^2 = ||z||^2, also for fewer samples than dimensions."""
    z = draw(samples, 8) * torch.arange(1.0, 9)
    q, s = residual_space(z, 0, by), residual_space(z, 3, by)
    assert q.shape == (8, 8)
    assert far(q.T @ q, torch.eye(8)) < 1e-12
    assert torch.equal(q[:, 3:], s)
    length = (z @ q[:, :3]).square().sum(1) + (z @ s).square().sum(1)
    assert far(length, z.square().sum(1)) < 1e-9


@double()
def test_each_decomposition_takes_its_own_space() -> None:
    """Table IV. svd: the least of ||Z S||, uncentred; pca: the same about the mean; qr: Z^T Z = Q R."""
    z = draw(50, 8) * torch.arange(1.0, 9) + 5
    spaces = {by: residual_space(z, 3, by) for by in DECOMPOSITIONS}
    energy = torch.linalg.svdvals(z).square()
    assert float((z @ spaces["svd"]).square().sum()) == pytest.approx(float(energy[3:].sum()))
    centred = z - z.mean(0)
    energy = torch.linalg.svdvals(centred).square()
    assert float((centred @ spaces["pca"]).square().sum()) == pytest.approx(float(energy[3:].sum()))
    q = residual_space(z, 0, "qr")
    assert float((q.T @ z.T @ z).tril(-1).abs().max()) < 1e-9
    assert far(spaces["svd"] @ spaces["svd"].T, spaces["pca"] @ spaces["pca"].T) > 0.01


def test_what_is_not_finite_stays_so_without_a_solver_error() -> None:
    """Pitfall: pinv and eigh raise an obscure error on features that blew up."""
    for value in (torch.nan, torch.inf):
        z = draw(6, 4)
        z[2, 1] = value
        for by in DECOMPOSITIONS:
            space = residual_space(z, 1, by)
            assert space.shape == (4, 3)
            assert bool(space.isnan().all())
        head = nn.Linear(4, 3)
        head.weight.data[0, 0] = value
        assert origin(head).shape == (4,)
        assert not bool(torch.isfinite(origin(head)).any())


# The loss


@double()
def test_the_mean_distance_is_the_mean_top_score() -> None:
    """Check: mean_i d(Z, S)_i equals the mean top score."""
    z, scores = draw(7, 8), draw(7, 5, seed=1).softmax(1)
    d = distance(z, residual_space(draw(30, 8, seed=2), 3), scores)
    assert d.shape == (7,)
    assert float(d.mean()) == pytest.approx(float(scores.max(1).values.mean()), abs=1e-12)


@double()
def test_kappa_is_a_constant() -> None:
    """Pitfall: kappa detached: d has the gradient kappa S S^T z / ||S^T z||, and none with respect to the scores."""
    z, scores = draw(7, 8).requires_grad_(), draw(7, 5, seed=1).softmax(1).requires_grad_()
    space = residual_space(draw(30, 8, seed=2), 3)
    residual = (z @ space).norm(dim=1, keepdim=True).detach()
    kappa = scores.max(1).values.sum() / residual.sum()
    by_z, by_scores = torch.autograd.grad(
        distance(z, space, scores).sum(), (z, scores), allow_unused=True, materialize_grads=False
    )
    assert far(by_z, (kappa * (z @ space) @ space.T / residual).detach()) < 1e-12
    assert by_scores is None


@double()
def test_a_free_kappa_only_moves_residuals_between_samples() -> None:
    """The distances add up to the top scores whatever the residuals are, so that their sum has no gradient in z."""
    z, scores = draw(7, 8).requires_grad_(), draw(7, 5, seed=1).softmax(1).requires_grad_()
    d = distance(z, residual_space(draw(30, 8, seed=2), 3), scores, "free")
    assert torch.equal(d, distance(z, residual_space(draw(30, 8, seed=2), 3), scores))
    (whole,) = torch.autograd.grad(d.sum(), z, retain_graph=True)
    one, by_scores = torch.autograd.grad(d[0], (z, scores))
    assert float(whole.abs().max()) < 1e-12 < 1e-2 < float(one.abs().max())
    assert float(by_scores.abs().max()) > 0


def test_no_residual_is_no_distance() -> None:
    """Guard: features inside the space have distance 0 and a finite gradient."""
    space = torch.eye(4)[:, 2:]
    z = torch.tensor([[1.0, 2, 0, 0], [3.0, 4, 0, 0]]).requires_grad_()
    d = distance(z, space, torch.full((2, 3), 1 / 3))
    d.sum().backward()  # type: ignore[no-untyped-call]
    assert d.tolist() == [0, 0]
    assert z.grad is not None
    assert bool(torch.isfinite(z.grad).all())


def test_rounding_is_no_residual() -> None:
    """Guard: fewer samples than r lie in the space but for rounding, which kappa would blow up a million times."""
    z = draw(3, 8).float()
    space = residual_space(z, 4)
    moved = z.clone().requires_grad_()
    d = distance(moved, space, torch.full((3, 3), 1 / 3))
    d.sum().backward()  # type: ignore[no-untyped-call]
    assert float((z @ space).norm()) > 0
    assert d.tolist() == [0] * 3
    assert moved.grad is not None
    assert float(moved.grad.norm()) == 0


def test_negative_top_logits_do_not_push_outwards() -> None:
    """scores="logits": kappa is never negative."""
    z, space = draw(4, 6), torch.eye(6)[:, 2:]
    assert distance(z, space, torch.full((4, 3), -2.0)).tolist() == [0] * 4
    assert float(distance(z, space, torch.full((4, 3), 2.0)).mean()) == pytest.approx(2)


@double()
def test_deviation() -> None:
    """Check: 0 < E < 1; it is Eq 11, and near 2 / (p + 2) at u = 0."""
    for seed in range(20):
        u_g, u_l = draw(2, 6, seed=seed) * 3
        scores = draw(6, 5, seed=seed + 100).softmax(1)
        found = deviation(u_g, u_l, scores)
        outside = u_g.exp() + u_l.exp()
        assert far(found, (outside / (scores.exp().sum(1) + outside)).mean()) < 1e-12
        assert 0 < float(found) < 1
        zero = float(deviation(torch.zeros(6), torch.zeros(6), scores))
        assert 2 / (5 + 2 + math.e - 1) < zero < 2 / (5 + 2)


def test_deviation_does_not_overflow() -> None:
    """One of b samples may carry all of the residual: u up to b; and logits have no bound."""
    u = torch.tensor([200.0, 0.0]).requires_grad_()
    found = deviation(u, u, torch.tensor([[500.0, 0.0], [1.0, 0.0]]))
    found.backward()  # type: ignore[no-untyped-call]
    assert 0 < found.item() < 1
    assert u.grad is not None
    assert bool(torch.isfinite(u.grad).all())


@double()
def test_consistency() -> None:
    """Check: U >= 0, U = 0 when u_l = u_g; adding a constant to u_l leaves U unchanged. It is Eq 12."""
    for seed in range(20):
        u_g, u_l = draw(2, 6, seed=seed)
        found = float(consistency(u_g, u_l))
        v, w = u_l.softmax(0), u_g.softmax(0)
        assert found == pytest.approx(float((v * (v / w).log()).sum()), abs=1e-12)
        assert found > 0
        assert float(consistency(u_g, u_g)) == 0
        assert float(consistency(u_g, u_l + 3)) == pytest.approx(found, abs=1e-12)
    assert float(consistency(u_g[:1], u_l[:1])) == 0  # a batch of one


# A client's round, once more by hand


class Hand:
    """Algorithm 1 at one client as the equations read: its own autograd, SVD, least squares and optimiser."""

    def __init__(self, lab: Lab, client: int, **chosen: Any) -> None:
        given = {"alpha": 0.1, "gamma": 0.1, "rank": 0.25, "decomposition": "svd", "scores": "softmax"}
        self.how: dict[str, Any] = {**given, **chosen}
        self.main_loss: bool = self.how.get("main_loss", True)
        self.lab, self.data, self.id = lab, lab.federation.client(client), client
        lab.replica.weights.load(lab.replica.initial, lab.replica.initial_buffers)
        self.net, self.frozen = copy.deepcopy(lab.replica.net), copy.deepcopy(lab.replica.net).eval()

    def train(self) -> Tensor:
        """All parameters at the end of the round."""
        local, gamma = self.lab.local, self.how["gamma"]
        optimiser = torch.optim.SGD(self.net.parameters(), lr=local.lr, momentum=local.momentum)
        space_g = space_l = self.space(self.frozen)
        for epoch in range(local.epochs):
            if epoch:
                space_l = self.space(self.net)
            for x, y in self.batches(epoch):
                self.net.train()
                loss, z, says = self.heads(x, y)
                if gamma:
                    z_g, a_g = compact_of(self.frozen)(self.frozen(x).features)
                    z_g = (z_g - self.origin(self.frozen)).detach()
                    l_g = self.scores(a_g.detach())
                    z = z - self.origin(self.net)
                    u_g = self.far(z, says, space_g) - self.far(z_g, l_g, space_g)
                    u_l = self.far(z, says, space_l) - self.far(z_g, l_g, space_l)
                    top = u_g.exp() + u_l.exp()
                    v, w = u_l.softmax(0), u_g.softmax(0)
                    kl = (v * (v / w).log()).sum() if len(y) > 1 else 0  # U is skipped for b = 1
                    loss = loss + gamma * ((top / (says.exp().sum(1) + top)).mean() + kl)
                optimiser.zero_grad(set_to_none=False)
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        return torch.cat([p.detach().flatten() for p in self.net.parameters()])

    def heads(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """L_o + alpha L_e (or, without the main head, L_e alone), Z and l."""
        out, alpha = self.net(x), self.how["alpha"]
        compact = compact_of(self.net)
        z, a_e = compact(out.features)
        loss = F.cross_entropy(a_e, y)
        if self.main_loss:
            loss = F.cross_entropy(out.logits, y) + alpha * loss
        if compact.decoder is not None:
            loss = loss + alpha * ((compact.decoder(z) - out.features.detach()) ** 2).mean()
        return loss, z, self.scores(a_e)

    def scores(self, a: Tensor) -> Tensor:
        return a.softmax(1) if self.how["scores"] == "softmax" else a

    @staticmethod
    def far(z: Tensor, scores: Tensor, space: Tensor) -> Tensor:
        residual = torch.einsum("bi,ij,kj,bk->b", z, space, space, z).sqrt()
        return (scores.amax(1).sum() / residual.sum()).detach() * residual

    @staticmethod
    @torch.no_grad()
    def origin(net: Net) -> Tensor:
        head = compact_of(net).head
        solved = torch.linalg.lstsq(head.weight.double(), -head.bias.double()[:, None], driver="gelsd")
        found: Tensor = solved.solution[:, 0].float()
        return found

    @torch.no_grad()
    def space(self, net: Net) -> Tensor:
        net.eval()
        x = self.data.prepare(self.data.x, None)
        z = (compact_of(net)(net(x).features)[0] - self.origin(net)).double()
        if self.how["decomposition"] == "pca":
            z = z - z.mean(0)
        rank = round(self.how["rank"] * z.shape[1])
        found: Tensor = torch.linalg.svd(z, full_matrices=True).Vh[rank:].T.float()
        return found

    def batches(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        """As `laboratory.batches`, with augmentation."""
        order, augment = (
            generator(self.lab.seed, 1, self.id, 0, epoch, purpose) for purpose in ("batches", "augment")
        )
        for index in torch.split(torch.randperm(self.data.samples, generator=order), self.lab.local.batch):
            yield self.data.prepare(self.data.x[index], augment), self.data.y[index]


def both(federation: Federation, model: str = MLP, **chosen: Any) -> tuple[Tensor, Tensor]:
    """The parameters after a client's round of three epochs, by the library and by hand."""
    lab = Lab(fedrda(**chosen), federation, model, lr=0.1, epochs=3, batch=16, momentum=0.5)
    return lab.trained(0).weights.flat.clone(), Hand(lab, 0, **chosen).train()


@pytest.mark.parametrize("model", [MLP, BATCHNORM, "cnn-fedrda"])
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"alpha": 1.0, "gamma": 1.0},
        {"alpha": 1.0, "gamma": 0.0},  # Table VI, without E + U
        {"alpha": 0.0, "gamma": 1.0},  # without L_e
        {"main_loss": False, "gamma": 1.0},  # without L_o
    ],
    ids=str,
)
def test_a_round_is_that_of_the_equations(model: str, chosen: dict[str, Any]) -> None:
    """Checks: the whole client step, every row of Table VI.

    No gradient through S, o, kappa and frozen features; epoch 0 in the global space, then in that of the epoch before.
    """
    assert far(*both(shards(60), model, **chosen)) < 2e-5


@pytest.mark.parametrize(
    "chosen",
    [
        {"rank": 0.6},
        {"width": 1.0},
        {"scores": "logits"},
        {"decomposition": "pca"},
        {"encoder": "autoencoder"},
        {"encoder": "autoencoder", "main_loss": False},
        {"encoder": "orthogonal"},
        {"encoder": "orthogonal", "main_loss": False},
        {"depth": 3},
    ],
    ids=str,
)
def test_every_variant_is_as_by_hand_and_matters(chosen: dict[str, Any]) -> None:
    weights, expected = both(shards(60), alpha=1.0, gamma=1.0, **chosen)
    assert far(weights, expected) < 2e-5
    plain, _ = both(shards(60), alpha=1.0, gamma=1.0)
    assert plain.shape != weights.shape or far(plain, weights) > 1e-4


def test_qr_is_another_method() -> None:
    ends = [
        Lab(fedrda(gamma=1, decomposition=by), shards(60), lr=0.1, epochs=2).trained(0).weights.flat.clone()
        for by in DECOMPOSITIONS
    ]
    assert all(far(ends[1], other) > 1e-5 for other in (ends[0], ends[2]))


def test_augmented_batches_are_as_by_hand() -> None:
    """Pitfall: with random augmentation, Z^g is that of the same augmented batch."""
    federation = federate("digits", 20, "iid", augment="crop:2,flip")
    assert far(*both(federation, alpha=1.0, gamma=1.0)) < 2e-5


def test_the_frozen_model_follows_the_augmentation() -> None:
    lab = Lab(fedrda(), federate("digits", 20, "iid", augment="flip"), lr=0.1)
    client = lab.trained(0)
    my = client.states["deviation"]
    x, index = client.data.prepare(client.data.x[:8].flip(3), None), torch.arange(8)
    z, scores = piece(lab)._frozen(Step(client, x, client.data.y[:8], index, 0), my)
    expected, logits = compact_of(my.scratch["frozen"].net)(my.scratch["frozen"](x).features)
    assert far(z, expected - my.scratch["o_g"]) < 1e-6
    assert far(scores, logits.softmax(1)) < 1e-6
    assert far(z, my.scratch["z_g"][index]) > 1e-2


@pytest.mark.parametrize(("augment", "passes"), [("none", 1), ("flip", 1 + 2 * 3)])
def test_frozen_features_are_computed_once(
    augment: str, passes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without augmentation a sample's frozen features never change: one pass, the same numbers as in each batch."""
    seen: list[Tensor] = []
    look = Frozen.__call__

    def counted(self: Frozen, x: Tensor) -> Any:
        seen.append(x)
        return look(self, x)

    monkeypatch.setattr(Frozen, "__call__", counted)
    federation = federate("digits", 20, "iid", augment=augment)
    lab = Lab(fedrda(), federation, lr=0.1, epochs=2, batch=32)
    client = lab.trained(0)
    assert client.steps == 2 * 3
    assert len(seen) == passes
    my, index = client.states["deviation"], torch.tensor([3, 1, 20])
    frozen: Frozen = my.scratch["frozen"]
    z, logits = compact_of(frozen.net)(frozen(client.data.prepare(client.data.x[index], None)).features)
    assert far(my.scratch["z_g"][index], z - my.scratch["o_g"]) < 1e-6
    assert far(my.scratch["l_g"][index], logits.softmax(1)) < 1e-6


# Which space when


def spaces(client: Client) -> tuple[Tensor, Tensor]:
    memo = client.states["deviation"].scratch
    return memo["S_g"], memo["S_l"]


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_epoch_0_uses_the_global_space_later_ones_that_of_the_epoch_before(model: str) -> None:
    """Check: U = 0 in epoch 0; then S_l is the space of the model, statistics included, as the epoch began."""
    settings: dict[str, Any] = {"lr": 0.1, "batch": 16}
    lab = Lab(fedrda(gamma=1), shards(60), model, epochs=1, **settings)
    client = lab.trained(0)
    space_g, space_l = spaces(client)
    assert space_l is space_g
    z, _ = piece(lab)._seen(client)  # after one epoch
    expected = residual_space(z.detach(), 2)
    later = Lab(fedrda(gamma=1), shards(60), model, epochs=2, **settings).trained(0)
    assert torch.equal(spaces(later)[0], space_g)
    assert far(spaces(later)[1], expected) < 1e-6
    assert far(expected @ expected.T, space_g @ space_g.T) > 1e-3


def test_the_spaces_of_all_epochs_are_used() -> None:
    """The second epoch differs from one that still compares with the global space."""

    class Stuck(Deviation):
        def gradient(self, step: StepView, my: Any, oracle: Any) -> Tensor:
            found: Tensor = oracle(step)
            return found

    settings: dict[str, Any] = {"lr": 0.1, "epochs": 2, "batch": 16}
    method = fedrda(gamma=1)
    ends = [Lab(method, shards(60), **settings).trained(0).weights.flat.clone()]
    compact = method.pieces[1]
    stuck = type(method)("stuck", (method.pieces[0], compact, Stuck(gamma=1.0)))
    ends.append(Lab(stuck, shards(60), **settings).trained(0).weights.flat.clone())
    assert far(*ends) > 1e-6


def test_the_frozen_model_is_left_as_it_was() -> None:
    lab = Lab(fedrda(gamma=1), digits(), BATCHNORM, lr=0.1, epochs=2)
    weights, buffers = lab.weights.clone(), lab.server.buffers.clone()
    frozen: Frozen = lab.trained(0).states["deviation"].scratch["frozen"]
    assert not frozen.net.training
    assert torch.equal(frozen.weights.flat, weights)
    assert torch.equal(frozen.weights.buffers, buffers)


# Encoders and heads


@pytest.mark.parametrize("depth", [1, 2, 4])
def test_mlp_encoder(depth: int) -> None:
    """Fig. 7b: one linear layer, or more with ReLU between them."""
    compact = compact_of(Lab(fedrda(depth=depth), digits()).replica.net)
    assert sum(isinstance(layer, nn.Linear) for layer in compact.encoder.modules()) == depth
    assert sum(isinstance(layer, nn.ReLU) for layer in compact.encoder.modules()) == depth - 1
    z, a = compact(draw(3, D))
    assert (z.shape, a.shape) == ((3, 8), (3, CLASSES))


@pytest.mark.parametrize("main_loss", [True, False])
def test_autoencoder_learns_to_reconstruct(main_loss: bool) -> None:
    """Table V: the reconstruction error falls, with and without the main head."""
    method = fedrda(encoder="autoencoder", alpha=1, gamma=0, main_loss=main_loss)
    lab = Lab(method, digits(), lr=0.1, epochs=3)

    @torch.no_grad()
    def error() -> float:
        client = lab.trained(0)
        compact = compact_of(client.net)
        assert compact.decoder is not None
        (out,) = client.outputs(client.data.x)
        spread = out.features.var(0, correction=0).mean()  # what the best constant would leave
        return float(F.mse_loss(compact.decoder(compact.encoder(out.features)), out.features) / spread)

    before = error()
    lab.rounds(range(6), range(6))
    assert error() < 0.7 * before


@pytest.mark.parametrize("main_loss", [True, False])
def test_orthogonal_encoder_never_moves(main_loss: bool) -> None:
    """Table V: a random orthonormal map, the same for everyone; not trained, not averaged, not sent."""
    method = fedrda(encoder="orthogonal", alpha=1, gamma=1, main_loss=main_loss)
    lab = Lab(method, digits(), lr=0.1)
    before = orthogonal(lab).clone()
    assert far(before @ before.T, torch.eye(8)) < 1e-5
    lab.rounds([0, 1], [2, 3])
    assert torch.equal(orthogonal(lab), before)
    assert not any("encoder" in name or "neck" in name for name in lab.replica.weights.layout.spans)
    assert not len(lab.sent(2, "share.buffers"))
    again, other = (orthogonal(Lab(method, digits(), seed=seed)) for seed in (0, 1))
    assert torch.equal(again, before)
    assert far(other, before) > 0.1


def orthogonal(lab: Lab) -> Tensor:
    encoder = compact_of(lab.replica.net).encoder
    assert isinstance(encoder, Orthogonal)
    return encoder.weight


def test_an_orthogonal_encoder_has_no_depth() -> None:
    with pytest.raises(FedAlloyError, match="leave depth=2 out"):
        Lab(fedrda(encoder="orthogonal", depth=2), digits())


def test_without_the_main_loss_the_compact_head_predicts() -> None:
    """Table VI, without L_o: the main head is gone, predictions go through encoder and compact head."""
    lab = Lab(fedrda(main_loss=False), digits(), lr=0.05)
    x, net = draw(5, 1, 8, 8), lab.replica.net
    out = net(x)
    z, logits = compact_of(net)(out.features)
    assert torch.equal(out.embedding, z)
    assert torch.equal(out.logits, logits)
    body = 64 * D + D
    assert lab.weights.numel() == body + D * 8 + 8 + 8 * CLASSES + CLASSES
    lab.rounds([0, 1])
    assert far(lab.weights, lab.replica.initial) > 1e-3


def test_two_methods_cannot_have_the_neck() -> None:
    with pytest.raises(AlloyConflict, match="both claim the neck"):
        moon() + fedrda(main_loss=False)
    assert isinstance(Lab(moon(proj_dim=4) + fedrda(), digits()).replica.net.compact, Compact)


def test_with_scaffold() -> None:
    """The full gradient of another part asks for the loss outside of any epoch."""
    lab = Lab(scaffold(c_update="option1", agg_weights="size") + fedrda(), shards(40), lr=0.05, epochs=2)
    lab.rounds([0], [0])
    assert bool(torch.isfinite(lab.weights).all())


# Edges


@pytest.mark.parametrize(("width", "rank"), [(0.5, 1.0), (0.5, 0.95), (0.1, 0.75)])
def test_a_rank_that_leaves_nothing_is_an_error(width: float, rank: float) -> None:
    """Pitfall: r >= r1 empties S; said before anything is trained."""
    with pytest.raises(FedAlloyError, match=r"leaves nothing of \d compact features; lower it"):
        Lab(fedrda(width=width, rank=rank), digits())


def test_a_batch_of_one_sample() -> None:
    """Pitfall: U is a KL across the batch: of one sample it is skipped; E is not."""
    assert far(*both(dealt([range(17)]), alpha=0.0, gamma=1.0)) < 2e-5
    ends = [
        Lab(fedrda(alpha=0, gamma=gamma), shards(3), lr=0.1, batch=1).trained(0).weights.flat.clone()
        for gamma in (1.0, 0.0)
    ]
    assert far(*ends) > 1e-5


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_a_run_that_blows_up_is_recorded_as_diverged(model: str, tmp_path: Path) -> None:
    """Pitfall: non-finite features end as a diverged run that says so, not as an obscure solver error."""
    method = "fedrda(alpha=1, gamma=1)"
    result = run(tmp_path, digits(), method, model, rounds=3, epochs=2, lr=1e6, weight_decay=1e6)
    assert result.summary["status"] == "diverged"
    assert result.summary["diverged_round"] == 1
    refused = result.history[-1]["refused"]
    assert len(refused) == 6
    assert all(why["why"].endswith("not finite") for why in refused)


def test_features_leave_the_global_space_less() -> None:
    """Check, behaviour: on a small Dirichlet problem the mean raw residual ||S_g^T Z_o|| of the clients' features
    after a round is lower with gamma > 0 than with gamma = 0."""
    method = fedrda(gamma=0)
    settings: dict[str, Any] = {"model": "mlp(hidden=32)", "lr": 0.05, "momentum": 0.9, "epochs": 3}
    common = Lab(method, digits(6, "dirichlet:0.1"), **settings).rounds(range(6), range(6))
    residuals: list[list[float]] = []
    for gamma in (0.0, 0.1, 1.0):
        lab = Lab(fedrda(gamma=gamma), common.federation, **settings)
        lab.server.resume(common.server.state(), 2)
        residuals.append([])
        for k in lab.federation.eligible:
            client = lab.trained(k)
            lab.server.round = 2
            before, after = (
                piece(lab)._seen(client, frozen)[0].detach()
                for frozen in (client.frozen(client.received, client.received_buffers), None)
            )
            residuals[-1].append(float((after @ piece(lab)._space(before)).norm(dim=1).mean()))
    none, little, much = residuals
    assert sum(much) < 0.5 * sum(none)
    assert sum(little) < 0.95 * sum(none)
    assert all(with_gamma < without for with_gamma, without in zip(much, none, strict=True))

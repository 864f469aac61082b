"""FedSCE: two models at every client, a subspace for one, an average by contribution for the other."""

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, batches, dealt, digits, far, handed_out, probed, run, shards
from torch import Tensor, nn

from fedalloy import models
from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.imports import Imports
from fedalloy.core.net import Inputs, Net
from fedalloy.core.registry import make
from fedalloy.core.wire import Items
from fedalloy.data import Dataset, load
from fedalloy.data.federation import Federation
from fedalloy.errors import FedAlloyError, FedAlloyWarning
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Record, Setup, play, resume, train
from fedalloy.mechanisms.mutual import divergence
from fedalloy.methods import fedsce, local
from fedalloy.methods.fedsce import contributions, outside, own_layers
from fedalloy.round.client import Client, Step
from fedalloy.round.replica import Replica, Replicas

SMALL: dict[str, Any] = {"p": 1, "mu": 0.1}  # what a net of two layers stands
ALONE: dict[str, Any] = {"mutual": False, "contribution": False}  # no KL, uniform weights
DIGITS = Inputs("image", (1, 8, 8), 10)
AUX_UP = ("share.weights", "share.buffers", "contribution.moved", "contribution.shifted")


def dropping(inputs: Inputs) -> Net:
    """A net that draws random numbers in every step."""
    body = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.ReLU(), nn.Dropout(0.5))
    return Net(body, nn.Linear(8, inputs.classes))


def without_affine(inputs: Inputs) -> Net:
    """A net whose last but one layer has no parameters."""
    hidden = [nn.Linear(64, 8), nn.Linear(8, 8), nn.Linear(8, 8)]
    body = nn.Sequential(nn.Flatten(), *hidden, nn.BatchNorm1d(8, affine=False))
    return Net(body, nn.Linear(8, inputs.classes))


class _Bare(nn.Module):
    def __init__(self, inputs: Inputs) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(64, inputs.classes))

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1) @ self.matrix


def without_layers(inputs: Inputs) -> Net:
    """A net of parameters that belong to no known layer."""
    net = Net(nn.Flatten(), nn.Linear(64, inputs.classes))
    net.body, net.head = _Bare(inputs), nn.Identity()
    return net


def copied(items: Items) -> Items:
    return {name: value.clone() for name, value in items.items()}


# The average by contribution


@pytest.mark.parametrize("values", [[1.0, 2.0, 5.0], [0.0, 3.0], [7.0], [1e-30, 1e30]])
def test_contributions_are_shares(values: list[float]) -> None:
    """Check: W_m >= 0 and sum W_m = 1 (Eq 14)."""
    found = contributions(values)
    assert sum(found) == pytest.approx(1)
    assert min(found) >= 0
    assert found == pytest.approx([value / sum(values) for value in values])


@pytest.mark.parametrize("value", [0.0, 1e-20, 3.0])
def test_equal_contributions_are_equal_shares(value: float) -> None:
    """Check: equal F for all clients gives W_m = 1/M; so does no movement at all (Eq 14 would divide by 0)."""
    assert contributions([value] * 5) == pytest.approx([0.2] * 5)


def averaged(lab: Lab, key: str, shares: Sequence[float]) -> Tensor:
    parts = [share * lab.sent(k, key).double() for k, share in zip(sorted(lab.replies), shares, strict=True)]
    return torch.stack(parts).sum(0).float()


@pytest.mark.parametrize("squared", [False, True])
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_the_server_averages_by_contribution(model: str, squared: bool) -> None:
    """theta_g <- sum_m W_m theta_gm with W_m from Eqs 13-15, the auxiliary model's BatchNorm statistics alike.

    F_1 is the distance moved, F_2 that of the features over all samples; `squared` leaves its root out.
    """
    lab = Lab(fedsce(squared=squared, **SMALL), digits(), model, lr=0.05)
    lab.round([0, 1, 4])
    before = lab.weights.clone(), lab.server.buffers.clone()
    lab.round([0, 2, 5])
    f = []
    for k, reply in lab.replies.items():
        data = lab.federation.client(k)
        z = [
            aux(model, *state)(data.prepare(data.x, None)).features
            for state in (before, [reply.items[key] for key in AUX_UP[:2]])
        ]
        f_2 = float((z[0] - z[1]).norm()) ** (2 if squared else 1)
        f.append((float((reply.items["share.weights"] - before[0]).norm()), f_2))
        assert float(reply.items["contribution.moved"]) == pytest.approx(f[-1][0], rel=1e-5)
        assert float(reply.items["contribution.shifted"]) == pytest.approx(f[-1][1], rel=1e-4)
    shares = [[value / sum(row) for value in row] for row in zip(*f, strict=True)]
    w = [sum(both) / 2 for both in zip(*shares, strict=True)]
    assert sum(w) == pytest.approx(1)
    assert max(w) - min(w) > 0.01
    assert far(lab.weights, averaged(lab, "share.weights", w)) < 1e-5
    if len(lab.server.buffers):
        assert far(lab.server.buffers, averaged(lab, "share.buffers", w)) < 1e-5


def aux(model: str, flat: Tensor, buffers: Tensor) -> Net:
    """An auxiliary model with these weights, in eval mode."""
    replica = Replica(local(), model, DIGITS, 0, imports=Imports())
    replica.weights.load(flat, buffers)
    net: Net = replica.net.eval().requires_grad_(False)
    return net


def test_without_contribution_everyone_counts_the_same() -> None:
    """Fig. 4: averaging in place of CE; sizes do not matter and nothing but the model goes up."""
    lab = Lab(fedsce(contribution=False, **SMALL), digits(), lr=0.05)
    lab.round([0, 1, 4])
    assert len(set(lab.sizes)) > 1
    assert far(lab.weights, averaged(lab, "share.weights", [1 / 3] * 3)) < 1e-6
    assert lab.replies[0].items.keys() == set(AUX_UP[:2])


def test_identical_clients_weigh_the_same() -> None:
    """Check: identical clients (same data, seed, architecture) give equal W_m."""
    lab = Lab(fedsce(**SMALL), dealt([range(50)] * 3), lr=0.05, batch=50, epochs=2)
    own = {k: lab.trained(k).received for k in range(3)}
    assert all(torch.equal(own[0], other) for other in own.values())
    lab.server.round = 0
    lab.round()
    for key in AUX_UP[2:]:
        shares = contributions([float(lab.sent(k, key)) for k in range(3)])
        assert shares == pytest.approx([1 / 3] * 3, rel=1e-4)


def test_nobody_moved() -> None:
    """Pitfall: every F is 0: 1/M for all, and the model stays where it is."""
    lab = Lab(fedsce(**SMALL), digits(), lr=0.0)
    before = lab.weights.clone()
    lab.round([0, 1, 2])
    assert [float(lab.sent(k, key)) for k in range(3) for key in AUX_UP[2:]] == [0] * 6
    assert far(lab.weights, before) < 1e-7


def test_larger_clients_weigh_more() -> None:
    """Pitfall: F_2 sums over the samples, so that it grows with their number; we follow the sum."""
    lab = Lab(fedsce(**SMALL), dealt([range(40), [*range(40)] * 4]), lr=0.05, batch=10**6)
    lab.round()
    few, many = (float(lab.sent(k, "contribution.shifted")) for k in (0, 1))
    assert many / few == pytest.approx(2, rel=1e-3)  # the square root of 4


# The subspace


@pytest.mark.parametrize("rank", [1, 3])
def test_projection_loss(rank: int) -> None:
    """Check: L_proj = 0 when delta lies in span(P), and equals ||delta||^2 when delta is orthogonal to it."""
    draw = torch.Generator().manual_seed(0)
    q = torch.linalg.qr(torch.randn(20, rank + 2, generator=draw, dtype=torch.float64)).Q
    P = q[:, :rank]
    inside = P @ torch.randn(rank, generator=draw, dtype=torch.float64)
    beside = q[:, rank:] @ torch.ones(2, dtype=torch.float64)
    assert float(outside(inside, P).square().sum()) < 1e-25
    assert far(outside(beside, P), beside) < 1e-12
    assert float(outside(inside + beside, P).square().sum()) == pytest.approx(2)


@pytest.mark.parametrize("mu", [0.1, 5.0])
def test_gradient_of_the_projection(mu: float) -> None:
    """Pitfall: the gradient is 2 mu (I - P P^T) delta, as autograd has it, delta from the round's start; first 0."""
    method, inner, outer = probed(fedsce(mu=mu, p=1, rank=2))
    lab = Lab(method, digits(), lr=0.01, epochs=2)
    lab.round([0])
    for seen in (inner.points, inner.gradients, outer.gradients):
        seen.clear()
    P = lab.keeps[0]["subspaceconstraint.P"].clone()
    client = lab.trained(0)
    span = slice(64 * 16 + 16, client.weights.span("main").stop)  # the head of the own model
    assert len(P) == span.stop - span.start == 16 * 10 + 10
    assert len(inner.points) > 5
    for i, (at, loss, total) in enumerate(zip(inner.points, inner.gradients, outer.gradients, strict=True)):
        delta = (at - client.received)[span].requires_grad_()
        proj = mu * (P @ P.T @ delta - delta).square().sum()
        (expected,) = torch.autograd.grad(proj, delta)
        added = total - loss
        assert far(added[span], expected) < 1e-6
        assert (float(expected.norm()) > 0) == (i > 0)
        added[span] = 0
        assert not bool(added.any())  # neither the other layers nor the auxiliary model


def bases(lab: Lab, rounds: int, client: int = 0) -> list[tuple[Tensor, Tensor]]:
    """P after every round, and the move of the constrained layers in that round."""
    found = []
    for _ in range(rounds):
        made = lab.trained(client)
        memo = made.states["subspaceconstraint"].scratch
        delta = made.weights.flat[memo["span"]] - made.received[memo["span"]]
        lab.server.round -= 1
        lab.round([client])
        found.append((lab.keeps[client]["subspaceconstraint.P"].clone(), delta))
    return found


@pytest.mark.parametrize("every", [1, 2, 3])
def test_the_subspace_follows_the_moves(every: int) -> None:
    """Check: P^T P = I_R after every update, which comes in rounds 0, s, 2 s: U_R of [P, delta] (Eq 8)."""
    lab = Lab(fedsce(mu=0.01, p=1, rank=2, every=every), digits(), lr=0.5, epochs=2)
    before = lab.trained(0).states["subspaceconstraint"].persistent["P"].clone()
    lab.server.round = 0
    assert far(before.T @ before, torch.eye(2)) < 1e-5
    for t, (P, delta) in enumerate(bases(lab, 5)):
        assert P.shape == (170, 2)
        assert far(P.T @ P, torch.eye(2)) < 1e-5
        if t % every:
            assert torch.equal(P, before)
        else:
            pair = torch.cat([before, delta[:, None]], dim=1).double()
            top = torch.linalg.eigh(pair @ pair.T).eigenvectors[:, -2:].float()
            assert far(P @ P.T, top @ top.T) < 1e-4
            assert far(P @ P.T, before @ before.T) > 1e-3
        before = P


def test_small_moves_do_not_turn_the_subspace() -> None:
    """Eq 8 as printed: next to the unit columns of P, a move shorter than 1 falls to the truncation."""
    lab = Lab(fedsce(mu=0.01, p=1, rank=2, every=1), digits(), lr=0.01)
    before = lab.trained(0).states["subspaceconstraint"].persistent["P"].clone()
    lab.server.round = 0
    for P, delta in bases(lab, 3):
        assert 0.01 < float(delta.norm()) < 0.5
        assert far(P @ P.T, before @ before.T) < 0.01


def test_every_client_has_a_subspace_of_its_own() -> None:
    lab = Lab(fedsce(**SMALL), digits(), lr=0.05)
    first, second, again = (
        lab.trained(k).states["subspaceconstraint"].persistent["P"].clone() for k in (0, 1, 0)
    )
    assert torch.equal(first, again)
    assert far(first, second) > 0.01


def test_a_rank_beyond_the_layers_constrains_nothing() -> None:
    ends = []
    for method in (fedsce(mu=5, p=1, rank=500, **ALONE), local()):
        lab = Lab(method, shards(40), lr=0.05).rounds([0], [0])
        ends.append(lab.keeps[0]["own.weights"])
    assert far(*ends) < 1e-4


@pytest.mark.parametrize(
    ("model", "p", "constrained"),
    [
        (MLP, 1, ["head"]),
        ("mlp(hidden=16, depth=3)", 2, ["body.5", "head"]),
        ("lenet", 2, ["body.9", "head"]),
        ("cnn-bn", 3, ["body.6", "body.7", "head"]),
        ("test_fedsce:without_affine", 2, ["body.3", "head"]),
    ],
)
def test_the_last_layers_are_constrained(model: str, p: int, constrained: list[str]) -> None:
    """The last p parameterised layers of the own model, norms counted; never those of the auxiliary model."""
    lab = Lab(fedsce(p=p, aux="lenet"), digits(), model)
    client = lab.trained(0)
    names = own_layers(client.net)[-p:]
    assert names == constrained
    span: slice = client.states["subspaceconstraint"].scratch["span"]
    spans = client.weights.layout.spans
    inside = {name for name, (a, b) in spans.items() if span.start <= a and b <= span.stop}
    assert {name.rpartition(".")[0] for name in inside} == set(names)
    assert span.stop == client.weights.span("main").stop == client.weights.span("aux").start
    size = sum(p.numel() for name in names for p in client.net.get_submodule(name).parameters())
    assert client.states["subspaceconstraint"].persistent["P"].shape == (size, 3)


def test_the_span_is_found_once_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """A walk over all modules belongs in no step."""
    walks = []
    walk = nn.Module.named_modules

    def counted(self: nn.Module, *args: Any, **rest: Any) -> Any:
        walks.append(self)
        return walk(self, *args, **rest)

    numbers = []
    for samples in (32, 320):
        lab = Lab(fedsce(**SMALL), shards(samples), lr=0.05).rounds([0])
        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "named_modules", counted)
            walks.clear()
            assert lab.trained(0).steps == samples // 32
            numbers.append(sum(net is lab.replica.net for net in walks))
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize("p", [2, 5])
def test_a_warning_when_most_of_the_net_is_constrained(p: int) -> None:
    """Pitfall: p = 5 is a sliver of a ResNet but most of a small net."""
    with pytest.warns(FedAlloyWarning, match=r"covers 2 of the 2 layers of mlp\(hidden=16\); .* p <= 2"):
        Lab(fedsce(p=p), digits())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Lab(fedsce(p=1), digits())
        Replica(fedsce(), "resnet18", DIGITS, 0)


def test_a_net_without_layers_is_an_error() -> None:
    with pytest.raises(FedAlloyError, match="has no linear, convolutional or norm layer"):
        Lab(fedsce(aux=MLP), digits(), "test_fedsce:without_layers")


# The own model


@pytest.mark.parametrize("model", [MLP, BATCHNORM, "lenet", "test_fedsce:dropping"])
@pytest.mark.parametrize("switches", [{"mu": 0.0, "p": 1}, {"subspace": False}], ids=str)
def test_without_its_terms_the_own_model_trains_as_local(model: str, switches: dict[str, Any]) -> None:
    """Check: with mu = 0, no KL and uniform weights, theta_m trains exactly as SOLO, bit for bit.

    Table 4, row "none". The auxiliary model draws its dropout elsewhere.
    """
    settings: dict[str, Any] = {"lr": 0.05, "epochs": 2, "momentum": 0.9, "batch": 16}
    alone = Lab(local(), shards(40, 33), model, **settings)
    lab = Lab(fedsce(**ALONE, **switches), alone.federation, model, **settings)
    for _ in range(3):
        alone.round()
        lab.round()
        for k in (0, 1):
            assert torch.equal(lab.keeps[k]["own.weights"], alone.keeps[k]["own.weights"])
            own = len(alone.keeps[k]["own.buffers"])
            assert torch.equal(lab.keeps[k]["own.buffers"], alone.keeps[k]["own.buffers"])
            assert (own > 0) == (model == BATCHNORM)
    assert (
        far(lab.weights, lab.replica.initial[lab.replica.weights.span("aux")]) > 1e-3
    )  # the other one trains too


class Hand:
    """A client's round as the equations read: two nets, two losses, two optimisers, autograd for everything."""

    def __init__(self, lab: Lab, client: int, **chosen: Any) -> None:
        given = {"mu": 5.0, "p": 5, "subspace": True, "mutual": True, "adaptive": True}
        self.how: dict[str, Any] = {**given, **chosen}
        self.lab, self.id = lab, client
        started = lab.trained(client)  # for what the client begins with
        lab.server.round -= 1
        if self.how["subspace"]:
            self.P = started.states["subspaceconstraint"].persistent["P"].clone()
        started.weights.load(started.received, started.received_buffers)
        own = copy.deepcopy(started.net)
        self.aux = own.aux
        del own.aux
        self.own = own

    def train(self) -> tuple[Tensor, Tensor]:
        """The parameters of both models at the end of the round."""
        local, how = self.lab.local, self.how
        optimisers = [
            torch.optim.SGD(net.parameters(), lr=local.lr, momentum=local.momentum)
            for net in (self.own, self.aux)
        ]
        last = self.last()
        began = torch.cat([p.detach().flatten() for p in last])
        self.own.train(), self.aux.train()
        for x, y in batches(self.lab, self.id, self.lab.server.round + 1):
            q_l, q_g = self.own(x).logits, self.aux(x).logits
            loss_l, loss_g = F.cross_entropy(q_l, y), F.cross_entropy(q_g, y)
            scale = (loss_l + loss_g).item() if how["adaptive"] else 1
            if how["mutual"]:
                loss_l = loss_l + kl(q_g.detach(), q_l) / scale
                loss_g = loss_g + kl(q_l.detach(), q_g) / scale
            if how["subspace"]:
                delta = torch.cat([p.flatten() for p in last]) - began
                loss_l = loss_l + how["mu"] * (self.P @ self.P.T @ delta - delta).square().sum()
            for optimiser, loss in zip(optimisers, (loss_l, loss_g), strict=True):
                optimiser.zero_grad()
                loss.backward()  # type: ignore[no-untyped-call]
                optimiser.step()
        own, aux = (
            torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (self.own, self.aux)
        )
        return own, aux

    def last(self) -> list[nn.Parameter]:
        kinds = (nn.Linear, nn.Conv2d, nn.BatchNorm1d, nn.BatchNorm2d)
        layers = [module for module in self.own.modules() if isinstance(module, kinds)]
        return [p for layer in layers[-self.how["p"] :] for p in layer.parameters()]


def kl(a: Tensor, b: Tensor) -> Tensor:
    """Eq 5."""
    p, q = a.softmax(1), b.softmax(1)
    return (p * (p / q).log()).sum(1).mean()


@pytest.mark.parametrize(
    ("model", "aux"), [(MLP, None), (BATCHNORM, BATCHNORM), ("lenet", BATCHNORM), ("cnn-bn", MLP)]
)
@pytest.mark.parametrize(
    "chosen",
    [
        {"mu": 0.5, "p": 1},  # LSL + DML + CE
        {"mu": 0.5, "p": 1, "contribution": False},  # LSL + DML
        {"mu": 0.5, "p": 1, **ALONE},  # LSL
        {"subspace": False},
        {"mu": 5.0, "p": 1, "adaptive": False},
    ],
    ids=str,
)
def test_a_round_is_that_of_the_equations(model: str, aux: str | None, chosen: dict[str, Any]) -> None:
    """Checks: the whole client step, the rows of Table 4.

    KL gradients do not mix between the models, the denominator is a constant, the projection is that of Eq 9.
    """
    lab = Lab(fedsce(aux=aux, **chosen), shards(60, 40), model, lr=0.05, epochs=2, batch=16, momentum=0.5)
    lab.round()
    own, common = Hand(lab, 0, **chosen).train()
    before = copied(lab.keeps[0])
    lab.round([0])
    assert far(lab.keeps[0]["own.weights"], own) < 2e-5
    assert far(lab.sent(0, "share.weights"), common) < 2e-5
    assert far(lab.keeps[0]["own.weights"], before["own.weights"]) > 1e-3


@pytest.mark.parametrize(
    "other",
    [{"mu": 0.5}, {"rank": 1}, {"every": 1}, {"adaptive": False}, {"mutual": False}, {"subspace": False}],
    ids=str,
)
def test_settings_matter(other: dict[str, Any]) -> None:
    ends = []
    for chosen in ({}, other):
        lab = Lab(fedsce(**{**SMALL, "mu": 5.0, **chosen}), digits(), lr=0.1, epochs=2)
        ends.append(lab.rounds([0, 1], [0, 1], [0, 1]).keeps[0]["own.weights"])
    assert far(*ends) > 1e-5


def test_divergence() -> None:
    """Eq 5: KL(softmax(a) || softmax(b)), batch mean; 0 for equal scores, never negative."""
    a, b = torch.randn(2, 6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert float(divergence(a, b)) == pytest.approx(float(kl(a, b)), abs=1e-12)
    assert float(divergence(a, b)) > 0
    assert float(divergence(a, b)) != pytest.approx(float(divergence(b, a)))
    assert float(divergence(a, a + 1)) == pytest.approx(0, abs=1e-12)


def test_two_perfect_models_have_a_finite_loss() -> None:
    """Eq 6 divides by the sum of both cross-entropies, which may be 0."""
    federation = dealt([[i for i, y in enumerate(load("digits", None).y[:200].tolist()) if y == 3]])
    client = Lab(fedsce(**SMALL), federation, lr=0.05).trained(0)
    biases = client.weights.views(client.weights.flat)
    for name in ("head.bias", "aux.head.bias"):
        biases[name][3] = 1e4
    step = Step(client, client.data.prepare(client.data.x, None), client.data.y, torch.arange(5), 0)
    assert bool(torch.isfinite(client._innermost(step)).all())
    assert float(step.value) == 0


# Wire, architectures, runs


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_bytes(model: str) -> None:
    """Down: theta_g; up: theta_gm and two floats. The own model and P never travel."""
    lab = Lab(fedsce(**SMALL), digits(), model, lr=0.05)
    size = models.size_of(model, DIGITS)
    each = 4 * (size.parameters + size.buffers)
    mail = lab.server.send(0)
    assert mail.items.keys() == set(AUX_UP[:2])
    assert sum(4 * value.numel() for value in mail.items.values()) == each
    outcome = lab.round([0, 1, 2])
    assert lab.replies[0].items.keys() == set(AUX_UP)
    assert sum(outcome.bytes_up.values()) == 3 * (each + 8 + 8)  # the last 8: how many samples
    assert lab.keeps[0].keys() == {"own.weights", "own.buffers", "subspaceconstraint.P"}
    assert len(lab.keeps[0]["own.weights"]) == size.parameters
    assert len(lab.keeps[0]["own.buffers"]) == size.buffers
    sent = lab.sent(0, "share.weights")
    assert far(sent, lab.keeps[0]["own.weights"]) > 1e-3


def test_own_models_stay_at_home() -> None:
    """The own model goes on where it stopped, whatever the server's model became."""
    lab = Lab(fedsce(**SMALL), digits(), BATCHNORM, lr=0.05)
    lab.round([0, 1])
    kept = copied(lab.keeps[0])
    client: Client = lab.trained(0)
    main, common = client.weights.span("main"), client.weights.span("aux")
    assert torch.equal(client.received[main], kept["own.weights"])
    assert torch.equal(client.received[common], lab.weights)
    assert torch.equal(client.received_buffers[client.weights.buffer_span("main")], kept["own.buffers"])


MODELS = ("cnn-bn", "lenet", "mlp(hidden=16)")


def test_the_smallest_architecture_is_the_auxiliary_one() -> None:
    """The paper takes the smallest client architecture; or the one that the user names."""
    sizes = {model: models.size_of(model, DIGITS).parameters for model in MODELS}
    assert min(sizes, key=lambda model: sizes[model]) == "mlp(hidden=16)"
    for name, expected in ((None, "mlp(hidden=16)"), ("lenet", "lenet")):
        replicas = Replicas(fedsce(p=1, aux=name), MODELS, DIGITS, 0)
        replicas.check()
        for k, model in enumerate(MODELS):
            replica = replicas.of(k)
            span = replica.weights.span("aux")
            assert span.stop - span.start == sizes[expected]
            assert replica.weights.span("main").stop == sizes[model]
    with pytest.raises(FedAlloyError, match="unknown model"):
        Replicas(fedsce(p=1, aux="lenett"), MODELS, DIGITS, 0).of(0)


def test_architectures_may_differ(tmp_path: Path) -> None:
    """Client m has architecture m mod 3; all upload the same auxiliary model; D.Avg and C.Avg are reported."""
    federation = digits(6, "dirichlet:0.5", 0.25)
    result = run(tmp_path, federation, "fedsce(p=1, mu=0.1)", models=",".join(MODELS), rounds=2, lr=0.05)
    d_g = models.size_of("mlp(hidden=16)", DIGITS).parameters
    for line in result.history:
        assert sum(line["bytes_up"].values()) == 6 * (4 * d_g + 8 + 8)
        assert sum(line["bytes_down"].values()) == 6 * 4 * d_g
        assert not line["refused"]
    metrics = result.history[-1]["metrics"]
    assert result.summary["metric"] == "personal_local_acc"
    assert {"personal_local_acc", "personal_local_acc_clients"} <= metrics.keys()
    assert "global_acc" not in metrics
    for k in range(6):
        size = models.size_of(MODELS[k % 3], DIGITS)
        kept = private(tmp_path / "run", k)
        assert len(kept["own.weights"]) == size.parameters
        assert len(kept["own.buffers"]) == size.buffers


@pytest.mark.parametrize("aux_model", ["mlp(hidden=16, norm=batch)", "cnn-bn"])
def test_the_auxiliary_model_is_tried_on_the_global_test_set(tmp_path: Path, aux_model: str) -> None:
    """Fig. 4: beside the own models, with weights and statistics as the server holds them."""
    federation, method = digits(), f"fedsce(p=1, mu=0.1, aux='{aux_model}')"
    run(tmp_path, federation, method, models="lenet,cnn-bn", rounds=2, lr=0.1, engine="workers", workers=2)
    line, state = RunFolder(tmp_path / "run").history()[-1], RunFolder(tmp_path / "run").restore()[1]
    net = aux(aux_model, state["server.weights"], state["server.buffers"])
    index = federation.split.global_test
    logits = net(federation.prepare(federation.dataset.x[index], None)).logits
    y = federation.dataset.y[index]
    assert line["metrics"]["aux_acc"] == pytest.approx(
        float((logits.argmax(1) == y).double().mean()), abs=0.01
    )
    assert line["metrics"]["aux_loss"] == pytest.approx(F.cross_entropy(logits, y).item(), rel=1e-3)
    assert "global_acc" not in line["metrics"]


def private(folder: Path, client: int) -> Items:
    return RunFolder(folder).vault.load(client, before=10**6)


class _Stopped(Exception):
    """Stands for whatever may stop a run."""


def test_private_model_and_subspace_survive_a_resume(tmp_path: Path) -> None:
    federation = digits()
    method = "fedsce(p=1, mu=0.1, every=2)"
    settings: dict[str, Any] = {"rounds": 4, "lr": 0.1}
    whole = run(tmp_path, federation, method, BATCHNORM, **settings)

    def stop(record: Record) -> None:
        if record["round"] == 2:
            raise _Stopped

    values = {**federation.origin, "model": BATCHNORM, "method": method, "engine": "inline", **settings}
    setup = Setup(Config.of(values), federation)
    with pytest.raises(_Stopped):
        play(setup, RunFolder.create(tmp_path / "stopped", setup.config), stop)
    resumed = resume(tmp_path / "stopped")
    assert resumed.summary["weights_sha256"] == whole.summary["weights_sha256"]
    for k in range(6):
        kept, expected = private(tmp_path / "stopped", k), private(tmp_path / "run", k)
        assert kept.keys() == expected.keys() == {"own.weights", "own.buffers", "subspaceconstraint.P"}
        assert all(torch.equal(kept[name], expected[name]) for name in kept)


@pytest.mark.parametrize("switches", ["", ", mutual=False", ", mutual=False, contribution=False"])
def test_a_run_that_blows_up_is_recorded_as_diverged(switches: str, tmp_path: Path) -> None:
    """A move that is not finite has no SVD; the run ends with a record that says why."""
    method = f"fedsce(p=1, mu=0.1{switches})"
    result = run(tmp_path, digits(), method, rounds=3, lr=1e6, weight_decay=1e6)
    assert result.summary["status"] == "diverged"
    assert all(why["why"].endswith("not finite") for why in result.history[-1]["refused"])


def test_it_needs_an_auxiliary_model() -> None:
    for part in ("mutual", "contribution"):
        with pytest.raises(AlloyConflict, match="needs an auxiliary model"):
            make(f"fedavg+{part}")


def two_domains() -> Federation:
    """Digits as they are for two clients, dark on bright for the two others."""
    plain = load("digits", None)
    x = plain.x.clone()
    train, test = (
        [range(150), range(150, 300), range(300, 450), range(450, 600)],
        [range(600, 800), range(800, 1000), range(1000, 1200), range(1200, 1400)],
    )
    for span in (*train[2:], *test[2:]):
        x[span.start : span.stop] = int(x.max()) - x[span.start : span.stop]
    dataset = Dataset(
        "domains", x, plain.y, plain.train, plain.kind, plain.classes, mean=plain.mean, std=plain.std
    )
    return handed_out(dataset, train, test)


def test_contribution_is_no_worse_than_averaging(tmp_path: Path) -> None:
    """Check, behaviour: on a two-domain toy, D.Avg with CE at least matches uniform averaging within noise."""
    found = []
    for contribution in (True, False):
        method = fedsce(contribution=contribution, **SMALL)
        result = train(
            two_domains(), MLP, method, out=tmp_path / str(contribution), engine="inline", rounds=8, lr=0.1
        )
        last = [line["metrics"]["personal_local_acc"] for line in result.history[-4:]]
        found.append(sum(last) / 4)
    assert min(found) > 0.6
    assert found[0] > found[1] - 0.02

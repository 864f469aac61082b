"""FedKD: teacher and student distil from each other, and the student's updates travel as truncated SVDs."""

import copy
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from laboratory import BATCHNORM, MLP, Lab, batches, by_class, digits, far, run, shards
from torch import Tensor, nn

from fedalloy import models
from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.imports import Imports
from fedalloy.core.net import Inputs, Net
from fedalloy.core.random import generator
from fedalloy.core.registry import make
from fedalloy.core.wire import bytes_of
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Setup
from fedalloy.mechanisms.svd import SVD, Matrix, matrices_of
from fedalloy.methods import fedkd
from fedalloy.round.client import Step
from fedalloy.round.replica import Replica
from fuzzing import examples

DIGITS = Inputs("image", (1, 8, 8), 10)
MIXED = ("cnn-bn", "lenet", "mlp(hidden=16)", "resnet18(width=0.25)", "vit-tiny")


class _Odd(Net):
    """Tensors of many shapes, among them vectors and convolutions of three."""

    def __init__(self) -> None:
        body = nn.Sequential(nn.Conv2d(1, 6, 3), nn.Conv2d(6, 5, (2, 3), bias=False), nn.BatchNorm2d(5))
        body.extend([nn.Conv2d(5, 3, 3), nn.Linear(20, 30)])
        super().__init__(body, nn.Linear(9, 3))


def odd(inputs: Inputs | None = None) -> Net:
    return _Odd()


def site_of(
    t_start: float = 0.95, t_end: float = 0.98, model: str = "test_fedkd:odd", **rest: Any
) -> Replica:
    return Replica(
        make(f"fedavg+svd(t_start={t_start}, t_end={t_end})"), model, DIGITS, 0, imports=Imports(), **rest
    )


def low_rank(replica: Replica, seed: int = 0) -> Tensor:
    """An update whose matrices have quickly falling spectra."""
    dice = generator(seed, "update")
    pieces = []
    for shape in replica.weights.layout.shapes.values():
        P, Q = shape[0], shape[1:].numel()
        scale = 3.0 ** -torch.arange(min(P, Q))
        left, right = torch.randn(P, len(scale), generator=dice), torch.randn(len(scale), Q, generator=dice)
        pieces.append(((left * scale) @ right).flatten())
    return torch.cat(pieces)


# The codec


@examples(80)
@given(st.integers(2, 12), st.integers(2, 12), st.integers(0, 12), st.floats(0.3, 1.0), st.integers(0, 1000))
def test_a_matrix_is_cut_at_its_energy(P: int, Q: int, rank: int, energy: float, seed: int) -> None:
    """Check: relative squared error <= 1 - T, by the smallest k that does it, full rank and zero included."""
    dice = generator(seed)
    dense = torch.randn(P, rank, generator=dice) @ torch.randn(rank, Q, generator=dice)
    matrix = Matrix(P, Q)
    k, coded = matrix.cut(dense.flatten(), energy)
    sigma = torch.linalg.svdvals(dense.double())
    total = float(sigma.square().sum())
    assert len(coded) == matrix.length(k)
    if not total:
        assert k == 0
    else:
        slack = 1e-6 * total
        assert float(sigma[:k].square().sum()) >= energy * total - slack
        assert k >= 1
        assert float(sigma[: k - 1].square().sum()) <= energy * total + slack
    back = matrix.rebuilt(k, coded).view(P, Q)
    assert float((back - dense).double().square().sum()) <= (1 - energy + 1e-5) * total
    if k * (P + Q + 1) >= P * Q:
        assert torch.equal(back, dense)  # dense, if that is no more


@pytest.mark.parametrize("shape", [(20, 50), (50, 20), (30, 30)])
def test_a_cut_matrix_is_that_of_the_svd(shape: tuple[int, int]) -> None:
    """U diag(sigma) V, sigma on the wire between orthonormal factors; k never falls when T rises."""
    dice = generator(1)
    dense = (torch.randn(shape[0], 6, generator=dice) * 2.0 ** -torch.arange(6)) @ torch.randn(
        6, shape[1], generator=dice
    )
    P, Q = shape
    U, sigma, V = torch.linalg.svd(dense, full_matrices=False)
    ranks = []
    for energy in (0.5, 0.8, 0.9, 0.95, 0.98, 0.999):
        k, coded = Matrix(P, Q).cut(dense.flatten(), energy)
        u, s, v = torch.split(coded, [P * k, k, k * Q])
        assert far(s, sigma[:k]) < 1e-4
        assert far(u.view(P, k).T @ u.view(P, k), torch.eye(k)) < 1e-5
        assert far(v.view(k, Q) @ v.view(k, Q).T, torch.eye(k)) < 1e-5
        assert far(Matrix(P, Q).rebuilt(k, coded).view(P, Q), (U[:, :k] * sigma[:k]) @ V[:k]) < 1e-4
        ranks.append(k)
    assert ranks == sorted(ranks)
    assert ranks[0] < ranks[-1]


def test_only_full_rank_qualifies() -> None:
    """Public loops look at k below full rank alone, and send zeros where only the full set has the energy."""
    k, coded = Matrix(40, 40).cut(torch.eye(40).flatten(), 0.98)
    assert k == 40
    assert torch.equal(coded, torch.eye(40).flatten())


def test_tensors_are_matrices_of_out_by_rest() -> None:
    """Convolutions too; vectors, and matrices too thin for factors, travel raw."""
    replica = site_of()
    found = [(m.P, m.Q, m.pays) for m in matrices_of(replica)]
    assert found == [
        (6, 9, True),
        (6, 1, False),
        (5, 36, True),
        (5, 1, False),
        (5, 1, False),
        (3, 45, True),
        (3, 1, False),
        (30, 20, True),
        (30, 1, False),
        (3, 9, True),
        (3, 1, False),
    ]
    assert sum(P * Q for P, Q, _ in found) == len(replica.initial)


@pytest.mark.parametrize("energy", [0.5, 0.95, 1.0])
def test_bytes_are_counted(energy: float) -> None:
    """Check: counted bytes equal sum 4 k (P + Q + 1) plus vectors, dense matrices and a rank for every matrix."""
    replica = site_of(energy, energy)
    value = low_rank(replica)
    coded = replica.encoded(value, 1)
    expected, dense = 0, 0
    for shape, piece in zip(
        replica.weights.layout.shapes.values(), replica.weights.views(value).values(), strict=True
    ):
        if len(shape) < 2:
            expected += 4 * len(piece)
            continue
        P, Q = shape[0], shape[1:].numel()
        sigma = torch.linalg.svdvals(piece.view(P, Q).double()).square()
        k = next(k for k in range(len(sigma) + 1) if sigma[:k].sum() >= energy * sigma.sum() - 1e-9)
        whole = k * (P + Q + 1) >= P * Q
        dense += whole
        expected += 4 + 4 * (P * Q if whole else k * (P + Q + 1))
    assert bytes_of({"coded": coded})["coded"] == expected
    assert len(coded) <= replica.coded_size == len(value) + 5
    assert (len(coded) == replica.coded_size) == (dense == 5) == (energy == 1.0)


@pytest.mark.parametrize("energy", [0.3, 0.9, 0.98, 1.0])
def test_errors_are_bounded_per_matrix(energy: float) -> None:
    """Check: relative squared error per matrix <= 1 - T; T = 1 rebuilds the update, vectors are exact."""
    replica = site_of(energy, energy)
    value = low_rank(replica)
    back = replica.as_sent(value, 1)
    for name, piece in replica.weights.views(value).items():
        found = replica.weights.views(back)[name]
        error = float((found - piece).square().sum() / piece.square().sum())
        assert error <= 1 - energy + 1e-6
        if piece.dim() < 2:
            assert torch.equal(found, piece)
    if energy == 1.0:
        assert far(back, value) < 1e-6


def test_several_updates_come_apart() -> None:
    replica = site_of(0.8, 0.8)
    coded = [replica.encoded(low_rank(replica, seed) * seed, 1) for seed in range(4)]
    assert len({len(one) for one in coded}) > 1
    assert len(replica.decoded(coded[0], 1).nonzero()) == 0  # an update of zeros: ranks and vectors alone
    found = replica.split(torch.cat(coded))
    assert len(found) == 4
    assert all(torch.equal(a, b) for a, b in zip(found, coded, strict=True))
    assert list(replica.split(torch.empty(0))) == []


@pytest.mark.parametrize("rank", [-1.0, 0.5, 7.0, 1e9, float("inf"), float("nan")])
def test_impossible_ranks_are_refused(rank: float) -> None:
    replica = site_of()
    coded = replica.encoded(low_rank(replica), 1)
    coded[0] = rank
    with pytest.raises(FedAlloyError, match="is no rank of a 6 x 9 matrix"):
        replica.decoded(coded, 1)


@pytest.mark.parametrize("size", [0, 3, 5, 40])
def test_cut_off_vectors_are_refused(size: int) -> None:
    replica = site_of()
    with pytest.raises(FedAlloyError, match=r"is no rank|are no matrices"):
        replica.decoded(replica.encoded(low_rank(replica), 1)[:size], 1)


def test_a_malformed_reply_does_not_stop_the_round() -> None:
    lab = Lab(fedkd(), digits(), lr=0.1)
    lab.server.round = 1
    replies = [lab.answer(lab.server.send(k)) for k in (0, 1, 2)]
    weights = replies[1].items["share.weights"].clone()
    weights[0] += 1
    bad = replace(replies[1], items=replies[1].items | {"share.weights": weights})
    outcome = lab.server.receive([0, 1, 2], [replies[0], bad, replies[2]])
    assert outcome.refused.keys() == {1}
    assert [reply.client for reply in outcome.accepted] == [0, 2]


def test_the_threshold_rises() -> None:
    """T(t) = T_start + (t + 1) / T_rounds (T_end - T_start), t from 0; the rounds are the run's unless told."""
    coder = SVD(0.9, 0.98)
    assert [coder.energy(site_of(rounds=4), round) for round in (1, 2, 3, 4, 5)] == pytest.approx(
        [0.92, 0.94, 0.96, 0.98, 0.98]
    )
    assert SVD(0.9, 0.98, rounds=2).energy(site_of(rounds=4), 1) == pytest.approx(0.94)
    assert coder.energy(site_of(), 3) == pytest.approx(0.98)
    values = {**digits().origin, "method": "fedkd", "model": MLP, "rounds": 8}
    setup = Setup(Config.of(values), digits())
    assert setup.method.claimant("encode") == SVD()
    assert SVD().energy(setup.replicas.of(0), 4) == pytest.approx(0.965)


# The student on its way


def test_full_energy_is_plain_averaging() -> None:
    """Check: T = 1: the student path equals uncompressed averaging; the teachers' too."""
    labs = [
        Lab(method, digits(), BATCHNORM, lr=0.05, epochs=2)
        for method in (fedkd(t_start=1.0, t_end=1.0), fedkd(compress=False))
    ]
    for chosen in ([0, 1, 5], [0, 1], [1, 5]):
        for lab in labs:
            lab.round(chosen)
        assert far(labs[0].weights, labs[1].weights) < 1e-5
        assert far(labs[0].server.buffers, labs[1].server.buffers) < 1e-5
        for k in chosen:
            assert far(labs[0].keeps[k]["own.weights"], labs[1].keeps[k]["own.weights"]) < 1e-5


def copies(lab: Lab, chosen: Sequence[int]) -> None:
    for k in chosen:
        assert torch.equal(lab.keeps[k]["share.x"], lab.server.previous)


@pytest.mark.parametrize("energy", [0.6, 0.95])
def test_all_students_are_the_same(energy: float) -> None:
    """Check: after each round all clients' theta_s are identical to the server's, also of who was away."""
    lab = Lab(fedkd(t_start=energy, t_end=energy), digits(), BATCHNORM, lr=0.1)
    dice = generator(3)
    for _ in range(15):
        count = int(torch.randint(1, 5, (), generator=dice))
        chosen = sorted(torch.randperm(6, generator=dice)[:count].tolist())
        lab.round(chosen)
        copies(lab, chosen)
    for k in range(6):
        client = lab.trained(k)
        lab.server.round -= 1
        assert torch.equal(client.received[client.weights.span("aux")], lab.weights)
        assert torch.equal(client.received_buffers[client.weights.buffer_span("aux")], lab.server.buffers)


def test_first_contact_is_dense_then_updates_travel() -> None:
    """Round 0 downlink: dense theta_s; later the compressed mean update, or those a client has missed."""
    lab = Lab(fedkd(t_start=0.5, t_end=0.5), digits(), lr=0.1)
    size = models.size_of(MLP, DIGITS).parameters
    lab.rounds([0, 1], [0], [0])
    lab.server.round += 1
    lengths = lab.server.states["share"].persistent["lengths"].tolist()
    assert len(lengths) == 3
    mails = {k: lab.server.send(k).items for k in (0, 1, 2)}
    assert [len(mails[k]["share.dense"]) for k in (0, 1, 2)] == [0, 0, size]
    assert [len(mails[k]["share.updates"]) for k in (0, 1, 2)] == [lengths[-1], sum(lengths), 0]
    assert sum(lengths) < size


def test_the_server_applies_what_it_broadcasts() -> None:
    """Rebuild each update, average with equal weights, compress the mean with the same T, apply what was sent."""
    lab = Lab(fedkd(t_start=0.7, t_end=0.7), shards(100, 20), lr=0.1).rounds([0, 1])
    before = lab.weights.clone()
    lab.round()
    moves = [lab.replica.decoded(lab.sent(k, "share.weights"), 2) for k in (0, 1)]
    mean = (moves[0] + moves[1]) / 2
    assert far(lab.weights, before + lab.replica.as_sent(mean, 2)) < 1e-5
    assert far(lab.weights, before + mean) > 1e-4


def test_compression_saves_without_harm(tmp_path: Path) -> None:
    """Check, behaviour: uplink bytes at T = 0.95 fall below dense on a CNN student; teachers are as good."""
    federation = digits(4, "dirichlet:0.5", 0.25)
    accuracy, up, down = {}, {}, {}
    for compress in (True, False):
        method = f"fedkd(student='cnn-feddw', t_end=0.95, compress={compress})"
        result = run(tmp_path / str(compress), federation, method, rounds=4, epochs=2, lr=0.1)
        last = result.history[-1]
        accuracy[compress] = last["metrics"]["personal_local_acc"]
        up[compress], down[compress] = (sum(last[way].values()) for way in ("bytes_up", "bytes_down"))
    dense = 4 * 4 * models.size_of("cnn-feddw", DIGITS).parameters
    assert up[False] == down[False] == dense
    assert max(up[True], down[True]) < 0.3 * dense
    assert accuracy[True] > accuracy[False] - 0.05


# The losses


def halves(lab: Lab, client: int) -> tuple[Net, Net, nn.Module | None]:
    """Copies of teacher, student and W_h as the client begins the coming round."""
    begun = lab.trained(client)
    lab.server.round -= 1
    begun.weights.load(begun.received, begun.received_buffers)
    teacher = copy.deepcopy(begun.net)
    student, bridge = teacher.aux, dict(teacher.named_children()).get("bridge")
    del teacher.aux
    if bridge is not None:
        del teacher.bridge
    return teacher, student, bridge


def kl(a: Tensor, b: Tensor) -> Tensor:
    p, q = a.softmax(1), b.softmax(1)
    return (p * (p / q).log()).sum(1).mean()


def flat(net: nn.Module) -> Tensor:
    return torch.cat([p.detach().flatten() for p in net.parameters()])


@pytest.mark.parametrize(
    ("model", "student"), [(MLP, None), (BATCHNORM, BATCHNORM), ("lenet", BATCHNORM), ("cnn-bn", MLP)]
)
@pytest.mark.parametrize(
    "chosen", [{}, {"hidden": False}, {"student_lr": 0.02}, {"clip": 0.5, "student_lr": 0.2}], ids=str
)
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
def test_a_round_is_that_of_the_equations(
    model: str, student: str | None, chosen: dict[str, Any], weight_decay: float
) -> None:
    """Three optimisers: L_t moves the teacher at eta_t, L_s the student at eta_s and W_h at eta_t."""
    lab = Lab(
        fedkd(student=student, compress=False, **chosen),
        shards(60, 40),
        model,
        lr=0.05,
        epochs=2,
        batch=16,
        momentum=0.5,
        weight_decay=weight_decay,
    )
    lab.round()
    teacher, pupil, bridge = halves(lab, 0)
    assert (bridge is None) == (chosen.get("hidden") is False)
    rates = [0.05, chosen.get("student_lr", 0.05), 0.05]
    parts = [part for part in (teacher, pupil, bridge) if part is not None]
    optimisers = [
        torch.optim.SGD(part.parameters(), lr=rate, momentum=0.5, weight_decay=weight_decay)
        for part, rate in zip(parts, rates, strict=False)
    ]
    teacher.train(), pupil.train()
    for x, y in batches(lab, 0, 2):
        t, s = teacher(x), pupil(x)
        ce_t, ce_s = F.cross_entropy(t.logits, y), F.cross_entropy(s.logits, y)
        D = (ce_t + ce_s).item()
        loss_t = ce_t + kl(s.logits.detach(), t.logits) / D
        loss_s = ce_s + kl(t.logits.detach(), s.logits) / D
        if bridge is not None:
            loss_t = loss_t + F.mse_loss(t.features, bridge(s.features).detach()) / D
            loss_s = loss_s + F.mse_loss(bridge(s.features), t.features.detach()) / D
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss_t.backward()  # type: ignore[no-untyped-call]
        loss_s.backward()  # type: ignore[no-untyped-call]
        if "clip" in chosen:
            own = [*teacher.parameters(), *(bridge.parameters() if bridge is not None else [])]
            torch.nn.utils.clip_grad_norm_(own, chosen["clip"])
            torch.nn.utils.clip_grad_norm_(pupil.parameters(), chosen["clip"])
        for optimiser in optimisers:
            optimiser.step()
    before = lab.keeps[0]["own.weights"].clone()
    lab.round([0])
    private = torch.cat([flat(part) for part in (teacher, bridge) if part is not None])
    assert far(lab.keeps[0]["own.weights"], private) < 3e-5
    assert far(lab.sent(0, "share.weights"), flat(pupil)) < 3e-5
    moved = (lab.keeps[0]["own.weights"] - before).abs()
    assert float(moved.max()) > 1e-3
    if bridge is not None:
        assert float(moved[len(flat(teacher)) :].max()) > 1e-5  # W_h learns too


def test_two_perfect_models_have_a_finite_loss() -> None:
    """Pitfall: D -> 0 late in training; it has a floor."""
    client = Lab(fedkd(), by_class([3]), lr=0.05).trained(0)
    for name, view in client.weights.views(client.weights.flat).items():
        if name.endswith("head.bias"):
            view[3] = 1e4
    step = Step(client, client.data.prepare(client.data.x, None), client.data.y, torch.arange(20), 0)
    assert bool(torch.isfinite(client._innermost(step)).all())


def test_a_rate_of_its_own_needs_sgd() -> None:
    with pytest.raises(FedAlloyError, match=r"studentrate\(lr=0.02\) needs --optimizer sgd"):
        Lab(fedkd(student_lr=0.02), digits(), optimizer="adam").round([0])
    Lab(fedkd(), digits(), optimizer="adam", lr=0.01).round([0])


def test_mutual_learning_is_that_of_fedsce() -> None:
    """FedSCE's Eq 6 is this loss without L^h."""
    one = Lab(fedkd(hidden=False, compress=False), digits(), lr=0.1).rounds([0, 1], [0, 2])
    other = Lab(make("fedsce(subspace=False, contribution=False)"), digits(), lr=0.1).rounds([0, 1], [0, 2])
    assert torch.equal(one.weights, other.weights)
    assert torch.equal(one.keeps[0]["own.weights"], other.keeps[0]["own.weights"])


# Wire, architectures, sums


def test_teacher_and_map_stay_at_home() -> None:
    lab = Lab(fedkd(student=BATCHNORM), digits(), "lenet", lr=0.05)
    outcome = lab.round([0, 1])
    assert lab.replies[0].items.keys() == {"share.weights", "share.buffers"}
    assert outcome.bytes_up["share.buffers"] == 2 * 4 * 32
    own = models.size_of("lenet", DIGITS).parameters + 84 * 16  # the teacher, and W_h
    assert len(lab.keeps[0]["own.weights"]) == own
    assert "samples" not in outcome.bytes_up


def test_architectures_may_differ(tmp_path: Path) -> None:
    """Teachers of five kinds, features of four widths; their accuracy counts, the student's is a secondary figure."""
    federation = digits(5, "dirichlet:0.5", 0.25)
    result = run(tmp_path, federation, "fedkd", models=",".join(MIXED), rounds=2, lr=0.05)
    assert not any(line["refused"] for line in result.history)
    assert result.summary["metric"] == "personal_local_acc"
    assert {"personal_local_acc", "personal_local_acc_clients", "aux_acc"} <= result.history[-1][
        "metrics"
    ].keys()
    for k, model in enumerate(MIXED):
        kept = RunFolder(tmp_path / "run").vault.load(k, before=99)
        bridge = 16 * models.width_of(model, DIGITS)
        assert len(kept["own.weights"]) == models.size_of(model, DIGITS).parameters + bridge
        assert len(kept["share.x"]) == models.size_of("mlp(hidden=16)", DIGITS).parameters


def test_it_learns(tmp_path: Path) -> None:
    result = run(tmp_path, digits(6, "dirichlet:0.5", 0.25), "fedkd", rounds=8, epochs=3, lr=0.1)
    metrics = result.history[-1]["metrics"]
    assert min(metrics["personal_local_acc"], metrics["aux_acc"]) > 0.8


def test_a_run_that_blows_up_is_recorded_as_diverged(tmp_path: Path) -> None:
    """What is not finite has no factors: it travels as it is, and the server says why it refuses."""
    result = run(tmp_path, digits(), "fedkd", rounds=3, lr=1e6, weight_decay=1e6)
    assert result.summary["status"] == "diverged"
    assert all(why["why"].endswith("not finite") for why in result.history[-1]["refused"])


@pytest.mark.parametrize(
    "host", ["fedavg", "fedprox(mu=0.1)", "moon(proj_dim=12)", "fednova", "fml", "share(part='body')"]
)
def test_the_codec_fits_other_methods(host: str) -> None:
    """At T = 1 nothing but rounding changes; below, bytes fall."""
    plain, full, cut = (
        Lab(make(host + rest), digits(), lr=0.1).rounds([0, 1, 2], [0, 2])
        for rest in ("", "+svd(t_start=1.0, t_end=1.0)", "+svd(t_start=0.5, t_end=0.5)")
    )
    assert far(plain.weights, full.weights) < 1e-5
    assert far(plain.weights, cut.weights) > 1e-5
    key = next(key for key in plain.replies[0].items if key.endswith((".weights", ".update")))
    assert cut.sent(0, key).numel() < 0.7 * plain.sent(0, key).numel()


def test_control_variates_are_not_cut_twice() -> None:
    """SCAFFOLD's ends apply the same change only if a second compression of it changes nothing."""
    with pytest.raises(AlloyConflict, match="svd spoils repeatable compression, which control needs"):
        make("scaffold+svd")
    with pytest.raises(AlloyConflict, match="both claim the compression"):
        make("fedavg+svd+subspace")

"""SSF: SCAFFOLD in a fresh subspace each round, and a downlink that brings only what a client has missed."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, digits, double, far, probed
from regression import error, regress, small
from torch import Tensor

from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.random import generator
from fedalloy.core.registry import make
from fedalloy.core.wire import Reply, bytes_of, dump, restore
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.stream import Stream
from fedalloy.mechanisms.subspace import Draw, Subspace, projector
from fedalloy.methods import fedavg, fednova, scaffold, ssf
from fedalloy.research.reproduce.matrix import Method, Problem, Run
from fedalloy.round.client import Client

NET = "regression:net"  # float64
PARTICIPANTS = ([0, 1, 5], [2], [0, 1, 2, 3, 4, 5], [4, 5], [1, 3], [0, 5], [0, 1, 2])


def c_of(lab: Lab) -> Tensor:
    return lab.server.states["control"].persistent["c"]


def variates(lab: Lab) -> Tensor:
    """Every client's c_i, zero for those never seen."""
    zero = torch.zeros_like(lab.weights)
    return torch.stack([lab.keeps.get(k, {}).get("control.c_k", zero) for k in range(lab.federation.clients)])


def operator(lab: Lab, round: int) -> Tensor:
    """P as one matrix on the flat weights, column by column through the codec."""
    columns = [lab.replica.encoded(unit, round) for unit in torch.eye(len(lab.weights))]
    return torch.stack(columns, 1)


# The projector


@pytest.mark.parametrize("kind", ["haar", "coordinate"])
@pytest.mark.parametrize(("rows", "rank"), [(1, 1), (7, 1), (30, 11), (16, 16)])
def test_rows_of_the_projector_are_orthonormal(kind: Draw, rows: int, rank: int) -> None:
    """Check: P P^T = I_r."""
    p = projector(rows, rank, generator(1), kind)
    assert (p.shape, p.dtype) == ((rank, rows), torch.float64)
    assert far(p @ p.T, torch.eye(rank, dtype=torch.float64)) < 1e-13


def test_haar_draws_have_no_favourite_direction() -> None:
    """Without the sign of R's diagonal, LAPACK's Q has a corner of one sign; E P = 0 and E P^T P = (r/d) I."""
    draws = torch.stack([projector(6, 2, generator(k)) for k in range(2000)])
    assert float(draws.mean(0).abs().max()) < 0.04  # standard deviation 0.009
    assert far((draws.mT @ draws).mean(0), torch.eye(6, dtype=torch.float64) / 3) < 0.04


def test_gaussian_and_coordinate_draws() -> None:
    gaussian = torch.stack([projector(50, 20, generator(k), "gaussian") for k in range(200)])
    assert float(gaussian.var()) == pytest.approx(1 / 50, rel=0.02)
    coordinate = projector(50, 20, generator(0), "coordinate")
    assert set(coordinate.flatten().tolist()) == {-1.0, 0.0, 1.0}
    assert ((coordinate != 0).sum(1) == 1).all()
    assert ((coordinate != 0).sum(0) <= 1).all()


def test_both_ends_draw_the_same_projector() -> None:
    """Check: same P on server and clients from the seed; another round, tensor or seed gives another."""
    labs = [Lab(ssf(), digits(), seed=seed) for seed in (3, 3, 4)]
    value = torch.randn(len(labs[0].weights), generator=generator(0))
    server, client, stranger = (lab.replica.encoded(value, 5) for lab in labs)
    assert torch.equal(server, client)
    assert not torch.equal(server, stranger)
    assert not torch.equal(server, labs[0].replica.encoded(value, 6))
    square = [
        projector(16, 3, generator(3, 4, name, "subspace")) for name in ("body.1.weight", "head.weight")
    ]
    assert far(*square) > 0.1


@double()
@pytest.mark.parametrize("settings", [{}, {"side": "longer"}, {"side": "input"}, {"scope": "whole"}])
def test_the_codec_is_one_orthonormal_operator(settings: dict[str, Any]) -> None:
    """Check: P P^T = I_r on the whole flat vector, and decoding is P^T."""
    lab = Lab(ssf(**settings), digits(), "mlp(hidden=6)")
    p = operator(lab, 2)
    assert len(p) == lab.replica.coded_size < len(lab.weights) / 2
    assert far(p @ p.T, torch.eye(len(p))) < 1e-13
    coded = torch.randn(len(p), generator=generator(0))
    assert far(lab.replica.decoded(coded, 2), p.T @ coded) < 1e-13


def test_draws_are_remembered_for_two_rounds() -> None:
    """A client decodes the last round's update and works in this one: nothing is drawn again for the next client."""
    lab = Lab(ssf(), digits())
    coder = lab.method.find(Subspace)
    assert coder
    old, new = coder.blocks(lab.replica, 1), coder.blocks(lab.replica, 2)
    coder.coded_size(lab.replica)
    assert coder.blocks(lab.replica, 1) is old
    assert coder.blocks(lab.replica, 2) is new
    coder.blocks(lab.replica, 3)
    assert len(lab.replica.memo["subspace"]) == 2


# The method


@double()
@pytest.mark.parametrize("scope", ["tensor", "whole"])
def test_full_rank_is_scaffold(scope: str) -> None:
    """Check: r = d: iterates equal SCAFFOLD to floating-point tolerance, with any participation."""
    problem = small()
    ours, theirs = (regress(method, problem) for method in (ssf(ratio=1.0, scope=scope), scaffold()))
    for chosen in ([0, 1, 2, 3], [0, 2], [1], [0, 1, 2, 3], [3, 1]):
        ours.round(chosen)
        theirs.round(chosen)
        assert far(ours.weights, theirs.weights) < 1e-14
        assert far(variates(ours), variates(theirs)) < 1e-13


@pytest.mark.parametrize("weights", ["uniform", "size"])
@double()
def test_full_rank_is_scaffold_on_a_net(weights: Literal["uniform", "size"]) -> None:
    """The same with batches, biases, several layers, server_lr and a schedule."""
    settings: dict[str, Any] = {"lr": 0.1, "lr_decay": 0.9, "epochs": 2}
    ours = Lab(ssf(ratio=1.0, server_lr=0.7, agg_weights=weights), digits(), NET, **settings)
    theirs = Lab(scaffold(server_lr=0.7, agg_weights=weights), digits(), NET, **settings)
    for chosen in PARTICIPANTS[:4]:
        ours.round(chosen)
        theirs.round(chosen)
    assert far(ours.weights, theirs.weights) < 1e-11
    assert far(ours.server.buffers, theirs.server.buffers) < 1e-11


@double()
def test_backfill() -> None:
    """Check: (I - P^T P) c_i is unchanged by the update, and P c_i afterwards equals the mean of P g."""
    method, inner, _ = probed(ssf(ratio=0.3))
    lab = Lab(method, digits(), NET, lr=0.05)
    for chosen in ([0], [1], [0], [2], [0]):
        inner.gradients.clear()
        before, p = variates(lab)[chosen[0]], operator(lab, lab.server.round + 1)
        lab.round(chosen)
        after = variates(lab)[chosen[0]]
        assert far(after - p.T @ (p @ after), before - p.T @ (p @ before)) < 1e-12
        assert far(p @ after, p @ torch.stack(inner.gradients).mean(0)) < 1e-12
        assert far(lab.sent(chosen[0], "control.dc"), p @ (after - before)) < 1e-12
    assert float((after - p.T @ (p @ after)).norm()) > 1e-3  # what lies outside is not simply nothing


@double()
def test_steps_follow_the_projected_direction() -> None:
    """Client step: b <- b - eta (P g - p_i + p_c), so that weights move in the range of P^T only."""
    method, inner, outer = probed(ssf(ratio=0.3))
    lab = Lab(method, digits(), NET, lr=0.05)
    lab.rounds([0, 1], [1, 2])
    p, c, c_i = operator(lab, 3), c_of(lab).clone(), variates(lab)[0]
    inner.gradients.clear()
    outer.points.clear()
    lab.round([0])
    b = torch.zeros(len(p))
    for g, point in zip(inner.gradients, outer.points, strict=True):
        assert far(point, lab.server.previous + p.T @ b) < 1e-12
        b -= 0.05 * (p @ g - p @ c_i + p @ c)
    assert far(lab.sent(0, "share.weights"), b) < 1e-12
    assert far(lab.weights, lab.server.previous + p.T @ b) < 1e-12


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("settings", [{}, {"refresh": 3}, {"ratio": 0.7, "server_lr": 0.5}])
def test_server_variate_is_the_mean_of_all(model: str, settings: dict[str, Any]) -> None:
    """Check: c = mean_i c_i after every round, with full and with any other participation."""
    lab = Lab(ssf(**settings), digits(), model, lr=0.05)
    for chosen in (*PARTICIPANTS, range(6)):
        lab.round(chosen)
        assert far(c_of(lab), variates(lab).mean(0)) < 1e-6
        assert float(c_of(lab).norm()) > 1e-3


@double()
@pytest.mark.parametrize("optimiser", [{"momentum": 0.9}, {"momentum": 0.5, "weight_decay": 0.1}])
def test_momentum_takes_the_mean_of_the_gradients(optimiser: dict[str, Any]) -> None:
    """Pitfall: momentum breaks option II; P c_i is then the explicit mean of P g (decay counts as gradient)."""
    method, inner, _ = probed(ssf(ratio=0.3))
    lab = Lab(method, digits(), NET, lr=0.05, **optimiser)
    decay = optimiser.get("weight_decay", 0.0)
    for _ in range(3):
        inner.gradients.clear()
        inner.points.clear()
        p = operator(lab, lab.server.round + 1)
        lab.round([0, 1])
        per_client = len(inner.gradients) - lab.replies[1].steps
        terms = [g + decay * w for g, w in zip(inner.gradients, inner.points, strict=True)][:per_client]
        assert far(p @ variates(lab)[0], p @ torch.stack(terms).mean(0)) < 1e-12
        assert far(c_of(lab), variates(lab).mean(0)) < 1e-12


def test_buffers_are_averaged() -> None:
    """Pitfall: BatchNorm statistics travel whole and are averaged as in FedAvg."""
    lab = Lab(ssf(), digits(), BATCHNORM, lr=0.1)
    for chosen in PARTICIPANTS:
        lab.round(chosen)
        sent = torch.stack([lab.sent(k, "share.buffers").double() for k in chosen])
        assert sent.shape[1] == 32
        assert far(lab.server.buffers, sent.mean(0).float()) < 1e-7
    assert far(lab.server.buffers, lab.replica.initial_buffers) > 0.01


@double()
@pytest.mark.parametrize(
    ("fast", "method"),
    [
        (Method("SSF", 4), ssf(ratio=1 / 3)),
        (Method("SSF", 12), ssf(ratio=1.0)),
        (Method("SCAFFOLD"), scaffold()),
        (Method("FedAvg"), fedavg(agg_weights="uniform")),
    ],
)
def test_the_fast_study_is_the_real_method(fast: Method, method: Any) -> None:
    """`fedalloy.research.reproduce` and the core give the same iterates to 1e-12."""
    problem, other = small(), small(zeta=5.0)
    lab, run = regress(method, problem), Run(fast, [other, problem], [0.02, 0.05])
    for _ in range(6):
        lab.round()
        run.step()
        assert far(lab.weights, run.x[:, 3:].flatten()) < 1e-12
        assert far(variates(lab), run.controls[:, :, 3:].flatten(1)) < 1e-12
        assert error(lab, problem) == pytest.approx(float(run.errors[1]), abs=1e-12)


@double()
def test_behaviour_through_the_core() -> None:
    """Check, behaviour: in few dimensions SSF reaches the optimum, FedAvg stops above 1e-2."""
    problem = Problem.drawn(1.0, clients=3, samples=20, rows=5, columns=2)
    errors = []
    for method, rounds in ((ssf(ratio=0.6), 60), (fedavg(agg_weights="uniform"), 25)):
        lab = regress(method, problem, lr=0.2)
        for _ in range(rounds):
            lab.round()
        errors.append(error(lab, problem))
    assert errors[0] < 1e-6
    assert errors[1] > 1e-2


@double()
def test_rare_refreshes_confine_the_model() -> None:
    """Pitfall: with refresh = 5, x stays in x_0 + the ranges seen so far: rank 2 of 12 until round 5, then 4."""
    lab = regress(ssf(ratio=1 / 6, refresh=5), small())
    ranks = []
    for _ in range(11):
        lab.round()
        ranks.append(int(torch.linalg.matrix_rank(lab.weights.view(12, 3), atol=1e-9)))
    assert ranks == [2] * 5 + [3] * 6  # a matrix of three columns has rank three at most
    moved = operator(lab, 5)
    assert torch.equal(moved, operator(lab, 1))
    assert not torch.equal(moved, operator(lab, 6))


@double()
def test_never_refreshed_the_model_stays_in_one_subspace() -> None:
    lab = regress(ssf(ratio=1 / 6, refresh=1000), small())
    p = operator(lab, 1)
    for _ in range(6):
        lab.round()
    assert far(lab.weights, p.T @ (p @ lab.weights)) < 1e-14
    assert error(lab, small()) > 0.5


# What travels


def floats(items: dict[str, Tensor]) -> int:
    return sum(value.numel() for value in items.values() if value.is_floating_point())


@double()
@pytest.mark.parametrize("scope", ["tensor", "whole"])
def test_messages_do_not_depend_on_the_dimension(scope: str) -> None:
    """Check: 2r floats and one round id each way, independent of d."""
    for rows in (20, 40, 80):
        lab = regress(ssf(ratio=4 / rows, scope=scope), small(rows=rows))
        lab.rounds([0, 1, 2, 3], [0, 1, 2, 3])
        r = 4 * 3
        lab.server.round += 1
        for client in range(4):
            mail = lab.server.send(client).items
            assert floats(mail) == floats(lab.replies[client].items) == 2 * r
            rest = {key: size for key, size in bytes_of(mail).items() if not mail[key].is_floating_point()}
            assert rest == {"share.since": 8}
            assert lab.sent(client, "share.weights").shape == lab.sent(client, "control.dc").shape == (r,)


def test_bytes_of_a_net() -> None:
    """Weight matrices travel at a fifth of their rows, biases whole, statistics whole."""
    lab = Lab(ssf(), digits(), BATCHNORM, lr=0.1)
    first = lab.server.send(0).items
    outcome = lab.round([0, 1])
    r = 3 * 64 + 16 + 16 + 16 + 2 * 16 + 10  # 16 x 64 and 10 x 16 at ranks 3 and 2; bias, BatchNorm, bias
    assert lab.replica.coded_size == r
    assert sum(outcome.bytes_up.values()) == 2 * 4 * (2 * r + 32)
    assert first["share.dense"].shape == (1242,)  # first contact: dense x
    assert first["share.updates"].shape == (0,)
    lab.server.round += 1
    mail = lab.server.send(0).items
    assert sum(bytes_of(mail).values()) == 4 * (2 * r + 32) + 8
    declared = lab.replica.specs("down")
    assert {key: spec.bytes for key, spec in declared.items()} == bytes_of(mail)


def copies(lab: Lab, chosen: Sequence[int]) -> None:
    """Every participant's x is the server's before this round, bit for bit."""
    for client in chosen:
        assert torch.equal(lab.keeps[client]["share.x"], lab.server.previous), client
        assert int(lab.keeps[client]["share.round"]) == lab.server.round


@pytest.mark.parametrize("settings", [{}, {"ratio": 0.5}, {"refresh": 3}, {"server_lr": 0.3}, {"ratio": 1.0}])
def test_absent_clients_catch_up_to_the_bit(settings: dict[str, Any]) -> None:
    """After any pattern of absences every client's copy of x equals the server's bit for bit."""
    lab = Lab(ssf(**settings), digits(), BATCHNORM, lr=0.1)
    dice = generator(7)
    for _ in range(25):
        count = int(torch.randint(1, 5, (), generator=dice))
        chosen = sorted(torch.randperm(6, generator=dice)[:count].tolist())
        lab.round(chosen)
        copies(lab, chosen)


def gap(lab: Lab, rounds: int) -> tuple[int, int, int]:
    """Client 0 takes part once, then is missed for some rounds: dense floats, updates and since in its mail."""
    lab.round([0, 1])
    for _ in range(rounds - 1):
        lab.round([1])
    lab.server.round += 1
    got = lab.server.send(0).items
    return len(got["share.dense"]), len(got["share.updates"]), int(got["share.since"])


@double()
def test_dense_weights_after_a_long_absence() -> None:
    """q mean updates, or dense x when q r >= d: here r = 3 x 3 and d = 12 x 3, so from q = 4 on."""
    for q in (1, 2, 3):
        assert gap(regress(ssf(ratio=0.25), small()), q) == (0, 9 * q, 1)
    assert gap(regress(ssf(ratio=0.25), small()), 4) == (36, 0, 5)
    assert gap(regress(ssf(ratio=0.25), small()), 7) == (36, 0, 8)
    # r = 5 x 3: three updates would be 45 floats
    assert gap(regress(ssf(ratio=0.4), small()), 2) == (0, 30, 1)
    assert gap(regress(ssf(ratio=0.4), small()), 3) == (36, 0, 4)


def test_the_server_keeps_no_more_updates_than_the_model_weighs() -> None:
    lab = Lab(ssf(), digits(), lr=0.1)
    for _ in range(12):
        lab.round([0])
    kept = lab.server.states["share"].persistent["updates"]
    assert kept.numel() < len(lab.weights) <= kept.numel() + lab.replica.coded_size


def deal_with(lab: Lab, chosen: Sequence[int], spoilt: Sequence[int]) -> None:
    """A round in which the server cannot use some of the replies."""
    lab.server.round += 1
    replies = [lab.answer(lab.server.send(client)) for client in chosen]
    bad = [replace(reply, loss=float("nan")) if reply.client in spoilt else reply for reply in replies]
    outcome = lab.server.receive(chosen, bad)
    assert sorted(outcome.refused) == sorted(spoilt)


def test_a_refused_reply_does_not_desynchronise() -> None:
    """The client has the round's weights already, the server does not know: no update is added twice."""
    lab = Lab(ssf(), digits(), lr=0.1)
    lab.rounds([0, 1, 2], [0, 1])
    deal_with(lab, [0, 1, 2], spoilt=[0])
    deal_with(lab, [0, 1], spoilt=[0])  # twice in a row
    lab.round([1, 2])
    lab.round([0, 1, 2])
    copies(lab, [0, 1, 2])


def test_a_client_whose_first_reply_is_refused_is_sent_everything_again() -> None:
    lab = Lab(ssf(), digits(), lr=0.1)
    deal_with(lab, [0, 1], spoilt=[0])
    lab.server.round += 1
    assert len(lab.server.send(0).items["share.dense"]) == len(lab.weights)
    lab.server.round -= 1
    lab.round([0, 1])
    copies(lab, [0, 1])


def test_a_client_that_lost_its_last_round_catches_up() -> None:
    """A crash before the private state was saved: the copy is older than the client's last reply."""
    lab = Lab(ssf(), digits(), lr=0.1)
    lab.rounds([0, 1], [0, 1])
    old = lab.keeps[0]
    deal_with(lab, [0, 1], spoilt=[0])
    lab.keeps[0] = old
    lab.round([0, 1])
    copies(lab, [0, 1])


def test_a_client_that_lost_everything_is_named() -> None:
    lab = Lab(ssf(), digits(), lr=0.1)
    lab.round([0, 1])
    del lab.keeps[1]
    with pytest.raises(FedAlloyError, match="client 1 has lost its copy"):
        lab.round([0, 1])


def test_a_round_without_any_usable_reply() -> None:
    lab = Lab(ssf(), digits(), lr=0.1)
    lab.rounds([0, 1], [1, 2])
    deal_with(lab, [0, 1], spoilt=[0, 1])
    lab.round([0, 2])
    copies(lab, [0, 2])
    lab.round([0, 1, 2])
    copies(lab, [0, 1, 2])


def test_an_evaluation_sees_the_weights_after_the_round() -> None:
    """Mail for an evaluation leaves when the round's update is known: present and absent clients load it."""
    lab = Lab(ssf(), digits(), lr=0.1)
    for chosen in ([0, 1, 2], [0, 1], [0]):
        lab.round(chosen)
        for client in range(4):
            mail = lab.server.send(client, "evaluate")
            data, keep = lab.federation.client(client), lab.keeps.get(client, {})
            info = lab.federation.info
            seen = Client(lab.method, lab.replica, data, info, lab.local, keep, mail, lab.seed)
            assert torch.equal(seen.received, lab.weights)


@pytest.mark.parametrize("method", ["ssf(ratio=0.3)", "fedsub(ratio=0.3)", "scaffold+subspace(refresh=2)"])
def test_resume_gives_the_same_bits(method: str) -> None:
    """Everything survives the way through bytes: server and clients are rebuilt after every second round."""
    straight, broken = (Lab(make(method), digits(), BATCHNORM, lr=0.1) for _ in range(2))
    for number, chosen in enumerate(PARTICIPANTS):
        straight.round(chosen)
        broken.round(chosen)
        if number % 2:
            state = restore(dump(broken.server.state()))[0]
            keeps = {client: restore(dump(keep))[0] for client, keep in broken.keeps.items()}
            broken = Lab(make(method), digits(), BATCHNORM, lr=0.1)
            broken.server.resume(state, straight.server.round)
            broken.keeps = keeps
    assert dump(straight.server.state()) == dump(broken.server.state())
    assert {k: dump(v) for k, v in straight.keeps.items()} == {k: dump(v) for k, v in broken.keeps.items()}


# Combinations


@double()
@pytest.mark.parametrize("mu", [0.0, 0.5])
def test_subspace_fits_other_methods(mu: float) -> None:
    """fedavg+subspace and fedprox+subspace: every step follows P^T P (g + mu (w - x)), averages are those of b."""
    method, inner, outer = probed(make(f"fedprox(mu={mu})+subspace(ratio=0.2)" if mu else "fedavg+subspace"))
    lab = Lab(method, digits(), NET, lr=0.1)
    p, x = operator(lab, 1), lab.weights.clone()
    lab.round([0, 3])
    for g, w, following in zip(inner.gradients, inner.points, outer.points[1:], strict=False):
        if not torch.equal(following, x):  # where the next client begins
            assert far(following, w - 0.1 * p.T @ (p @ (g + mu * (w - x)))) < 1e-13
    assert len(lab.sent(0, "share.weights")) == lab.replica.coded_size == len(p)
    n = torch.tensor([float(lab.sizes[k]) for k in (0, 3)])
    sent = torch.stack([lab.sent(k, "share.weights") for k in (0, 3)])
    assert far(lab.weights, x + p.T @ ((n / n.sum()) @ sent)) < 1e-13
    assert len(lab.server.send(0).items["share.weights"]) == len(lab.weights)  # the downlink is share's own


@double()
def test_scaffold_with_a_subspace_is_ssf() -> None:
    """SSF is scaffold+subspace with a thin downlink."""
    labs = [Lab(make(name), digits(), NET, lr=0.1) for name in ("scaffold+subspace(ratio=0.2)", "ssf")]
    for chosen in PARTICIPANTS:
        for lab in labs:
            lab.round(chosen)
        assert far(labs[0].weights, labs[1].weights) < 1e-12
        assert far(c_of(labs[0]), c_of(labs[1])) < 1e-12


@pytest.mark.parametrize("base", ["prox(mu=0.5)", "control"])
def test_the_projection_is_outermost_in_any_order(base: str) -> None:
    head = "fedavg(agg_weights=uniform)"
    labs = [
        Lab(make(text), digits(), lr=0.1)
        for text in (f"{head}+{base}+subspace", f"{head}+subspace+{base}", f"subspace+{base}+{head}")
    ]
    for lab in labs:
        lab.rounds([0, 1], [1, 2], [0, 2])
    assert torch.equal(labs[0].weights, labs[1].weights)
    assert torch.equal(labs[0].weights, labs[2].weights)
    p = labs[1].method.with_hook("gradient")
    assert isinstance(p[-1], Subspace)


def test_fednova_updates_are_projected_too() -> None:
    lab = Lab(fednova() + Subspace(0.2), digits(), lr=0.1)
    start = lab.weights.clone()
    p = operator(lab, 1)
    lab.round([0, 1])
    moved = lab.weights - start
    assert float(moved.norm()) > 0.01
    assert far(moved, p.T @ (p @ moved)) < 1e-5


def test_impossible_combinations_are_refused() -> None:
    for text in ("local+subspace", "share(part='body')+subspace"):
        with pytest.raises(AlloyConflict, match="global model"):
            make(text)
    with pytest.raises(AlloyConflict):
        make("ssf+subspace(ratio=0.5)")
    with pytest.raises(FedAlloyError, match="use share"):
        make("stream(buffers=local)")
    for bad in ({"ratio": 0.0}, {"ratio": 1.5}, {"refresh": 0}, {"side": "right"}):
        with pytest.raises(FedAlloyError):
            ssf(**bad)


@pytest.mark.parametrize("part", ["", "part='body'"])
def test_a_stream_without_a_codec_is_share(part: str) -> None:
    """The updates are then as long as the model, or its shared part; the result is FedAvg's up to rounding."""
    streamed, plain = (
        Lab(make(f"stream({part})"), digits(), lr=0.1),
        Lab(make(f"share({part})"), digits(), lr=0.1),
    )
    for chosen in PARTICIPANTS:
        streamed.round(chosen)
        plain.round(chosen)
        copies(streamed, chosen)
    assert far(streamed.weights, plain.weights) < 1e-6
    assert streamed.method.find(Stream)
    assert all(isinstance(reply, Reply) for reply in streamed.replies.values())

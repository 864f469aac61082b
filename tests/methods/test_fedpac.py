"""FedPAC: features drawn to global centroids, heads combined by a quadratic programme per client."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, dealt, digits, double, far, probed, run
from torch import Tensor

from fedalloy.core.alloy import Alloy, AlloyConflict, Mechanism, alloy
from fedalloy.core.registry import make
from fedalloy.core.state import State
from fedalloy.core.views import Oracle, StepView
from fedalloy.core.weights import BASE, HEAD
from fedalloy.data.federation import Federation
from fedalloy.mechanisms.simplex import simplex_minimum
from fedalloy.methods import fedpac, fedper, fedrep
from fedalloy.methods.fedpac import LEAST, combination, kept, quadratic, statistics


def lab(method: Alloy, model: str = MLP, federation: Federation | None = None, **local: Any) -> Lab:
    return Lab(method, federation or digits(), model, **{"lr": 0.1, "batch": 32, **local})


def by_label(*groups: tuple[int, ...], each: int = 60) -> Federation:
    """Digits dealt to clients that hold only some classes."""
    y = digits().dataset.y[:1400].tolist()
    used: set[int] = set()
    shards = []
    for group in groups:
        mine = [i for i, label in enumerate(y) if label in group and i not in used][:each]
        used.update(mine)
        shards.append(mine)
    return dealt(shards)


def sent(at: Lab, name: str) -> Tensor:
    """What the participants of the latest round uploaded, one row each."""
    rows = [at.sent(client, f"headcombination.{name}") for client in sorted(at.replies)]
    return torch.stack(rows).double()


def heads(at: Lab) -> dict[int, Tensor]:
    """The combined heads that the server holds."""
    keep = at.server.states["headcombination"].persistent
    return {int(name.removeprefix("head")): value for name, value in keep.items() if name != "mean"}


# The weights of a combination


def problem(clients: int, seed: int = 0, spread: float = 1.0) -> tuple[Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    H = spread * torch.randn(clients, 30, generator=draw, dtype=torch.float64)
    return H, torch.rand(clients, generator=draw, dtype=torch.float64)


def objective(H: Tensor, V: Tensor, i: int, a: Tensor) -> float:
    """The variance of the combination, and the squared distance of its H to that of client i."""
    return float((a.square() * V).sum() + (H[i] - a @ H).square().sum())


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("spread", [0.05, 0.3, 3.0])
def test_weights_are_no_worse_than_the_own_head_or_the_mean(seed: int, spread: float) -> None:
    """Check: a_i >= 0, sums to 1; its objective is at most V_i (the own head alone) and that of the uniform vector."""
    H, V = problem(8, seed, spread)
    gram = (H - H.mean(0)) @ (H - H.mean(0)).T
    for i in range(8):
        a = simplex_minimum(quadratic(gram, V, i))
        assert float(a.min()) >= 0
        assert float(a.sum()) == pytest.approx(1, abs=1e-12)
        uniform = torch.full((8,), 1 / 8, dtype=torch.float64)
        own = torch.eye(8, dtype=torch.float64)[i]
        assert objective(H, V, i, own) == pytest.approx(float(V[i]))
        found = objective(H, V, i, a)
        assert found <= min(float(V[i]), objective(H, V, i, uniform)) + 1e-9
        assert found == pytest.approx(float(a @ quadratic(gram, V, i) @ a), rel=1e-9)


def test_the_quadratic_form_entry_by_entry() -> None:
    H, V = problem(5)
    gram = H @ H.T
    for i in range(5):
        P = quadratic(gram, V, i)
        for j in range(5):
            for k in range(5):
                entry = float((H[i] - H[j]) @ (H[i] - H[k])) + (float(V[j]) if j == k else 0.0)
                assert float(P[j, k]) == pytest.approx(entry, abs=1e-12)


def test_clients_that_are_alike_share_alike() -> None:
    """Check: equal H and equal V give uniform weights."""
    H, _ = problem(1)
    for variance in (0.0, 0.5):
        found = combination(H.expand(6, -1), torch.full((6,), variance, dtype=torch.float64))
        assert far(found, torch.full((6, 6), 1 / 6, dtype=torch.float64)) < 1e-9


def test_a_client_far_from_all_others_keeps_its_own_head() -> None:
    """Check: H_i far from the others relative to V_i: a_i is the unit vector."""
    H, V = problem(6, spread=0.01)
    H[2] += 100
    found = combination(H, V)
    assert torch.equal(found[2], torch.eye(6, dtype=torch.float64)[2])
    assert float(found[0, 2]) == 0
    assert int((found[0] > 0).sum()) > 1


def test_small_weights_vanish_and_the_rest_sums_to_one() -> None:
    a = torch.tensor([0.6, 0.3985, 0.0009, 0.0006], dtype=torch.float64)
    assert torch.allclose(kept(a), torch.tensor([0.6, 0.3985, 0, 0], dtype=torch.float64) / 0.9985)
    many = torch.full((3000,), 1 / 3000, dtype=torch.float64)  # all small, none vanishes
    assert float(many[0]) < LEAST
    assert torch.allclose(kept(many), many)


# What clients send


@double()
def test_statistics_are_those_of_the_paper() -> None:
    draw = torch.Generator().manual_seed(0)
    z, y = torch.randn(50, 4, generator=draw), torch.randint(0, 5, (50,), generator=draw)
    H, V = statistics(z, y, 7)
    total = 0.0
    for c in range(7):
        mine = z[y == c]
        if not len(mine):
            assert torch.equal(H[c], torch.zeros(4))
            continue
        share, mean, square = len(mine) / 50, mine.mean(0), mine.square().sum(1).mean()
        assert far(H[c], share * mean) < 1e-12
        total += float(share * square - share**2 * mean.square().sum())
    assert float(V) == pytest.approx(total / 50, abs=1e-12)
    assert float(V) > 0
    assert sorted(set(range(7)) - set(y.tolist())) == [5, 6]


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_they_are_taken_under_the_received_body_in_evaluation_mode(model: str) -> None:
    """Pitfall: H and V before training, centroids after it. Absent classes give rows of zeros."""
    federation = by_label((0, 1, 2), (2, 3), (4,))
    at = lab(fedpac(), model, federation).rounds([0, 1, 2])
    body, buffers = at.weights.clone(), at.server.buffers.clone()
    at.round([0, 1])
    for client in (0, 1):
        data = federation.client(client)
        x = data.prepare(data.x, None)
        flat, _ = at.replica.whole(BASE, body, buffers)
        H, V = statistics(at.replica.frozen(flat, buffers)(x).features, data.y, 10)
        assert far(at.sent(client, "headcombination.H"), H) < 1e-5
        assert float(at.sent(client, "headcombination.V")) == pytest.approx(float(V), rel=1e-4)
        absent = data.counts == 0
        assert torch.equal(at.sent(client, "headcombination.H")[absent], torch.zeros(int(absent.sum()), 16))
        flat[at.replica.weights.span(BASE)] = at.sent(client, "share.weights")
        z = at.replica.frozen(flat, at.sent(client, "share.buffers"))(x).features
        means = torch.stack([z[data.y == c].mean(0) for c in data.y.unique()])  # type: ignore[no-untyped-call]
        assert far(at.sent(client, "features-means.means"), means) < 1e-5


# Heads


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_new_heads_are_combinations_of_those_that_were_sent(model: str) -> None:
    at = lab(fedpac(), model).rounds([0, 1, 2], [1, 2, 3, 4])
    weights = combination(sent(at, "H").flatten(1), sent(at, "V"))
    assert int((weights > 0).sum()) > 4
    for i, client in enumerate([1, 2, 3, 4]):
        assert far(heads(at)[client], weights[i] @ sent(at, "head")) < 1e-6


def test_identical_clients_end_with_the_mean_head() -> None:
    """Check: all clients hold identical data: all new heads equal the mean head."""
    at = lab(fedpac(), federation=dealt([range(80)] * 4)).rounds([0, 1, 2, 3])
    mean = sent(at, "head").mean(0)
    assert all(far(head, mean) < 1e-6 for head in heads(at).values())
    assert far(sent(at, "head")[0], mean) > 1e-4  # they saw other batches


def test_groups_with_disjoint_labels_keep_to_themselves() -> None:
    """Check, behaviour: the weight mass of a_i stays inside the own group."""
    groups = ((0, 1, 2), (0, 1, 2), (0, 1, 2), (7, 8, 9), (7, 8, 9), (7, 8, 9))
    at = lab(fedpac(), federation=by_label(*groups), epochs=2).rounds(*[range(6)] * 3)
    weights = combination(sent(at, "H").flatten(1), sent(at, "V"))
    own = weights[:3, :3].sum(1).tolist() + weights[3:, 3:].sum(1).tolist()
    assert min(own) > 0.95
    assert int((weights > 0.1).sum()) > 6  # and is shared within it


def test_who_is_not_sampled_keeps_the_head_and_who_comes_late_begins_with_the_first_one() -> None:
    at = lab(fedpac()).rounds([0, 1, 2])
    first = {client: head.clone() for client, head in heads(at).items()}
    assert sorted(first) == [0, 1, 2]
    at.round([1, 3])
    assert torch.equal(heads(at)[0], first[0])
    assert not torch.equal(heads(at)[1], first[1])
    for client, head in ((0, first[0]), (5, at.replica.initial[at.replica.weights.span(HEAD)])):
        assert torch.equal(at.server.send(client).items["headcombination.head"], head)


def test_biases_go_with_their_rows() -> None:
    """Pitfall: they are combined with the same weights."""
    at = lab(fedpac()).rounds([0, 1], [0, 1])
    assert heads(at)[0].shape == (10 * 16 + 10,)
    weights = combination(sent(at, "H").flatten(1), sent(at, "V"))
    assert far(heads(at)[0][-10:], (weights[0] @ sent(at, "head"))[-10:]) < 1e-6


# Training


@pytest.mark.parametrize(
    "optimiser", [{}, {"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adam", "lr": 0.01}]
)
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_without_alignment_and_combination_it_is_fedrep(model: str, optimiser: dict[str, Any]) -> None:
    """Check: lam = 0 and no combination equals FedRep with one head epoch and E body epochs, bit for bit."""
    ours = lab(fedpac(lam=0.0, combine=False, head_lr=0.2), model, epochs=2, **optimiser)
    other = lab(fedrep(head_epochs=1, body_epochs=2, head_lr=0.2), model, epochs=2, **optimiser)
    for chosen in ([0, 1, 2], [1, 2, 4], [0, 1, 3]):
        ours.round(chosen)
        other.round(chosen)
    assert torch.equal(ours.weights, other.weights)
    assert torch.equal(ours.server.buffers, other.server.buffers)
    for client in range(5):
        assert torch.equal(ours.keeps[client]["own.weights"], other.keeps[client]["own.weights"])
    moved = lab(fedpac(lam=0.0, head_lr=0.2), model, epochs=2, **optimiser).rounds(
        [0, 1, 2], [1, 2, 4], [0, 1, 3]
    )
    assert far(moved.weights, ours.weights) > 1e-4


@pytest.mark.parametrize("optimiser", [{"momentum": 0.9, "weight_decay": 0.1}, {"optimizer": "adam"}])
def test_each_phase_leaves_the_other_part_alone(optimiser: dict[str, Any]) -> None:
    """Check: in the head phase theta, in the body phase phi_k are bit-identical before and after."""
    method, _, outer = probed(fedpac())
    at = lab(method, BATCHNORM, **optimiser).rounds([0, 1])
    base, head = at.replica.weights.span(BASE), at.replica.weights.span(HEAD)
    outer.points.clear()
    at.round([0])
    steps = -(-at.sizes[0] // 32)
    points = [*outer.points]
    assert len(points) == 2 * steps
    ended = torch.cat([at.sent(0, "share.weights"), at.sent(0, "headcombination.head")])
    for point in points[: steps + 1]:
        assert torch.equal(point[base], points[0][base])
    for point in (*points[steps:], ended):
        assert torch.equal(point[head], points[steps][head])
    assert far(points[steps][head], points[0][head]) > 1e-4
    assert far(ended[base], points[0][base]) > 1e-4


@dataclass(frozen=True)
class _Losses(Mechanism):
    """Notes of every step whether the body is trained, the loss beside cross-entropy, features and labels."""

    found: list[tuple[bool, float, Tensor, Tensor]] = field(default_factory=list, compare=False)

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        g = oracle(step)
        z, plain = step.out.features, F.cross_entropy(step.out.logits, step.y)
        self.found.append((z.requires_grad, float(step.value - plain.detach()), z.detach(), step.y))
        return g


def test_features_are_drawn_to_the_global_centroids() -> None:
    """lam times the mean over batch and features, in the body phase alone; nothing in the first round."""
    losses = _Losses()
    at = lab(alloy("noted", fedpac(lam=3.0), losses)).rounds([0, 1, 2])
    assert all(abs(extra) < 1e-6 for _, extra, _, _ in losses.found)
    losses.found.clear()
    means = at.server.states["features-means"].persistent["means"].clone()
    at.round([0])
    for trained, extra, z, y in losses.found:
        expected = 3 * float((z - means[y]).square().mean()) if trained else 0.0
        assert extra == pytest.approx(expected, abs=1e-5)
    assert {trained for trained, _, _, _ in losses.found} == {False, True}
    assert max(extra for _, extra, _, _ in losses.found) > 0.01


def test_a_class_without_a_global_centroid_is_drawn_to_the_own_one() -> None:
    """Pitfall: not to itself, and not to a row of zeros."""
    federation, losses = by_label((0, 1), (1, 2, 3)), _Losses()
    at = lab(alloy("noted", fedpac(), losses), MLP, federation).rounds([0])
    data = federation.client(1)
    flat, buffers = at.replica.whole(BASE, at.weights, at.server.buffers)
    received = at.replica.frozen(flat, buffers)(data.prepare(data.x, None)).features
    targets = at.server.states["features-means"].persistent["means"].clone()
    assert not bool(targets[2:].any())
    for c in (2, 3):
        targets[c] = received[data.y == c].mean(0)
    losses.found.clear()
    at.round([1])
    for trained, extra, z, y in losses.found:
        assert extra == pytest.approx(float((z - targets[y]).square().mean()) if trained else 0, abs=1e-5)
    assert max(extra for _, extra, _, _ in losses.found) > 0.01


def test_centroids_are_weighed_by_counts_and_kept_when_nobody_holds_a_class() -> None:
    """Pitfalls: public code averages without counts, raises an error or forgets."""
    federation = by_label((0, 1), (1,), (5,))
    at = lab(fedpac(), MLP, federation).rounds([0, 1, 2])
    keep = at.server.states["features-means"].persistent
    five = keep["means"][5].clone()
    n = torch.tensor([float(federation.client(k).counts[1]) for k in (0, 1)])
    rows = torch.stack([at.sent(0, "features-means.means")[1], at.sent(1, "features-means.means")[0]])
    assert far(keep["means"][1], (n[:, None] * rows).sum(0) / n.sum()) < 1e-6
    assert n[0] != n[1]
    at.round([0, 1])
    assert torch.equal(at.server.states["features-means"].persistent["means"][5], five)
    assert at.server.states["features-means"].persistent["seen"].nonzero().flatten().tolist() == [0, 1, 5]


def test_alignment_brings_features_of_clients_together() -> None:
    """What it is for: class means of different clients lie closer, relative to how far classes are apart."""
    spreads = []
    for lam in (0.0, 1.0):
        at = lab(make(f"fedpac(lam={lam})+classmeans"), epochs=2).rounds(*[range(6)] * 4)
        rows: dict[int, list[Tensor]] = {}
        for client in range(6):
            counts = at.federation.client(client).counts
            for c, row in zip(
                counts.nonzero().flatten(), at.sent(client, "features-means.means"), strict=True
            ):
                if counts[c] >= 10:
                    rows.setdefault(int(c), []).append(row)
        within = torch.stack([torch.stack(found).var(0).sum() for found in rows.values() if len(found) > 1])
        between = torch.stack([torch.stack(found).mean(0) for found in rows.values()]).var(0).sum()
        spreads.append(float(within.mean() / between))
    assert spreads[1] < 0.75 * spreads[0]


def test_rates_and_epochs() -> None:
    """The head's rate follows the schedule; the body has all of the local epochs."""
    method, _, outer = probed(fedpac(lam=0.0, head_epochs=3, head_lr=0.5))
    at = lab(method, federation=dealt([range(20), range(20, 90)]), lr=0.1, lr_decay=0.5, epochs=2, batch=64)
    at.rounds([0, 1])
    outer.points.clear()
    outer.gradients.clear()
    at.round([0])
    assert len(outer.points) == 3 + 2
    base, head = at.replica.weights.span(BASE), at.replica.weights.span(HEAD)
    moved = outer.points[1] - outer.points[0]
    assert far(moved[head], -0.25 * outer.gradients[0][head]) < 1e-6
    moved = outer.points[4] - outer.points[3]
    assert far(moved[base], -0.05 * outer.gradients[3][base]) < 1e-6


# Models


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_a_personal_model_is_the_new_body_under_the_combined_head(model: str) -> None:
    at = lab(fedpac(), model).rounds([0, 1, 2], [1, 2])
    base, head = at.replica.weights.span(BASE), at.replica.weights.span(HEAD)
    for client in (0, 1, 2, 5):
        tested = at.tested(client)
        assert torch.equal(tested.weights.flat[base], at.weights)
        assert torch.equal(tested.weights.buffers, at.server.buffers)
        expected = heads(at).get(client, at.replica.initial[head])
        assert torch.equal(tested.weights.flat[head], expected)
    assert not any(at.keeps.values())  # a client keeps nothing that the server does not send


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_the_global_model_has_the_mean_of_the_sent_heads_by_size(model: str) -> None:
    at = lab(fedpac(), model).rounds([0, 1, 2], [1, 2, 4])
    flat, buffers = at.server.shown()["global"]
    n = torch.tensor([at.sizes[k] for k in (1, 2, 4)], dtype=torch.float64)
    assert torch.equal(flat[at.replica.weights.span(BASE)], at.weights)
    assert torch.equal(buffers, at.server.buffers)
    assert far(flat[at.replica.weights.span(HEAD)], n / n.sum() @ sent(at, "head")) < 1e-6


def test_what_is_recorded(tmp_path: Path) -> None:
    """All accuracies of personal models, the headline among them, and that of the global one."""
    federation = digits(6, "dirichlet:0.1")
    result = run(tmp_path, federation, "fedpac", "mlp", rounds=4, epochs=2, lr=0.1, eval_every=4)
    metrics = result.history[-1]["metrics"]
    assert result.summary["metric"] == "personal_local_acc"
    assert {"personal_local_acc_clients", "personal_on_global_acc", "global_acc"} <= metrics.keys()
    assert metrics["personal_local_acc"] > metrics["personal_on_global_acc"] + 0.1
    assert result.summary["private_sha256"] is None


def test_without_combination_there_is_no_global_model(tmp_path: Path) -> None:
    result = run(tmp_path, digits(), "fedpac(combine=False)", rounds=2)
    assert "global_acc" not in result.history[-1]["metrics"]
    assert result.summary["private_sha256"] is not None


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_bytes(tmp_path: Path, model: str) -> None:
    """Down: body, own head, centroids with their mask. Up: body, head, centroids of held classes, counts, H, V, n_k."""
    federation = digits()
    result = run(tmp_path, federation, "fedpac", model, rounds=2)
    body, buffers, head, f = (
        64 * 16 + 16 + (32 if model == BATCHNORM else 0),
        32 if model == BATCHNORM else 0,
        170,
        16,
    )
    held = sum(int((federation.client(k).counts > 0).sum()) for k in range(6))
    for line in result.history:
        assert sum(line["bytes_down"].values()) == 6 * (4 * (body + buffers + head + 10 * f) + 10)
        up = 6 * (4 * (body + buffers + head + 10 * f + 1) + 8 * 10 + 8) + 4 * held * f
        assert sum(line["bytes_up"].values()) == up


def test_it_needs_a_body_of_its_own_under_the_heads() -> None:
    for text in ("fedavg+headcombination", "headcombination", "share(part='head')+headcombination"):
        with pytest.raises(AlloyConflict, match="headcombination needs a shared body"):
            make(text)
    at = lab(alloy("part by part", fedper(), make("fedpac"))).rounds([0, 1])
    assert at.method.pieces == fedpac().pieces

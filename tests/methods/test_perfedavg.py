"""Per-FedAvg: steps along the gradient after a step, and personal models that take that step."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, dealt, digits, double, far, probed, run, shards
from quadratics import _Quadratic, solve
from torch import Tensor

from fedalloy.core.alloy import Alloy, Mechanism, alloy
from fedalloy.core.registry import make
from fedalloy.core.state import State
from fedalloy.core.views import Oracle, StepView
from fedalloy.core.wire import Mail
from fedalloy.data.federation import Federation
from fedalloy.methods import fedavg, perfedavg
from fedalloy.methods.perfedavg import Meta
from fedalloy.round.client import client_model

DROPOUT = "regression:dropout"
VARIANTS = ("fo", "hf", "exact")


def lab(method: Alloy, model: str = MLP, federation: Federation | None = None, **local: Any) -> Lab:
    return Lab(method, federation or digits(), model, **{"batch": 32, **local})


# Without an inner step


@pytest.mark.parametrize("model", [MLP, BATCHNORM, DROPOUT])
@pytest.mark.parametrize("inner_batch", ["independent", "same"])
@pytest.mark.parametrize("variant", ["fo", "hf"])
def test_without_an_inner_step_it_is_fedavg_in_plain_sgd(model: str, inner_batch: str, variant: str) -> None:
    """Check: alpha = 0 equals FedAvg with plain SGD at rate beta, bit for bit, whatever the clients' optimiser."""
    method = perfedavg(alpha=0.0, beta=0.1, inner_batch=inner_batch, variant=variant)
    ours = lab(method, model, epochs=2, lr=7.0, optimizer="adam", weight_decay=0.1, lr_decay=0.5)
    plain = lab(fedavg(), model, epochs=2, lr=0.1, lr_decay=0.5)
    for chosen in ([0, 1, 2], [1, 2, 4], [0, 3]):
        assert [r.steps for r in ours.round(chosen).accepted] == [
            r.steps for r in plain.round(chosen).accepted
        ]
        assert torch.equal(ours.weights, plain.weights)
        assert torch.equal(ours.server.buffers, plain.server.buffers)


def test_an_inner_step_makes_a_difference() -> None:
    ends = []
    for alpha in (0.0, 0.1):
        for variant in VARIANTS:
            at = lab(perfedavg(alpha=alpha, beta=0.1, variant=variant)).rounds([0, 1])
            ends.append(at.weights)
    assert torch.equal(ends[0], ends[1])
    assert torch.equal(ends[0], ends[2])
    assert min(far(ends[3], ends[0]), far(ends[4], ends[3])) > 1e-4


# One step


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_the_gradient_after_a_step_moves_the_weights_before_it(model: str) -> None:
    """Check: w moves by exactly -beta v; w~ leaves no trace. Pitfall: it is not FedAvg with two steps."""
    method, inner, outer = probed(perfedavg(alpha=0.2, beta=0.05, inner_batch="same"))
    at = lab(method, model, shards(100))
    start = at.weights.clone()
    at.round()
    steps = len(outer.points)
    assert steps == 4
    assert len(inner.points) == 2 * steps
    ends = [*outer.points[1:], at.weights]
    for i in range(steps):
        w, v = outer.points[i], outer.gradients[i]
        assert torch.equal(inner.points[2 * i], w)
        assert torch.equal(inner.points[2 * i + 1], w - 0.2 * inner.gradients[2 * i])
        assert torch.equal(v, inner.gradients[2 * i + 1])
        assert torch.equal(ends[i], torch.add(w, v, alpha=-0.05))
    assert torch.equal(outer.points[0], start)


@pytest.mark.parametrize("variant", VARIANTS)
def test_running_statistics_are_those_of_the_outer_pass(variant: str) -> None:
    """Pitfall: neither of the copies that only serve a gradient, nor left at their initial values."""
    method, inner, _ = probed(perfedavg(alpha=0.2, beta=0.05, variant=variant))
    at = lab(method, BATCHNORM, shards(30))
    at.round()
    data = at.federation.client(0)
    net = at.replica.frozen(inner.points[1], at.replica.initial_buffers).net.train()
    net(data.prepare(data.x, None))
    found = torch.cat([b.flatten() for b in net.buffers() if b.is_floating_point()])
    assert far(at.server.buffers, found) < 1e-6
    assert far(found, at.replica.initial_buffers) > 1e-3


@dataclass(frozen=True)
class _Notes(Mechanism):
    """Notes the samples of every step, and the state of torch's generator after it."""

    samples: list[list[int]] = field(default_factory=list, compare=False)
    dice: list[Tensor] = field(default_factory=list, compare=False)

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        g = oracle(step)
        self.samples.append(step.index.tolist())
        self.dice.append(torch.get_rng_state())
        return g


@pytest.mark.parametrize("variant", VARIANTS)
def test_outer_batches_and_their_dropout_are_those_of_fedavg(variant: str) -> None:
    """Also where w~ is another model than w."""
    plain, ours = _Notes(), _Notes()
    for method, notes in ((fedavg(), plain), (perfedavg(variant=variant, beta=0.1), ours)):
        lab(alloy("noted", method, notes), DROPOUT, epochs=2).round([0, 1])
    assert ours.samples == plain.samples
    assert len(ours.dice) == len(plain.dice) > 4
    assert all(torch.equal(a, b) for a, b in zip(ours.dice, plain.dice, strict=True))


# Batches


@dataclass(frozen=True)
class _Looking(Meta):
    """Notes which samples went into which pass."""

    seen: list[tuple[str, list[int]]] = field(default_factory=list, compare=False)

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        def noted(other: StepView) -> Tensor:
            self.seen.append(("outer" if other is step else "aside", other.index.tolist()))
            return oracle(other)

        return super().gradient(step, my, noted)


def passes(**settings: Any) -> list[tuple[str, list[int]]]:
    looking = _Looking(**settings)
    lab(alloy("looking", fedavg(), looking), BATCHNORM, shards(33, 50), epochs=3, batch=8).round([0])
    return looking.seen


def test_inner_batches_come_from_streams_of_their_own() -> None:
    """Every stream goes through all of the data before it begins again; no pass is left without samples."""
    found = passes(variant="hf")
    each = 4  # inner, outer, and two for the curvature; the fifth batch has one sample, which BatchNorm cannot take
    assert len(found) == each * 4 * 3
    assert [kind for kind, _ in found] == ["aside", "outer", "aside", "aside"] * 12
    inner, outer, ahead, behind = ([index for _, index in found[i::each]] for i in range(each))
    assert ahead == behind
    for stream in (inner, outer, ahead):
        for lap in range(3):
            drawn = [i for index in stream[4 * lap : 4 * lap + 4] for i in index]
            assert len(set(drawn)) == len(drawn) == 32
        assert stream[:4] != stream[4:8]  # in another order
    for one, other in ((inner, outer), (inner, ahead), (outer, ahead)):
        assert all(set(a) != set(b) for a, b in zip(one, other, strict=True))


def test_or_are_the_same_batch() -> None:
    found = passes(variant="hf", inner_batch="same")
    for i in range(0, len(found), 4):
        assert len({tuple(index) for _, index in found[i : i + 4]}) == 1


# The curvature


@pytest.mark.parametrize("delta", [1e-4, 1e-2, 1.0, 100.0])
@double()
def test_without_a_hessian_it_is_exact_on_quadratics(delta: float) -> None:
    """Check: "hf" equals "exact" to 1e-6 for any delta."""
    loss = _Quadratic(((0.5, 2.0, 1.0), (1.5, 0.3, 1.0)), ((1.0, -2.0, 0.5), (3.0, 4.0, -5.0)))
    ends = [
        solve(perfedavg(alpha=0.3, beta=0.1, variant=v, delta=delta), loss, sizes=(4, 4), steps=5)
        for v in ("hf", "exact", "fo")
    ]
    for at in ends:
        at.rounds([0, 1], [0, 1])
    assert far(ends[0].weights, ends[1].weights) < 1e-6
    assert far(ends[2].weights, ends[1].weights) > 1e-2


@double()
def test_the_error_of_the_difference_falls_with_the_square_of_delta() -> None:
    """Check: on a smooth problem the error falls about 100-fold from delta 1e-2 to 1e-3 in float64."""
    exact, coarse, fine = (_step(variant, delta) for variant, delta in _THREE)
    ratio = float((coarse - exact).norm() / (fine - exact).norm())
    assert 80 < ratio < 120


_THREE = (("exact", 1e-3), ("hf", 1e-2), ("hf", 1e-3))


def _step(variant: str, delta: float, model: str = "regression:smooth") -> Tensor:
    """The gradient of one step after some training, so that v is not small."""
    method, _, outer = probed(perfedavg(alpha=0.5, beta=0.5, variant=variant, delta=delta))
    at = lab(method, model, shards(60, 60), steps=1)
    at.server.weights = 3 * at.server.weights
    at.round([0])
    return outer.gradients[0]


def test_the_difference_holds_in_float32() -> None:
    """Pitfall: a delta that is too small loses all digits; the default does not."""
    exact, _, fine = (_step(variant, delta) for variant, delta in _THREE)
    first = _step("fo", 1e-3)
    assert far(fine, exact) < 2e-2 * far(first, exact)


def test_dropout_is_the_same_on_either_side_of_the_difference() -> None:
    exact, _, fine = (_step(variant, delta, DROPOUT) for variant, delta in _THREE)
    first = _step("fo", 1e-3, DROPOUT)
    assert far(fine, exact) < 0.1 * far(first, exact)


# Fixed points

A = (0.5, 1.0, 2.0)
B = (-1.0, 2.0, 5.0)
ALPHA = 0.2


@pytest.mark.parametrize(
    ("method", "power"),
    [
        (fedavg(), 0),
        (perfedavg(alpha=ALPHA, beta=0.1), 1),
        (perfedavg(alpha=ALPHA, beta=0.1, variant="hf"), 2),
        (perfedavg(alpha=ALPHA, beta=0.1, variant="exact"), 2),
    ],
    ids=["fedavg", *VARIANTS],
)
def test_fixed_points_of_quadratics(method: Alloy, power: int) -> None:
    """Check, behaviour: means of b_k weighted by a_k (FedAvg), a_k (1 - alpha a_k) (fo), a_k (1 - alpha a_k)^2."""
    with double():
        assert float(settled(method)) == pytest.approx(weighted(power), abs=1e-6)


def settled(method: Alloy) -> Tensor:
    loss = _Quadratic(tuple((a,) for a in A), tuple((b,) for b in B))
    return solve(method, loss, sizes=(4, 4, 4), lr=0.1).rounds(*[[0, 1, 2]] * 400).weights


def weighted(power: int) -> float:
    weights = [a * (1 - ALPHA * a) ** power for a in A]
    return sum(w * b for w, b in zip(weights, B, strict=True)) / sum(weights)


def test_the_loss_after_an_inner_step_is_smallest_for_the_last() -> None:
    def after(x: float) -> float:
        ends = [x - ALPHA * a * (x - b) for a, b in zip(A, B, strict=True)]
        return sum(a / 2 * (end - b) ** 2 for a, b, end in zip(A, B, ends, strict=True)) / len(A)

    plain, first, second = (after(weighted(power)) for power in (0, 1, 2))
    assert second < first < plain
    assert after(weighted(2)) < min(after(weighted(2) - 0.01), after(weighted(2) + 0.01))


def test_weights_by_size_or_uniform() -> None:
    """Pitfall: it changes the meta-objective."""
    ends = [
        lab(perfedavg(beta=0.1, agg_weights=w), federation=shards(200, 30)).rounds([0, 1]).weights
        for w in ("size", "uniform")
    ]
    assert far(*ends) > 1e-4


# Personal models


def judged(at: Lab, client: int) -> Tensor:
    """The scores of a client's own model on the global test set."""
    mail: Mail = at.server.send(client, "evaluate")
    data, keep = at.federation.client(client), at.keeps.get(client, {})
    scores = client_model(at.method, at.replica, data, at.federation.info, at.local, keep, mail, at.seed)
    return scores(at.federation.dataset.x[at.federation.split.global_test])


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("steps", [1, 3])
def test_a_personal_model_is_some_steps_on_the_own_training_data(model: str, steps: int) -> None:
    """Pitfalls: not on test data, not on another client's; in chunks it is still the gradient over all samples."""
    federation = shards(700, 60)
    at = lab(perfedavg(alpha=0.3, beta=0.1, adapt_steps=steps), model, federation).rounds([0, 1])
    server = at.weights.clone()
    for client in (0, 1):
        data = federation.client(client)
        look = at.replica.frozen(at.weights, at.server.buffers)
        look.net.requires_grad_(True)
        for _ in range(steps):
            loss = F.cross_entropy(look.net(data.prepare(data.x, None)).logits, data.y)
            slopes = torch.autograd.grad(loss, list(look.net.parameters()))
            look.weights.flat.sub_(0.3 * torch.cat([g.flatten() for g in slopes]))
        look.net.requires_grad_(False)
        x = federation.prepare(federation.dataset.x[federation.split.global_test], None)
        assert far(judged(at, client), look(x).logits) < 1e-4
    assert far(judged(at, 0), judged(at, 1)) > 1e-2
    assert torch.equal(at.weights, server)
    assert not any(at.keeps.values())


def test_other_parts_losses_stay_out_of_the_personal_step() -> None:
    """They count on a round that has begun."""
    for text in ("perfedavg+contrast(mu=1)", "perfedavg+dw(mu=1)", "perfedavg+balancedsoftmax"):
        at = lab(make(text)).rounds([0, 1])
        assert bool(torch.isfinite(judged(at, 0)).all())


def test_adapting_helps_under_skew(tmp_path: Path) -> None:
    """And both are recorded: own splits in both averages, the global set, and the server's model as it is."""
    method = "perfedavg(alpha=0.3, beta=0.3)"
    result = run(tmp_path, digits(6, "dirichlet:0.1"), method, "mlp", rounds=5, epochs=2, eval_every=5)
    metrics = result.history[-1]["metrics"]
    assert result.summary["metric"] == "personal_local_acc"
    assert {"personal_local_acc_clients", "personal_on_global_acc", "global_acc"} <= metrics.keys()
    assert metrics["personal_local_acc"] > metrics["global_acc"] + 0.05


def test_without_adapting_there_is_only_the_global_model(tmp_path: Path) -> None:
    """FedDW's way: the server's model on the global test set."""
    settings: dict[str, Any] = {"rounds": 3, "epochs": 2}
    plain = run(tmp_path / "0", digits(), "perfedavg(beta=0.1, adapt_steps=0)", **settings)
    usual = run(tmp_path / "1", digits(), "perfedavg(beta=0.1)", **settings)
    assert plain.summary["metric"] == "global_acc"
    assert not any(name.startswith("personal") for name in plain.history[-1]["metrics"])
    assert plain.history[-1]["metrics"]["global_acc"] == usual.history[-1]["metrics"]["global_acc"]
    assert plain.summary["weights_sha256"] == usual.summary["weights_sha256"]


@pytest.mark.parametrize("variant", VARIANTS)
def test_bytes_are_those_of_fedavg(tmp_path: Path, variant: str) -> None:
    ours = run(tmp_path / "ours", digits(), f"perfedavg(variant={variant})", BATCHNORM, rounds=2)
    plain = run(tmp_path / "plain", digits(), "fedavg", BATCHNORM, rounds=2)
    for line, other in zip(ours.history, plain.history, strict=True):
        assert (line["bytes_up"], line["bytes_down"]) == (other["bytes_up"], other["bytes_down"])
    assert ours.summary["private_sha256"] is None


def test_a_client_with_few_samples() -> None:
    """Pitfall: no batch is split in two, so none is left empty."""
    for model in (MLP, BATCHNORM):
        at = lab(perfedavg(beta=0.1, variant="hf"), model, dealt([range(3), range(3, 36)]), batch=2)
        assert [reply.steps for reply in at.round().accepted] == ([2, 17] if model == MLP else [1, 16])

"""FedALA: the start of a round is a learned mixture of the received and the client's own old model."""

import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, dealt, digits, double, far, run
from torch import Tensor

from fedalloy.core.alloy import Alloy
from fedalloy.core.registry import make
from fedalloy.core.wire import Mail
from fedalloy.data.federation import Federation
from fedalloy.methods import fedala, fedavg
from fedalloy.methods.fedala import ALA, mixed, slope
from fedalloy.round.client import Client, client_model

HOME = sys.modules["fedalloy.methods.fedala"]  # the package's attribute of this name is the recipe
DEEP = "mlp(hidden=16, depth=2, norm=batch)"


def lab(method: Alloy, model: str = MLP, federation: Federation | None = None, **local: Any) -> Lab:
    return Lab(method, federation or digits(), model, **{"lr": 0.1, "batch": 32, **local})


def started(at: Lab, client: int) -> tuple[Tensor, Tensor]:
    """A client's weights and statistics as local training in the coming round finds them."""
    training, at.local = at.local, replace(at.local, epochs=0)
    made = at.trained(client)
    at.local = training
    at.server.round -= 1
    return made.weights.flat.clone(), made.weights.buffers.clone()


def learned(at: Lab, client: int) -> Tensor:
    return at.keeps[client]["ala.W"]


class Spy:
    """Counts passes and remembers the samples that W was learned on."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.batches: list[tuple[int, Tensor]] = []
        self.losses: list[float] = []
        monkeypatch.setattr(HOME, "slope", self)

    def __call__(self, client: Client, index: Tensor, top: slice) -> tuple[float, Tensor]:
        self.batches.append((client.id, index))
        loss, gradient = slope(client, index, top)
        self.losses.append(loss)
        return loss, gradient

    def took(self) -> list[Tensor]:
        """The batches since the last time."""
        found = [index for _, index in self.batches]
        self.batches.clear()
        return found


# Where training starts


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_the_first_participation_is_fedavg(model: str) -> None:
    """Check: training starts from exactly w, so round 1 equals FedAvg, bit for bit."""
    ours, plain = lab(fedala(), model), lab(fedavg(), model)
    ours.round()
    plain.round()
    assert torch.equal(ours.weights, plain.weights)
    assert torch.equal(ours.server.buffers, plain.server.buffers)
    assert not any("ala.W" in keep for keep in ours.keeps.values())


def test_a_client_that_joins_late_starts_from_the_received_model() -> None:
    """Pitfall: an explicit memory of having trained, whatever the first layer says."""
    late = lab(fedala(), BATCHNORM).rounds([0, 1], [0, 1])
    weights, buffers = started(late, 2)
    assert torch.equal(weights, late.weights)
    assert torch.equal(buffers, late.server.buffers)


def test_a_client_whose_first_layer_never_moved_still_mixes() -> None:
    """Pitfall: the public test compares the first tensors and takes equal ones for a first participation."""
    at = lab(fedala()).rounds([0, 1], [0, 1])
    at.keeps[0]["ala.w_k"][: 64 * 16] = at.weights[: 64 * 16]
    weights, _ = started(at, 0)
    assert not torch.equal(weights, at.weights)


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("layers", [0, 1])
def test_without_a_rate_the_whole_run_is_fedavg(model: str, layers: int) -> None:
    """Check: eta_W = 0: W stays 1 and the whole run equals FedAvg bit for bit."""
    ours, plain = lab(fedala(eta_w=0.0, num_ala_layers=layers), model), lab(fedavg(), model)
    for chosen in ([0, 1, 2], [1, 2, 4], [0, 1, 2, 3]):
        ours.round(chosen)
        plain.round(chosen)
        assert torch.equal(ours.weights, plain.weights)
        assert torch.equal(ours.server.buffers, plain.server.buffers)
    assert torch.equal(learned(ours, 1), torch.ones_like(learned(ours, 1)))


@pytest.mark.parametrize(
    ("layers", "names"),
    [
        (1, ["head"]),
        (2, ["body.5", "head"]),  # the last BatchNorm, whole
        (0, [""]),
        (99, [""]),
    ],
)
def test_the_top_layers_are_mixed_and_the_rest_is_received(layers: int, names: list[str]) -> None:
    """Check: lower layers after ALA are bit-identical to w; buffers are those of w."""
    at = lab(fedala(num_ala_layers=layers), DEEP).rounds([0, 1], [0, 1])
    first = at.replica.weights.span(names[0]).start
    before = at.keeps[0]
    weights, buffers = started(at, 0)
    assert torch.equal(weights[:first], at.weights[:first])
    assert torch.equal(buffers, at.server.buffers)
    assert not torch.equal(weights[first:], at.weights[first:])
    assert learned(at, 0).shape == (len(weights) - first,)
    assert torch.equal(at.keeps[0]["ala.w_k"], before["ala.w_k"])


def test_layers_are_those_of_the_model() -> None:
    """The names that the test above counts on."""
    names = list(lab(fedala(), DEEP).replica.weights.layout.spans)
    assert names[-4:] == ["body.5.weight", "body.5.bias", "head.weight", "head.bias"]


def test_the_mixture_is_exact_at_its_ends() -> None:
    w, w_k = torch.randn(2, 10_000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mixed(w, w_k, torch.ones(10_000)), w)
    assert torch.equal(mixed(w, w_k, torch.zeros(10_000)), w_k)
    W = torch.rand(10_000, generator=torch.Generator().manual_seed(1))
    assert far(mixed(w, w_k, W), w_k + (w - w_k) * W) < 1e-6


def test_the_start_is_the_mixture_by_what_was_learned() -> None:
    at = lab(fedala(), BATCHNORM).rounds([0, 1], [0, 1], [0, 1])
    w_k, head = at.keeps[0]["ala.w_k"].clone(), at.replica.weights.span("head")
    w, training = at.weights.clone(), at.local
    at.local = replace(training, epochs=0)
    at.round([0, 1])
    begun = at.sent(0, "share.weights")[head]
    assert torch.equal(begun, mixed(w[head], w_k[head], learned(at, 0)))
    assert 0 < float(learned(at, 0).mean()) < 1


# How W is learned


@pytest.mark.parametrize("eta_w", [1.0, 1e4])
def test_weights_stay_between_0_and_1(eta_w: float) -> None:
    """Check: 0 <= W <= 1 after any number of updates."""
    at = lab(fedala(eta_w=eta_w, num_ala_layers=0), BATCHNORM).rounds(*[[0, 1, 2]] * 4)
    for client in (0, 1, 2):
        W = learned(at, client)
        assert float(W.min()) >= 0
        assert float(W.max()) <= 1
        assert bool((W < 1).any())
    if eta_w > 1:
        assert float(learned(at, 0).min()) == 0


@pytest.mark.parametrize("layers", [1, 3])
@double()
def test_the_gradient_of_the_mixing_weights(layers: int) -> None:
    """Check: G * (w - w_k) matches a numerical derivative of l(w_hat(W)) to 1e-4."""
    method = fedala(num_ala_layers=layers, eta_w=1e-3, start_until_converged=False, rand_percent=100.0)
    at = lab(method, "regression:net", batch=10_000).rounds([0, 1], [0, 1])
    at.keeps[0]["ala.W"] = W = torch.full_like(learned(at, 0), 0.5)
    w, w_k, data = at.weights.clone(), at.keeps[0]["ala.w_k"].clone(), at.federation.client(0)
    top = slice(len(w) - len(W), len(w))
    look = at.replica.frozen(w, at.server.buffers)

    def loss(W: Tensor) -> float:
        flat = w.clone()
        flat[top] = w_k[top] + (w - w_k)[top] * W
        look.weights.load(flat, at.server.buffers)
        return float(F.cross_entropy(look(data.prepare(data.x, None)).logits, data.y))

    at.local = replace(at.local, epochs=0)
    at.round([0, 1])
    gradient = (W - learned(at, 0)) / 1e-3
    draw, h = torch.Generator().manual_seed(0), 1e-5
    assert float(gradient.abs().max()) > 1e-3
    for i in torch.randperm(len(W), generator=draw)[:40].tolist():
        nudge = torch.zeros_like(W)
        nudge[i] = h
        assert float(gradient[i]) == pytest.approx((loss(W + nudge) - loss(W - nudge)) / (2 * h), abs=1e-4)


def test_a_good_old_model_is_kept_where_the_new_one_is_bad() -> None:
    """Check, behaviour: mean W falls below 1, and the loss at the ALA start is below that of w."""
    own = [i for i in range(1200) if int(digits().dataset.y[i]) in (0, 1)]
    others = [i for i in range(1200) if int(digits().dataset.y[i]) not in (0, 1)]
    federation = dealt([own, others])
    at = lab(fedala(), MLP, federation, epochs=5).rounds([0, 1], [1])
    data = federation.client(0)

    def loss(flat: Tensor) -> float:
        look = at.replica.frozen(flat, at.server.buffers)
        return float(F.cross_entropy(look(data.prepare(data.x, None)).logits, data.y))

    assert loss(at.keeps[0]["ala.w_k"]) < 0.1 * loss(at.weights)
    bad = loss(at.weights)
    at.local = replace(at.local, epochs=0)
    at.round([0, 1])
    assert float(learned(at, 0).mean()) < 0.95
    assert loss(at.sent(0, "share.weights")) < 0.9 * bad


# How often and on what


def passes(batches: Sequence[Tensor], each: int) -> int:
    assert len(batches) % each == 0
    return len(batches) // each


def test_the_first_time_until_the_loss_settles_and_then_one_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    at = lab(fedala()).rounds([0, 1])
    assert spy.took() == []
    used = int(0.8 * at.sizes[0])
    each = -(-used // 32)
    at.round([0])
    count = passes(spy.took(), each)
    assert 11 <= count <= 100
    last = torch.tensor(spy.losses[each - 1 :: each], dtype=torch.float64)
    deviations = [float(last[i - 10 : i].std(correction=0)) for i in range(11, count + 1)]
    assert deviations[-1] < 0.1
    assert all(deviation >= 0.1 for deviation in deviations[:-1])
    for _ in range(2):
        at.round([0])
        assert passes(spy.took(), each) == 1


@pytest.mark.parametrize(
    ("settings", "count"),
    [
        ({"threshold": 0.0}, 100),
        ({"threshold": 0.0, "max_start_epochs": 7}, 7),
        ({"threshold": 1e6}, 11),
        ({"threshold": 1e6, "num_pre_loss": 3}, 4),
        ({"start_until_converged": False}, 1),
    ],
)
def test_passes_of_the_start_phase(
    settings: dict[str, Any], count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    spy = Spy(monkeypatch)
    lab(fedala(**settings), batch=10_000).rounds([0, 1], [0])
    assert len(spy.took()) == count


def test_a_random_part_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall: a contiguous slice of data that are sorted by class would be biased."""
    spy = Spy(monkeypatch)
    at = lab(fedala(rand_percent=50.0, start_until_converged=False)).rounds([0, 1])
    drawn = []
    for _ in range(2):
        at.round([0])
        drawn.append(torch.cat(spy.took()))
    for index in drawn:
        assert len(index) == len(set(index.tolist())) == at.sizes[0] // 2
        assert int(index.max() - index.min()) >= len(index)
    assert set(drawn[0].tolist()) != set(drawn[1].tolist())


def test_all_of_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    """FedDW's way: a single pass over all local data in every round."""
    spy = Spy(monkeypatch)
    at = lab(fedala(start_until_converged=False, rand_percent=100.0)).rounds([0, 1])
    for _ in range(2):
        at.round([0])
        assert torch.cat(spy.took()).sort().values.tolist() == list(range(at.sizes[0]))


def test_even_a_sliver_is_a_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(monkeypatch)
    at = lab(fedala(rand_percent=0.1), BATCHNORM, dealt([range(3), range(3, 90)])).rounds([0, 1], [0])
    assert {len(index) for index in spy.took()} == {1}
    assert bool(torch.isfinite(at.weights).all())


def test_settled_means_the_deviation_of_the_last_losses() -> None:
    """That of the losses themselves (divided by n), of the last ones only, and never before there is one more."""
    part = ALA(num_pre_loss=2)
    assert part._settled([9.0, 0.0, 0.15])  # deviation 0.075; divided by n - 1 it would be 0.106
    assert not part._settled([9.0, 0.0, 0.25])
    assert not part._settled([0.0, 0.0])


def test_every_client_has_weights_of_its_own() -> None:
    """Pitfall: public code keeps them in a worker that serves several clients."""
    at = lab(fedala()).rounds([0, 1, 2], [0, 1, 2])
    alone = lab(fedala()).rounds([0, 1, 2], [2])
    assert not torch.equal(learned(at, 0), learned(at, 1))
    assert torch.equal(learned(at, 2), learned(alone, 2))


# The wire


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_nothing_more_is_sent_than_by_fedavg(tmp_path: Path, model: str) -> None:
    """Check: uploads contain no W; bytes equal FedAvg's."""
    ours, plain = (
        run(tmp_path / method, digits(), method, model, rounds=3, participation=0.5)
        for method in ("fedala", "fedavg")
    )
    for line, other in zip(ours.history, plain.history, strict=True):
        assert line["bytes_up"] == other["bytes_up"]
        assert line["bytes_down"] == other["bytes_down"]
    at = lab(fedala(), model).rounds([0, 1], [0, 1])
    assert at.replies[0].items.keys() == {"share.weights", "share.buffers"}


# Evaluation


def judged(at: Lab, client: int) -> Tensor:
    """The scores of a client's own model on the global test set."""
    mail: Mail = at.server.send(client, "evaluate")
    data, keep = at.federation.client(client), at.keeps.get(client, {})
    scores = client_model(at.method, at.replica, data, at.federation.info, at.local, keep, mail, at.seed)
    return scores(at.federation.dataset.x[at.federation.split.global_test])


def scored(at: Lab, flat: Tensor, buffers: Tensor) -> Tensor:
    x = at.federation.dataset.x[at.federation.split.global_test]
    look = at.replica.frozen(flat, buffers)
    return look(at.federation.prepare(x, None)).logits


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_models_are_tested_as_training_left_them(model: str) -> None:
    """Also those of clients that were not sampled; who never took part has the global model."""
    at = lab(fedala(), model).rounds([0, 1], [0, 1], [1, 2])
    for client in (0, 1, 2):
        keep = at.keeps[client]
        expected = scored(at, keep["ala.w_k"], keep["ala.buffers"])
        assert far(judged(at, client), expected) < 1e-5
    assert torch.equal(at.sent(1, "share.weights"), at.keeps[1]["ala.w_k"])
    assert torch.equal(at.sent(1, "share.buffers"), at.keeps[1]["ala.buffers"])
    assert far(judged(at, 5), scored(at, at.weights, at.server.buffers)) < 1e-5


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_or_after_mixing_with_the_newest_model(model: str) -> None:
    """As the authors do, for all clients, sampled or not; W as it was last learned."""
    at = lab(fedala(ala_all=True), model).rounds([0, 1], [0, 1], [1, 2])
    head = at.replica.weights.span("head")
    for client in (0, 1):
        flat = at.weights.clone()
        flat[head] = mixed(flat[head], at.keeps[client]["ala.w_k"][head], learned(at, client))
        assert far(judged(at, client), scored(at, flat, at.server.buffers)) < 1e-5
        assert far(flat, at.weights) > 1e-3
    for client in (2, 5):  # took part once, never
        assert far(judged(at, client), scored(at, at.weights, at.server.buffers)) < 1e-5


@pytest.mark.parametrize("ala_all", [False, True])
def test_an_evaluation_learns_nothing(ala_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    at = lab(fedala(ala_all=ala_all), BATCHNORM).rounds([0, 1], [0, 1])
    kept = {name: value.clone() for name, value in at.keeps[0].items()}

    def never(*_: object) -> None:
        raise AssertionError("an evaluation trains")

    monkeypatch.setattr(HOME, "slope", never)
    judged(at, 0)
    assert kept.keys() == at.keeps[0].keys()
    assert all(torch.equal(kept[name], at.keeps[0][name]) for name in kept)
    with pytest.raises(AssertionError):
        at.round([0])


def test_what_is_recorded(tmp_path: Path) -> None:
    """Both averages over own test splits, the mean on the global set, and the server's model as an extra."""
    federation = digits(6, "dirichlet:0.1")
    result = run(tmp_path, federation, "fedala", "mlp", rounds=4, epochs=2, lr=0.1, participation=0.5)
    assert result.summary["metric"] == "personal_local_acc"
    metrics = result.history[-1]["metrics"]
    assert {"personal_local_acc_clients", "personal_on_global_acc", "global_acc"} <= metrics.keys()
    assert metrics["personal_local_acc"] > metrics["personal_on_global_acc"] + 0.2
    assert result.accuracy == metrics["personal_local_acc"]


def test_the_part_stands_on_other_methods() -> None:
    """W is learned on the plain loss, so it may stand before parts whose round has not begun yet."""
    for text in ("fedala+dw(mu=1)", "fedala+prox(mu=0.1)", "moon(proj_dim=8)+ala(num_ala_layers=2)"):
        at = lab(make(text)).rounds([0, 1], [0, 1], [0, 1])
        assert float(learned(at, 0).mean()) < 1

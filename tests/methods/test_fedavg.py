"""FedAvg, and the conventions that all methods share: batches, steps, averages, buffers, bytes."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, batches, dealt, digits, far, full_gradient, probed, run, shards
from torch import Tensor

from fedalloy.experiment.run import sample
from fedalloy.methods import fedavg


@pytest.mark.parametrize(
    ("model", "optimiser"),
    [(MLP, {}), (MLP, {"momentum": 0.9, "weight_decay": 1e-3}), (BATCHNORM, {"momentum": 0.9})],
)
def test_one_client_is_one_uninterrupted_run(model: str, optimiser: dict[str, Any]) -> None:
    """Check: K = 1 equals local training with the optimiser restarted each round, bit for bit."""
    lab = Lab(fedavg(), shards(100), model, epochs=2, batch=32, lr=0.1, **optimiser)
    net = copy.deepcopy(lab.replica.net).train()
    for round in (1, 2, 3):
        lab.round()
        restarted = torch.optim.SGD(net.parameters(), lr=0.1, foreach=False, **optimiser)
        for x, y in batches(lab, 0, round):
            restarted.zero_grad()
            F.cross_entropy(net(x).logits, y).backward()  # type: ignore[no-untyped-call]
            restarted.step()
        assert torch.equal(lab.weights, torch.cat([p.detach().flatten() for p in net.parameters()]))
        statistics = [b.flatten() for b in net.buffers() if b.is_floating_point()]
        assert torch.equal(lab.server.buffers, torch.cat(statistics or [torch.empty(0)]))


@pytest.mark.parametrize("agg_weights", ["size", "uniform"])
def test_one_full_batch_step_is_gradient_descent(agg_weights: str) -> None:
    """Check: E = 1, B >= max n_k, plain SGD: one step w - lr sum_k p_k grad F_k(w) to 1e-6."""
    federation = digits()
    lab = Lab(fedavg(agg_weights=agg_weights), federation, batch=10_000, lr=0.5)
    net, start = copy.deepcopy(lab.replica.net), lab.weights.clone()
    chosen = [0, 2, 5]
    sizes = torch.tensor([float(lab.sizes[k]) for k in chosen])
    p = sizes / sizes.sum() if agg_weights == "size" else torch.full((3,), 1 / 3)
    gradient = sum(
        (p_k * full_gradient(net, federation.client(k)) for p_k, k in zip(p, chosen, strict=True)),
        torch.zeros_like(start),
    )
    lab.round(chosen)
    assert far(lab.weights, start - 0.5 * gradient) < 1e-6
    assert far(lab.weights, start) > 1e-3  # weights that sum to one over the participants move the model


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_the_order_of_clients_leaves_no_trace(model: str) -> None:
    """Check: listing or executing the sampled clients in another order leaves w and buffers bit-identical."""
    straight, shuffled = (Lab(fedavg(), digits(), model, lr=0.1, momentum=0.9) for _ in range(2))
    for _ in range(2):
        straight.round([0, 1, 3, 4])
        shuffled.round([4, 1, 0, 3], answer_in=[3, 0, 4, 1])
    assert torch.equal(straight.weights, shuffled.weights)
    assert torch.equal(straight.server.buffers, shuffled.server.buffers)


def test_a_client_trains_alike_whoever_else_is_sampled() -> None:
    alone, together = (Lab(fedavg(), digits(), lr=0.1) for _ in range(2))
    alone.round([2])
    together.round([0, 1, 2, 3])
    assert torch.equal(alone.sent(2, "share.weights"), together.sent(2, "share.weights"))


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_bytes_are_weights_and_buffers_of_every_participant(tmp_path: Path, model: str) -> None:
    """Check: bytes per round equal |S| 4 (d + b) down and the same (+ n_k) up."""
    result = run(tmp_path, digits(), "fedavg", model, rounds=2, participation=0.5)
    d = 64 * 16 + 16 + 16 * 10 + 10 + (32 if model == BATCHNORM else 0)
    b = 32 if model == BATCHNORM else 0
    assert result.summary["parameters"] == d
    for line in result.history:
        assert len(line["participants"]) == 3
        assert sum(line["bytes_down"].values()) == 3 * 4 * (d + b)
        assert sum(line["bytes_up"].values()) == 3 * (4 * (d + b) + 8)


def test_label_skew_hurts(tmp_path: Path) -> None:
    """Check, behaviour: far above chance with Dirichlet 100, clearly lower with Dirichlet 0.05, same seed."""
    accuracy = {
        skew: run(
            tmp_path / skew, digits(10, skew), "fedavg", "mlp", rounds=10, lr=0.1, eval_every=10
        ).accuracy
        for skew in ("dirichlet:100", "dirichlet:0.05")
    }
    even, skewed = accuracy["dirichlet:100"], accuracy["dirichlet:0.05"]
    assert even is not None
    assert skewed is not None
    assert even > 0.8
    assert skewed < even - 0.1


def test_clients_keep_nothing_and_the_server_only_the_model() -> None:
    lab = Lab(fedavg(), digits(), BATCHNORM, lr=0.1, momentum=0.9)
    lab.round([0, 1])
    assert lab.keeps == {0: {}, 1: {}}
    assert lab.server.state().keys() == {"server.weights", "server.buffers"}


def test_average_is_over_the_participants() -> None:
    """Pitfall: dividing by the data of all clients would shrink the model under partial participation."""
    lab = Lab(fedavg(), shards(30, 50, 200), lr=0.1)
    lab.round([0, 1])
    expected = (30 * lab.sent(0, "share.weights").double() + 50 * lab.sent(1, "share.weights").double()) / 80
    assert torch.equal(lab.weights, expected.float())


def test_server_lr_scales_the_step() -> None:
    whole, half = Lab(fedavg(), digits(), lr=0.1), Lab(fedavg(server_lr=0.5), digits(), lr=0.1)
    start = whole.weights.clone()
    whole.round()
    half.round()
    assert far(half.weights, (start + whole.weights) / 2) < 1e-7


def test_buffers_are_averaged_like_the_weights() -> None:
    lab = Lab(fedavg(), shards(30, 50), BATCHNORM, lr=0.1)
    lab.round()
    expected = (30 * lab.sent(0, "share.buffers").double() + 50 * lab.sent(1, "share.buffers").double()) / 80
    assert torch.equal(lab.server.buffers, expected.float())
    assert far(lab.server.buffers, lab.replica.initial_buffers) > 1e-3


def test_local_buffers_stay_and_come_back() -> None:
    """buffers="local": each client keeps its own, nothing is sent."""
    lab = Lab(fedavg(buffers="local"), shards(40, 40), BATCHNORM, lr=0.1, batch=40)
    bytes_up = lab.round().bytes_up
    assert bytes_up["share.buffers"] == 0
    assert lab.server.send(0).items["share.buffers"].numel() == 0
    first = {k: lab.keeps[k]["own.buffers"].clone() for k in (0, 1)}
    assert far(first[0], first[1]) > 1e-3
    lab.round([0])
    assert torch.equal(lab.keeps[1]["own.buffers"], first[1])
    # the running mean moves on from the client's own: new = 0.9 old + 0.1 batch
    batch_mean = (lab.keeps[0]["own.buffers"] - 0.9 * first[0])[:16] / 0.1
    data = lab.federation.client(0)
    old = lab.server.previous[: 64 * 16 + 16]  # the first linear layer
    inputs = data.prepare(data.x, None).flatten(1)
    assert far(batch_mean, F.linear(inputs, old[:1024].view(16, 64), old[1024:]).mean(0)) < 1e-3


def test_dropped_buffers_start_anew() -> None:
    """buffers="drop": reset to their initial values at load, nothing is sent or kept."""
    lab = Lab(fedavg(buffers="drop"), shards(40, 40), BATCHNORM, lr=0.1)
    assert lab.round().bytes_up["share.buffers"] == 0
    assert lab.keeps == {0: {}, 1: {}}
    client = lab.trained(0)
    assert torch.equal(client.received_buffers, lab.replica.initial_buffers)
    assert far(client.weights.buffers, lab.replica.initial_buffers) > 1e-3


@pytest.mark.parametrize("buffers", ["average", "local", "drop"])
def test_buffer_policies_change_bytes_not_weights_of_round_one(buffers: str) -> None:
    """In train mode BatchNorm looks at the batch only, so the weights are the same under every policy."""
    lab, plain = (Lab(fedavg(buffers=policy), digits(), BATCHNORM, lr=0.1) for policy in (buffers, "average"))
    for _ in range(2):
        lab.round()
        plain.round()
    assert torch.equal(lab.weights, plain.weights)


@pytest.mark.parametrize(("model", "steps"), [(MLP, 6), (BATCHNORM, 4)])
def test_one_sample_batches_are_skipped_with_batchnorm_only(model: str, steps: int) -> None:
    """65 samples in batches of 32: the third batch holds one sample; a skipped step does not count."""
    lab = Lab(fedavg(), shards(65), model, epochs=2, batch=32, lr=0.1)
    lab.round()
    assert lab.replies[0].steps == steps
    assert lab.replies[0].seen == (128 if model == BATCHNORM else 130)
    assert lab.replies[0].samples == 65


@pytest.mark.parametrize(("model", "steps"), [(MLP, 5), (BATCHNORM, 0)])
def test_batches_of_one_throughout(model: str, steps: int) -> None:
    """With BatchNorm and batch size 1 every batch is skipped, not only the last."""
    lab = Lab(fedavg(), shards(5), model, batch=1, lr=0.1)
    start = lab.weights.clone()
    lab.round()
    assert lab.replies[0].steps == steps
    assert torch.equal(lab.weights, start) == (steps == 0)


def test_a_short_batch_is_kept() -> None:
    """Pitfall: a loader that drops the last batch never trains a client with n_k < B."""
    lab = Lab(fedavg(), shards(10, 70), batch=32, lr=0.1)
    start = lab.weights.clone()
    lab.round()
    assert [lab.replies[k].steps for k in (0, 1)] == [1, 3]
    assert far(lab.sent(0, "share.weights"), start) > 0


@pytest.mark.parametrize(("wanted", "seen"), [(1, 32), (3, 70), (7, 70 + 70 + 32)])
def test_a_fixed_number_of_steps_runs_over_as_many_epochs_as_needed(wanted: int, seen: int) -> None:
    lab = Lab(fedavg(), shards(70), steps=wanted, epochs=99, batch=32, lr=0.1)
    lab.round()
    assert (lab.replies[0].steps, lab.replies[0].seen) == (wanted, seen)


def test_the_learning_rate_decays_with_the_round_alone() -> None:
    """A schedule is a function of the round index only: a client first seen in round 3 uses that round's rate."""
    method, probe, _ = probed(fedavg())
    lab = Lab(method, shards(20, 20), lr=0.4, lr_decay=0.5, batch=20)
    for round, client in enumerate([0, 0, 1], 1):
        before = lab.weights.clone()
        lab.round([client])
        assert far(before - lab.weights, 0.4 * 0.5 ** (round - 1) * probe.gradients[-1]) < 1e-7


def test_augmentation_and_dropout_leave_the_global_generator_alone() -> None:
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    Lab(fedavg(), digits(), lr=0.1).round([0])
    assert torch.equal(before, torch.random.get_rng_state())


@pytest.mark.parametrize(("participation", "count"), [(0.5, 3), (0.34, 2), (0.01, 1), (1.0, 5)])
def test_sampling_is_uniform_among_clients_with_data(participation: float, count: int) -> None:
    """m = max(int(C K), 1) of all K; a client without data is never asked."""
    federation = dealt([range(9), range(9, 20), [], range(20, 30), range(30, 31), range(31, 60)])
    drawn = [sample(federation, participation, seed=0, round=r) for r in range(60)]
    assert all(len(set(clients)) == count and 2 not in clients for clients in drawn)
    assert {k for clients in drawn for k in clients} == {0, 1, 3, 4, 5}
    assert all(clients == sorted(clients) for clients in drawn)


def test_runs_with_adam_restart_it_every_round() -> None:
    """Pitfall: an optimiser kept across rounds. Adam's first step has length lr in every round."""
    lab = Lab(fedavg(), shards(20), batch=20, lr=0.01, optimizer="adam")
    moved: list[Tensor] = []
    for _ in range(3):
        before = lab.weights.clone()
        lab.round()
        moved.append((lab.weights - before).abs())
    for step in moved:
        assert float(step.max()) == pytest.approx(0.01, rel=1e-3)
        assert float((step[step > 0.001] - 0.01).abs().max()) < 1e-3


def test_a_run_says_who_took_part_and_how_much_they_did(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"rounds": 2, "participation": 0.5, "epochs": 2, "batch": 32}
    result = run(tmp_path, digits(), "fedavg", **settings)
    for line in result.history:
        sizes = [int(digits().sizes[k]) for k in line["participants"]]
        assert line["samples"] == 2 * sum(sizes)
        assert line["steps"] == 2 * sum(-(-n // 32) for n in sizes)

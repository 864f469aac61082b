"""FedDistill: mean outputs of each class, gathered while training, and distillation towards their average."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, assert_trains_alone, batches, by_class, dealt, digits, far, run
from torch import Tensor

from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.registry import make
from fedalloy.data import load
from fedalloy.methods import feddistill, local
from fedalloy.round.client import Client, Step

LOGITS, PROBABILITIES = "logits-means", "probabilities-means"


def rows(lab: Lab, label: str = LOGITS) -> Tensor:
    return lab.server.states[label].persistent["means"]


def sent(lab: Lab, client: int, label: str = LOGITS) -> dict[int, Tensor]:
    """A client's mean outputs of the latest round, by class."""
    classes = lab.sent(client, f"{label}.counts").nonzero().flatten().tolist()
    return dict(zip(classes, lab.sent(client, f"{label}.means"), strict=True))


def started(lab: Lab, client: int) -> Client:
    """A client at the beginning of the coming round; the server's clock is left alone."""
    made = lab.trained(client)
    lab.server.round -= 1
    return made


def targets(lab: Lab, client: int) -> tuple[Tensor, list[int]]:
    """What a client will distil towards, and for which classes."""
    memo = started(lab, client).states["outputdistillation"].scratch
    return memo["targets"], memo["known"].nonzero().flatten().tolist()


def term(lab: Lab, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lam times the distillation on a batch with these labels, the logits, and the targets."""
    client = started(lab, 0)
    x = client.data.prepare(client.data.x[: len(y)], None)
    step = Step(client, x, y, torch.arange(len(y)), 0)
    step.out = client.net(x)
    piece = lab.method.pieces[-1]
    loss = piece.loss(step, client.state_of(piece))
    return (
        torch.zeros(()) if loss is None else loss,
        step.out.logits,
        client.states["outputdistillation"].scratch["targets"],
    )


# The term


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("settings", [{}, {"output": "prob"}, {"leave_one_out": True}], ids=str)
def test_without_distillation_clients_train_alone(model: str, settings: dict[str, Any]) -> None:
    """Check: lam = 0 equals local training bit for bit."""
    assert_trains_alone(feddistill(lam=0.0, **settings), model)


def test_the_first_round_has_no_term() -> None:
    ends = []
    for lam in (0.0, 1.0):
        lab = Lab(feddistill(lam=lam), digits(), lr=0.05).rounds([0, 1])
        first = lab.keeps[0]["own.weights"].clone()
        ends.append((first, lab.rounds([0, 1]).keeps[0]["own.weights"]))
    assert torch.equal(ends[0][0], ends[1][0])
    assert far(ends[0][1], ends[1][1]) > 1e-4


@pytest.mark.parametrize("output", ["logits", "prob"])
def test_the_term_by_hand(output: str) -> None:
    """lam CE(softmax(a), t_y), t the softmax of mean logits, or mean probabilities; the mean is over the batch."""
    lab = Lab(feddistill(lam=3.0, output=output), by_class([0, 1, 2], [2, 4]), lr=0.05).rounds([0, 1], [0, 1])
    y = torch.tensor([0, 1, 2, 4, 4])
    loss, a, t = term(lab, y)
    mean = rows(lab, LOGITS if output == "logits" else PROBABILITIES)
    expected = mean.softmax(1) if output == "logits" else mean
    assert far(t[[0, 1, 2, 4]], expected[[0, 1, 2, 4]]) < 1e-7
    assert t[[0, 1, 2, 4]].sum(1) == pytest.approx(torch.ones(4), abs=1e-6)
    p = a.softmax(1)
    by_hand = -(expected[y] * p.log()).sum() / 5
    assert loss.item() == pytest.approx(3 * by_hand.item(), rel=1e-5)


def test_absent_rows_are_left_out() -> None:
    """A class that nobody holds adds nothing and gets no gradient; public code lets it distil towards itself."""
    lab = Lab(feddistill(), by_class([0, 1], [1, 2]), lr=0.05).rounds([0, 1])
    y = torch.tensor([0, 7, 1, 9])
    loss, a, t = term(lab, y)
    (gradient,) = torch.autograd.grad(loss, a)
    assert not bool(gradient[[1, 3]].any())
    for i in (0, 2):
        assert far(gradient[i], (a[i].detach().softmax(0) - t[y[i]]) / 4) < 1e-6
    nothing, _, _ = term(lab, torch.tensor([7, 8]))
    assert float(nothing) == 0


@pytest.mark.parametrize("output", ["logits", "prob"])
def test_the_term_is_at_least_the_entropy_of_its_target(output: str) -> None:
    """Check: distillation minus the entropy of the target is >= 0; with raw logits as targets it had no bound."""
    lab = Lab(feddistill(output=output), by_class([0, 1, 2]), lr=0.2, epochs=5).rounds([0], [0])
    y = torch.tensor([0, 1, 2] * 5)
    loss, a, t = term(lab, y)
    entropy = -(t[y] * t[y].clamp(min=1e-30).log()).sum(1).mean()
    gap = loss.item() - entropy.item()
    assert gap > 0
    assert gap == pytest.approx(
        F.kl_div(a.detach().log_softmax(1), t[y], reduction="batchmean").item(), abs=1e-5
    )


def distance(lam: float) -> float:
    """How far the clients' mean logits are from the average, after a few rounds."""
    lab = Lab(feddistill(lam=lam), digits(), lr=0.05, epochs=2)
    for _ in range(4):
        lab.round()
    gaps = []
    for k in range(6):
        gaps += [float((row - rows(lab)[c]).norm()) for c, row in sent(lab, k).items()]
    return sum(gaps) / len(gaps)


def test_mean_outputs_come_closer() -> None:
    """Check, behaviour: a client's mean logit rows move towards the average when lam grows, over a few rounds."""
    found = [distance(lam) for lam in (0.0, 1.0, 10.0)]
    assert found[0] > 1.1 * found[1] > 1.2 * found[2]


# Means


@pytest.mark.parametrize(("output", "label"), [("logits", LOGITS), ("prob", PROBABILITIES)])
def test_outputs_are_gathered_while_training(output: str, label: str) -> None:
    """F[c]: the mean output over all batches of all epochs, as the model was then."""
    lab = Lab(feddistill(output=output), by_class([0, 1], [1, 2]), lr=0.1, epochs=3, batch=16).rounds([0, 1])
    net = lab.replica.net
    lab.replica.reset()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    said, labels = [], []
    for x, y in batches(lab, 0, 1):
        a = net(x).logits
        optimiser.zero_grad()
        F.cross_entropy(a, y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        said.append(a.detach() if output == "logits" else a.detach().softmax(1))
        labels.append(y)
    values, y = torch.cat(said), torch.cat(labels)
    for c, row in sent(lab, 0, label).items():
        assert far(row, values[y == c].mean(0)) < 1e-5
    assert len(y) == 3 * 40


def test_every_holder_counts_the_same() -> None:
    """G[c] is the plain mean over the clients that sent c, and the mean itself where only one holds the class."""
    y = load("digits", None).y.tolist()
    of = {c: [i for i, label in enumerate(y) if label == c] for c in (1, 2, 3)}
    lab = Lab(feddistill(), dealt([of[1][:40] + of[2][:9], of[1][50:60] + of[3][:9]]), lr=0.1)
    lab.round()
    first, second = sent(lab, 0), sent(lab, 1)
    assert far(rows(lab)[1], (first[1] + second[1]) / 2) < 1e-6
    assert torch.equal(rows(lab)[2], first[2])
    assert torch.equal(rows(lab)[3], second[3])


# Leaving one out


def test_the_only_holder_has_nobody_to_learn_from() -> None:
    """Check: G[c] equals F_m[c] when only m holds class c; leave-one-out then drops the term."""
    lab = Lab(feddistill(leave_one_out=True), by_class([0, 1], [1, 2]), lr=0.1).rounds([0, 1])
    assert torch.equal(rows(lab)[0], sent(lab, 0)[0])
    assert targets(lab, 0)[1] == [1, 2]
    assert targets(lab, 1)[1] == [0, 1]
    alone = Lab(feddistill(leave_one_out=True), by_class([0, 1]), lr=0.1).rounds([0], [0], [0])
    plain = Lab(local(), alone.federation, lr=0.1).rounds([0], [0], [0])
    assert torch.equal(alone.keeps[0]["own.weights"], plain.keeps[0]["own.weights"])
    with_own = Lab(feddistill(), alone.federation, lr=0.1).rounds([0], [0], [0])
    assert far(with_own.keeps[0]["own.weights"], plain.keeps[0]["own.weights"]) > 1e-4


@pytest.mark.parametrize("output", ["logits", "prob"])
def test_the_others_are_averaged(output: str) -> None:
    """g_mc = (M_c G[c] - F_m[c]) / (M_c - 1): the mean over the other holders."""
    label = LOGITS if output == "logits" else PROBABILITIES
    lab = Lab(
        feddistill(leave_one_out=True, output=output), by_class([0, 1, 2], [1, 2], [2, 3]), lr=0.1
    ).rounds([0, 1, 2])
    own = [sent(lab, k, label) for k in range(3)]
    expected = {
        0: {1: own[1][1], 2: (own[1][2] + own[2][2]) / 2, 3: own[2][3]},
        2: {1: (own[0][1] + own[1][1]) / 2},
    }
    for k, others in expected.items():
        found, known = targets(lab, k)
        for c, row in others.items():
            assert c in known
            assert far(found[c], row.softmax(0) if output == "logits" else row) < 1e-5


def test_identical_clients_get_their_own_mean() -> None:
    """Check: leave-one-out with identical clients returns the clients' own mean."""
    lab = Lab(feddistill(leave_one_out=True), dealt([range(50)] * 3), lr=0.1, batch=50).rounds([0, 1, 2])
    for k in range(3):
        found, known = targets(lab, k)
        assert known == sorted(sent(lab, k))
        for c, row in sent(lab, k).items():
            assert far(found[c], row.softmax(0)) < 1e-5


def test_who_was_away_has_nothing_to_leave_out() -> None:
    """A row that others have renewed since holds no mean of this client, and is used as it is."""
    lab = Lab(feddistill(leave_one_out=True), by_class([0, 1], [1, 2], [1, 3]), lr=0.1)
    lab.rounds([0, 1], [1, 2])
    found, known = targets(lab, 0)
    assert known == [1, 2, 3]  # class 0 still holds its own mean and nothing else
    assert far(found[1], rows(lab)[1].softmax(0)) < 1e-7
    mail = lab.server.send(0).items
    assert mail["outputdistillation.mine"].nonzero().flatten().tolist() == [0]
    assert mail["outputdistillation.holders"].tolist() == [1, 2, 1, 1, 0, 0, 0, 0, 0, 0]
    found, known = targets(lab, 1)
    assert known == [0, 1, 3]
    assert far(found[1], sent(lab, 2)[1].softmax(0)) < 1e-5


def test_a_refused_mean_is_not_left_out() -> None:
    """What the server did not use is not in its rows."""
    lab = Lab(feddistill(leave_one_out=True), by_class([0, 1], [1, 2]), lr=0.1)
    lab.server.round = 1
    replies = [lab.answer(lab.server.send(k)) for k in (0, 1)]
    replies[0].items[f"{LOGITS}.means"][0, 0] = torch.nan
    assert 0 in lab.server.receive([0, 1], replies).refused
    mail = lab.server.send(0).items
    assert not bool(mail["outputdistillation.mine"].any())
    found, known = targets(lab, 0)
    assert known == [1, 2]
    assert far(found, rows(lab).softmax(1)) < 1e-7


# Wire, architectures, sums


@pytest.mark.parametrize("model", [MLP, "lenet"])
def test_bytes_do_not_depend_on_the_model(model: str) -> None:
    """Down C^2 floats and C mask bits (leave-one-out: M_c too); up C_m C floats and which classes."""
    lab = Lab(feddistill(), by_class([0, 1, 5], [2]), model, lr=0.05)
    assert {k: tuple(v.shape) for k, v in lab.server.send(0).items.items()} == {
        f"{LOGITS}.means": (10, 10),
        f"{LOGITS}.seen": (10,),
    }
    outcome = lab.round()
    assert outcome.bytes_up == {f"{LOGITS}.means": 4 * (3 + 1) * 10, f"{LOGITS}.counts": 2 * 8 * 10}
    assert lab.sent(0, f"{LOGITS}.counts").tolist() == [1, 1, 0, 0, 0, 1, 0, 0, 0, 0]  # presence, no counts
    assert lab.keeps[0].keys() == {"own.weights", "own.buffers"}


def test_architectures_may_differ(tmp_path: Path) -> None:
    models = "mlp(hidden=16),cnn-bn,lenet,resnet18(width=0.25),vit-tiny"
    result = run(tmp_path, digits(5, "dirichlet:0.5", 0.25), "feddistill", models=models, rounds=2, lr=0.05)
    assert not any(line["refused"] for line in result.history)
    assert result.summary["metric"] == "personal_local_acc"
    assert result.history[-1]["metrics"]["personal_local_acc"] > 0.2


def test_it_learns(tmp_path: Path) -> None:
    federation = digits(6, "dirichlet:0.5", 0.25)
    result = run(tmp_path, federation, "feddistill(leave_one_out=True)", rounds=8, epochs=3, lr=0.1)
    metrics = result.history[-1]["metrics"]
    assert min(metrics["personal_local_acc"], metrics["personal_local_acc_clients"]) > 0.85


def test_running_and_final_soft_labels_do_not_mix() -> None:
    with pytest.raises(AlloyConflict, match="both claim class means of probabilities"):
        make("feddistill(output=prob)+share+dw")

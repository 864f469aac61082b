"""FedProto: class prototypes from all clients, features pulled towards them, predictions by the nearest one."""

from pathlib import Path
from typing import Any

import pytest
import torch
from laboratory import BATCHNORM, MLP, Lab, assert_trains_alone, batches, by_class, dealt, digits, far, run
from torch import Tensor, nn

from fedalloy import models
from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.net import Inputs
from fedalloy.core.registry import make
from fedalloy.data import load
from fedalloy.errors import FedAlloyError
from fedalloy.mechanisms.common_width import CommonWidth
from fedalloy.methods import fedproto, local
from fedalloy.round.client import Step, client_model
from fedalloy.round.replica import Replicas

MEANS = "features-means"
DIGITS = Inputs("image", (1, 8, 8), 10)
MIXED = ("mlp(hidden=16)", "cnn-bn", "lenet", "resnet18(width=0.25)", "vit-tiny")


def prototypes(lab: Lab) -> Tensor:
    return lab.server.states[MEANS].persistent["means"]


def seen(lab: Lab) -> list[int]:
    found: list[int] = lab.server.states[MEANS].persistent["seen"].nonzero().flatten().tolist()
    return found


def features(lab: Lab, client: int) -> tuple[Tensor, Tensor]:
    """What a client's kept model says of its training data, in eval mode, and the labels."""
    data = lab.federation.client(client)
    net = lab.replica.frozen(lab.keeps[client]["own.weights"], lab.keeps[client]["own.buffers"])
    return net(data.prepare(data.x, None)).features, data.y


def term(lab: Lab, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """lam R on a batch with these labels, its features, and the prototypes."""
    client = lab.trained(0)
    x = client.data.prepare(client.data.x[: len(y)], None)
    step = Step(client, x, y, torch.arange(len(y)), 0)
    step.out = client.net(x)
    piece = next(p for p in lab.method if p.label == "prototypepull")
    loss = piece.loss(step, client.state_of(piece))
    return (
        torch.zeros(()) if loss is None else loss,
        step.out.features,
        client.states[MEANS].received["means"],
    )


# The term


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
@pytest.mark.parametrize("settings", [{}, {"weighted": True}, {"proto_pass": "train"}], ids=str)
def test_without_the_pull_clients_train_alone(model: str, settings: dict[str, Any]) -> None:
    """Check: lam = 0 equals local training bit for bit."""
    assert_trains_alone(fedproto(lam=0.0, **settings), model)


def test_the_first_round_has_no_pull() -> None:
    """No R in round 0, whatever lam: there is nothing to be pulled to."""
    ends = [Lab(fedproto(lam=lam), digits(), lr=0.05).rounds([0, 1], [0, 1]) for lam in (0.0, 1.0)]
    firsts = [Lab(fedproto(lam=lam), digits(), lr=0.05).rounds([0, 1]) for lam in (0.0, 1.0)]
    assert torch.equal(*(lab.keeps[0]["own.weights"] for lab in firsts))
    assert far(*(lab.keeps[0]["own.weights"] for lab in ends)) > 1e-4


def test_the_pull_by_hand() -> None:
    """R is the mean over batch and feature entries of (z - C[y])^2: squared L2 divided by k (public code's MSE)."""
    lab = Lab(fedproto(lam=3.0), by_class([0, 1, 2], [0, 4]), lr=0.05).rounds([0, 1])
    y = torch.tensor([0, 1, 1, 2, 4])
    loss, z, P = term(lab, y)
    by_hand = torch.stack([(z[i] - P[c]).square().sum() for i, c in enumerate(y.tolist())]).sum() / (5 * 16)
    assert loss.item() == pytest.approx(3 * by_hand.item(), rel=1e-5)


def test_absent_classes_are_left_out_and_counted() -> None:
    """Check: absent classes give zero gradient from R. They stay in the mean's denominator."""
    lab = Lab(fedproto(lam=1.0), by_class([0, 1], [1, 2]), lr=0.05).rounds([0, 1])
    assert seen(lab) == [0, 1, 2]
    y = torch.tensor([0, 7, 1, 9])
    loss, z, P = term(lab, y)
    (gradient,) = torch.autograd.grad(loss, z)
    assert not bool(gradient[[1, 3]].any())
    for i in (0, 2):
        assert far(gradient[i], 2 * (z[i].detach() - P[y[i]]) / (4 * 16)) < 1e-8
    nothing, _, _ = term(lab, torch.tensor([7, 9, 9]))
    assert float(nothing) == 0


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_features_come_closer(model: str) -> None:
    """Check, behaviour: the mean ||z - C[y]|| on training data falls when lam > 0."""
    gaps = {}
    for lam in (0.0, 10.0):
        lab = Lab(fedproto(lam=lam), digits(), model, lr=0.05, epochs=2)
        for _ in range(4):
            lab.round()
        pairs = [features(lab, k) for k in range(6)]
        norms = torch.cat([(z - prototypes(lab)[y]).norm(dim=1) for z, y in pairs])
        scale = torch.cat([z.norm(dim=1) for z, _ in pairs]).mean()
        gaps[lam] = float(norms.mean()), float(norms.mean() / scale)
    assert gaps[10.0][0] < 0.8 * gaps[0.0][0]
    assert gaps[10.0][1] < gaps[0.0][1]  # not because everything shrinks


# Prototypes


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_one_client_has_its_own_prototypes(model: str) -> None:
    """Check: with one client C equals its own prototypes: mean features of the trained model in eval mode."""
    lab = Lab(fedproto(), by_class([0, 3, 8]), model, lr=0.05).rounds([0], [0])
    z, y = features(lab, 0)
    assert seen(lab) == [0, 3, 8]
    for c in seen(lab):
        assert far(prototypes(lab)[c], z[y == c].mean(0)) < 1e-6


@pytest.mark.parametrize("weighted", [False, True])
def test_aggregation(weighted: bool) -> None:
    """C[c] is the plain mean over the clients that sent c; `weighted`: by their class counts."""
    y = load("digits", None).y.tolist()
    of = {c: [i for i, label in enumerate(y) if label == c] for c in (1, 2, 3)}
    federation = dealt([of[1][:40] + of[2][:5], of[1][50:60] + of[3][:5]])
    lab = Lab(fedproto(weighted=weighted), federation, lr=0.05).rounds([0, 1])
    own = []
    for k in (0, 1):
        z, labels = features(lab, k)
        own.append({c: z[labels == c].mean(0) for c in set(labels.tolist())})
    shares = (0.8, 0.2) if weighted else (0.5, 0.5)
    assert far(prototypes(lab)[1], shares[0] * own[0][1] + shares[1] * own[1][1]) < 1e-6
    assert far(prototypes(lab)[2], own[0][2]) < 1e-6
    assert far(prototypes(lab)[3], own[1][3]) < 1e-6
    assert far(own[0][1], own[1][1]) > 1e-3


def test_a_class_that_no_participant_holds_keeps_its_prototype() -> None:
    lab = Lab(fedproto(), by_class([0, 1], [1, 2]), lr=0.05).rounds([0])
    assert seen(lab) == [0, 1]
    before = prototypes(lab).clone()
    lab.round([1])
    assert seen(lab) == [0, 1, 2]
    assert torch.equal(prototypes(lab)[0], before[0])
    assert far(prototypes(lab)[1], before[1]) > 1e-4


@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_prototypes_of_training_are_those_of_all_epochs(model: str) -> None:
    """proto_pass=train: the mean of the features of every batch of every epoch, as the model was then."""
    lab = Lab(fedproto(proto_pass="train"), by_class([0, 1], [1, 2]), model, lr=0.1, epochs=3, batch=16)
    lab.round()
    after = Lab(fedproto(), lab.federation, model, lr=0.1, epochs=3, batch=16).rounds([0, 1])
    net = lab.replica.net
    lab.replica.reset()
    optimiser = torch.optim.SGD(net.parameters(), lr=0.1)
    said, labels = [], []
    net.train()
    for x, y in batches(lab, 0, 1):
        out = net(x)
        optimiser.zero_grad()
        nn.functional.cross_entropy(out.logits, y).backward()  # type: ignore[no-untyped-call]
        optimiser.step()
        said.append(out.features.detach())
        labels.append(y)
    z, y = torch.cat(said), torch.cat(labels)
    assert len(y) == 3 * 40
    expected = torch.stack([z[y == c].mean(0) for c in (0, 1)])
    assert far(lab.sent(0, f"{MEANS}.means"), expected) < 1e-5
    assert far(after.sent(0, f"{MEANS}.means"), expected) > 1e-3


def test_classes_that_training_did_not_reach_are_not_sent() -> None:
    """A fixed number of steps may miss a class: "never seen" is no row, not a row of zeros."""
    lab = Lab(fedproto(proto_pass="train"), digits(2, "iid"), lr=0.05, steps=1, batch=4)
    lab.round()
    held = lab.sent(0, f"{MEANS}.counts")
    assert int(held.sum()) == len(lab.sent(0, f"{MEANS}.means")) <= 4
    assert set(held.tolist()) == {0, 1}


# The wire


@pytest.mark.parametrize("model", ["mlp(hidden=32)", "mlp(hidden=32, depth=3)"])
def test_bytes_do_not_depend_on_the_model(model: str) -> None:
    """Check: upload is C_m k floats, independent of model size, and which classes; down C k floats and a mask."""
    lab = Lab(fedproto(), by_class([0, 1, 5], [2]), model, lr=0.05)
    mail = lab.server.send(0).items
    assert mail.keys() == {f"{MEANS}.means", f"{MEANS}.seen"}
    assert mail[f"{MEANS}.means"].shape == (10, 32)
    assert mail[f"{MEANS}.seen"].dtype == torch.bool
    outcome = lab.round()
    assert lab.sent(0, f"{MEANS}.means").shape == (3, 32)
    assert lab.sent(1, f"{MEANS}.means").shape == (1, 32)
    assert outcome.bytes_up == {f"{MEANS}.means": 4 * (3 + 1) * 32, f"{MEANS}.counts": 2 * 8 * 10}


@pytest.mark.parametrize("proto_pass", ["eval", "train"])
def test_without_weights_only_presence_is_told(proto_pass: str) -> None:
    for weighted in (False, True):
        lab = Lab(fedproto(weighted=weighted, proto_pass=proto_pass), by_class([0, 5]), lr=0.05).rounds([0])
        told = lab.sent(0, f"{MEANS}.counts")[[0, 5]].tolist()
        assert told == ([20, 20] if weighted else [1, 1])


# Predictions


def scores(lab: Lab, client: int = 0) -> Tensor:
    data = lab.federation.client(client)
    mail = lab.server.send(client, "evaluate")
    model = client_model(
        lab.method,
        lab.replica,
        data,
        lab.federation.info,
        lab.local,
        lab.keeps.get(client, {}),
        mail,
        lab.seed,
    )
    return model(data.x)


def test_the_nearest_prototype_decides() -> None:
    """`proto`: nearest in L2 among classes that have one; others cannot be predicted. `head`: the own head."""
    lab = Lab(fedproto(), by_class([0, 1, 2], [2, 3]), lr=0.05, epochs=3).rounds([0, 1])
    z, _ = features(lab, 0)
    found = scores(lab)
    assert bool(torch.isinf(found[:, 4:]).all())
    by_hand = torch.stack([(z - prototypes(lab)[c]).norm(dim=1) for c in range(4)], dim=1)
    assert far(-found[:, :4], by_hand) < 1e-4
    assert torch.equal(found.argmax(1), by_hand.argmin(1))
    heads = Lab(fedproto(evaluate="head"), lab.federation, lr=0.05, epochs=3).rounds([0, 1])
    assert torch.equal(heads.keeps[0]["own.weights"], lab.keeps[0]["own.weights"])
    net = heads.replica.frozen(heads.keeps[0]["own.weights"], heads.keeps[0]["own.buffers"])
    data = heads.federation.client(0)
    assert far(scores(heads), net(data.prepare(data.x, None)).logits) < 1e-6


def test_before_there_are_prototypes_the_head_decides() -> None:
    """Public code returns accuracy 0 there."""
    lab = Lab(fedproto(), digits(), lr=0.05)
    data = lab.federation.client(0)
    net = lab.replica.frozen(lab.replica.initial, lab.replica.initial_buffers)
    assert far(scores(lab), net(data.prepare(data.x, None)).logits) < 1e-6


@pytest.mark.parametrize("evaluate", ["proto", "head"])
def test_it_learns(tmp_path: Path, evaluate: str) -> None:
    """C.Avg and D.Avg on the clients' own test data; there is no global model."""
    federation = digits(6, "dirichlet:0.5", 0.25)
    result = run(tmp_path, federation, f"fedproto(evaluate={evaluate})", rounds=8, epochs=3, lr=0.1)
    metrics = result.history[-1]["metrics"]
    assert result.summary["metric"] == "personal_local_acc"
    assert min(metrics["personal_local_acc"], metrics["personal_local_acc_clients"]) > 0.85
    assert "global_acc" not in metrics


# Architectures


def test_architectures_may_differ(tmp_path: Path) -> None:
    """Perceptron, convolutions, a residual net and a transformer exchange prototypes of one width."""
    result = run(
        tmp_path, digits(5, "dirichlet:0.5", 0.25), "fedproto", models=",".join(MIXED), rounds=2, lr=0.05
    )
    for line in result.history:
        assert not line["refused"]
        assert line["bytes_down"][f"{MEANS}.means"] == 5 * 4 * 10 * 16
    assert result.history[-1]["metrics"]["personal_local_acc"] > 0.2


def test_features_of_different_nets_get_one_width() -> None:
    """By default the smallest of the federation; nets that have it are left alone, others get a head that fits."""
    widths = {model: models.width_of(model, DIGITS) for model in MIXED}
    assert len(set(widths.values())) > 3
    assert min(widths.values()) == widths["mlp(hidden=16)"] == 16
    for asked, width in ((None, 16), (24, 24), (200, 200)):
        replicas = Replicas(fedproto(feature_dim=asked), MIXED, DIGITS, 0)
        replicas.check()
        for k, model in enumerate(MIXED):
            replica, plain = replicas.of(k), Replicas(local(), MIXED, DIGITS, 0).of(k)
            assert replica.net.width == width
            out = replica.net.eval()(torch.randn(3, *DIGITS.shape))
            assert out.features.shape == (3, width)
            assert out.logits.shape == (3, 10)
            span = plain.weights.span("body")
            assert torch.equal(replica.initial[replica.weights.span("body")], plain.initial[span])
            if widths[model] == width:
                assert torch.equal(replica.initial, plain.initial)


def test_the_common_width_is_a_mean() -> None:
    replica = Replicas(fedproto(feature_dim=8), ("mlp(hidden=16)",), DIGITS, 0).of(0)
    plain = Replicas(local(), ("mlp(hidden=16)",), DIGITS, 0).of(0)
    x = torch.randn(5, *DIGITS.shape)
    pooled, whole = (s.net(x).features.detach() for s in (replica, plain))
    assert far(pooled, whole.view(5, 8, 2).mean(2)) < 1e-6


def test_one_architecture_is_left_alone() -> None:
    lab, alone = Lab(fedproto(), digits()), Lab(local(), digits())
    assert torch.equal(lab.replica.initial, alone.replica.initial)


def test_the_width_comes_before_what_reads_the_features() -> None:
    for text in ("fedavg+projector+commonwidth(width=4)", "fedrda+commonwidth(width=4)"):
        with pytest.raises(
            FedAlloyError, match=r"commonwidth\(width=4\) changes the features, which the net's"
        ):
            Lab(make(text), digits())
    lab = Lab(make("fedavg+commonwidth(width=4)+projector(width=8)"), digits(), lr=0.05).rounds([0])
    assert lab.replica.net.width == 4
    assert Lab(make("fedavg+headwithoutbias+commonwidth(width=4)"), digits()).replica.net.head.bias is None


# Sums


def test_the_pull_needs_prototypes() -> None:
    with pytest.raises(
        AlloyConflict, match=r"prototypepull needs class means of features, .*add 'classmeans'"
    ):
        make("fedavg+prototypepull")
    lab = Lab(make("fedavg+classmeans+prototypepull(lam=1)"), digits(), lr=0.05).rounds([0, 1], [0, 1])
    plain = Lab(make("fedavg"), digits(), lr=0.05).rounds([0, 1], [0, 1])
    assert far(lab.weights, plain.weights) > 1e-5


def test_two_kinds_of_prototypes_are_refused() -> None:
    with pytest.raises(AlloyConflict, match="classmeans and runningmeans both claim class means of features"):
        make("fedavg+classmeans+runningmeans")
    with pytest.raises(AlloyConflict, match="same part with different settings"):
        make("fedproto+pba+fedetf")
    assert CommonWidth() == make("fedproto").pieces[0]

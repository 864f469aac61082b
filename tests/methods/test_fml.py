"""FML: a private model and a common meme model that teach each other; only the meme is averaged."""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, batches, digits, far, probed, run, shards
from torch import Tensor

from fedalloy import models
from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.net import Inputs
from fedalloy.core.registry import make
from fedalloy.experiment.folder import RunFolder
from fedalloy.mechanisms.clip import Clip
from fedalloy.methods import fedavg, fml, local
from fedalloy.round.client import Step
from fedalloy.round.replica import Replicas

DIGITS = Inputs("image", (1, 8, 8), 10)
MIXED = ("cnn-bn", "lenet", "mlp(hidden=16)", "resnet18(width=0.25)", "vit-tiny")


def kl(a: Tensor, b: Tensor) -> Tensor:
    """KL(softmax(a) || softmax(b)), summed over classes, batch mean."""
    p, q = a.softmax(1), b.softmax(1)
    return (p * (p / q).log()).sum(1).mean()


# The two losses


@pytest.mark.parametrize("model", [MLP, BATCHNORM, "lenet", "test_fedsce:dropping"])
@pytest.mark.parametrize("beta", [0.3, 1.0])
def test_without_the_meme_the_own_model_trains_alone(model: str, beta: float) -> None:
    """Check: alpha = 1: theta_m trajectories equal local training bit for bit; the meme learns all the same."""
    settings: dict[str, Any] = {"lr": 0.05, "epochs": 2, "momentum": 0.9, "batch": 16}
    alone = Lab(local(), shards(40, 33), model, **settings)
    lab = Lab(fml(alpha=1.0, beta=beta), alone.federation, model, **settings)
    start = lab.weights.clone()
    for _ in range(3):
        alone.round()
        lab.round()
        for k in (0, 1):
            assert torch.equal(lab.keeps[k]["own.weights"], alone.keeps[k]["own.weights"])
            assert torch.equal(lab.keeps[k]["own.buffers"], alone.keeps[k]["own.buffers"])
    assert far(lab.weights, start) > 1e-3


@pytest.mark.parametrize("weights", ["uniform", "size"])
@pytest.mark.parametrize("meme", [MLP, BATCHNORM])
@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_without_the_own_model_the_meme_is_fedavg(weights: str, meme: str, alpha: float) -> None:
    """Check: beta = 1: theta_g trajectories equal FedAvg on the meme architecture, same weighting and batches."""
    settings: dict[str, Any] = {"lr": 0.05, "epochs": 2, "momentum": 0.9, "batch": 16}
    average = Lab(fedavg(agg_weights=weights), shards(60, 40, 21), meme, **settings)
    lab = Lab(
        fml(alpha=alpha, beta=1.0, meme=meme, agg_weights=weights), average.federation, BATCHNORM, **settings
    )
    lab.server.weights = average.weights.clone()
    for chosen in ([0, 1], [1, 2], [0, 2]):
        average.round(chosen)
        lab.round(chosen)
        assert torch.equal(lab.weights, average.weights)
        assert torch.equal(lab.server.buffers, average.server.buffers)


def both(lab: Lab, client: int) -> tuple[models.Net, models.Net]:
    """Copies of a client's two models as it begins the coming round."""
    begun = lab.trained(client)
    lab.server.round -= 1
    begun.weights.load(begun.received, begun.received_buffers)
    own = copy.deepcopy(begun.net)
    meme = own.aux
    del own.aux
    return own, meme


@pytest.mark.parametrize(
    ("model", "meme"), [(MLP, None), (BATCHNORM, BATCHNORM), ("lenet", BATCHNORM), ("cnn-bn", MLP)]
)
@pytest.mark.parametrize(
    "chosen",
    [
        {},
        {"alpha": 0.2, "beta": 0.9},
        {"detach": False},
        {"kl": "mean", "alpha": 0.1, "beta": 0.1},
        {"clip": 0.5},
    ],
    ids=str,
)
def test_a_round_is_that_of_the_equations(model: str, meme: str | None, chosen: dict[str, Any]) -> None:
    """Two nets, two losses, two optimisers: both forward passes first, then both steps."""
    lab = Lab(fml(meme=meme, **chosen), shards(60, 40), model, lr=0.05, epochs=2, batch=16, momentum=0.5)
    lab.round()
    own, common = both(lab, 0)
    how: dict[str, Any] = {"alpha": 0.5, "beta": 0.5, "detach": True, "kl": "sum", "clip": None, **chosen}
    optimisers = [torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.5) for net in (own, common)]
    own.train(), common.train()
    scale = 1 / 10 if how["kl"] == "mean" else 1
    for x, y in batches(lab, 0, 2):
        l, g = own(x).logits, common(x).logits  # noqa: E741
        fixed_l, fixed_g = (l.detach(), g.detach()) if how["detach"] else (l, g)
        loss_l = how["alpha"] * F.cross_entropy(l, y) + (1 - how["alpha"]) * scale * kl(fixed_g, l)
        loss_g = how["beta"] * F.cross_entropy(g, y) + (1 - how["beta"]) * scale * kl(fixed_l, g)
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss_l.backward(retain_graph=True)
        loss_g.backward()
        if how["clip"]:
            for net in (own, common):
                torch.nn.utils.clip_grad_norm_(net.parameters(), how["clip"])
        for optimiser in optimisers:
            optimiser.step()
    before = lab.keeps[0]["own.weights"].clone()
    lab.round([0])
    flat = [torch.cat([p.detach().flatten() for p in net.parameters()]) for net in (own, common)]
    assert far(lab.keeps[0]["own.weights"], flat[0]) < 2e-5
    assert far(lab.sent(0, "share.weights"), flat[1]) < 2e-5
    assert far(lab.keeps[0]["own.weights"], before) > 1e-3


def test_divergences_are_zero_for_equal_models_and_never_negative() -> None:
    """Check: KL terms are 0 when both models give equal logits; both are >= 0."""
    lab = Lab(fml(alpha=0.25, beta=0.25, meme=MLP), digits(), lr=0.1)
    client = lab.trained(0)
    x, y = client.data.prepare(client.data.x[:20], None), client.data.y[:20]
    piece = lab.method.pieces[-1]

    def terms() -> tuple[float, float, float]:
        step = Step(client, x, y, torch.arange(20), 0)
        step.out = client.net(x)
        loss = piece.loss(step, client.state_of(piece))
        assert loss is not None
        g = client.net.aux(x).logits
        distilled = loss.item() - 0.25 * F.cross_entropy(g, y).item()
        return distilled, kl(g, step.out.logits).item(), kl(step.out.logits, g).item()

    distilled, one, other = terms()
    assert min(one, other) > 1e-4
    assert distilled == pytest.approx(0.75 * (one + other), rel=1e-3)
    flat = client.weights.flat
    flat[client.weights.span("main")] = flat[client.weights.span("aux")]
    assert terms()[0] == pytest.approx(0, abs=1e-6)


def test_each_loss_reaches_one_model_unless_told_otherwise() -> None:
    """The partner's output is a constant: with alpha = 1 the own gradient does not depend on beta, unless told so."""
    gradients = {}
    for detach in (True, False):
        for beta in (0.2, 0.9):
            method, inner, _ = probed(fml(alpha=1.0, beta=beta, detach=detach))
            lab = Lab(method, digits(), lr=0.05, steps=1)
            lab.round([0])
            gradients[detach, beta] = inner.gradients[0][lab.replica.weights.span("main")]
    assert torch.equal(gradients[True, 0.2], gradients[True, 0.9])
    assert far(gradients[False, 0.2], gradients[False, 0.9]) > 1e-4


def gap(alpha: float) -> float:
    """The mean KL between the two models on the training data after local training."""
    lab = Lab(fml(alpha=alpha, beta=alpha), digits(), lr=0.1, epochs=3)
    found = []
    for _ in range(3):
        lab.round()
    for k in range(6):
        client = lab.trained(k)
        lab.server.round -= 1
        x = client.data.prepare(client.data.x, None)
        with torch.no_grad():
            l, g = client.net(x).logits, client.net.aux(x).logits  # noqa: E741
        found.append((kl(l, g) + kl(g, l)).item())
    return sum(found) / len(found)


def test_the_models_come_closer() -> None:
    """Check, behaviour: the mean KL after local training is lower with alpha = beta = 0.5 than with 1."""
    assert gap(0.5) < 0.7 * gap(1.0)


def test_clipping_is_per_model() -> None:
    """Longer gradients are shortened to the limit, each model's by its own; shorter ones are left alone."""
    client = Lab(fml(clip=2.0), digits(), lr=0.05).trained(0)
    clip = Clip(2.0)
    main, aux = (client.weights.span(part) for part in ("main", "aux"))
    raw = torch.randn(len(client.weights.flat), generator=torch.Generator().manual_seed(0))
    raw[main] *= 10 / raw[main].norm()
    raw[aux] *= 0.5 / raw[aux].norm()
    step = Step(client, client.data.x, client.data.y, client.data.y, 0)
    g = clip.gradient(step, client.state_of(clip), lambda _: raw.clone())
    assert g[main].norm().item() == pytest.approx(2, rel=1e-5)
    assert far(g[main], raw[main] / 5) < 1e-6
    assert torch.equal(g[aux], raw[aux])


# Wire, architectures, runs


@pytest.mark.parametrize("model", [MLP, "lenet"])
def test_nothing_private_travels(model: str) -> None:
    """Check: no private tensor occurs in the upload; upload size equals the meme's, whatever the private model."""
    lab = Lab(fml(meme=BATCHNORM), digits(), model, lr=0.05)
    size = models.size_of(BATCHNORM, DIGITS)
    assert sum(v.numel() for v in lab.server.send(0).items.values()) == size.parameters + size.buffers
    outcome = lab.round([0, 1, 2])
    assert outcome.bytes_up == {
        "share.weights": 3 * 4 * size.parameters,
        "share.buffers": 3 * 4 * size.buffers,
    }
    assert lab.replies[0].items.keys() == {"share.weights", "share.buffers"}
    own = lab.keeps[0]["own.weights"]
    sent = torch.cat([v.flatten() for v in lab.replies[0].items.values()])
    for name, view in lab.replica.weights.views(torch.cat([own, lab.weights])).items():
        if not name.startswith("aux."):
            windows = sent.unfold(0, view.numel(), 1) if view.numel() <= len(sent) else sent[:0, None]
            assert not bool((windows == view.flatten()).all(1).any()), name


def test_everyone_counts_the_same_by_default() -> None:
    for weights in ("uniform", "size"):
        lab = Lab(fml(agg_weights=weights), shards(100, 20), BATCHNORM, lr=0.1)
        lab.round()
        shares = (0.5, 0.5) if weights == "uniform" else (5 / 6, 1 / 6)
        for key, found in (("share.weights", lab.weights), ("share.buffers", lab.server.buffers)):
            expected = shares[0] * lab.sent(0, key) + shares[1] * lab.sent(1, key)
            assert far(found, expected) < 1e-6


def test_the_meme_is_the_smallest_architecture_unless_named() -> None:
    for named, expected in ((None, "mlp(hidden=16)"), ("lenet", "lenet")):
        replicas = Replicas(fml(meme=named), MIXED, DIGITS, 0)
        replicas.check()
        size = models.size_of(expected, DIGITS).parameters
        for k in range(len(MIXED)):
            span = replicas.of(k).weights.span("aux")
            assert span.stop - span.start == size


def test_architectures_may_differ(tmp_path: Path) -> None:
    """Private models of five kinds; their accuracy counts, that of the meme is a secondary figure."""
    federation = digits(5, "dirichlet:0.5", 0.25)
    result = run(tmp_path, federation, "fml", models=",".join(MIXED), rounds=2, lr=0.05)
    assert not any(line["refused"] for line in result.history)
    assert result.summary["metric"] == "personal_local_acc"
    metrics = result.history[-1]["metrics"]
    assert {"personal_local_acc", "personal_local_acc_clients", "aux_acc"} <= metrics.keys()
    assert "global_acc" not in metrics
    for k, model in enumerate(MIXED):
        kept = RunFolder(tmp_path / "run").vault.load(k, before=99)
        assert len(kept["own.weights"]) == models.size_of(model, DIGITS).parameters


def test_it_learns(tmp_path: Path) -> None:
    federation = digits(6, "dirichlet:0.5", 0.25)
    result = run(tmp_path, federation, "fml", rounds=8, epochs=3, lr=0.1)
    metrics = result.history[-1]["metrics"]
    assert min(metrics["personal_local_acc"], metrics["aux_acc"]) > 0.8


def test_one_loss_for_the_auxiliary_model() -> None:
    with pytest.raises(AlloyConflict, match="both claim the auxiliary model's loss"):
        make("fml+mutual")
    with pytest.raises(AlloyConflict, match="meme needs an auxiliary model"):
        make("fedavg+meme")

"""CCVR: pooled moments, virtual features, and a classifier that learns from them while the rest stands still."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from laboratory import BATCHNORM, MLP, Lab, dealt, digits, far, run
from torch import Tensor

from fedalloy.core.alloy import AlloyConflict
from fedalloy.core.registry import make
from fedalloy.core.wire import Items, Reply
from fedalloy.data.federation import federate
from fedalloy.errors import FedAlloyWarning
from fedalloy.experiment.folder import RunFolder
from fedalloy.methods import ccvr
from fedalloy.methods.ccvr import Covariance, Moments, VirtualFeatures, drawn, moments, pooled
from fedalloy.round.replies import Outcome

COVARIANCES: list[Covariance] = ["full", "diag"]
SKEWED = "pathological:3"


def features(count: int, width: int = 5, classes: int = 4, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Correlated features around class means that are large beside the spread."""
    draw = torch.Generator().manual_seed(seed)
    y = torch.randint(classes, (count,), generator=draw)
    mix = torch.randn(classes, width, width, generator=draw, dtype=torch.float64)
    z = torch.randn(count, 1, width, generator=draw, dtype=torch.float64) @ mix[y]
    return z[:, 0] + 10 * torch.randn(classes, width, generator=draw, dtype=torch.float64)[y], y


def asked(lab: Lab, clients: list[int] | None = None) -> Outcome:
    """The question after the last round, by hand."""
    (asker,) = lab.method.asking(last=True)
    return lab.ask(asker, clients or lab.federation.eligible)


def accuracy(lab: Lab, flat: Tensor) -> float:
    federation = lab.federation
    index = federation.split.global_test
    lab.replica.weights.load(flat, lab.server.buffers)
    lab.replica.net.eval()
    scores = lab.replica.net(federation.prepare(federation.dataset.x[index], None)).logits
    return float((scores.argmax(1) == federation.dataset.y[index]).double().mean())


def kept(lab: Lab) -> Items:
    return lab.server.states["virtualfeatures"].persistent


@pytest.mark.parametrize("cov", COVARIANCES)
@pytest.mark.parametrize("cuts", [[30], [1, 2, 3, 50], [10, 11, 40, 41], list(range(1, 60))])
@pytest.mark.parametrize("seed", [0, 1])
def test_pooled_moments(cov: Covariance, cuts: list[int], seed: int) -> None:
    """Check 1: those of the concatenated features, whoever holds what, single samples included (1e-10)."""
    z, y = features(60, seed=seed)
    shards = zip(torch.tensor_split(z, cuts), torch.tensor_split(y, cuts), strict=True)
    parts = [moments(z_k, y_k, 4, cov) for z_k, y_k in shards if len(y_k)]
    counts, means, covariances = pooled(iter(parts), 4, 5, cov)
    assert torch.equal(counts, torch.bincount(y, minlength=4))
    for c in range(4):
        expected = torch.cov(z[y == c].T)
        assert far(means[c], z[y == c].mean(0)) < 1e-10
        assert far(covariances[c], expected if cov == "full" else expected.diagonal()) < 1e-10


@pytest.mark.parametrize("cov", COVARIANCES)
def test_local_moments(cov: Covariance) -> None:
    """Pitfall: the local covariance is unbiased; of a single sample it is 0. Only classes that occur have rows."""
    z, y = features(40)
    z, y = z[(y == 1) | (y == 3)], y[(y == 1) | (y == 3)]
    z, y = torch.cat([z, torch.ones(1, 5)]), torch.cat([y, torch.tensor([0])])
    counts, means, covariances = moments(z, y, 4, cov)
    assert counts.tolist() == [1, int((y == 1).sum()), 0, int((y == 3).sum())]
    assert len(means) == len(covariances) == 3
    assert torch.equal(means[0], torch.ones(5, dtype=torch.float64))
    assert not covariances[0].any()
    expected = torch.cov(z[y == 3].T)
    assert far(covariances[2], expected if cov == "full" else expected.diagonal()) < 1e-12


@pytest.mark.parametrize("cov", COVARIANCES)
def test_classes_of_one_and_of_none(cov: Covariance) -> None:
    """Pitfall: N = 1 has covariance 0 (plus the jitter), N = 0 is left out with a warning."""
    z, y = features(40, classes=3)
    z, y = torch.cat([z[y > 0], z[y == 0][:1]]), torch.cat([y[y > 0], y[y == 0][:1]])
    found = pooled([moments(z, y, 4, cov)], 4, 5, cov)
    assert not found[2][0].any()
    part = VirtualFeatures(samples=500, cov=cov, jitter=0.01)
    with pytest.warns(FedAlloyWarning, match="holds class 3"):
        drawn_z, drawn_y = part.virtual(found, torch.Generator().manual_seed(0))
    assert torch.bincount(drawn_y, minlength=4).tolist() == [500, 500, 500, 0]
    alone = drawn_z[drawn_y == 0]
    variances = found[2][:3].diagonal(dim1=1, dim2=2) if cov == "full" else found[2][:3]
    assert float(alone.var(0).mean()) == pytest.approx(0.01 * float(variances.mean()), rel=0.1)
    assert far(alone.mean(0), z[-1]) < 0.5


def test_nobody_answered() -> None:
    lab = Lab(ccvr(), digits(), lr=0.1).rounds([0, 1])
    with pytest.warns(FedAlloyWarning, match="holds class 0, 1, 2"):
        lab.server.hear(lab.method.asking(last=True)[0], [0], [])
    assert kept(lab) == {}


@pytest.mark.parametrize("cov", COVARIANCES)
def test_draws(cov: Covariance) -> None:
    """Check 3: reproducible; sample mean and covariance approach mu and Sigma as M grows."""
    z, y = features(400, classes=1)
    _, (mean, *_), (covariance, *_) = moments(z, y, 1, cov)
    full = covariance if cov == "full" else covariance.diag()
    gaps = []
    for count in (100, 100_000):
        first, again, other = (
            drawn(mean, covariance, 0.0, count, torch.Generator().manual_seed(seed)) for seed in (0, 0, 1)
        )
        assert torch.equal(first, again)
        assert not torch.equal(first, other)
        gaps.append((float((first.mean(0) - mean).norm()), float((torch.cov(first.T) - full).norm())))
    assert gaps[1][0] < 0.2 * gaps[0][0]
    assert gaps[1][1] < 0.2 * gaps[0][1]
    assert gaps[1][1] < 0.03 * float(full.norm())


def test_more_features_than_samples() -> None:
    """Pitfall: a covariance without full rank is drawn from all the same, and stays in its subspace."""
    z, y = features(4, width=9, classes=1)
    _, (mean, *_), (covariance, *_) = moments(z, y, 1)
    found = drawn(mean, covariance, 0.0, 2000, torch.Generator().manual_seed(0))
    assert bool(torch.isfinite(found).all())
    assert int(torch.linalg.matrix_rank(torch.cov(found.T), atol=1e-6)) == 3
    wider = drawn(mean, covariance, 0.5, 20_000, torch.Generator().manual_seed(0))
    assert far(torch.cov(wider.T), covariance + 0.5 * torch.eye(9)) < 0.05 * float(covariance.norm())


@pytest.mark.parametrize("cov", COVARIANCES)
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_what_the_server_hears(model: str, cov: Covariance) -> None:
    """Check 1 with real clients: what is pooled is what one party with all data would have found, in eval mode."""
    seen: list[Moments] = []

    class _Spy(VirtualFeatures):
        def virtual(self, gaussians: Moments, draw: torch.Generator) -> tuple[Tensor, Tensor]:
            seen.append(gaussians)
            return super().virtual(gaussians, draw)

    lab = Lab(make("fedavg") + _Spy(cov=cov, samples=1), digits(6, SKEWED), model, lr=0.1).rounds([0, 1, 2])
    asked(lab)
    everyone = [lab.federation.client(k) for k in range(6)]
    x, y = torch.cat([data.x for data in everyone]), torch.cat([data.y for data in everyone])
    lab.replica.weights.load(lab.weights, lab.server.buffers)
    lab.replica.net.eval()
    z = lab.replica.net(lab.federation.prepare(x, None)).features.detach().double()
    counts, means, covariances = seen[0]
    assert torch.equal(counts, torch.bincount(y, minlength=10))
    for c in range(10):
        expected = torch.cov(z[y == c].T)
        assert far(means[c], z[y == c].mean(0)) < 1e-5
        assert far(covariances[c], expected if cov == "full" else expected.diagonal()) < 1e-4


@pytest.mark.parametrize("host", ["fedavg", "moon(mu=0, proj_dim=12)", "feddw"])
@pytest.mark.parametrize("model", [MLP, BATCHNORM])
def test_the_extractor_stands_still(host: str, model: str) -> None:
    """Check 2: weights of the body and BatchNorm statistics are the same bits; all of the classifier has moved."""
    lab = Lab(make(f"{host}+virtualfeatures"), digits(6, SKEWED), model, lr=0.1).rounds([0, 1, 2], [3, 4, 5])
    before, buffers = lab.weights.clone(), lab.server.buffers.clone()
    asked(lab)
    shown = lab.server.shown()
    after, statistics = shown["global"]
    assert torch.equal(lab.weights, before)
    assert torch.equal(shown["uncalibrated"][0], before)
    body = lab.replica.weights.span("body")
    assert torch.equal(after[body], before[body])
    assert torch.equal(statistics, buffers)
    assert bool((after[body.stop :] != before[body.stop :]).any())
    for name, (start, stop) in lab.replica.weights.layout.spans.items():
        moved = far(after[start:stop], before[start:stop]) > 0
        assert moved == (not name.startswith("body.")), name


def test_without_samples_nothing_changes() -> None:
    """Check 2: M = 0."""
    lab = Lab(ccvr(samples=0), digits(), lr=0.1).rounds([0, 1])
    before = lab.weights.clone()
    asked(lab)
    assert lab.server.shown().keys() == {"global"}
    assert torch.equal(lab.server.shown()["global"][0], before)


def test_the_classifier_s_training_by_hand() -> None:
    """SGD with momentum on cross-entropy, shuffled batches, the head alone."""
    lab = Lab(ccvr(head_lr=0.05, head_momentum=0.5, head_epochs=3, head_batch=7), digits(), lr=0.1).rounds(
        [0]
    )
    part = lab.method.find(VirtualFeatures)
    assert part is not None
    z, y = torch.randn(20, 16, generator=torch.Generator().manual_seed(0)), torch.arange(20) % 10
    lab.replica.weights.load(lab.weights, lab.server.buffers)
    head = torch.nn.Linear(16, 10)
    span = lab.replica.weights.span("head")
    torch.nn.utils.vector_to_parameters(lab.weights[span].clone(), head.parameters())
    part.calibrate(lab.replica, z, y, torch.Generator().manual_seed(5))
    draw, optimiser = (
        torch.Generator().manual_seed(5),
        torch.optim.SGD(head.parameters(), lr=0.05, momentum=0.5),
    )
    for _ in range(3):
        order = torch.randperm(20, generator=draw)
        for index in (order[:7], order[7:14], order[14:]):
            optimiser.zero_grad()
            F.cross_entropy(head(z[index]), y[index]).backward()  # type: ignore[no-untyped-call]
            optimiser.step()
    assert (
        far(lab.replica.weights.flat[span], torch.cat([p.detach().flatten() for p in head.parameters()]))
        < 1e-6
    )


def test_clipped_draws() -> None:
    found = moments(*features(60), 4)
    z, _ = VirtualFeatures(relu_clip=False).virtual(found, torch.Generator().manual_seed(0))
    clipped, _ = VirtualFeatures(relu_clip=True).virtual(found, torch.Generator().manual_seed(0))
    assert float(z.min()) < 0
    assert torch.equal(clipped, z.clamp(min=0))


def test_a_spoilt_classifier_is_mended() -> None:
    """Check 4, behaviour: +5 on one class's bias after training; CCVR brings back most of what that cost."""
    lab = Lab(ccvr(), digits(6, "iid"), lr=0.1, epochs=3).rounds(*[range(6)] * 5)
    sound = accuracy(lab, lab.weights)
    start, _ = lab.replica.weights.layout.spans["head.bias"]
    lab.server.weights = lab.weights.clone()
    lab.server.weights[start + 3] += 5
    spoilt = accuracy(lab, lab.weights)
    asked(lab)
    mended = accuracy(lab, lab.server.shown()["global"][0])
    assert spoilt < sound - 0.2
    assert mended > spoilt + 0.8 * (sound - spoilt)


@pytest.mark.parametrize(
    "host",
    ["fedavg", "fedprox", "scaffold", "feddyn", "fednova", "moon(proj_dim=12)", "balancedsoftmax", "ssf"],
)
def test_any_host_is_calibrated(host: str, tmp_path: Path) -> None:
    """After the last round alone; the accuracy before is reported beside it; clients in the skew gain by it."""
    federation = federate("digits", 6, "pathological:2", seed=0)
    settings: dict[str, Any] = {"rounds": 3, "lr": 0.05, "epochs": 2, "participation": 0.5}
    result = run(tmp_path, federation, f"{host}+virtualfeatures", **settings)
    plain = run(tmp_path / "plain", federation, host, **settings)
    *before, last = [line["metrics"] for line in result.history]
    *expected, end = [line["metrics"] for line in plain.history]
    assert before == expected
    assert last["uncalibrated_acc"] == end["global_acc"]
    assert last["global_acc"] > end["global_acc"] + 0.1
    assert result.accuracy == last["global_acc"]


@pytest.mark.parametrize("host", ["fedetf", "fedblade"])
def test_not_for_a_fixed_head(host: str) -> None:
    with pytest.raises(AlloyConflict, match="etfhead and virtualfeatures both claim the classifier"):
        make(f"{host}+virtualfeatures")
    with pytest.raises(AlloyConflict, match="needs global model"):
        make("share(part='body')+virtualfeatures")


@pytest.mark.parametrize("clients", ["all", "last"])
@pytest.mark.parametrize("cov", COVARIANCES)
def test_the_wire(tmp_path: Path, cov: str, clients: str) -> None:
    """Once: the final model down; a mean, a covariance and a count for each class held up."""
    federation = digits(6, SKEWED)
    method = f"ccvr(cov={cov},clients={clients},samples=5)"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedAlloyWarning)  # the last participants may lack a class
        result = run(tmp_path, federation, method, rounds=2, lr=0.1, participation=0.5)
    first, last = result.history
    assert first["bytes_up"].keys() == {"share.weights", "share.buffers", "samples"}
    chosen = range(6) if clients == "all" else last["participants"]
    held = sum(int((federation.client(k).counts > 0).sum()) for k in chosen)
    assert last["bytes_up"]["virtualfeatures.means"] == 4 * 16 * held
    assert last["bytes_up"]["virtualfeatures.covariances"] == 4 * 16 * held * (16 if cov == "full" else 1)
    assert last["bytes_up"]["virtualfeatures.counts"] == 8 * 10 * len(chosen)
    assert last["bytes_down"]["virtualfeatures.weights"] * 3 == last["bytes_down"]["share.weights"] * len(
        chosen
    )


def test_a_liar_is_refused() -> None:
    """Rows for classes that a client does not claim would be taken for those of others."""
    lab = Lab(ccvr(), digits(), lr=0.1).rounds([0])
    items = {
        "virtualfeatures.counts": torch.tensor([3, 0, 0, 2, 0, 0, 0, 0, 0, 0]),
        "virtualfeatures.means": torch.zeros(3, 16),
        "virtualfeatures.covariances": torch.zeros(2, 16, 16),
    }
    with pytest.warns(FedAlloyWarning):
        outcome = lab.server.hear(lab.method.asking(last=True)[0], [0], [Reply(1, 0, items, samples=5)])
    assert outcome.refused == {0: "virtualfeatures.means has 3 rows for 2 classes"}


def test_the_calibrated_model_is_kept(tmp_path: Path) -> None:
    """A run that is opened again shows it."""
    federation = dealt([range(300), range(300, 600)])
    run(tmp_path, federation, "ccvr(samples=20)", rounds=1, lr=0.1)
    state = RunFolder(tmp_path / "run").restore()[1]
    lab = Lab(ccvr(samples=20), federation, lr=0.1)
    lab.server.resume(state, 1)
    assert torch.equal(lab.server.shown()["global"][0], state["virtualfeatures.calibrated"])
    assert far(state["virtualfeatures.calibrated"], state["server.weights"]) > 1e-3


@pytest.mark.parametrize(
    "settings",
    [
        {"samples": 20},
        {"cov": "diag"},
        {"head_lr": 0.1},
        {"head_momentum": 0.0},
        {"head_epochs": 2},
        {"head_batch": 16},
        {"jitter": 1.0},
        {"relu_clip": True},
    ],
)
def test_settings_reach_the_calibration(settings: dict[str, Any]) -> None:
    ends = []
    for chosen in ({}, settings):
        lab = Lab(ccvr(**chosen), digits(), lr=0.1).rounds([0, 1])
        asked(lab)
        ends.append(kept(lab)["calibrated"])
    assert far(*ends) > 1e-4

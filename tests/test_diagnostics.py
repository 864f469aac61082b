"""A look inside: the numbers against known spectra and known geometry, and that looking changes nothing."""

import json
from pathlib import Path

import pytest
import torch

import fedalloy as fa
from fedalloy.analysis.diagnose import _apart
from fedalloy.core.diagnostics import collapse, effective_rank, spectrum
from fedalloy.experiment.run import reopen
from fedalloy.methods.fedetf import simplex_etf
from terminal import fedalloy, history

RUN = ("--engine", "inline", "--rounds", "2", "--clients", "3", "--skew", "iid", "--model", "mlp(hidden=8)")


def test_effective_rank_counts_equal_directions() -> None:
    assert effective_rank(torch.ones(7)) == pytest.approx(7)
    assert effective_rank(torch.tensor([3.0, 0.0, 0.0])) == pytest.approx(1)


def test_spectrum_is_that_of_the_covariance_and_of_the_correlation() -> None:
    z = torch.randn(50, 4, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 3.0, 9.0])
    covariance, correlation = z.double().T.cov(), z.double().T.corrcoef()
    assert torch.allclose(spectrum(z), torch.linalg.eigvalsh(covariance).flip(0))
    assert torch.allclose(spectrum(z, correlation=True), torch.linalg.eigvalsh(correlation).flip(0))


def test_collapse_is_complete_on_a_simplex_and_not_elsewhere() -> None:
    means = simplex_etf(6, 4, torch.Generator().manual_seed(0)).T
    y = torch.arange(4).repeat(10)
    perfect = collapse(means[y], y)
    assert perfect.nc1 == pytest.approx(0, abs=1e-9)
    assert perfect.nc1r == pytest.approx(0, abs=1e-9)
    assert perfect.nc1n == pytest.approx(0, abs=1e-9)
    assert perfect.nc2 == pytest.approx(0, abs=1e-5)
    noisy = collapse(means[y] + torch.randn(40, 6, generator=torch.Generator().manual_seed(1)), y)
    assert noisy.nc1 > 0.1
    assert noisy.nc1r > 0.1
    assert noisy.nc1n > 0.1
    assert noisy.nc2 > 0.1
    assert noisy.nc2n > 0.01


def test_within_class_spread_by_hand() -> None:
    """Two classes at -1 and +1, each with samples half a unit to either side."""
    z = torch.tensor([[-1.5], [-0.5], [0.5], [1.5]])
    found = collapse(z, torch.tensor([0, 0, 1, 1]))
    assert found.nc1r == pytest.approx(0.25)
    assert found.nc1 == pytest.approx(0.125)


def test_looking_changes_nothing(tmp_path: Path) -> None:
    for name, flags in {"seen": ("--diagnose-every", "1"), "unseen": ()}.items():
        fedalloy("run", "--method", "feddw(mu=1)", *RUN, *flags, "--out", str(tmp_path / name))
    seen, unseen = (json.loads((tmp_path / name / "summary.json").read_text()) for name in ("seen", "unseen"))
    assert seen["weights_sha256"] == unseen["weights_sha256"]
    lines = history(tmp_path / "seen")
    assert all("distance of class relations to soft labels" in line["diagnostics"] for line in lines)
    assert all("effective rank of features (covariance)" in line["diagnostics"] for line in lines)
    assert all("diagnostics" not in line for line in history(tmp_path / "unseen"))


def test_diagnose_adds_figures_to_the_report(tmp_path: Path) -> None:
    fedalloy("run", "--method", "feddw(mu=1)", *RUN, "--out", str(tmp_path / "r"))
    before = (tmp_path / "r" / "report.html").read_text()
    found = fedalloy("diagnose", str(tmp_path / "r"), "--clients", "2", "--json").json
    assert found["nc1"] > 0
    after = (tmp_path / "r" / "report.html").read_text()
    for title in (
        "Singular values",
        "Soft labels",
        "Norm of class weights by share of the class",
        "Features by client",
    ):
        assert title in after
        assert title not in before
    stored = json.loads((tmp_path / "r" / "diagnostics.json").read_text())
    assert set(stored["clients"]) == {"0", "1"}
    assert len(stored["matrices"]["soft labels"]) == 10


def test_diagnose_needs_a_checkpoint(tmp_path: Path) -> None:
    assert fedalloy("diagnose", str(tmp_path)).code == 2


def test_diagnose_looks_at_different_models_too(tmp_path: Path) -> None:
    federation = fa.federate("digits", clients=2, skew="iid")
    fa.train(federation, models="mlp(hidden=8),mlp(hidden=4)", method="local", rounds=1, out=tmp_path / "r")
    found = fedalloy("diagnose", str(tmp_path / "r"), "--json").json
    assert set(found) == {"report"}  # no global model, no common space of features


def test_the_auxiliary_model_is_scored_as_it_stands(tmp_path: Path) -> None:
    """Its accuracy is that of net.aux with the server's weights on the global test set."""
    federation = fa.federate("digits", clients=4, skew="iid")
    result = fa.train(
        federation, method="fedsce(p=1, mu=0.1)", rounds=2, models="mlp,lenet", out=tmp_path / "r"
    )
    server, _, _ = reopen(result.folder)
    replica, index = server.replica, federation.split.global_test
    replica.weights.flat[replica.weights.span("aux")] = server.weights
    said = replica.net.aux.eval()(federation.prepare(federation.dataset.x[index], None)).logits.argmax(1)
    expected = float((said == federation.dataset.y[index]).double().mean())
    assert result.history[-1]["metrics"]["aux_acc"] == expected
    assert expected > 0.2
    assert "Auxiliary model" in result.report().read_text()


def test_features_over_rounds_are_kept_and_drawn(tmp_path: Path) -> None:
    flags = ("--method", "fedsce(p=1,mu=0.1)", "--models", "mlp,lenet", "--clients", "4", "--rounds", "4")
    fedalloy("run", *flags, "--diagnose-every", "2", "--out", str(tmp_path / "r"))
    assert sorted(p.name for p in (tmp_path / "r/features").iterdir()) == [
        "000002.safetensors",
        "000004.safetensors",
    ]
    fedalloy("diagnose", str(tmp_path / "r"))
    panels = json.loads((tmp_path / "r/diagnostics.json").read_text())["panels"]
    assert [(panel["round"], panel["client"][0]) for panel in panels] == [
        (r, k) for r in (2, 4) for k in range(4)
    ]
    assert all(len(p["x"]) == len(p["y"]) == len(p["class"]) == len(p["client"]) for p in panels)
    assert panels[0]["x"] != panels[4]["x"], "the client has learned something in between"
    assert "Features over rounds" in (tmp_path / "r/report.html").read_text()


def test_clients_that_agree_have_centroids_at_no_distance() -> None:
    """Two clients with the same features of a class, and one class that only one of them holds."""
    one = torch.tensor([[0.0, 0.0], [2.0, 0.0], [5.0, 5.0]])
    assert _apart([one, one], [0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 2]) == {
        "distance of clients' class centroids": 0.0
    }
    moved = one + torch.tensor([3.0, 4.0])
    assert _apart([one, moved], [0, 0, 0, 1, 1, 1], [0, 0, 1, 0, 0, 2]) == {
        "distance of clients' class centroids": 5.0
    }
    assert _apart([one], [0, 0, 0], [0, 0, 1]) == {}


def test_fedrda_notes_how_far_features_leave_the_global_space(tmp_path: Path) -> None:
    """Less with the deviation term than without it would, and nothing before anything has been trained."""
    name = "share of local features outside the global space"
    federation = fa.federate("digits", clients=4, skew="dirichlet:0.1")
    shares = {}
    for gamma in (1e-6, 1.0):
        method = f"fedrda(alpha=1, gamma={gamma})"
        result = fa.train(
            federation, method=method, rounds=4, epochs=3, diagnose_every=1, out=tmp_path / f"{gamma}"
        )
        shares[gamma] = [line["diagnostics"][name] for line in result.history]
        assert all(0 < share < 1 for share in shares[gamma])
    assert shares[1.0][-1] < shares[1e-6][-1]

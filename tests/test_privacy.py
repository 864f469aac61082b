"""Differential privacy: what is clipped, what is noised, what is refused, and what the accountant says of it."""

import math
import re
import statistics
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedalloy.analysis.explain import explain
from fedalloy.core import registry
from fedalloy.core.alloy import Alloy, AlloyConflict, Folded, Mechanism, Slots, alloy
from fedalloy.core.random import BLOCK, gaussian
from fedalloy.core.state import State
from fedalloy.core.training import Local
from fedalloy.core.views import ServerView
from fedalloy.core.wire import Items, Mail, Reduce, Reply, Slot
from fedalloy.data.federation import Federation, federate
from fedalloy.errors import FedAlloyError
from fedalloy.experiment import run
from fedalloy.experiment.run import train
from fedalloy.mechanisms import privacy
from fedalloy.mechanisms.privacy import Private, epsilon, shortening
from fedalloy.mechanisms.share import Share
from fedalloy.round.client import client_round
from fedalloy.round.replica import Replica
from fedalloy.round.server import Server

FED = federate("digits", clients=4, skew="dirichlet:0.5")
MLP = "mlp(hidden=16)"  # 1210 weights
LOCAL = Local(lr=0.1, batch=64)


class Round:
    """The first round of a method, by hand."""

    def __init__(
        self, text: str | Alloy, fed: Federation = FED, local: Local = LOCAL, secret: int = 0, seed: int = 0
    ) -> None:
        self.method = registry.make(text) if isinstance(text, str) else text
        self.replica = Replica(self.method, MLP, fed.dataset.inputs, 0)
        self.fed, self.local, self.secret, self.seed = fed, local, secret, seed
        self.server = Server(self.method, self.replica, fed.info, local, seed, secret)
        self.server.round = 1

    def reply(self, client: int, keep: Items | None = None, mail: Mail | None = None) -> Reply:
        mail, data = mail or self.server.send(client), self.fed.client(client)
        return client_round(
            self.method,
            self.replica,
            data,
            self.fed.info,
            self.local,
            keep or {},
            mail,
            self.seed,
            self.secret,
        )[0]

    def move(self, client: int) -> Tensor:
        """All that a client adds, as one vector, in float64."""
        return self.added(self.reply(client))

    def added(self, reply: Reply) -> Tensor:
        slots, origin = self.replica.additive("up"), self.replica.initial[self.replica.shared].double()
        return torch.cat([reply.items[k].double() - (origin if s.relative else 0) for k, s in slots.items()])

    def mean(self) -> Tensor:
        """The server's weights after the round, less those before it."""
        clients = self.fed.eligible
        assert not self.server.receive(clients, [self.reply(k) for k in clients]).refused
        return self.server.weights.double() - self.replica.initial.double()


# Clipping


@pytest.mark.parametrize("host", ["fedavg", "scaffold", "fedprox", "fedper"])
def test_all_that_a_client_adds_is_clipped_as_one_vector(host: str) -> None:
    plain, private = Round(host), Round(f"{host}+private(clip=0.25, where=server)")
    for k in range(4):
        before, after = plain.move(k), private.move(k)
        assert float(before.norm()) > 0.3
        assert float(after.norm()) == pytest.approx(0.25, rel=1e-5)
        assert torch.allclose(after, before * (0.25 / before.norm()), atol=1e-7)


@pytest.mark.parametrize("host", ["fedavg", "scaffold"])
def test_short_updates_leave_bit_for_bit(host: str) -> None:
    plain, private = Round(host), Round(f"{host}+private(clip=1e6, where=server)")
    for k in range(4):
        one, other = plain.reply(k).items, private.reply(k).items
        assert one.keys() == other.keys()
        assert all(torch.equal(one[key], other[key]) for key in one)


def test_the_factor() -> None:
    vectors = [torch.tensor([3.0, 0.0]), torch.tensor([4.0])]
    assert shortening(vectors, 5.0) == 1.0
    assert shortening(vectors, 6.0) == 1.0
    assert shortening(vectors, 2.5) == 0.5
    assert shortening([torch.zeros(3)], 1e-9) == 1.0
    assert shortening([], 1.0) == 1.0
    for bad in (math.nan, math.inf, -math.inf):
        assert shortening([*vectors, torch.tensor([bad])], 1.0) == 0.0


@pytest.mark.parametrize("where", ["client", "server"])
def test_what_is_not_finite_adds_nothing(where: str) -> None:
    """A refusal would tell the server something of the data."""
    wild = Round(f"fedavg+private(clip=1, noise=0.5, where={where})", local=replace(LOCAL, lr=1e30))
    moved = wild.move(0)
    assert bool(torch.isfinite(moved).all())
    if where == "server":
        assert not moved.any()
    else:
        assert float(moved.square().mean()) == pytest.approx(0.25, rel=0.2)


# Noise


def assert_normal(z: Tensor, deviation: float) -> None:
    """Mean, variance and the share within one deviation, each within 5 of its own standard deviations."""
    z, n = z.double() / deviation, len(z)
    assert n > 1000
    assert abs(float(z.mean())) < 5 / math.sqrt(n)
    assert abs(float(z.square().sum()) - n) < 5 * math.sqrt(2 * n)  # chi-square with n degrees of freedom
    assert abs(float((z.abs() < 1).double().mean()) - 0.6827) < 5 * math.sqrt(0.6827 * 0.3173 / n)


def test_gaussian_numbers() -> None:
    values = [torch.zeros(BLOCK - 1), torch.zeros(0), torch.arange(7.0), torch.zeros(BLOCK)]
    found = gaussian(values, 1, "a")
    assert [len(one) for one in found] == [BLOCK - 1, 0, 7, BLOCK]
    whole = torch.cat(found)
    assert whole.dtype == torch.float64
    assert_normal(whole, 1.0)
    assert len(set(whole.tolist())) == len(whole)  # blocks do not repeat
    pairs = whole[: BLOCK - BLOCK % 2].view(2, -1)
    assert abs(float((pairs[0] * pairs[1]).mean())) < 5 / math.sqrt(BLOCK / 2)
    assert float(whole.abs().max()) > 4
    assert [len(one) for one in gaussian([torch.zeros(0)], 1)] == [0]


def test_gaussian_numbers_depend_on_every_counter_and_every_bit() -> None:
    value = torch.zeros(5)
    first = gaussian([value], 3, 4, "noise")[0]
    assert torch.equal(first, gaussian([value.clone()], 3, 4, "noise")[0])
    nearly = value.clone()
    nearly[4] = 1e-45
    others = [
        gaussian([value], 4, 3, "noise"),
        gaussian([value], 3, 4, "voice"),
        gaussian([value], 3 + 2**200, 4, "noise"),
        gaussian([nearly], 3, 4, "noise"),
    ]
    for (other,) in others:
        assert not (first == other).any()


@pytest.mark.parametrize(("clip", "noise"), [(0.25, 1.0), (2.0, 0.3)])
def test_clients_add_noise_in_proportion_to_the_clip(clip: float, noise: float) -> None:
    clean = Round(f"scaffold+private(clip={clip}, where=server)")
    noisy = Round(f"scaffold+private(clip={clip}, noise={noise})")
    found = [noisy.move(k) - clean.move(k) for k in range(4)]
    for z in found:
        assert_normal(z, noise * clip)
    assert abs(float(found[0] @ found[1])) < 5 * (noise * clip) ** 2 * math.sqrt(len(found[0]))
    weights, control = torch.split(found[0], 1210)
    assert abs(float(weights @ control)) < 5 * (noise * clip) ** 2 * math.sqrt(1210)


@pytest.mark.parametrize(("where", "deviation"), [("client", 0.5 / 2), ("server", 0.5 / 4)])
def test_noise_of_the_mean(where: str, deviation: float) -> None:
    """Of four clients: noise clip / sqrt(n) where each adds its own, noise clip / n where the server does."""
    clean, private = _Open(0.5, 1e-9, where="server"), Private(0.5, 1.0, where=where)  # type: ignore[arg-type]
    share = Share(agg_weights="uniform")
    found = Round(alloy("noisy", share, private)).mean() - Round(alloy("clean", share, clean)).mean()
    assert_normal(found, deviation)


def test_server_noise_reaches_every_increment() -> None:
    clean, noisy = (
        Round("scaffold+private(clip=0.5, where=server, noise=0.001)"),
        Round("scaffold+private(clip=0.5, where=server)"),
    )
    for one in (clean, noisy):
        one.mean()
    c, c_noisy = (one.server.states["control"].persistent["c"] for one in (clean, noisy))
    assert_normal(c_noisy - c, 0.5 / 4)
    weights = noisy.server.weights - clean.server.weights
    assert abs(float(weights @ (c_noisy - c))) < 5 * (0.5 / 4) ** 2 * math.sqrt(1210)


def test_noise_in_a_subspace_is_that_of_its_coordinates() -> None:
    """P has orthonormal rows: P z is as normal as z, and the rest of z does not travel."""
    text = "fedavg+subspace(ratio=0.5)+private(clip=0.5, noise={})"
    clean, noisy = (Round(text.format(noise)) for noise in (0.001, 1.0))
    found = [noisy.reply(k).items["share.weights"] - clean.reply(k).items["share.weights"] for k in range(4)]
    assert len(found[0]) == clean.replica.coded_size < 1210
    assert_normal(torch.cat(found), 0.5)


def test_noise_is_drawn_from_the_secret() -> None:
    text = "fedavg+private(clip=0.5)"
    open_, closed, again = Round(text), Round(text, secret=2**255 + 1), Round(text, secret=2**255 + 1)
    assert torch.equal(closed.move(0), again.move(0))
    assert not (open_.move(0) == closed.move(0)).any()
    text = "fedavg+private(clip=0.5, where=server)"
    one, other = Round(text), Round(text, secret=5)
    assert torch.equal(one.move(0), other.move(0))  # clients only clip
    assert not (one.mean() == other.mean()).any()


def test_two_models_in_one_round_do_not_share_their_noise() -> None:
    """Else the difference of two answers would lay both bare."""
    noisy, clean = Round("fedavg+private(clip=0.5)"), Round("fedavg+private(clip=0.5, where=server)")
    mail = noisy.server.send(0)
    other = replace(mail, items=mail.items | {"share.weights": mail.items["share.weights"] + 0.1})
    first, second = (
        noisy.reply(0, mail=one).items["share.weights"] - clean.reply(0, mail=one).items["share.weights"]
        for one in (mail, other)
    )
    assert_normal((first - second) / math.sqrt(2), 0.5)


def test_noise_differs_from_round_to_round_and_client_to_client() -> None:
    still = Round(
        "fedavg+private(clip=0.5)", local=replace(LOCAL, lr=1e-12)
    )  # every update is the same: nothing
    first, other = still.move(0), still.move(1)
    still.server.round = 2
    assert not (first == other).any()
    assert not (first == still.move(0)).any()


# Sensitivity


@dataclass(frozen=True)
class _Open(Private):
    """Lets a test see the mean before its noise."""

    def folded(self, server: ServerView, my: State, got: Folded) -> Folded:
        return got


def relabelled(fed: Federation, client: int) -> Federation:
    """The same federation, but all samples of one client have other labels, and are upside down."""
    mine = fed.split.train(client)
    x, y = fed.dataset.x.clone(), fed.dataset.y.clone()
    x[mine], y[mine] = x[mine].flip(-1), (y[mine] + 3) % 10
    return replace(fed, dataset=replace(fed.dataset, x=x, y=y))


@pytest.mark.parametrize("host", ["fedavg", "scaffold", "feddyn"])
def test_one_client_moves_the_mean_by_no_more_than_promised(host: str) -> None:
    """Other data: at most 2 clip / n; no update at all: at most clip / n. Whatever the learning rate."""
    method = registry.make(host) + _Open(0.5, where="server")
    wild = replace(LOCAL, lr=2.0, epochs=3)
    seen: list[Tensor] = []
    for fed in (FED, relabelled(FED, 1)):
        round = Round(method, fed, wild)
        replies = [round.reply(k) for k in range(4)]
        total = torch.stack([round.added(reply) for reply in replies])
        assert float(total.norm(dim=1).max()) <= 0.5 * (1 + 1e-5)
        seen.append(total.mean(0))
    moved = float((seen[0] - seen[1]).norm())
    assert moved <= 2 * 0.5 / 4 * (1 + 1e-5)
    assert moved > 0.5 / 4  # the bound is nearly met: the test is not an empty one


def test_sizes_do_not_count() -> None:
    """The plain mean, whatever the host's weights: a client with many samples is no more visible than one with few."""
    assert FED.sizes.max() > 2 * FED.sizes.min()
    found = Round(alloy("sized", Share(agg_weights="size"), _Open(0.5, where="server")))
    mean = torch.stack([found.move(k) for k in range(4)]).mean(0)
    assert not found.server.weighed
    assert torch.allclose(found.mean(), mean, atol=1e-6)


# What is refused


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("private", "private needs shared weights, and stands alone"),
        ("local+private", "private needs shared weights, which alone does not give"),
        ("fedproto+private", "features-means.means would leave a client neither clipped nor noised"),
        ("feddw+private", "probabilities-means.means would leave a client neither clipped nor noised"),
        ("ccvr+private", "private refuses virtualfeatures: virtualfeatures.counts would leave a client"),
        ("fedfm+private", "private refuses classanchors (brought by matching): classanchors.means would"),
        ("fednova+private", "private refuses normalised: share.tau would leave a client"),
        ("scaffold(lean_upload=true)+private", "private refuses control(lean_upload=True): control.steps"),
        ("fedpac+private", "private spoils size weights, which"),
        ("fedsce+private", "private spoils size weights, which contribution needs"),
        (
            "scaffold(agg_weights=size)+private",
            "private spoils size weights, which control(agg_weights='size')",
        ),
        (
            "feddyn(size_scaled=true)+private",
            "dynamic(size_scaled=True) refuses private: it scales by the number",
        ),
        (
            "fedavg+svd+private(where=server)",
            "private(where='server') refuses svd: what it decodes may be longer",
        ),
        (
            "ssf+private(where=server)",
            "private(where='server') refuses subspace: what it decodes may be longer",
        ),
        ("fedavg+private+private(clip=2)", "private and private(clip=2.0) are the same part"),
        ("fedavg+private(amplify=true)", "private(amplify=true) counts on nobody knowing who took part"),
        ("fedavg+private(clip=0)", "private: clip must be a number from 1e-12 to 1000000, not 0"),
        ("fedavg+private(noise=-1)", "private: noise must be a number from 0.001 to 1000, not -1"),
        ("fedavg+private(delta=1)", "private: delta must be a number of at least 1e-12 and below 1, not 1"),
        ("fedavg+private(where=here)", "private: where must be 'client' or 'server', not 'here'"),
    ],
)
def test_refusals_name_the_slot_and_both_parts(text: str, sentence: str) -> None:
    with pytest.raises(FedAlloyError, match=re.escape(sentence)):
        registry.make(text)


@dataclass(frozen=True)
class _Each(Mechanism):
    """Sends an increment, of which the server gets the sum, or everybody's."""

    reduce: Reduce = "sum"

    @property
    def up(self) -> Slots:
        return {"step": Slot(self.reduce, increment=True)}


@pytest.mark.parametrize("reduce", ["sum", "all", "class_mean"])
def test_only_means_are_covered(reduce: Reduce) -> None:
    alloy("mean", Share(), _Each("uniform"), Private())
    with pytest.raises(
        AlloyConflict, match=r"private refuses _each.*: _each\.step would leave a client neither"
    ):
        alloy("each", Share(), _Each(reduce), Private())


@dataclass(frozen=True)
class _Weighing(Mechanism):
    """Sends nothing, and weighs."""

    def weigh(self, server: ServerView, my: State, replies: Sequence[Reply]) -> list[float]:
        return [1.0] * len(replies)


def test_who_weighs_is_refused() -> None:
    with pytest.raises(AlloyConflict, match="private refuses _weighing: it weighs replies by what it sees"):
        alloy("weighed", Share(), _Weighing(), Private())


@dataclass(frozen=True)
class _Looking(Share):
    """Sends nothing but weights, and looks at each reply."""

    def on_reply(self, server: ServerView, my: State, reply: Reply) -> None:
        my.scratch["seen"] = reply


def test_who_looks_at_replies_is_refused_where_these_are_clean() -> None:
    alloy("looking", _Looking(), Private())
    with pytest.raises(
        AlloyConflict, match=r"refuses _looking: it looks at each reply, where noise only hides"
    ):
        alloy("looking", _Looking(), Private(where="server"))


def test_statistics_of_batchnorm_are_refused_unless_they_stay() -> None:
    inputs = FED.dataset.inputs
    with pytest.raises(
        AlloyConflict, match=r"private refuses share on mlp\(norm=batch\): share\.buffers, statist"
    ):
        Replica(registry.make("fedavg+private"), "mlp(norm=batch)", inputs, 0)
    for buffers in ("local", "drop"):
        Replica(registry.make(f"fedavg(buffers={buffers})+private"), "mlp(norm=batch)", inputs, 0)


# The accountant


@pytest.mark.parametrize("delta", [1e-5, 1e-3])
@pytest.mark.parametrize("rounds", [1, 7, 200])
@pytest.mark.parametrize(
    ("noise", "rate"), [(1.0, 1.0), (0.4, 1.0), (5.0, 1.0), (1.0, 0.1), (0.8, 0.03), (2.0, 0.5)]
)
@pytest.mark.filterwarnings("ignore:Optimal order is the")  # of the library's own accountant
def test_epsilon_is_that_of_the_library(noise: float, rate: float, rounds: int, delta: float) -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    for _ in range(rounds):
        accountant.step(noise_multiplier=noise, sample_rate=rate)
    expected = accountant.get_epsilon(delta)
    method = Private(noise=noise, delta=delta, where="server", amplify=True)
    found = method.account([rate] * rounds)
    assert found["epsilon"] == pytest.approx(expected, abs=1e-3)
    assert found["delta"] == delta
    assert epsilon(noise, [rate] * rounds, delta) == found["epsilon"]
    plain = Private(noise=noise, delta=delta, where="server").account([rate] * rounds)
    assert plain["epsilon"] == epsilon(noise, [1.0] * rounds, delta)
    assert plain["epsilon"] >= found["epsilon"]


@pytest.mark.filterwarnings("ignore:Optimal order is the")
def test_rounds_with_other_rates_add_up() -> None:
    from opacus.accountants import RDPAccountant

    accountant = RDPAccountant()
    rates = [0.1, 0.2, 0.1, 1.0]
    for rate in rates:
        accountant.step(noise_multiplier=1.5, sample_rate=rate)
    assert epsilon(1.5, rates, 1e-5) == pytest.approx(accountant.get_epsilon(1e-5), abs=1e-3)


@pytest.mark.parametrize("noise", [0.5, 1.0, 3.0])
def test_one_round_by_hand(noise: float) -> None:
    """Order alpha costs alpha / (2 noise^2), turned into (epsilon, delta) at the best of all orders."""
    delta = 1e-5
    for order in (1.5, 2.0, 10.0, 40.0):
        at = privacy._opacus()[0].index(order)
        assert float(privacy._step(noise, 1.0)[at]) == pytest.approx(order / (2 * noise**2), rel=1e-12)
    orders = [1 + i / 1000 for i in range(10, 62000)]
    best = min(
        a / (2 * noise**2) - (math.log(delta) + math.log(a)) / (a - 1) + math.log((a - 1) / a) for a in orders
    )
    found = epsilon(noise, [1.0], delta)
    assert best - 1e-9 <= found <= best + 1e-3
    assert exact(noise, delta) < found < 1.25 * exact(noise, delta)


def exact(noise: float, delta: float) -> float:
    """The smallest epsilon of the Gaussian mechanism: where Phi(1/2s - es) - exp(e) Phi(-1/2s - es) is delta."""
    cdf = statistics.NormalDist().cdf
    low, high = 0.0, 100.0
    for _ in range(100):
        e = (low + high) / 2
        spent = cdf(1 / (2 * noise) - e * noise) - math.exp(e) * cdf(-1 / (2 * noise) - e * noise)
        low, high = (e, high) if spent > delta else (low, e)
    return high


def test_no_rounds_cost_nothing_and_edges_do_not_warn() -> None:
    assert epsilon(1.0, [], 1e-5) == 0.0
    assert epsilon(100.0, [1.0], 1e-5) < 0.3  # the largest order is the best
    assert epsilon(0.05, [1.0], 1e-5) > 100  # the smallest
    assert epsilon(1000.0, [1.0], 0.9) == 0.0


def test_without_the_library_no_round_begins(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    monkeypatch.setattr(run, "one_round", None)
    privacy._opacus.cache_clear()
    with pytest.raises(FedAlloyError, match=r"opacus: pip install 'fedalloy\[dp\]'"):
        train(FED, MLP, "fedavg+private", rounds=1, engine="inline", out=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    privacy._opacus.cache_clear()


# Whole runs


@pytest.mark.parametrize("amplify", [False, True])
def test_epsilon_is_in_every_line_and_in_the_summary(amplify: bool) -> None:
    text = f"fedavg+private(noise=2, delta=1e-4, where=server, amplify={amplify})"
    done = train(FED, MLP, text, rounds=3, participation=0.5, engine="inline", eval_every=3)
    rate = 0.5 if amplify else 1.0
    expected = [epsilon(2.0, [rate] * rounds, 1e-4) for rounds in (1, 2, 3)]
    assert [line["epsilon"] for line in done.history] == expected
    assert expected[0] < expected[1] < expected[2]
    assert {line["delta"] for line in done.history} == {1e-4}
    assert (done.summary["epsilon"], done.summary["delta"]) == (expected[-1], 1e-4)


def test_the_rate_is_that_of_who_is_asked() -> None:
    """At least one client is, however small the participation; and only those that hold data."""
    text = "fedavg+private(where=server, amplify=true)"
    done = train(FED, MLP, text, rounds=1, participation=0.01, engine="inline")
    assert done.history[0]["sampled"] == 0.25
    assert done.summary["epsilon"] == epsilon(1.0, [0.25], 1e-5)


def test_a_little_noise_still_lets_it_learn() -> None:
    fed = federate("digits", clients=4, skew="iid")
    settings: dict[str, Any] = {"rounds": 8, "engine": "inline", "lr": 0.1, "epochs": 2, "eval_every": 8}
    done = train(fed, MLP, "fedavg+private(clip=2, noise=0.005)", **settings)
    assert done.accuracy is not None
    assert done.accuracy > 0.6
    drowned = train(fed, MLP, "fedavg+private(clip=2, noise=1)", **settings)
    assert drowned.accuracy is not None
    assert drowned.accuracy < 0.4


def test_it_is_explained() -> None:
    facts = explain("fedavg+private", MLP, FED.dataset.inputs).facts()
    part = facts["parts"][-1]
    assert part["name"] == "private"
    assert "has the last word on what leaves" in part["does"]
    assert "has the last word on what was folded" not in part["does"]
    assert "the last word on what leaves" in part["claims"]
    assert not [row for row in facts["wire"] if row["slot"] == "samples"]
    assert {row["reduce"] for row in facts["wire"] if row["direction"] == "up"} == {"uniform"}
    assert ("the client seals", "private") in facts["algorithm"]
    assert facts["bytes_up"] == facts["bytes_down"] == 4 * 1210
    trusted = explain("fedavg+private(where=server)", MLP, FED.dataset.inputs).facts()["parts"][-1]
    assert "has the last word on what was folded" in trusted["does"]
    assert "private" in registry.parts()


def test_the_table_in_the_documentation_is_right() -> None:
    page = (Path(__file__).parent.parent / "docs" / "privacy.md").read_text()
    rows = re.findall(r"^\| ([\d.]+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE)
    assert len(rows) == 15
    for noise, rounds, *said in rows:
        cases = [(1.0, 1.0), (0.5, 1.0), (1.0, 0.1)]  # left out, replaced, amplified
        found = [epsilon(float(noise) * part, [rate] * int(rounds), 1e-5) for part, rate in cases]
        assert [f"{value:.2f}" for value in found] == said

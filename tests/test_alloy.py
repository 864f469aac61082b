"""Alloys: all pairs of parts train or are refused by name; expressions are read, never run."""

import itertools
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

import fedalloy
from fedalloy.analysis.explain import explain
from fedalloy.core import registry
from fedalloy.core.alloy import Alloy, AlloyConflict, Mechanism, alloy
from fedalloy.core.expression import parse
from fedalloy.core.state import State
from fedalloy.core.training import Local
from fedalloy.core.views import ClientView, Oracle, StepView
from fedalloy.core.wire import Items, Slot
from fedalloy.data.federation import federate
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.run import one_thread
from fedalloy.mechanisms.head import HeadWithoutBias
from fedalloy.mechanisms.privacy import Private
from fedalloy.mechanisms.share import Share
from fedalloy.methods.fedetf import ETFHead
from fedalloy.methods.fedprox import Prox
from fedalloy.methods.moon import Projector
from fedalloy.methods.scaffold import Control
from fedalloy.round.client import client_model, client_round, client_told
from fedalloy.round.replica import Replica
from fedalloy.round.server import Server
from fuzzing import examples

FED = federate("digits", clients=3, skew="iid", seed=0)
LOCAL = Local(batch=256, epochs=2, lr=0.05)
MODEL = "mlp(hidden=4, norm=batch)"
BARE = "mlp(hidden=4)"
PARTS = sorted(name for name, kind in registry.parts().items() if kind.__module__.startswith("fedalloy."))
# Settings that change what a part needs, gives or sends.
SETTINGS = [
    "share(part='body')",
    "share(part=':-1')",
    "share(agg_weights='uniform')",
    "share(buffers='local', server_lr=0.5)",
    "normalised(part='body', server_momentum=0.5)",
    "normalised(buffers='local')",
    "control(agg_weights='size')",
    "control(lean_upload=True)",
    "control(agg_weights='size', lean_upload=True)",
    "control(c_update='option1')",
    "prox(part='aux')",
    "prox(part='head')",
    "contrast(buffer_size=2)",
    "personalmodel(candidates=(0.1, 1))",
    "stragglers(fraction=0.5)",
    "alone(participation_applies=True)",
    "outputdistillation(output='prob', leave_one_out=True)",
    "runningmeans(of='logits')",
    "svd(t_start=0.5)",
    "private(where='server')",
]
BASES = ["", "fedavg+", "fedavg(agg_weights=uniform)+", "scaffold+"]


def trained_or_refused(method: Alloy) -> None:
    """One conflict shows only in a model: a part that bares a linear head meets a head of another kind."""
    if method.find(HeadWithoutBias) and method.find(ETFHead):
        with pytest.raises(FedAlloyError, match="headwithoutbias needs a linear head"):
            trained(method)
    else:
        trained(method)


def trained(method: Alloy) -> Server:
    """Two rounds of two clients, without files, and a look at a personal model."""
    model = BARE if method.find(Private) else MODEL  # statistics of BatchNorm are nothing that is covered
    replica = Replica(method, model, FED.dataset.inputs, seed=0)
    server = Server(method, replica, FED.info, LOCAL, seed=0)
    keeps: dict[int, Items] = {0: {}, 1: {}}
    with one_thread():
        for server.round in (1, 2):
            replies = []
            for client, keep in keeps.items():
                mail = server.send(client)
                reply, keeps[client] = client_round(
                    method, replica, FED.client(client), FED.info, LOCAL, keep, mail, seed=0
                )
                replies.append(reply)
            outcome = server.receive(list(keeps), replies)
            assert not outcome.refused, outcome.refused
            for asker in method.asking(last=server.round == 2):
                asked = server.ask(asker, list(keeps))
                told = [client_told(method, replica, FED.client(mail.client), mail) for mail in asked]
                assert not server.hear(asker, list(keeps), told).refused
        if method.personal:
            mail, data = server.send(0, "evaluate"), FED.client(0)
            tested = client_model(method, replica, data, FED.info, LOCAL, keeps[0], mail, seed=0)
            assert bool(torch.isfinite(tested(data.x_test)).all())
    for items in (server.state(), *keeps.values()):
        assert all(bool(torch.isfinite(value).all()) for value in items.values())
    return server


def assert_names_both(conflict: AlloyConflict, pieces: list[Mechanism]) -> None:
    """Two parts, or a part and the need that nobody meets; and what to do about it."""
    sentence = str(conflict)
    named = [piece for piece in pieces if str(piece) in sentence]
    assert named, sentence
    assert len(named) >= 2 or any(need in sentence for piece in named for need in piece.needs), sentence
    assert "; " in sentence or "stands alone" in sentence or "not give" in sentence


def pieces_of(text: str) -> list[Mechanism]:
    found = [registry._piece(term, None) for term in parse(text)]
    parts = [part for piece in found for part in (piece if isinstance(piece, Alloy) else [piece])]
    return [each for part in parts for each in (part, *part.brings)]


@pytest.mark.filterwarnings("ignore::fedalloy.errors.FedAlloyWarning")  # a tiny net for every part
@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("part", [*PARTS, *SETTINGS])
def test_every_pair_trains_or_is_refused_by_name(base: str, part: str) -> None:
    """All pairs are put together on every base; each is trained on one of them, so that all bases have their turn."""
    others = [*PARTS, *SETTINGS]
    place = others.index(part)
    for number, other in enumerate(others[place:]):
        text = f"{base}{part}+{other}"
        try:
            method = registry.make(text)
        except AlloyConflict as conflict:
            assert_names_both(conflict, pieces_of(text))
            with pytest.raises(AlloyConflict):
                registry.make(f"{base}{other}+{part}")
            continue
        registry.make(f"{base}{other}+{part}")
        if (place + number) % len(BASES) == BASES.index(base):
            trained_or_refused(method)


@pytest.mark.filterwarnings("ignore::fedalloy.errors.FedAlloyWarning")
@pytest.mark.parametrize("part", [*PARTS, *SETTINGS])
@pytest.mark.parametrize("base", BASES)
def test_every_part_alone(base: str, part: str) -> None:
    try:
        method = registry.make(base + part)
    except AlloyConflict as conflict:
        assert_names_both(conflict, pieces_of(base + part))
    else:
        trained_or_refused(method)


def test_the_pairs_are_not_all_refused() -> None:
    """Else the tests above prove little."""
    for text in (
        "fedavg+projector+contrast",
        "scaffold+prox+stragglers",
        "scaffold+dynamic",
        "fednova+contrast",
    ):
        trained(registry.make(text))
    for text in (
        "share+alone",
        "prox",
        "fedavg+control",
        "share+normalised",
        "stragglers+stragglers(fraction=0.5)",
    ):
        with pytest.raises(AlloyConflict):
            registry.make(text)


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("share+alone", "share and alone both claim the aggregation of weights; keep one of them"),
        (
            "prox",
            "prox needs shared weights, and stands alone; start from a method that shares them, such as",
        ),
        (
            "fedavg+control",
            "control needs uniform weights, which share does not give; start from one such as",
        ),
        (
            "fedprox(mu=0.1)+prox(mu=0.5)",
            "prox(mu=0.1) and prox(mu=0.5) are the same part with different settings",
        ),
        (
            "fedavg+stragglers+stragglers(fraction=0.5)",
            "stragglers and stragglers(fraction=0.5) are the same part",
        ),
        (
            "feddw+dw(sl_momentum=0.5)",
            "classmeans(of='probabilities', identity=True) (brought by dw) and classmeans(of='probabilities', "
            "momentum=0.5, identity=True) (brought by dw(sl_momentum=0.5)) are the same part",
        ),
    ],
)
def test_conflicts_say_what_and_what_instead(text: str, sentence: str) -> None:
    with pytest.raises(AlloyConflict) as caught:
        registry.make(text)
    assert str(caught.value).startswith(sentence)


# Putting parts together


@dataclass(frozen=True)
class _Tag(Mechanism):
    """Adds its letter to a list whenever the gradient passes."""

    letter: str = "a"
    tags = list[str]()

    @property
    def label(self) -> str:
        return f"tag{self.letter}"

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        g = oracle(step)
        self.tags.append(self.letter)
        return g


@pytest.mark.parametrize("order", list(itertools.permutations("abc")))
def test_gradient_wrappers_nest_in_the_order_of_the_alloy(order: tuple[str, ...]) -> None:
    method = alloy("tags", Share(), *[_Tag(letter) for letter in order])
    _Tag.tags.clear()
    trained(method)
    batches = sum(-(-int(FED.sizes[client]) // LOCAL.batch) for client in (0, 1))
    assert "".join(_Tag.tags) == "".join(order) * (2 * LOCAL.epochs * batches)


def test_explain_says_the_order() -> None:
    for text, order in {"scaffold+prox": ["control", "prox"], "fedprox+dynamic": ["prox", "dynamic"]}.items():
        text = text.replace("fedprox", "fedprox(agg_weights=uniform)")
        said = explain(text, "mlp", FED.dataset.inputs).facts()["gradient_order"]
        assert [word.partition("(")[0].lower() for word in said] == order


@dataclass(frozen=True)
class _Times(Mechanism):
    """Multiplies the gradient, or adds to it: the order matters."""

    factor: float = 1.0
    plus: float = 0.0

    @property
    def label(self) -> str:
        return f"times{self.factor}{self.plus}"

    def gradient(self, step: StepView, my: State, oracle: Oracle) -> Tensor:
        return oracle(step) * self.factor + self.plus


def test_the_first_part_is_the_innermost() -> None:
    """A factor of 0 hides what is inside it, not what is outside."""
    hide, push = _Times(factor=0.0), _Times(plus=0.01)
    start = Replica(alloy("start", Share()), MODEL, FED.dataset.inputs, seed=0).initial
    assert torch.equal(trained(alloy("inside", Share(), push, hide)).weights, start)
    assert not torch.equal(trained(alloy("outside", Share(), hide, push)).weights, start)


@dataclass(frozen=True)
class _Last(Mechanism):
    """Sets the whole model to one number when training is over."""

    number: float = 0.5

    def after_training(self, client: ClientView, my: State) -> None:
        assert not client.net.training
        client.weights.flat.fill_(self.number)


def test_the_last_change_of_the_model_is_sent() -> None:
    """Also by parts that come first, such as the one that sends the weights."""
    server = trained(alloy("last", Share(), _Last()))
    assert torch.equal(server.weights, torch.full_like(server.weights, 0.5))


def test_equal_parts_merge() -> None:
    assert registry.make("fedprox(mu=0.1)+prox(mu=0.1)").pieces == registry.make("fedprox(mu=0.1)").pieces
    assert registry.make("fedavg+fedprox").pieces == (Share(), Prox())
    assert alloy("twice", Share(), Share()).pieces == (Share(),)


def test_plus_joins_alloys_and_parts() -> None:
    method = fedalloy.methods.fedavg() + fedalloy.methods.moon(proj_dim=8) + Prox(0.1)
    assert [type(piece) for piece in method][:2] == [Share, Projector]
    assert method.pieces[-1] == Prox(0.1)
    assert method.title == "FedAvg + MOON + Prox"
    assert registry.method(method.expression).pieces == method.pieces


def test_alloys_answer_questions() -> None:
    method = registry.make("scaffold+prox")
    assert method.find(Control) == Control()
    assert method.find(Projector) is None
    assert method.with_hook("gradient") == (Control(), Prox())
    assert method.claimant("weigh") is None
    assert method.whole
    assert not method.personal
    assert registry.make("local").personal
    for text, whole, personal in (
        ("fedavg+finetune", True, True),
        ("fedper", False, True),
        ("share(part='aux')+auxiliary", False, True),
    ):
        assert (registry.make(text).whole, registry.make(text).personal) == (whole, personal)
    assert registry.make("local").full_participation
    with pytest.raises(AlloyConflict, match="has no parts"):
        alloy("nothing")


def test_mechanisms_are_values() -> None:
    assert Prox(0.1) == Prox(0.1)
    assert hash(Prox(0.1)) == hash(Prox(0.1))
    with pytest.raises(AttributeError):
        Prox(0.1).mu = 0.2  # type: ignore[misc]
    assert str(Prox()) == "prox"
    assert str(Prox(0.5)) == "prox(mu=0.5)"


# A user's own


@dataclass(frozen=True)
class Shout(Mechanism):
    """A user's own part, with an upload of its own."""

    volume: int = 3

    @property
    def up(self) -> dict[str, Slot]:
        return {"sound": Slot("sum", ())}

    def upload(self, client: ClientView, my: State) -> Items:
        return {"sound": torch.tensor(float(self.volume))}


def test_a_users_own_part_is_found_by_name() -> None:
    assert registry.parts()["shout"] is Shout
    method = registry.make("fedavg+Shout(volume=7)")
    assert method.pieces == (Share(), Shout(7))
    assert registry.method(method.expression).pieces == method.pieces
    trained(method)
    with pytest.raises(FedAlloyError, match="unknown parameter of shout 'volum'; did you mean 'volume'"):
        registry.make("fedavg+shout(volum=1)")


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    (tmp_path / "own_methods.py").write_text(
        "from fedalloy import Alloy, alloy\n"
        "from fedalloy.methods import fedavg\n"
        "from fedalloy.methods.fedprox import Prox\n"
        "def close(mu: float = 0.25) -> Alloy:\n"
        "    return alloy('Close', fedavg(), Prox(mu))\n"
        "def wrong() -> Alloy:\n"
        "    return 7\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    yield "own_methods"
    sys.modules.pop("own_methods", None)


def test_a_users_own_method(own_module: str) -> None:
    method = registry.method(f"{own_module}:close(mu=0.5)")
    assert method.pieces == (Share(), Prox(0.5))
    assert method.title == "Close"
    assert registry.method(method.expression).pieces == method.pieces
    mixed = registry.method(f"{own_module}:close+projector(width=8)")
    assert mixed.pieces == (Share(), Prox(0.25), Projector(8))
    assert registry.method(mixed.expression).pieces == mixed.pieces
    trained(mixed)


@pytest.mark.parametrize(
    ("rest", "sentence"),
    [
        (":wrong", "returned int, not an alloy; build it with fedalloy.alloy"),
        (":clos", "unknown name in module own_methods"),
        (":close(nu=1)", "cannot call method"),
        (":", "cannot read"),
        ("_nowhere:close", "cannot import"),
    ],
)
def test_a_users_own_method_gone_wrong(own_module: str, rest: str, sentence: str) -> None:
    with pytest.raises(FedAlloyError, match=sentence):
        registry.method(own_module + rest)


# Expressions


@pytest.mark.parametrize(
    "text", ["FedProx(mu=0.1)", "fed-prox(mu=0.1)", "FED_PROX( mu = 1e-1 )", " fedprox(mu=.1) "]
)
def test_names_are_forgiving(text: str) -> None:
    method = registry.make(text)
    assert method.pieces == (Share(), Prox(0.1))
    assert method.expression == "fedprox(mu=0.1)"


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("fedprx", "unknown method 'fedprx'; did you mean 'fedprox'?"),
        ("fedavg+proks", "unknown method 'proks'; did you mean 'prox'?"),
        ("moon(temprature=1)", "unknown parameter of moon 'temprature'; did you mean 'temperature'?"),
        ("fedprox(x=1)", "unknown parameter of fedprox 'x'; there are: agg_weights, local_epochs, mu"),
        ("fedprox(mu=-1)", "fedprox: mu must be a number from 0 to 1000000, not -1"),
        ("fedprox(mu=much)", "fedprox: mu must be a number from 0 to 1000000, not 'much'"),
        ("fedprox(mu=1e999)", "fedprox: mu must be a number from 0 to 1000000, not inf"),
        ("fedavg(agg_weights=sizes)", "fedavg: agg_weights must be 'size' or 'uniform', not 'sizes'"),
        ("moon(proj_dim=0)", "moon: proj_dim must be a whole number from 1 to 16384, not 0"),
        ("moon(proj_dim=1.5)", "moon: proj_dim must be a whole number from 1 to 16384, not 1.5"),
        ("fedprox(mu=True)", "fedprox: mu must be a number from 0 to 1000000, not True"),
        (
            "fednova(server_momentum=1)",
            "fednova: server_momentum must be a number of at least 0 and below 1, not 1",
        ),
        ("prox(mu=-1)+fedavg", "prox: mu must be a number from 0 to 1000000, not -1"),
        ("fedprox(mu=1, mu=2)", "cannot read"),
        ("", "no method given"),
        (" + ", "no method given"),
    ],
)
def test_mistakes_are_answered(text: str, sentence: str) -> None:
    with pytest.raises(FedAlloyError) as caught:
        registry.make(text)
    assert str(caught.value).startswith(sentence)


HOSTILE = [
    "__import__('os').system('touch {}')",
    "fedavg(x=__import__('os').system('touch {}'))",
    "fedprox(mu=open('{}', 'w'))",
    "exec(\"open('{}', 'w')\")",
    "eval(source=\"open('{}', 'w')\")",
    "(lambda: open('{}', 'w'))()",
    "[open('{}', 'w') for _ in (1,)]",
    "fedavg if open('{}', 'w') else fedavg",
    "fedavg + open('{}', 'w')",
    "f\"{{open('{}', 'w')}}\"",
    "fedavg(**{{'buffers': open('{}', 'w')}})",
    "fedavg(*[open('{}', 'w')])",
    "fedprox(mu=(x := open('{}', 'w')))",
    "().__class__.__base__.__subclasses__()",
    "fedavg.__globals__",
    "fedavg(buffers=fedavg(buffers=local))",
    "fedprox(mu=fedprox)",
    "fedprox(mu=[[[[1]]]])",
    "fedprox(mu=1)(mu=2)",
    "fedprox(mu=" + "-" * 5000 + "1)",
    "fedprox(local_epochs=" + "(" * 300 + "1" + ")" * 300 + ")",
    "(" * 5000 + "fedavg" + ")" * 5000,
    "[" * 5000,
    "a." * 5000 + "b",
    "fedavg(" * 1000,
    "fedprox(mu=" + "9" * 5000 + ")",
    "fedprox(mu=9**9**9**9)",
    "(fedavg+moon)",
    "fedavg\x00",
    "\ud800",
    "fedavg; import os",
    "fedavg\nimport os",
    ":",
    ":x",
    "..x:y",
    "nowhere.at.all:f",
    "os:(a+b)",
    "math:pi",
    "os:path",
    "1:2",
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_nothing_is_ever_run(number: int, tmp_path: Path) -> None:
    trap = tmp_path / "trap"
    with pytest.raises(FedAlloyError):
        registry.make(HOSTILE[number].replace("{}", str(trap)).replace("{{", "{").replace("}}", "}"))
    assert not trap.exists()


SCRAPS = (
    """FedAvg mu nu = ( ) , + - 1 0.5 1e-3 -1 [ ] ' " none True ** * lambda . local size mlp # é 0x if _ \\"""
)
words = st.sampled_from([*registry.RECIPES, *PARTS, *SCRAPS.split(), " ", "\n"])
no_import = st.text(st.characters(exclude_characters=":"), max_size=30)  # a colon means: import this module


@examples(400)
@given(st.lists(words, max_size=14).map("".join) | no_import)
@example("fedprox(mu=1e+2, local_epochs=(1, 2))+projector")
@pytest.mark.filterwarnings("ignore::SyntaxWarning")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_any_text_is_an_alloy_or_an_error_for_the_user(text: str) -> None:
    try:
        method = registry.make(text)
    except FedAlloyError:
        return
    assert isinstance(method, Alloy)
    assert registry.method(method.expression).pieces == method.pieces


floats = st.floats(0, 1e6, allow_nan=False)
calls = st.one_of(
    st.builds("fedprox(mu={!r}, straggler_fraction={!r})".format, floats, st.floats(0, 1)),
    st.builds("fedprox(local_epochs={!r})".format, st.lists(st.integers(1, 9), min_size=1).map(tuple)),
    st.builds(
        "fedavg(agg_weights={}, buffers='{}')".format, st.sampled_from(["size", "uniform"]), st.just("drop")
    ),
    st.builds("moon(mu={!r}, proj_dim={!r})".format, floats, st.integers(1, 999)),
    st.builds("feddyn(max_grad_norm=none, size_scaled={!r})".format, st.booleans()),
    st.builds("scaffold(c_update={}, server_lr={!r})".format, st.just("option1"), st.floats(1e-9, 1e6)),
    st.sampled_from(["fednova", "local(participation_applies=True)", "FedNova(mu=0)"]),
)
addons = st.builds(
    "prox(mu={!r}, part='{}')".format, floats, st.sampled_from(["main", "head"])
) | st.sampled_from(["projector(width=7)", "contrast", "stragglers(epochs=(1, 2))"])


@examples(200)
@given(calls, st.lists(addons, max_size=2))
def test_the_canonical_expression_makes_the_same_method(call: str, more: list[str]) -> None:
    try:
        method = registry.make("+".join([call, *more]))
    except AlloyConflict:
        return
    again = registry.method(method.expression)
    assert again.pieces == method.pieces
    assert again.expression == method.expression
    assert Alloy(method.title, method.pieces).expression == "+".join(map(str, method.pieces))
    assert registry.make(Alloy(method.title, method.pieces).expression).pieces == method.pieces

"""Code outside of FedAlloy: nobody imports it who was not allowed to, and what is no method is never called."""

import random
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

import fedalloy as fa
from fedalloy import models
from fedalloy.core import registry
from fedalloy.core.expression import foreign, parse
from fedalloy.core.imports import Imports, foreign_in
from fedalloy.core.net import Inputs
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.experiment.run import Setup, start
from fuzzing import dice
from terminal import fedalloy

DIGITS = Inputs("image", (1, 8, 8), classes=10)
HOSTILE = [
    "fedavg()+{}",
    "{}",
    "{}+fedavg",
    "fedavg(agg_weights='(')+{}",
    "fedprox(mu=1)+prox(mu=2)+{}",
    "fedsce(aux='{}')",
    'fml(meme="{}")',
    "fedkd(student='{}')",
    "fedavg+auxiliary(model='{}')",
    "fedavg\n+\n{}",
    "fedavg # comment +\n+ {}",
]
SMALL: dict[str, Any] = {"clients": 2, "rounds": 2, "model": "mlp(hidden=4)", "engine": "inline"}


@pytest.fixture
def evil(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module that leaves a file when it is imported, and another when its functions are called."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "evil.py").write_text(
        "from pathlib import Path\n"
        "import fedalloy as fa\n"
        "from torch import nn\n"
        "Path('imported').touch()\n"
        "def boom(cmd=''):\n    Path('called').touch()\n"
        "def mine(mu: float = 0.1) -> fa.Alloy:\n    return fa.method('fedavg')\n"
        "def net(inputs) -> nn.Module:\n"
        "    return nn.Sequential(nn.Flatten(), nn.Linear(64, inputs.classes))\n"
    )
    yield tmp_path
    sys.modules.pop("evil", None)


def untouched(room: Path) -> bool:
    return not (room / "imported").exists() and not (room / "called").exists()


@pytest.mark.parametrize("name", ["evil:boom(cmd=1)", "evil:mine", " evil : net ", "evil:mine(mu=2)"])
@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_is_imported_without_leave(evil: Path, text: str, name: str) -> None:
    whole = text.replace("{}", name)
    with suppress(FedAlloyError):  # where it cannot even be read
        assert foreign([whole])
    with pytest.raises(FedAlloyError):
        Setup(Config.of({**SMALL, "method": whole}))
    assert untouched(evil)


@pytest.mark.parametrize(
    "settings", [{"model": "evil:net"}, {"models": "mlp,evil:net"}, {"method": "evil:mine"}]
)
def test_a_foreign_name_is_found_in_every_setting(evil: Path, settings: dict[str, str]) -> None:
    assert foreign_in(settings) == [
        next(iter(settings.values())).partition(",")[2] or next(iter(settings.values()))
    ]
    with pytest.raises(FedAlloyError, match="is code outside of FedAlloy"):
        Setup(Config.of({**SMALL, "method": "local", **settings}))
    assert untouched(evil)


@pytest.mark.parametrize(
    "name",
    ["evil:boom(cmd='x')", "os:system(command='touch called')", "subprocess:getoutput(cmd='touch called')",
     "os:getcwd", "builtins:exec", "builtins:dict", "subprocess:Popen(args='touch called')", "evil:Path"],
)  # fmt: skip
def test_even_with_leave_only_what_promises_a_method_or_a_model_is_called(evil: Path, name: str) -> None:
    with pytest.raises(FedAlloyError, match="is no method"):
        registry.make(f"fedavg+{name}", Imports())
    with pytest.raises(FedAlloyError, match="is no model"):
        models.build(name, DIGITS, Imports())
    assert not (evil / "called").exists()


@pytest.mark.parametrize(
    "name",
    [
        "..evil:mine",
        "evil:",
        ":mine",
        "evil:mine:net",
        "evil:mi ne",
        "ev il:mine",
        "evil:1",
        "evil：mine",
        "еvil:mine",
    ],
)
def test_a_name_of_wrong_form_is_not_looked_for(evil: Path, name: str) -> None:
    for make in (lambda: registry.method(name), lambda: models.build(name, DIGITS, Imports())):
        with pytest.raises(FedAlloyError):
            make()
    assert untouched(evil)


def test_what_is_typed_needs_no_leave(evil: Path) -> None:
    assert fa.method("evil:mine(mu=1)").title == "FedAvg"
    fed = fa.federate("digits", clients=2, seed=0)
    assert fa.train(
        fed, model="evil:net", method="evil:mine+prox(mu=0.1)", rounds=1, engine="inline"
    ).accuracy
    assert fedalloy("explain", "evil:mine", "--model", "evil:net", "--json").code == 0


def test_a_config_file_needs_leave_for_foreign_names(evil: Path) -> None:
    Path("some.toml").write_text(
        'method = "fedavg()+evil:mine"\nmodel = "evil:net"\nclients = 2\nrounds = 1\n'
    )
    for command in ("run", "compare fedavg", "tune fedprox --trials 1"):
        said = fedalloy(*command.split(), "--config", "some.toml", "--out", "out", "--engine", "inline")
        assert said.code == 2
        assert "some.toml names code outside of FedAlloy (evil:" in said.err
        assert "if you trust it, add --allow-code" in said.err
        assert untouched(evil)
        assert not Path("out").exists()
    half = fedalloy("run", "--config", "some.toml", "--method", "fedavg", "--out", "out")
    assert half.code == 2
    assert "(evil:net)" in half.err
    assert untouched(evil)
    words = ("run", "--config", "some.toml", "--engine", "inline", "--json")
    own = fedalloy(*words, "--method", "evil:mine", "--model", "evil:net", "--out", "own")
    assert own.code == 0, own.err
    assert fedalloy(*words, "--allow-code", "--out", "out").code == 0


def test_a_folder_needs_leave_for_foreign_names(evil: Path) -> None:
    class Stop(Exception): ...

    def stop(record: dict[str, Any]) -> None:
        raise Stop

    config = Config.of({**SMALL, "method": "evil:mine", "model": "evil:net"})
    with pytest.raises(Stop):
        start(config, Path("run"), stop, imports=Imports())
    Path("imported").unlink()
    sys.modules.pop("evil")
    before = sorted(path.name for path in Path("run").rglob("*"))
    for words in (
        ("run", "--resume", "run"),
        ("diagnose", "run"),
        ("run", "--resume", "run", "--method", "evil:mine"),
    ):
        said = fedalloy(*words)
        assert said.code == 2
        assert "config.toml names code outside of FedAlloy (evil:" in said.err
    with pytest.raises(FedAlloyError, match="if you trust it"):
        fa.resume("run")
    assert fedalloy("report", "run").code in (0, 2)  # reads numbers alone
    assert untouched(evil)
    assert sorted(path.name for path in Path("run").rglob("*") if path.name != "report.html") == before
    typed = fedalloy("run", "--resume", "run", "--method", "evil:mine", "--model", "evil:net")
    assert typed.code == 0, typed.err
    assert fedalloy("diagnose", "run", "--allow-code").code == 0
    assert fa.resume("run", allow_code=True).accuracy


@pytest.mark.parametrize("address", ["example.org:6379", "127.0.0.1:6379", "ray://example.org:1"])
def test_a_cluster_that_a_file_names_needs_leave(evil: Path, address: str) -> None:
    """Whoever holds the head of a Ray cluster runs code on the machines that join it."""
    Path("some.toml").write_text(f'engine = "ray"\nray_address = "{address}"\nclients = 2\nrounds = 1\n')
    for command in ("run", "compare fedavg", "tune fedprox --trials 1"):
        said = fedalloy(*command.split(), "--config", "some.toml", "--out", "out")
        assert said.code == 2
        assert f"names a Ray cluster ({address}), which can run code here" in " ".join(said.err.split())
        assert not Path("out").exists()
    config = Config.of({**SMALL, "rounds": 1, "method": "fedavg"})
    start(config, Path("run"))
    text = Path("run/config.toml").read_text()
    Path("run/config.toml").write_text(f'{text}ray_address = "{address}"\n')
    Path("run/summary.json").unlink()
    assert "names a Ray cluster" in " ".join(fedalloy("run", "--resume", "run").err.split())
    with pytest.raises(FedAlloyError, match="names a Ray cluster"):
        fa.resume("run")


def test_installed_packages_may_offer_names(evil: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("plug.dist-info").mkdir()
    Path("plug.dist-info/METADATA").write_text("Metadata-Version: 2.1\nName: plug\nVersion: 1\n")
    Path("plug.dist-info/entry_points.txt").write_text(
        "[fedalloy.methods]\nmy-method = evil:mine\nodd = evil:boom\n[fedalloy.models]\nmy_net = evil:net\n"
    )
    sys.path.insert(0, str(evil))
    from fedalloy.core import imports

    imports._installed.cache_clear()
    try:
        assert registry.make("my-method(mu=1)+prox(mu=0.1)").expression.startswith("mymethod(mu=1)+")
        assert models.build("my-net", DIGITS).head.out_features == 10
        with pytest.raises(FedAlloyError, match="is no method"):
            registry.make("odd")
        assert not Path("called").exists()
    finally:
        imports._installed.cache_clear()


# Expressions that nobody would type


SCRAPS = r"""fedavg fedprox moon prox share mlp cnn-bn evil:boom subprocess:getoutput os:system a.b.c:d ..x:y : :: ( )
(( )) [ ] { } + - * ** , ; = == . .. ' " \ \n # @ ! mu= part=':-1' model='evil:boom' cmd='x' aux=evil:boom 1 1e308
1e-300 1e999 9**9**9 0x_1 1_0 -1 none True lambda import exec eval __import__('os') if for in f'{x}' b'' ... := ->
~ not"""
ODD = [
    "\u00e9",
    "\uff1a",
    "\u0435vil:boom",
    "\u037e",
    "\uff08",
    "\uff09",
    "\u202e",
    "\ud800",
    "\x00",
    "\t",
    "'" * 3,
]
ATOMS = [*SCRAPS.split(), *ODD]
WATCHED = ("import", "exec", "os.system", "subprocess.Popen", "os.exec", "open", "socket.connect")


def expression(chance: random.Random) -> str:
    kind = chance.random()
    if kind < 0.05:
        return chance.choice(
            ["(", "[", "-", "a.", "fedavg+", "x(", "~", "not ", "'", "9"]
        ) * chance.randrange(1, 5000)
    if kind < 0.4:
        parts = [
            chance.choice(["fedavg", "fedprox(mu=1)", "moon", f"prox(mu={chance.choice(ATOMS)})"])
            for _ in range(3)
        ]
        parts.insert(
            chance.randrange(4), chance.choice(ATOMS) + chance.choice(["", "()", "(cmd='touch called')"])
        )
        text = "+".join(parts)
    else:
        text = chance.choice(["", " ", "\n"]).join(
            chance.choice(ATOMS) for _ in range(chance.randrange(1, 12))
        )
    for _ in range(chance.randrange(3)):
        at = chance.randrange(len(text) + 1)
        text = text[:at] + chance.choice(ATOMS) + text[at + chance.randrange(2) :]
    return text


@pytest.mark.fuzz
def test_no_expression_imports_anything(evil: Path) -> None:
    registry.method("fedavg")
    for text in ("nothing", "no-model"):  # what is installed is looked up once
        with pytest.raises(FedAlloyError):
            registry.make(text)
        with pytest.raises(FedAlloyError):
            models.build(text, DIGITS)
    seen: list[str] = []
    watching = True

    def spy(event: str, details: Any) -> None:
        if watching and event in WATCHED:
            seen.append(f"{event} {details}")

    sys.addaudithook(spy)
    known, taken = set(sys.modules), 0
    for chance in dice(4000, 120_000):
        text = expression(chance)
        began = time.thread_time()
        for reading in (parse, lambda text: foreign([text]), registry.make):
            with suppress(FedAlloyError):
                reading(text)
                taken += reading is parse
        assert time.thread_time() - began < 5, (chance, text[:200])
        assert not seen, (chance, text, seen)
    watching = False
    assert set(sys.modules) == known
    assert taken > 100
    assert untouched(evil)


def test_a_long_expression_is_not_read() -> None:
    for text in ("a" * 10_000_000, "(" * 10_000_000, "fedavg+" * 1_000_000, "a-" * 5_000_000):
        began = time.thread_time()
        with pytest.raises(FedAlloyError, match="letters"):
            registry.make(text)
        assert time.thread_time() - began < 5

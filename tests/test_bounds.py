"""Absurd settings: whatever number stands in whatever place, it does no harm or is refused in one sentence."""

import types
import typing
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from fedalloy import models
from fedalloy.core import registry
from fedalloy.core.alloy import Alloy, alloy
from fedalloy.core.net import Inputs
from fedalloy.core.parameters import checked, expected, hints
from fedalloy.data.federation import federate
from fedalloy.deploy.plausible import check_plan
from fedalloy.deploy.terms import Terms, read_settings
from fedalloy.errors import FedAlloyError, FedAlloyWarning, shown
from fedalloy.experiment.config import Config, flag
from fedalloy.experiment.run import Setup, start
from fuzzing import examples
from terminal import fedalloy

ABSURD = [
    10**400, -(10**400), 10**5000, 2**63, 10**9 + 1, -1, 0, 1e-300, -1e-300, 1e300, 1e-13,
    float("nan"), float("inf"), -float("inf"), "9" * 400, "9" * 5000, "x", "", "x\0", "(" * 3000, None, True,
    (), (10**400,), (1e300,), (-1,) * 999,
]  # fmt: skip
FED = federate("digits", clients=3, limit=60)
SMALL = Config(engine="inline", clients=3, rounds=2, limit=60)
IMAGES, WORDS = Inputs("image", (1, 8, 8), 10), Inputs("tokens", (5,), 2, 100)
FACTORIES = models._FACTORIES
Way = Callable[..., Any]


def recipe(name: str) -> Way:
    return lambda **given: registry.RECIPES[name].make(**given)


def part(name: str) -> Way:
    kind = registry.parts()[name]
    return lambda **given: alloy("some", registry.make("fedavg"), kind(**checked(name, kind, given)))


def model(name: str) -> Way:
    def build(**given: Any) -> None:
        checked(name, FACTORIES[name], given)
        word = ", ".join(f"{key}={value!r}" for key, value in given.items())
        with torch.device("meta"):
            models.build(f"{name}({word})", WORDS if name == "bilstm" else IMAGES)

    return build


OWN: dict[str, Way] = {
    name: kind for name, kind in registry.parts().items() if kind.__module__.startswith("fedalloy.")
}
MAKERS: dict[str, tuple[Way, dict[str, Any]]] = {
    **{f"recipe {name}": (recipe(name), hints(one.make)) for name, one in registry.RECIPES.items()},
    **{f"part {name}": (part(name), hints(kind)) for name, kind in sorted(OWN.items())},
    **{f"model {name}": (model(name), hints(one)) for name, one in FACTORIES.items()},
}
PLACES = [(maker, name) for maker, (_, known) in MAKERS.items() for name in known]


def put(maker: str, name: str, value: Any) -> str | None:
    """Build it with this value, and all that a run needs; what is said where it is refused."""
    try:
        made = MAKERS[maker][0](**{name: value})
        if isinstance(made, Alloy):
            Setup(SMALL, FED, made).server()
    except FedAlloyError as error:
        return str(error)
    return None


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FedAlloyWarning)
        yield


def numbers(hint: Any, limits: Any = None) -> Iterator[tuple[type, Any]]:
    """Every number that a hint allows, with its bounds."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        yield from numbers(inner[0], inner[1])
    elif origin in (typing.Union, types.UnionType, tuple):
        for one in inner:
            yield from numbers(one)
    elif hint in (int, float):
        yield hint, limits


def ends(hint: Any) -> list[float]:
    """The smallest and the largest values that are allowed."""
    found = []
    for kind, limits in numbers(hint):
        found += [end for end in (limits.ge, limits.le) if end is not None]
        found += [1 - 1e-9] if limits.lt is not None and kind is float else []
    return found


@pytest.mark.parametrize(("maker", "name"), PLACES, ids=lambda word: word.replace(" ", "-"))
def test_every_parameter_is_bounded_on_both_sides(maker: str, name: str) -> None:
    hint = MAKERS[maker][1][name]
    for _, limits in numbers(hint):
        assert limits.ge is not None, expected(hint)
        assert (limits.le is None) != (limits.lt is None), expected(hint)
        assert max(abs(end) for end in (limits.ge, limits.le or limits.lt)) <= 10**9


@pytest.mark.parametrize("kind", [Config, Terms])
def test_every_setting_is_bounded_on_both_sides(kind: type[pydantic.BaseModel]) -> None:
    for name, hint in typing.get_type_hints(kind, include_extras=True).items():
        if name in kind.model_fields:
            for _, limits in numbers(hint):
                assert limits.ge is not None, name
                assert (limits.le is None) != (limits.lt is None), name


@pytest.mark.parametrize("maker", [maker for maker, (_, known) in MAKERS.items() if known])
def test_an_absurd_parameter_does_no_harm_or_is_refused_by_name(maker: str) -> None:
    for name, hint in MAKERS[maker][1].items():
        for value in ABSURD:
            said = put(maker, name, value)
            assert said is None or "\n" not in said
            assert said is None or len(said) < 700
        if any(True for _ in numbers(hint)):
            for value in (10**400, 1e300, float("nan")):
                said = put(maker, name, value) or ""
                assert f"{name} must be {expected(hint)}, not {shown(value)}" in said


@pytest.mark.parametrize("maker", [maker for maker, (_, known) in MAKERS.items() if known])
def test_the_bounds_themselves_can_be_built(maker: str) -> None:
    for name, hint in MAKERS[maker][1].items():
        if typing.get_origin(hint) is not tuple:
            for value in ends(hint):
                if value not in (16384, 100_000):  # possible, but slow or too large together with others
                    said = put(maker, name, value)
                    assert said is None or f"must be {expected(hint)}" not in said


def accepted(values: dict[str, Any], source: str = "") -> str | None:
    try:
        config = Config.of({"engine": "inline", "limit": 60, "clients": 3, **values}, source)
        Setup(config).server()
        config.typed()
    except FedAlloyError as error:
        return str(error)
    return None


TEXTS = [
    "dirichlet:1e-300", "dirichlet:1e300", "dirichlet:1e-6", "quantity:1000000", "balanced-dirichlet:1e-6",
    f"pathological:{'9' * 400}", f"pathological:-{'9' * 400}", f"quantity:{'9' * 5000}", "quantity:nan",
    f"crop:{'9' * 5000}", "crop:100000", "a" * 100_000, "+" * 10_000, "fedavg+" * 3000, "mlp," * 1000,
    "mlp(hidden=16384, depth=64)", f"mlp(hidden={'9' * 400})", f"mlp(hidden={'9' * 5000})", "mlp(hidden=1e999)",
    "fedavg+private(noise=1e-300)", "fedavg+private(clip=1e300)", "ssf(ratio=1e-300)",
]  # fmt: skip


@pytest.mark.parametrize("source", ["", "config.toml"])
@pytest.mark.parametrize("name", Config.model_fields)
def test_an_absurd_setting_does_no_harm_or_is_refused(name: str, source: str) -> None:
    for value in [*ABSURD, *TEXTS]:
        if value is not None and not (isinstance(value, str) and name in ("data", "data_root")):
            said = accepted({name: value}, source)
            assert said is None or "\n" not in said
            assert said is None or len(said) < 5000
        if name not in ("personal_on_global",) and isinstance(value, int | float) and abs(value) > 10**10:
            assert said is not None
            assert (flag(name) if not source else name) in said


@pytest.mark.parametrize("name", Terms.model_fields)
def test_an_absurd_term_is_refused(name: str) -> None:
    for value in [*ABSURD, *TEXTS]:
        assert "\n" not in (agreed({name: value}) or "")


def agreed(values: dict[str, Any]) -> str | None:
    try:
        config, terms = read_settings({"sites": "own", "class-names": "a,b", "clients": 2, **values})
        check_plan(config, terms, None, 9092)
    except FedAlloyError as error:
        return str(error)
    return None


DIGITS = "9" * 400
COMMANDS = [
    (f"run --rounds {DIGITS}", "--rounds must be a whole number from 1 to 1000000, not 99999"),
    (f"run --rounds {'9' * 5000}", "--rounds must be a whole number from 1 to 1000000, not 99999"),
    ("run --lr 1e300", "--lr must be a number from 1e-12 to 1000000, not 1e300; for example 0.05"),
    ("run --clients 1000001", "--clients must be a whole number from 1 to 1000000, not 1000001; for example 10"),
    ("run --clients 1000000", "take at most 1438 clients"),
    ("run --workers 1000 --clients 1000", "--workers 1000 is too much for"),
    ("run --workers 1001", "--workers must be a whole number from 1 to 1000, not 1001"),
    (f"run --seed {DIGITS}", "--seed must be a whole number from 0 to 9223372036854775807, not 99999"),
    ("run --method fedavg+private(noise=1e-300)", "private: noise must be a number from 0.001 to 1000, not 1e-300"),
    ("run --method fedavg+private(clip=1e300)", "private: clip must be a number from 1e-12 to 1000000, not 1e+300"),
    ("run --method ssf(ratio=1e-300)", "ssf: ratio must be a number from 1e-06 to 1, not 1e-300"),
    (f"run --model mlp(hidden={10**30})", "mlp: hidden must be a whole number from 1 to 16384"),
    ("run --model mlp(hidden=16384,depth=64)", "make it smaller"),
    (f"compare fedavg --seeds 0,{'9' * 5000}", "--seeds must be whole numbers of at least 0, each of at most 18"),
    (f"compare fedavg --seeds {'0,' * 1000}1", "--seeds names 1001 seeds; name 1000 at most"),
    ("compare fedavg fedprox(mu=1e300)", "fedprox: mu must be a number from 0 to 1000000, not 1e+300"),
    ("compare fedavg --target 1e300", "--target must be an accuracy between 0 and 1"),
    (f"tune fedprox --trials {DIGITS}", "--trials must be a whole number from 1 to 1000000, not 99999"),
    ("tune fedprox --lr-values 0.1,1e300", "--lr-values must be numbers from 1e-12 to 1000000, not '0.1,1e300'"),
    ("tune fedprox(mu=1e300)", "fedprox: mu must be a number from 0 to 1000000, not 1e+300"),
    (f"partition --clients {DIGITS}", "--clients must be a whole number from 1 to 1000000"),
    ("partition --skew dirichlet:1e-300", "the number must lie from 1e-06 to 1000000"),
    (f"partition --augment crop:{DIGITS}", "crop needs its padding in pixels, such as crop:4"),
    (f"explain moon(proj_dim={DIGITS})", "moon: proj_dim must be a whole number from 1 to 16384"),
    (f"models --model mlp(depth={DIGITS})", "mlp: depth must be a whole number from 0 to 64"),
    (f"bench --rounds {DIGITS}", "--rounds must be a whole number from 2 to 1000"),
    (f"bench --repeats {DIGITS}", "--repeats must be a whole number from 1 to 1000"),
    (f"reproduce feddw/table1 --jobs {DIGITS}", "--jobs must be a whole number from 1 to 1000"),
    ("reproduce feddw/table1 --jobs 1000", "--jobs 1000 is too much for"),
    (f"reproduce feddw/table1 --rounds {DIGITS}", "--rounds must be a whole number from 1 to 1000000"),
    (f"reproduce feddw/table1 --seeds {DIGITS}", "--seeds must be whole numbers of at least 0"),
    (f"diagnose r --clients {DIGITS}", "--clients must be a whole number from 1 to 1000000"),
    (f"deploy init d --clients {DIGITS} --class-names a,b", "--clients must be a whole number from 1 to 1000000"),
    ("deploy init d --clients 1001 --class-names a,b", "a deployment has 1000 at most"),
    ("deploy init d --clients 2 --class-names a,b --most-norm nan", "--most-norm must be a number from 1 to 1000000"),
    ("deploy init d --clients 2 --class-names a,b --least-sites 0", "--least-sites must be a whole number from 1"),
    ("deploy init d --clients 2 --class-names a,b --join-limit 1e300", "--join-limit must be a number from 1e-12"),
    ("deploy init d --clients 2 --class-names a,b --model mlp(hidden=99999)", "mlp: hidden must be a whole number"),
    (f"deploy init d --clients 2 --class-names a,b --port {DIGITS}", "they run from 1 to 65535"),
    ("deploy site d --patience 1e300", "--patience must be a number from 0 to 1000000"),
    ("deploy site d --look-every nan", "--look-every must be a number from 1e-12 to 1000000"),
    ("deploy site d --most-epsilon inf", "--most-epsilon must be a number from 0 to 1000000"),
]  # fmt: skip


@pytest.mark.parametrize(("typed", "says"), COMMANDS, ids=lambda words: words[:60])
def test_a_command_says_the_bound_and_writes_nothing(
    typed: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    said = fedalloy(*typed.split())
    told = " ".join(said.err.split())
    assert (said.code, said.out) == (2, "")
    assert says in told
    assert len(told) < 500
    assert not list(tmp_path.iterdir())


FILES = [
    (f"rounds = {DIGITS}", "config.toml: rounds must be a whole number from 1 to 1000000, not 99999"),
    (f"rounds = {'9' * 5000}", "is not valid TOML"),
    ("lr = 1e300", "config.toml: lr must be a number from 1e-12 to 1000000, not 1e+300; for example 0.05"),
    ("lr = nan", "config.toml: lr must be a number from 1e-12 to 1000000, not nan"),
    (f"x = {'[' * 5000}", "is not valid TOML"),
    (f'data = "{"x" * 5000}"', "data is 5000 characters long; write 4096 at most"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "says"), FILES, ids=lambda words: words[:30])
def test_a_file_is_bounded_alike(
    text: str, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("config.toml").write_text(text)
    said = fedalloy("run", "--config", "config.toml")
    assert said.code == 2
    assert says in " ".join(said.err.split())
    assert [file.name for file in tmp_path.iterdir()] == ["config.toml"]


EXTREME = ["private(noise=0.001)", "private(noise=1000, clip=1000000)", "private(clip=1e-12, delta=1e-12)"]


@pytest.mark.parametrize(
    "method", [f"fedavg+{one}" for one in EXTREME] + ["ssf(ratio=1e-6)", "fedprox(mu=1000000)"]
)
def test_a_run_at_the_bounds_ends(method: str, tmp_path: Path) -> None:
    found = start(SMALL.model_copy(update={"method": method}), tmp_path / "r")
    assert found.summary["status"] in ("finished", "diverged")


def test_a_number_without_bounds_in_a_part_of_ones_own_has_some() -> None:
    def own(count: int = 1, weight: float = 1.0) -> None: ...

    assert checked("own", own, {"count": 10**9, "weight": -2.5}) == {"count": 10**9, "weight": -2.5}
    for value in (10**400, float("inf")):
        with pytest.raises(
            FedAlloyError, match="count must be a whole number from -1000000000 to 1000000000"
        ):
            checked("own", own, {"count": value})


anything = st.one_of(
    st.integers(), st.integers(-(10**500), 10**500), st.floats(), st.text(max_size=50), st.booleans(), st.none(),
    st.lists(st.integers() | st.floats(), max_size=5).map(tuple),
)  # fmt: skip


@pytest.mark.fuzz
@examples(200)
@given(st.sampled_from(PLACES), anything)
@example(("part deviation", "gamma"), 10**400)
def test_anything_in_any_parameter(place: tuple[str, str], value: Any) -> None:
    said = put(*place, value)
    assert said is None or len(said) < 700


@pytest.mark.fuzz
@examples(100)
@given(st.sampled_from(sorted({*Config.model_fields} - {"data", "data_root", "engine"})), anything)
def test_anything_in_any_setting(name: str, value: Any) -> None:
    for source in ("", "file"):
        said = accepted({name: value}, source)
        assert said is None or len(said) < 5000

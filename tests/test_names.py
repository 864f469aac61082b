"""A model has one name: however it is typed, the same net starts from the same weights."""

import shutil
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedalloy import models
from fedalloy.cli.deploy import _spelling
from fedalloy.core import registry
from fedalloy.core.expression import split
from fedalloy.data.federation import federate
from fedalloy.errors import FedAlloyError, FedAlloyWarning
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Setup, play, resume, start, train
from fedalloy.research.compare import Comparison
from fedalloy.research.presets import PRESETS, preset
from fuzzing import examples
from terminal import fedalloy, tree

ROOT = Path(__file__).parent.parent
TINY = Config(engine="inline", clients=3, rounds=1, limit=60, lr=0.1)
BEGUN = (
    Path(__file__).parent / "begun"
)  # two of four rounds, by a version that drew weights by the name as typed
ENDS_AS = "6ee44301323e28054952932981d828460a9da580e08007a640b1a7f153b92c54"


def weights(folder: Path, **changed: object) -> str:
    return str(start(TINY.model_copy(update=changed), folder).summary["weights_sha256"])


@pytest.mark.parametrize("name", [model.name for model in models.names()])
def test_a_name_of_the_zoo_is_its_own_spelling(name: str) -> None:
    assert models.spelled(name) == name
    for typed in (name.replace("-", "_"), name.upper(), f" {name.replace('-', '')} ", f"{name}()"):
        assert models.spelled(typed) == name


@pytest.mark.parametrize(
    ("typed", "one"),
    [
        ("mlp(hidden=64)", "mlp"),
        ("mlp( norm = 'batch',hidden=50 )", "mlp(hidden=50, norm=batch)"),
        ("MLP(depth=1, hidden=5_0)", "mlp(hidden=50)"),
        ("mlp(norm=none)", "mlp"),
        ("resnet-18(width=1)", "resnet18"),
        ("resnet18(units=(256,128), width=.5)", "resnet18(width=0.5, units=(256, 128))"),
        ("resnet18(units=[256], width=2.0)", "resnet18(width=2, units=(256,))"),
        ("cnn_feddw(widths=(6,16))", "cnn-feddw(widths=(6, 16))"),
        (" my.own:Net ", "my.own:Net"),
        ("my.own:Net( x=1.0,s='none' )", 'my.own:Net(x=1.0, s="none")'),
    ],
)
def test_parameters_have_one_spelling_too(typed: str, one: str) -> None:
    assert models.spelled(typed) == models.spelled(one) == one


numbers = st.integers(1, 300).map(str)
spaces = st.sampled_from(["", " ", "  "])


@pytest.mark.fuzz
@examples(40)
@given(
    st.fixed_dictionaries({}, optional={"hidden": numbers, "depth": st.just("2"), "norm": st.just("batch")}),
    st.randoms(use_true_random=False),
    spaces,
)
def test_order_and_spaces_do_not_count(parameters: dict[str, str], draw: object, space: str) -> None:
    listed = list(parameters.items())
    draw.shuffle(listed)  # type: ignore[attr-defined]
    typed = (
        f"{space}MLP({space}" + f"{space},".join(f"{k}{space}={space}{v}" for k, v in listed) + f"{space})"
    )
    plain = f"mlp({', '.join(f'{k}={v}' for k, v in parameters.items())})"
    assert models.spelled(typed) == models.spelled(plain) == models.spelled(models.spelled(typed))


def test_what_is_published_keeps_its_weights() -> None:
    """The names in published runs, presets and items are the ones that weights are drawn by."""
    listed = [preset(name).settings for name in PRESETS]
    found = {str(one[name]) for one in listed for name in ("model", "models") if name in one}
    for file in (ROOT / "results" / "runs").glob("*/config.toml"):
        config = tomllib.loads(file.read_text())
        found |= {config["model"], *split(config.get("models", ""))}
    assert len(found) > 4
    assert [text for text in found if ",".join(map(models.spelled, split(text))) != text] == []


def test_two_spellings_start_from_the_same_weights(tmp_path: Path) -> None:
    less = {"limit": 20, "clients": 1}
    assert weights(tmp_path / "a", model="cnn_bn", **less) == weights(tmp_path / "b", model="cnn-bn", **less)
    assert RunFolder(tmp_path / "a").config.model == "cnn-bn"
    assert weights(tmp_path / "c", model="mlp") == weights(tmp_path / "d", model="MLP( hidden = 64 )")
    assert weights(tmp_path / "e", model="mlp(hidden=8)") != weights(tmp_path / "f", model="mlp(hidden=9)")


def test_in_python_too() -> None:
    fed = federate("digits", clients=3, limit=60)
    runs = [
        train(fed, text, rounds=1, lr=0.1, engine="inline") for text in ("mlp(hidden=8)", "MLP( hidden=8 )")
    ]
    assert runs[0].summary["weights_sha256"] == runs[1].summary["weights_sha256"]


def test_several_spellings_are_one_architecture(tmp_path: Path) -> None:
    weights(tmp_path / "a", models="mlp, MLP(hidden=64)", method="fedavg")  # fedavg refuses different ones
    assert RunFolder(tmp_path / "a").config.models == "mlp,mlp"


@pytest.mark.parametrize("typed", ["fed_avg", "FedAvg()", "fedavg(server_lr=1)"])
def test_the_spelling_of_a_method_draws_nothing(typed: str, tmp_path: Path) -> None:
    assert weights(tmp_path / "a", method=typed) == weights(tmp_path / "b", method="fedavg")


def test_a_method_is_the_same_under_two_spellings() -> None:
    for one, other in (("fedprox(mu=0.1)", "FedProx( mu = .1 )"), ("fedprox(mu=1)", "fed-prox(mu=1.0)")):
        assert registry.make(one).pieces == registry.make(other).pieces
        with pytest.raises(FedAlloyError, match="is named twice; name every method once"):
            Comparison.plan(TINY, [one, other], [0])


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    return Path(shutil.copytree(BEGUN, tmp_path / "begun"))


@pytest.mark.parametrize("typed", [(), ("--model", "mlp(hidden=8)"), ("--model", "mlp( hidden=8, depth=1 )")])
def test_a_run_that_began_under_another_spelling_ends_as_it_would_have(
    typed: tuple[str, ...], begun: Path
) -> None:
    """Clients 0 and 1 take part for the first time after it: their own heads are drawn only then."""
    found = fedalloy("run", "--resume", str(begun), *typed, "--json").json
    assert (found["status"], found["weights_sha256"]) == ("finished", ENDS_AS)
    assert RunFolder(begun).config.model == "MLP( hidden = 8 )"


def test_another_model_is_still_refused(begun: Path) -> None:
    said = fedalloy("run", "--resume", str(begun), "--model", "mlp(hidden=9)")
    assert said.code == 2
    assert "was started with other settings (--model" in said.err


def test_as_a_new_run_it_has_the_one_name(begun: Path, tmp_path: Path) -> None:
    again = start(RunFolder(begun).config, tmp_path / "again")
    assert again.config.model == "mlp(hidden=8)"
    plain = start(again.config, tmp_path / "plain")
    assert again.summary["weights_sha256"] == plain.summary["weights_sha256"] != ENDS_AS


def as_typed(path: Path, config: Config) -> str:
    """A run as older versions played it: weights are drawn by the name as it was typed."""
    return str(play(Setup(config), RunFolder.create(path, config)).summary["weights_sha256"])


def test_a_comparison_goes_on_under_the_names_it_began_with(tmp_path: Path) -> None:
    """A method that is added later starts from the weights that the others started from."""
    old = TINY.model_copy(update={"model": "MLP(hidden=8)"})
    as_typed(tmp_path / "c" / "fedavg" / "seed0", old)
    before = tree(tmp_path / "c" / "fedavg")
    expected = as_typed(tmp_path / "other", old.model_copy(update={"method": "fedprox"}))
    plan = Comparison.plan(
        TINY.model_copy(update={"model": "mlp(hidden=8)"}), ["fedavg", "fedprox"], [0], tmp_path / "c"
    )
    plan.run()
    after = tree(tmp_path / "c" / "fedavg")
    assert all(after[name] == before[name] for name in before if name != "seed0")  # it has a report now
    assert RunFolder(tmp_path / "c" / "fedprox" / "seed0").config.model == "MLP(hidden=8)"
    assert (RunFolder(tmp_path / "c" / "fedprox" / "seed0").summary() or {})["weights_sha256"] == expected


def test_a_comparison_is_found_again_under_either_spelling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--rounds", "1", "--limit", "60", "--clients", "3", "--engine", "inline")
    first = fedalloy("compare", "fedavg", *flags, "--model", "mlp(hidden=8)", "--json").json
    before = tree(tmp_path / first["runs"][0]["folder"])
    again = fedalloy("compare", "fedavg", *flags, "--model", "MLP( hidden=8 )", "--json").json
    assert again["folder"] == first["folder"]
    assert tree(tmp_path / first["runs"][0]["folder"]) == before


def test_a_deployment_takes_the_one_name_and_keeps_the_one_it_began_with(begun: Path, tmp_path: Path) -> None:
    config = Config(model="MLP(hidden=8)", method=RunFolder(begun).config.method)
    assert _spelling(config, tmp_path / "new") == ['model="mlp(hidden=8)"']
    assert _spelling(config, begun) == ['model="MLP( hidden = 8 )"']
    assert _spelling(config.spelled(), tmp_path / "new") == []


def test_resume_in_python(begun: Path) -> None:
    with pytest.warns(FedAlloyWarning, match="begun by an earlier version"):
        assert resume(begun).summary["weights_sha256"] == ENDS_AS

"""A paper's comparison, and every method at once."""

import warnings
from pathlib import Path

import pytest

from fedalloy.core import registry
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.config import Config
from fedalloy.research.compare import Comparison
from fedalloy.research.presets import PRESETS, every_method, preset
from terminal import fedalloy


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize("name", PRESETS)
def test_methods_and_settings_of_a_preset_exist(name: str) -> None:
    chosen = preset(name)
    assert [registry.make(method) for method in chosen.methods]
    config = Config.of(dict(chosen.settings))
    assert name in {method.partition("(")[0] for method in chosen.methods}
    if len(config.architectures) > 1:
        assert {method.partition("(")[0] for method in chosen.methods} <= set(
            every_method(config.architectures)
        )


def test_flags_win_over_a_preset() -> None:
    flags = (
        "--data",
        "digits",
        "--model",
        "mlp",
        "--rounds",
        "1",
        "--clients",
        "3",
        "--epochs",
        "1",
        "--out",
        "c",
    )
    found = fedalloy("compare", "fedavg", "feddw", "--preset", "feddw", *flags, "--json").json
    assert [run["method"] for run in found["runs"]] == ["fedavg", "feddw"]
    text = Path("c/feddw/seed0/config.toml").read_text()
    assert 'optimizer = "adam"' in text
    assert 'data = "digits"' in text
    assert "rounds = 1\n" in text


def test_every_method_that_fits() -> None:
    assert set(every_method(("mlp", "mlp"))) == set(registry.RECIPES)
    mixed = every_method(("mlp", "lenet"))
    assert {"local", "fedsce", "fedproto", "fml"} <= set(mixed)
    assert not {"fedavg", "scaffold", "moon"} & set(mixed)


def test_what_the_settings_do_not_allow_is_left_out_and_named() -> None:
    """One method that wants plain SGD does not keep all the others from being compared."""
    base = Config(momentum=0.9, clients=3, rounds=1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = Comparison.plan(base, every_method(("mlp",)), [0], Path("all"), fitting=True)
    assert any("fedsub is left out: FedSub's dual step needs plain SGD" in str(one.message) for one in said)
    assert set(plan.methods) == registry.RECIPES.keys() - {"fedsub"}
    with pytest.raises(FedAlloyError, match="dual step needs plain SGD"):
        Comparison.plan(base, ["fedavg", "fedsub"], [0], Path("both"))
    assert "dual step" in fedalloy("run", "--method", "fedsub", "--momentum", "0.9", "--out", "r").err
    assert not Path("r").exists()


def test_mistakes_are_named() -> None:
    assert "feddw" in fedalloy("compare", "--preset", "fedww").err
    assert "leave the others" in fedalloy("compare", "fedavg", "--all").err
    assert "name the methods" in fedalloy("compare").err

"""A paper's comparison, and every method at once."""

from pathlib import Path

import pytest

from fedalloy import registry
from fedalloy.config import Config
from fedalloy.presets import PRESETS, every_method, preset
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


def test_mistakes_are_named() -> None:
    assert "feddw" in fedalloy("compare", "--preset", "fedww").err
    assert "leave the others" in fedalloy("compare", "fedavg", "--all").err
    assert "name the methods" in fedalloy("compare").err

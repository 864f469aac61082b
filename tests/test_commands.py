"""What FedAlloy prints or writes as a command, it accepts."""

import shlex
from pathlib import Path
from typing import Any

import pytest

from fedalloy.cli.app import _given, app
from fedalloy.experiment.config import Config
from fedalloy.research.reproduce import GRIDS
from fedalloy.research.reproduce.printed import Asked, _command
from terminal import fedalloy, strict_json, tree
from test_config import OTHER


def read(words: list[str]) -> dict[str, Any]:
    """What the command line makes of these words; nothing is run."""
    assert words[0] == "fedalloy"
    _, bound, *_ = app.parse_args(words[1:], exit_on_error=False, print_error=False)
    return dict(bound.arguments)


def settings(words: list[str]) -> Config:
    return Config.of(_given(read(words).get("settings")))


@pytest.mark.parametrize("name", OTHER)
def test_every_setting_is_read_back(name: str) -> None:
    config = Config.of({name: OTHER[name]})
    assert settings(["fedalloy", "run", *config.typed()]) == config


@pytest.mark.parametrize(
    "values",
    [
        OTHER,
        {"data_root": "-odd"},
        {"data_root": "with space/and 'quote'"},
        {"lr": 1e-12},
        {"weight_decay": 1e6},
        {"lr_decay": 1 - 2**-53},
        {"seed": 2**63 - 1},
        {"method": 'fedblade(decorr=none)+share(part=":-1")'},
        {"models": "mlp(hidden=64, depth=2),cnn"},
    ],
)
def test_odd_values_are_read_back(values: dict[str, Any]) -> None:
    config = Config.of(values)
    typed = shlex.split(shlex.join(["fedalloy", "run", *config.typed()]))
    assert settings(typed) == config


@pytest.mark.parametrize("item", list(GRIDS)[::6])
def test_the_commands_of_a_reproduction_are_read_back(item: str) -> None:
    for cell in (GRIDS[item].cells("cpu")[0], GRIDS[item].cells("paper")[-1]):
        config = cell.configs[max(cell.configs)]
        expected = config.model_copy(update={"data_root": "DATA", "workers": None})
        assert settings(shlex.split(_command(config))) == expected
    asked = Asked(item, "paper", {"rounds": 3, "personal_on_global": False}, ["a", "b"], [0, 7], "best")
    found = read(shlex.split(asked.command))
    assert (found["item"], found["scale"], found["only"]) == (item, "paper", "a,b")
    assert (found["seeds"], found["judge"]) == ("0,7", "best")
    assert _given(found["settings"]) == {"rounds": 3, "personal_on_global": False, "data_root": "DATA"}


def test_the_command_of_a_comparison_finds_its_runs_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--rounds", "1", "--limit", "60", "--clients", "3", "--engine", "inline", "--lr", "0.05")
    methods = ("fedavg", "FedProx( mu=.1 )", "fedblade(decorr=none)")
    said = ("--seeds", "0,3", "--target", "0.123456789", "--model", "mlp(norm='batch')")
    first = fedalloy("compare", *methods, *flags, *said, "--json").json
    folder = tmp_path / first["folder"]
    record = strict_json((folder / "compare.json").read_text())
    runs = {name: kept for name, kept in tree(folder).items() if "/seed" in name}
    assert fedalloy(*shlex.split(record["command"])[1:], "--json").json == first
    assert {name: kept for name, kept in tree(folder).items() if "/seed" in name} == runs
    assert strict_json((folder / "compare.json").read_text()) == record
    assert (folder / "report.html").read_text().count("0.123456789") >= 1

"""Bad input: one sentence that says what to type instead, exit code 2, nothing written."""

import os
from pathlib import Path

import numpy as np
import pytest

from fedalloy.experiment.config import Config
from terminal import QUICK, fedalloy, save_npz, tree

BAD: list[tuple[str, str]] = [
    # numbers out of range, or none
    ("run --clients 0", "--clients must be a whole number from 1 to 1000000, not 0; for example 10"),
    ("run --clients many", "--clients must be a whole number from 1 to 1000000, not many"),
    ("run --clients 2.5", "not 2.5"),
    ("run --clients=", "not nothing"),
    ("run --momentum 2", "--momentum must be a number of at least 0 and below 1, not 2"),
    ("run --lr 0", "--lr must be a number from 1e-12 to 1000000, not 0; for example 0.05"),
    ("run --lr nan", "--lr must be a number from 1e-12 to 1000000, not nan"),
    ("run --lr inf", "--lr must be a number from 1e-12 to 1000000, not inf"),
    ("run --participation 1.5", "--participation must be a number from 1e-06 to 1, not 1.5"),
    ("run --test-share 1", "--test-share must be a number of at least 0 and below 1"),
    ("run --seed -1", "--seed must be a whole number from 0 to 9223372036854775807"),
    ("run --eval-every 0", "--eval-every must be a whole number from 1 to 1000000"),
    ("run --workers 0", "--workers must be a whole number from 1 to 1000, not 0"),
    ("run --timeout nan", "--timeout must be a number from 1e-12 to 1000000"),
    ("run --optimizer sgdd", "--optimizer must be 'sgd' or 'adam' or 'adamw', not sgdd"),
    ("run --engine ray9", "--engine must be 'inline' or 'workers'"),
    ("partition --clients 0", "--clients must be"),
    # skew and augmentation
    ("run --skew dirichlet:-1", "alpha must be a finite number above 0"),
    ("run --skew dirchlet:1", "did you mean 'dirichlet'?"),
    ("run --skew iid:3", "iid takes no number"),
    ("run --augment spin", "there are: crop, flip, none"),
    # methods
    ("run --method fedprx", "unknown method 'fedprx'; did you mean 'fedprox'?"),
    ("run --method fedprox(mu=-1)", "fedprox: mu must be a number from 0 to 1000000, not -1"),
    ("run --method fedprox(mu=x)", "not 'x'"),
    ("run --method fedprox(muu=1)", "did you mean 'mu'?"),
    ("run --method fedprox(", "such as 'fedprox(mu=0.1)'"),
    ("run --method fedprox(0.1)", "such as 'fedprox(mu=0.1)'"),
    ("run --method __import__('os')", "write a name"),
    ("run --method os:system", "os:system is no method"),
    ("run --method os:getcwd", "os:getcwd is no method"),
    ("run --method nowhere:thing", "cannot import 'nowhere:thing'"),
    ("run --method prox", "prox"),
    ("explain fedprx", "did you mean 'fedprox'?"),
    ("explain", "the METHOD is missing. See 'fedalloy explain --help'."),
    # models
    ("run --model resnt18", "did you mean 'resnet18'?"),
    ("run --model mlp(hiden=3)", "did you mean 'hidden'?"),
    ("run --model mlp(hidden=0)", "hidden must be a whole number"),
    ("run --model bilstm", "use cnn, resnet18 or mlp instead"),
    ("run --models mlp,cnn", "use one --model, or a method for different models such as 'local'"),
    ("run --models ,", "--models names no model; write for example 'mlp,cnn'"),
    ("models --model resnt18", "did you mean 'resnet18'?"),
    ("explain fedavg --model resnt18", "did you mean 'resnet18'?"),
    # data
    ("run --data digit", "did you mean 'digits'?"),
    ("run --data mnist", "give --data-root DIR"),
    ("run --data mnist --data-root nowhere", "--data-root nowhere is not a folder"),
    ("run --data mnist --data-root data", "there are: digits"),
    ("run --data ../x --data-root data", "its plain name"),
    ("run --data pickled --data-root data", "pickled Python objects"),
    ("run --data nan --data-root data", "NaN"),
    ("run --data negative --data-root data", "labels start at 0"),
    ("run --data empty --data-root data", "empty"),
    ("run --data blank --data-root data", "blank"),
    ("run --data noise --data-root data", "not a readable UTF-8 CSV file"),
    ("run --clients 100000", "take at most 1438 clients"),
    ("models --data mnist", "give --data-root DIR"),
    # words
    ("run --rouns 3", "unknown option: --rouns. Did you mean --rounds? See 'fedalloy run --help'."),
    ("run --rounds", "--rounds needs a value"),
    ("run extra", "'extra' was not expected. See 'fedalloy run --help'."),
    ("runn", 'Did you mean "run"?'),
    # config files
    ("run --config nowhere.toml", "there is no config file nowhere.toml"),
    ("run --config data", "data is a folder; give a file, such as --config data/config.toml"),
    ("run --config unknown.toml", "unknown.toml: unknown setting 'methd'; did you mean 'method'?"),
    ("run --config type.toml", "type.toml: clients must be a whole number from 1 to 1000000, not '5'"),
    ("run --config flag.toml", "flag.toml: rounds must be a whole number from 1 to 1000000, not True"),
    ("run --config section.toml", "section.toml: settings stand at the top of the file, not under [run]"),
    ("run --config syntax.toml", "syntax.toml is not valid TOML"),
    ("run --config noise.toml", "noise.toml is not a text file"),
    ("compare fedavg --config unknown.toml", "unknown.toml: unknown setting"),
    # places
    ("run --out data", "data exists already; carry on with '--resume data', or give another --out"),
    ("run --out file", "file exists already"),
    ("run --out file/x", "give another --out"),
    ("run --out /proc/x", "give another --out"),
    ("compare fedavg --out file", "cannot write file: file exists; give another --out"),
    ("partition --out data", "cannot write data: is a directory; give another --out"),
    ("partition --out nowhere/x.html", "cannot write nowhere/x.html: no such file or directory"),
    ("run --resume nowhere", "nowhere is not a run folder"),
    ("run --resume data", "data is not a run folder"),
    ("run --resume data --out x", "leave --config and --out away"),
    ("run --resume data --config type.toml", "leave --config and --out away"),
    ("report nowhere", "nowhere is not a run folder"),
    ("report", "the FOLDER is missing"),
    # comparisons
    ("compare", "name the methods to compare"),
    ("compare fedavg fedprx", "did you mean 'fedprox'?"),
    ("compare fedavg FedAvg", "fedavg is named twice"),
    (
        "compare fedavg --seeds a",
        "--seeds must be whole numbers of at least 0, each of at most 18 digits, not 'a'; for example 0,1,2",
    ),
    ("compare fedavg --seeds -1", "--seeds must be whole numbers of at least 0"),
    ("compare fedavg --seeds 0 --seed 1", "give --seeds or --seed, not both"),
    ("compare fedavg --method scaffold", "name the methods without --method"),
    ("compare fedavg --target 50", "--target must be an accuracy between 0 and 1, not 50"),
    ("compare fedavg local --models mlp,cnn", "FedAvg averages whole models"),
]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with bad files of every kind."""
    monkeypatch.chdir(tmp_path)
    images = np.zeros((8, 8, 8), np.uint8)
    labels = np.arange(8) % 2
    save_npz(Path("data/pickled.npz"), {"x": np.array([{}], dtype=object), "y": np.array([0])})
    save_npz(Path("data/nan.npz"), {"x": np.full((8, 8, 8), np.nan), "y": labels})
    save_npz(Path("data/negative.npz"), {"x": images, "y": labels - 1})
    Path("data/empty.npz").touch()
    Path("data/blank.csv").touch()
    Path("data/noise.csv").write_bytes(b"\xff\xfe\x00\x80" * 50)
    Path("file").write_text("a file")
    Path("noise.toml").write_bytes(b"\xff\xfe\x00\x80" * 50)
    Path("unknown.toml").write_text('methd = "fedavg"\n')
    Path("type.toml").write_text('clients = "5"\n')
    Path("flag.toml").write_text("rounds = true\n")
    Path("section.toml").write_text("[run]\nclients = 3\n")
    Path("syntax.toml").write_text("clients = \n")
    return tmp_path


@pytest.mark.parametrize(("typed", "fragment"), BAD, ids=[typed for typed, _ in BAD])
def test_bad_input_ends_in_a_sentence_and_writes_nothing(here: Path, typed: str, fragment: str) -> None:
    before = tree(here)
    said = fedalloy(*typed.split())
    assert said.code == 2
    assert said.out == ""
    assert said.err.startswith("error: ")
    assert said.err.count("\n") == 1
    assert fragment in said.err
    assert "input should be" not in said.err.lower()
    assert tree(here) == before


def test_an_empty_method_is_no_method(here: Path) -> None:
    assert "no method given; try 'fedavg'" in fedalloy("run", "--method", "").err
    assert not (here / "runs").exists()


def test_errors_leave_standard_output_to_json(here: Path) -> None:
    said = fedalloy("run", "--method", "fedprx", "--json")
    assert (said.code, said.out) == (2, "")


def test_every_setting_has_an_error_of_its_own(tmp_path: Path) -> None:
    """Whatever the setting, a value of a wrong type in a file names the file, the setting and what it must be."""
    for name in Config.model_fields:
        file = tmp_path / "config.toml"
        file.write_text(f"{name} = 1979-05-27\n")
        said = fedalloy("run", "--config", str(file), "--out", str(tmp_path / "x"))
        assert said.code == 2
        assert f"{file}: {name} must be " in said.err


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        (("--lr", "0.2"), ["--lr 0.1 instead of 0.2"]),
        (("--rounds", "3"), ["--rounds 2 instead of 3"]),
        (("--eval-every", "2", "--seed", "7"), ["--eval-every 1 instead of 2", "--seed 0 instead of 7"]),
        (("--method", "scaffold"), ["--method fedavg instead of scaffold"]),
        (("--models", "mlp,mlp"), ["--models None instead of mlp,mlp"]),
    ],
)
def test_a_resume_with_other_numbers_is_refused_by_name(
    tmp_path: Path, flags: tuple[str, ...], named: list[str]
) -> None:
    place = str(tmp_path / "run")
    assert fedalloy("run", *QUICK, "--out", place).code == 0
    before = tree(tmp_path)
    said = fedalloy("run", "--resume", place, *flags)
    assert said.code == 2
    assert all(words in said.err for words in named)
    assert tree(tmp_path) == before


def test_what_does_not_change_numbers_may_change_on_resume(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    assert fedalloy("run", *QUICK, "--out", place).code == 0
    said = fedalloy(
        "run", "--resume", place, "--engine", "workers", "--workers", "2", "--timeout", "9", "--lr", "0.1"
    )
    assert said.code == 0, said.err


def test_a_run_folder_that_exists_is_never_written_over(tmp_path: Path) -> None:
    place = str(tmp_path / "run")
    assert fedalloy("run", *QUICK, "--out", place).code == 0
    before = tree(tmp_path)
    said = fedalloy("run", *QUICK, "--out", place)
    assert said.code == 2
    assert f"carry on with '--resume {place}'" in said.err
    assert tree(tmp_path) == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_folder_without_permission_is_named(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    said = fedalloy("run", *QUICK, "--out", str(tmp_path / "run"))
    assert said.code == 2
    assert "give another --out" in said.err

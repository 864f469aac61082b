"""Settings: one set of names, checked once, written whole."""

import tomllib
from pathlib import Path
from typing import Any

import pytest

from fedalloy.core import expression
from fedalloy.core.expression import Term, parse, slug, split
from fedalloy.errors import FedAlloyError, unknown, writing
from fedalloy.experiment.config import FREE, Config, flag

OTHER: dict[str, Any] = {
    "method": "fedprox(mu=0.1)",
    "data": "mine",
    "data_root": "somewhere",
    "limit": 500,
    "model": "cnn",
    "models": "mlp,cnn",
    "clients": 7,
    "skew": "iid",
    "test_share": 0.25,
    "validation": 0.125,
    "augment": "flip",
    "participation": 0.5,
    "rounds": 3,
    "epochs": 2,
    "steps": 11,
    "batch": 8,
    "lr": 0.125,
    "lr_decay": 0.5,
    "momentum": 0.75,
    "weight_decay": 0.001,
    "optimizer": "adam",
    "precision": "bf16",
    "seed": 9,
    "eval_every": 2,
    "eval_clients": 3,
    "personal_on_global": False,
    "diagnose_every": 3,
    "checkpoint_every": 4,
    "engine": "inline",
    "workers": 2,
    "ray_address": "10.0.0.1:6379",
    "gpus_per_worker": 0.5,
    "timeout": 5.5,
}


def test_toml_holds_every_setting_and_reads_back_the_same(tmp_path: Path) -> None:
    assert OTHER.keys() == Config.model_fields.keys()
    config = Config.of(OTHER)
    file = tmp_path / "config.toml"
    file.write_text(config.toml())
    assert tomllib.loads(config.toml()) == OTHER
    assert Config.of(Config.read(file), str(file)) == config


def test_every_default_fits_its_own_range() -> None:
    defaults = {name: field.default for name, field in Config.model_fields.items()}
    assert Config.of(defaults, "defaults") == Config()


@pytest.mark.parametrize("name", OTHER)
def test_what_changes_the_numbers_is_told_from_what_does_not(name: str) -> None:
    changed = Config().differences(Config.of({name: OTHER[name]}))
    if name in FREE:
        assert changed == []
    else:
        assert changed == [f"{flag(name)} {getattr(Config(), name)} instead of {OTHER[name]}"]


def test_names_in_a_file_may_have_hyphens(tmp_path: Path) -> None:
    file = tmp_path / "config.toml"
    file.write_text("eval-every = 5\nlr_decay = 0.5\n")
    assert Config.read(file) == {"eval_every": 5, "lr_decay": 0.5}


def test_whole_numbers_stand_for_numbers_but_words_do_not() -> None:
    assert Config.of({"lr": 1}, "file").lr == 1.0
    with pytest.raises(
        FedAlloyError, match=r"^file: lr must be a number from 1e-12 to 1000000, not '1'; for example 0.05$"
    ):
        Config.of({"lr": "1"}, "file")


def test_python_callers_hear_of_unknown_settings_too() -> None:
    with pytest.raises(FedAlloyError, match=r"^unknown setting 'round'; did you mean 'rounds'\?$"):
        Config.of({"round": 3})


def test_architectures_are_cut_at_commas_outside_parentheses() -> None:
    assert Config(models="mlp(hidden=8, depth=2), cnn").architectures == ("mlp(hidden=8, depth=2)", "cnn")
    assert Config(model="cnn").architectures == ("cnn",)


def test_local_settings_reach_the_clients() -> None:
    local = Config.of(OTHER).local
    names = ("epochs", "steps", "batch", "lr", "momentum", "weight_decay", "optimizer", "lr_decay")
    assert {name: getattr(local, name) for name in names} == {name: OTHER[name] for name in names}


class TestExpression:
    @pytest.mark.parametrize(
        ("typed", "terms"),
        [
            ("FedAvg", [Term("fedavg")]),
            ("Per-FedAvg", [Term("perfedavg")]),
            ("  moon + DW(mu=1) ", [Term("moon"), Term("dw", {"mu": 1})]),
            ("a(x=-1e-2, y=none, z=TRUE)", [Term("a", {"x": -0.01, "y": None, "z": True})]),
            ("a(x=(1, 2), y=[3])", [Term("a", {"x": (1, 2), "y": (3,)})]),
            ("a(x=first-order)", None),
            ("a(x='first-order')", [Term("a", {"x": "first-order"})]),
        ],
    )
    def test_parse(self, typed: str, terms: list[Term] | None) -> None:
        if terms is None:
            with pytest.raises(FedAlloyError, match="cannot read"):
                parse(typed)
        else:
            assert parse(typed) == terms

    @pytest.mark.parametrize("typed", ["a(x=1, x=2)", "a(**b)", "a.b", "a(x=b())", "(" * 300, "\0", "+"])
    def test_what_is_no_expression_is_refused(self, typed: str) -> None:
        with pytest.raises(FedAlloyError, match="cannot read"):
            parse(typed)

    @pytest.mark.parametrize(
        "term", [Term("a", {"x": 'say "hi"', "y": (1, 2.5), "z": None, "b": True, "c": -3}), Term("a")]
    )
    def test_a_term_reads_back_as_itself(self, term: Term) -> None:
        assert parse(str(term)) == [term]

    def test_one_term_where_one_is_expected(self) -> None:
        with pytest.raises(FedAlloyError, match="names 2 things where one is expected"):
            expression.single("a+b")

    @pytest.mark.parametrize(
        ("text", "pieces"),
        [
            ("a,b", ["a", "b"]),
            ("a(x=1, y=(2, 3)), b", ["a(x=1, y=(2, 3))", "b"]),
            ("a, b(x=(1, 2), y=3),", ["a", "b(x=(1, 2), y=3)"]),
            (" , ", []),
        ],
    )
    def test_split(self, text: str, pieces: list[str]) -> None:
        assert split(text) == pieces

    @pytest.mark.parametrize("text", ["../../etc", "hf:user/name", "a b", "x" * 500, "fedprox(mu=0.1)+dw"])
    def test_a_slug_is_one_plain_name(self, text: str) -> None:
        name = slug(text)
        assert name
        assert len(name) <= 80
        assert Path(name).name == name
        assert not name.startswith(".")


class TestErrors:
    def test_the_nearest_name_or_all_of_them(self) -> None:
        assert str(unknown("method", "fedprx", ["fedavg", "fedprox"])) == (
            "unknown method 'fedprx'; did you mean 'fedprox'?"
        )
        assert str(unknown("method", "zzz", ["b", "a"])) == "unknown method 'zzz'; there are: a, b"

    def test_a_refusal_to_write_names_what_the_user_typed(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        said = r"^cannot write place: not a directory; give another --out$"
        with pytest.raises(FedAlloyError, match=said), writing(Path("place")):
            (tmp_path / "file" / "x").write_text("")

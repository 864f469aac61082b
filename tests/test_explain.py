"""What `explain` says of a method is what the method does."""

import re
from pathlib import Path
from typing import Any

import pytest

from fedalloy.core import registry
from terminal import fedalloy, history

MODEL = "mlp(hidden=8, norm=batch)"  # has buffers, which some methods send too
CLIENTS = 3


def explained(method: str, *flags: str) -> dict[str, Any]:
    found: dict[str, Any] = fedalloy("explain", method, "--model", MODEL, "--json", *flags).json
    return found


@pytest.mark.filterwarnings(
    "ignore::fedalloy.errors.FedAlloyWarning"
)  # a small net for methods of large ones
@pytest.mark.parametrize("method", registry.RECIPES)
def test_bytes_and_state_are_those_of_a_real_run(method: str, tmp_path: Path) -> None:
    facts = explained(method)
    settings = (
        "--engine",
        "inline",
        "--clients",
        str(CLIENTS),
        "--skew",
        "iid",
        "--rounds",
        "2",
        "--model",
        MODEL,
    )
    assert fedalloy("run", "--method", method, *settings, "--out", str(tmp_path / "r")).code == 0
    for line in history(tmp_path / "r")[-1:]:  # a client's first contact may bring more
        for way in ("down", "up"):
            said = {row["slot"]: CLIENTS * row["bytes"] for row in facts["wire"] if row["direction"] == way}
            sent = dict(line[f"bytes_{way}"])
            if method == "fedkd":  # its codec's lengths depend on the values: the most is told
                weights = {"down": "share.updates", "up": "share.weights"}[way]
                assert 0 < sent[weights] < said[weights]
                sent[weights] = said[weights]
            assert said == sent
            once = {row["slot"] for row in facts["wire"] if row["reduce"] == "once, at the end"}
            assert bool(once) == (method == "ccvr")
            each = sum(count for slot, count in sent.items() if slot not in once)
            assert CLIENTS * facts[f"bytes_{way}"] == each
    kept = list((tmp_path / "r" / "checkpoint").glob("clients/*/*.safetensors"))
    assert len(kept) == (CLIENTS if facts["client_state"] else 0)


@pytest.mark.parametrize("method", registry.RECIPES)
def test_it_is_said_in_words_too(method: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    said = fedalloy("explain", method)
    assert (said.code, said.trouble) == (0, [])
    facts = fedalloy("explain", method, "--json").json
    assert said.out.startswith(facts["title"])
    for name in [*(row["name"] for row in facts["parameters"]), *(part["name"] for part in facts["parts"])]:
        assert re.search(rf"^ ?{re.escape(name)}\b", said.out, re.MULTILINE), name
    assert all(len(line) <= 80 for line in said.out.splitlines())


def test_parameters_come_with_ranges() -> None:
    ranges = {row["name"]: (row["default"], row["range"]) for row in explained("fedprox")["parameters"]}
    assert ranges["mu"] == (0.01, "a number from 0 to 1000000")
    assert ranges["straggler_fraction"] == (0.0, "a number from 0 to 1")
    assert ranges["agg_weights"] == ("size", "'size' or 'uniform'")


def test_what_the_paper_says_stands_beside_the_parameters() -> None:
    facts = explained("feddw")
    mu = next(row for row in facts["parameters"] if row["name"] == "mu")
    assert "10 on CIFAR-100" in mu["paper"]
    assert mu["does"] == "weight of the class-relation term"
    assert any(note.startswith("Differs from the paper. ") for note in facts["notes"])
    assert "Differs from the paper." in fedalloy("explain", "feddw").out


def test_one_round_is_told_in_its_order() -> None:
    moments = dict(explained("fedblade+prox")["algorithm"])
    assert moments["each step: loss"] == "balancedsoftmax + lddecorr + pba"
    assert moments["each step: gradient"] == "loss → prox → optimiser"
    assert "features-means.counts" in moments["the client sends"]
    assert list(moments)[-1] == "the server aggregates"
    assert dict(explained("fedavg")["algorithm"])["each step: loss"] == "cross-entropy"


@pytest.mark.parametrize("recipe", registry.RECIPES.values(), ids=registry.RECIPES)
def test_every_default_is_within_its_own_range(recipe: registry.Recipe) -> None:
    defaults = {name: parameter.default for name, parameter in recipe.parameters.items()}
    assert recipe.make(**defaults).pieces == recipe.make().pieces


def test_a_sum_is_explained_as_one_method() -> None:
    facts = explained("moon(mu=1)+prox(mu=0.5)")
    assert [part["name"] for part in facts["parts"]][-1] == "prox"
    assert next(part for part in facts["parts"] if part["name"] == "prox")["settings"]["mu"] == 0.5
    assert facts["gradient_order"] == ["prox"]
    assert facts["parameters"] == []


def test_the_model_decides_the_bytes() -> None:
    small, large = explained("fedavg"), fedalloy("explain", "fedavg", "--model", "cnn", "--json").json
    assert large["bytes_down"] == 4 * (large["model"]["parameters"] + large["model"]["buffers"])
    assert small["bytes_down"] == 4 * (small["model"]["parameters"] + small["model"]["buffers"])
    assert large["bytes_up"] == large["bytes_down"] + 8  # and the number of samples
    assert large["bytes_down"] > small["bytes_down"]


def test_a_method_of_ones_own_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own_recipe.py").write_text(
        "import fedalloy as fa\n"
        "from fedalloy.mechanisms.share import Share\n"
        "def mine(server_lr: float = 1.0) -> fa.Alloy:\n"
        "    return fa.alloy('Mine', Share(server_lr=server_lr))\n"
    )
    facts = explained("own_recipe:mine(server_lr=0.5)")
    assert facts["title"] == "Mine"
    assert facts["parts"][0]["settings"]["server_lr"] == 0.5
    said = fedalloy("explain", "own_recipe:mine(lr=0.5)")
    assert said.code == 2
    assert "cannot call method 'own_recipe:mine(lr=0.5)'" in said.err


def test_methods_say_what_they_need_reveal_and_cost() -> None:
    rows = {row["name"]: row for row in fedalloy("methods", "--json").json["methods"]}
    assert rows["fedavg"]["reveals"] == ["weights"]
    assert rows["feddw"]["reveals"] == ["weights", "class means of predictions", "label counts"]
    assert rows["fedblade"]["reveals"] == ["weights", "class means of features", "label counts"]
    assert "BatchNorm" in rows["fedblade"]["advice"][0]
    assert (rows["local"]["reveals"], rows["local"]["up"], rows["local"]["models"]) == ([], 0, "personal")
    assert (rows["scaffold"]["up"], rows["scaffold"]["private_state"]) == (2, True)
    assert (rows["fedsce"]["architectures"], rows["fedprox"]["architectures"]) == ("any", "one")
    said = " ".join(fedalloy("methods").out.split())
    assert "server sees weights, class means of predictions, label counts" in said

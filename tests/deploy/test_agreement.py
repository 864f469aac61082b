"""All sites prepare their samples alike: as given, or by totals that add up exactly to those of a simulation."""

import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Array, Message
from loopback import Loopback

from fedalloy.core.net import Inputs
from fedalloy.data import Prepare, Preprocessing, load
from fedalloy.data.federation import federate
from fedalloy.data.totals import Totals
from fedalloy.deploy.agreement import FILE, SOURCE
from fedalloy.deploy.journal import Journal
from fedalloy.deploy.server import serve
from fedalloy.deploy.site import Desk
from fedalloy.deploy.statistics import from_items, to_items
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import train
from fuzzing import dice

NAMES = "benign,malign"
DIGITS = "0,1,2,3,4,5,6,7,8,9"
SETTINGS: dict[str, Any] = {
    "method": "scaffold", "model": "mlp(hidden=4)", "clients": 3, "rounds": 2, "lr": 0.1, "batch": 16,
    "data": "scans", "class_names": NAMES, "join_limit": 1.0, "round_limit": 5.0,
}  # fmt: skip


def vectors(k: int) -> Any:
    noise = np.random.default_rng(k)
    y = np.arange(40) % 2
    return ((noise.normal(size=(40, 3)) + y[:, None]) * [1, 1e-3, 1e4] + 10 * k).astype(np.float32), y


def images(k: int) -> Any:
    noise = np.random.default_rng(k)
    y = np.arange(40) % 2
    return (noise.integers(40 * k + 5, 40 * k + 90, (40, 4, 4)) + 40 * y[:, None, None]).astype(np.uint8), y


def written(root: Path, make: Any) -> list[dict[str, Any]]:
    """Three sites whose data differ; `all/` holds them side by side, as a simulation reads them."""
    (root / "all").mkdir(parents=True)
    for k in range(3):
        x, y = make(k)
        (root / f"site{k}").mkdir()
        np.savez(root / f"site{k}" / "scans.npz", x=x, y=y)
        np.savez(root / "all" / f"part{k}.npz", x=x, y=y)
    return [{"data-root": str(root / f"site{k}")} for k in range(3)]


def served(root: Path, nodes: list[dict[str, Any]], name: str = "run", **changes: Any) -> Any:
    settings = {**SETTINGS, "run_folder": str(root / name), **changes}
    grid = Loopback(settings, root / f"{name}-state", nodes)
    return serve(grid, settings)


def simulated(root: Path) -> Any:
    joined = load("part0+part1+part2", root / "all", tuple(NAMES.split(",")))
    fed = federate(joined, 3, "domain")
    return fed, train(fed, SETTINGS["model"], SETTINGS["method"], rounds=2, lr=0.1, batch=16, engine="inline")


@pytest.mark.parametrize("make", [vectors, images])
def test_a_deployment_is_its_simulation_also_in_the_preprocessing(tmp_path: Path, make: Any) -> None:
    nodes = written(tmp_path, make)
    result = served(tmp_path, nodes)
    fed, simulation = simulated(tmp_path)
    agreed = Preprocessing.from_json((tmp_path / "run" / FILE).read_text())
    assert (agreed.mean, agreed.std) == (fed.dataset.mean, fed.dataset.std)
    assert result.summary["weights_sha256"] == simulation.summary["weights_sha256"]
    source = json.loads((tmp_path / "run" / SOURCE).read_text())
    assert source["clients"] == [0, 1, 2]
    assert source["refused"] == {}
    kept = list((tmp_path / "run-state" / "preprocessing").iterdir())
    assert [file.read_text() for file in kept] == [agreed.to_json()]


@pytest.mark.parametrize("make", [vectors, images])
def test_masked_sums_are_as_exact(tmp_path: Path, make: Any) -> None:
    nodes = written(tmp_path, make)
    served(tmp_path, nodes, "open", method="fedavg", rounds=1)
    served(tmp_path, nodes, "masked", method="fedavg", rounds=1, masked=True)
    assert (tmp_path / "open" / FILE).read_text() == (tmp_path / "masked" / FILE).read_text()
    assert "masked" in json.loads((tmp_path / "masked" / SOURCE).read_text())["from"]


def test_a_site_of_one_class_gets_right_what_others_get_right(tmp_path: Path) -> None:
    """By its own mean and deviation a benign-only hospital looks like any other, and the same weights fail it."""

    def skewed(k: int) -> Any:
        y = np.zeros(40, int) if k == 2 else (np.arange(40) % 6 > 0).astype(int)
        x = np.random.default_rng(k).normal(size=(40, 2)) * 0.3 + 4.0 * y[:, None]
        return x.astype(np.float32), y

    nodes = written(tmp_path, skewed)
    settings = {**SETTINGS, "run_folder": str(tmp_path / "run"), "method": "fedavg", "rounds": 15}
    grid = Loopback(settings, tmp_path / "state", nodes)
    result = serve(grid, settings)
    assert [result.history[-1]["metrics"]["per_client"][k] for k in range(3)] == [1.0] * 3
    desk = grid.desks[102]
    assert (
        desk._settled((tmp_path / "run" / FILE).read_text())[0].dataset.x is desk.federation.dataset.x
    )  # no copy
    told, setup = desk._settled((tmp_path / "run" / FILE).read_text())
    site = setup.replicas.of(2)
    weights = RunFolder(result.folder).checkpoint()[1]["server.weights"]
    net = site.net
    torch.nn.utils.vector_to_parameters(weights, net.parameters())

    def accuracy(prepare: Prepare) -> float:
        with torch.no_grad():
            guess = net.eval()(prepare(told.dataset.x)).logits.argmax(1)
        return float((guess == told.dataset.y).double().mean())

    assert accuracy(told.prepare) == 1.0
    assert accuracy(desk.federation.prepare) < 0.8  # by its own statistics, as it was before anybody agreed


def text_sites(root: Path) -> list[dict[str, Any]]:
    """Three sites that use other words, each with a split of its own; `whole.csv` holds them all."""
    words = ["good fine", "bad ill", "good well", "bad pain"]
    header, whole, nodes = "text,label,split\n", "", []
    for k in range(3):
        (root / f"site{k}").mkdir(parents=True)
        rows = "".join(
            f"{words[(n + k) % 4]} {'here ' * k}{words[k]},{(n + k) % 2},{'test' if n < 4 else 'train'}\n"
            for n in range(16)
        )
        (root / f"site{k}" / "scans.csv").write_text(header + rows)
        whole += rows
        nodes.append({"data-root": str(root / f"site{k}")})
    (root / "whole.csv").write_text(header + whole)
    return nodes


def test_texts_are_numbered_alike_and_trained_as_in_a_simulation(tmp_path: Path) -> None:
    nodes, names = text_sites(tmp_path), ("benign", "malign")
    for terms in ({}, {"inputs": "tokens:9:20"}):
        with pytest.raises(FedAlloyError, match="must number words alike: give --preprocessing FILE"):
            served(tmp_path, nodes, model="bilstm", method="fedavg", **terms)
    joined = load("whole", tmp_path, names)
    (tmp_path / "given.json").write_text(joined.preprocessing.to_json())
    given = {"preprocessing": str(tmp_path / "given.json")}
    result = served(tmp_path, nodes, model="bilstm", method="fedavg", **given)
    assert (tmp_path / "run" / FILE).read_text() == joined.preprocessing.to_json()
    domain = torch.cat([torch.arange(3).repeat_interleave(12), torch.arange(3).repeat_interleave(4)])
    fed = federate(replace(joined, domain=domain, domain_names=("a", "b", "c")), 3, "domain")
    simulation = train(fed, "bilstm", "fedavg", rounds=2, lr=0.1, batch=16, engine="inline")
    assert result.summary["weights_sha256"] == simulation.summary["weights_sha256"]


@pytest.mark.parametrize("test_share", [0.0, 0.25])
def test_statistics_do_not_depend_on_what_sites_test_on(tmp_path: Path, test_share: float) -> None:
    served(tmp_path, written(tmp_path, vectors), test_share=test_share, rounds=1)
    joined = load("part0+part1+part2", tmp_path / "all", tuple(NAMES.split(",")))
    agreed = Preprocessing.from_json((tmp_path / "run" / FILE).read_text())
    assert (agreed.mean, agreed.std) == (joined.mean, joined.std)


def test_one_site_cannot_drown_the_others(tmp_path: Path) -> None:
    """Totals that are possible but absurd, 1e30 where others have 1: refused by name."""

    def absurd(k: int) -> Any:
        x, y = vectors(k)
        return (x * np.float32(1e30) if k == 1 else x), y

    served(tmp_path, written(tmp_path, absurd), method="fedavg", rounds=1)
    source = json.loads((tmp_path / "run" / SOURCE).read_text())
    assert source["refused"] == {"1": "sends sums a million times beyond those of the others"}
    assert max(Preprocessing.from_json((tmp_path / "run" / FILE).read_text()).std) < 1e5


def test_given_statistics_are_used_and_nothing_is_asked(tmp_path: Path) -> None:
    nodes = written(tmp_path, images)
    settings = {**SETTINGS, "run_folder": str(tmp_path / "run"), "mean": "0.25", "std": "0.5"}
    grid = Loopback(settings, tmp_path / "state", nodes)
    grid.deaf = lambda question: "statistics" in question.content
    serve(grid, settings)
    agreed = Preprocessing.from_json((tmp_path / "run" / FILE).read_text())
    assert (agreed.mean, agreed.std) == ((0.25,), (0.5,))
    with pytest.raises(FedAlloyError, match="sends no statistics"):
        grid.desks[100]._statistics()


@pytest.mark.parametrize(
    ("terms", "why"),
    [
        ({"mean": "0.1"}, "go together"),
        ({"mean": "0.1", "std": "0"}, "above 0"),
        ({"mean": "a", "std": "1"}, "something else than numbers"),
        ({"mean": "nan", "std": "1"}, "something else than numbers"),
        ({"mean": "0.1,0.2", "std": "1,1"}, "expected 1 each"),
        ({"mean": "33.3", "std": "78.5"}, r"of pixels scaled to \[0, 1\]; divide"),
        ({"preprocessing": "nowhere.json"}, "No such file"),
        ({"preprocessing": "x", "mean": "0.1", "std": "1"}, "leave --mean and --std away"),
        ({"method": "fedavg+private"}, "does not cover counts, sums and squares"),
    ],
)
def test_mistyped_terms(tmp_path: Path, terms: dict[str, Any], why: str) -> None:
    nodes = written(tmp_path, images)
    with pytest.raises(FedAlloyError, match=why):
        served(tmp_path, nodes, **terms)
    assert not (tmp_path / "run").exists()


def test_a_run_keeps_what_it_began_with(tmp_path: Path) -> None:
    """A restart does not compute anew, even if a site's data have changed; a site refuses a change in mid-run."""
    nodes = written(tmp_path, vectors)
    settings = {**SETTINGS, "run_folder": str(tmp_path / "run"), "method": "fedavg"}
    grid = Loopback(settings, tmp_path / "state", nodes)

    def cut(question: Message, answer: Message) -> Message:
        if question.metadata.group_id == "2":
            raise KeyboardInterrupt
        return answer

    grid.tamper = cut
    with pytest.raises(KeyboardInterrupt):
        serve(grid, settings)
    before = (tmp_path / "run" / FILE).read_text()
    again = Loopback(settings, tmp_path / "state", nodes)
    again.deaf = lambda question: "statistics" in question.content
    serve(again, settings)
    assert (tmp_path / "run" / FILE).read_text() == before
    run = (tmp_path / "run" / "run-id").read_text()
    other = json.dumps({**json.loads(before), "mean": [0.0, 0.0, 0.0]}, sort_keys=True)
    with pytest.raises(FedAlloyError, match="began with another preprocessing"):
        again.desks[100]._agreed(Journal(tmp_path / "state", run, 0), {"preprocessing": other})
    (tmp_path / "run" / FILE).unlink()
    with pytest.raises(FedAlloyError, match=r"is gone, and this run began with it"):
        serve(Loopback(settings, tmp_path / "state", nodes), settings)


def test_who_joins_late_gets_the_same(tmp_path: Path) -> None:
    """It was not asked for statistics, and trains by those of the others from its first round on."""
    nodes = written(tmp_path, vectors)
    settings = {**SETTINGS, "run_folder": str(tmp_path / "run"), "method": "fedavg", "least_sites": 2}
    grid = Loopback(settings, tmp_path / "state", nodes)
    grid.present = {100, 101}

    def cut(question: Message, answer: Message) -> Message:
        if question.metadata.group_id == "2":
            raise KeyboardInterrupt
        return answer

    grid.tamper = cut
    with pytest.raises(KeyboardInterrupt):
        serve(grid, settings)
    again = Loopback(settings, tmp_path / "state", nodes)
    again.present = {100, 101, 102}
    result = serve(again, {**settings, "least_sites": 3})
    assert [line["participants"] for line in result.history] == [[0, 1], [0, 1, 2]]
    assert json.loads((tmp_path / "run" / SOURCE).read_text())["clients"] == [0, 1]
    last = again.desks[102]._last
    assert last
    assert last[0] == (tmp_path / "run" / FILE).read_text()


@pytest.mark.parametrize(
    ("slot", "value", "why"),
    [
        ("count", np.array([[-5, 0, 0, 0]]), "counts -5 numbers"),
        ("count", np.array([[5, 0, 0, 0]]), "numbers in 32 samples|contradict"),
        ("count", np.array([[2**62, 0, 0, 0]]), "beyond their range"),
        ("squares", np.zeros((3, 40), np.int64), "contradict its squares"),
        ("squares", -np.ones((3, 40), np.int64), "contradict its squares"),
        ("sums", np.zeros((3, 22), np.float64), "is float64, declared int64"),
        ("sums", np.full((3, 22), np.nan), "is float64, declared int64"),
        ("sums", np.zeros((4, 22), np.int64), r"has shape \(4, 22\)"),
        ("sums", np.zeros((3, 10**5), np.int64), "has shape"),
        ("more", np.zeros(3), "undeclared"),
    ],
)
def test_hostile_statistics_are_refused_by_name(tmp_path: Path, slot: str, value: Any, why: str) -> None:
    nodes = written(tmp_path, vectors)
    settings = {**SETTINGS, "run_folder": str(tmp_path / "run"), "method": "fedavg", "rounds": 1}
    grid = Loopback(settings, tmp_path / "state", nodes)

    def lie(question: Message, answer: Message) -> Message:
        if "statistics" in question.content and question.metadata.dst_node_id == 101:
            answer.content.array_records["items"][f"statistics.{slot}"] = Array(value)
        return answer

    grid.tamper = lie
    serve(grid, settings)
    source = json.loads((tmp_path / "run" / SOURCE).read_text())
    assert source["clients"] == [0, 2]
    assert re.search(why, source["refused"]["1"])


def test_columns_in_another_order_and_strange_columns(tmp_path: Path) -> None:
    nodes = []
    for k, header in enumerate(["age,dose,label", "dose,age,label", "age,weight,label"]):
        (tmp_path / f"site{k}").mkdir()
        rows = "".join(
            (f"{n},{50 + n},{n % 2}\n" if header.startswith("dose") else f"{50 + n},{n},{n % 2}\n")
            for n in range(20)
        )
        (tmp_path / f"site{k}" / "scans.csv").write_text(f"{header}\n{rows}")
        nodes.append({"data-root": str(tmp_path / f"site{k}")})
    result = served(tmp_path, nodes, method="fedavg", rounds=1)
    agreed = Preprocessing.from_json((tmp_path / "run" / FILE).read_text())
    assert agreed.feature_names == ("age", "dose")
    assert agreed.mean[0] > 50 > agreed.mean[1]
    assert json.loads((tmp_path / "run" / SOURCE).read_text())["refused"] == {"2": "has other columns"}
    (lost,) = result.history[0]["refused"]
    assert lost["client"] == 2


def test_a_site_with_another_shape_is_refused_where_it_is(tmp_path: Path) -> None:
    nodes = written(tmp_path, images)
    agreed = Preprocessing("image", (1, 5, 5), 2, ("benign", "malign"), (0.5,), (0.5,))
    desk = Desk({**SETTINGS}, {"client": 0, "state": str(tmp_path / "state"), **nodes[0]})
    with pytest.raises(FedAlloyError, match=r"agreed on are image, \(1, 5, 5\)"):
        desk.hello(agreed.to_json())
    with pytest.raises(FedAlloyError, match="other classes than the terms"):
        desk.hello(Preprocessing("image", (1, 4, 4), 2, ("cat", "dog"), (0.5,), (0.5,)).to_json())


def command(*words: object) -> tuple[int, str]:
    done = subprocess.run(
        [sys.executable, "-m", "fedalloy", *map(str, words)], capture_output=True, text=True, check=False
    )
    return done.returncode, (done.stdout + done.stderr).replace("\n", " ")


def test_a_file_from_pilot_data_goes_into_a_deployment(tmp_path: Path) -> None:
    file, made = tmp_path / "pilot.json", tmp_path / "federation"
    code, said = command("preprocessing", "digits", "--class-names", DIGITS, "--out", file)
    assert code == 0
    agreed = Preprocessing.from_json(file.read_text())
    assert agreed.sha256[:12] in said
    asked = ("deploy", "init", made, "--clients", 2, "--data", "scans", "--class-names", DIGITS)
    assert command(*asked, "--preprocessing", file, "--method", "fedavg+private")[0] == 0
    assert (made / "server" / FILE).read_text() == agreed.to_json()
    assert "given in the terms" in (made / "README.md").read_text()
    assert 'preprocessing = "preprocessing.json"' in (made / "app" / "pyproject.toml").read_text()


@pytest.mark.parametrize(
    ("more", "why"),
    [
        (("--method", "fedavg+private"), "does not cover counts, sums and squares"),
        (("--preprocessing", "nowhere.json"), "nowhere.json: No such file"),
        (("--mean", "0.5"), "--mean and --std go together"),
    ],
)
def test_a_deployment_that_cannot_agree_is_not_made(tmp_path: Path, more: tuple[str, ...], why: str) -> None:
    made = tmp_path / "federation"
    asked = ("deploy", "init", made, "--clients", 2, "--data", "scans", "--class-names", DIGITS)
    code, said = command(*asked, *more)
    assert (code, why in said) == (2, True), said
    assert not made.exists()


def test_limbs_carry_any_total() -> None:
    x = torch.tensor([[3.4e38, -1e-45], [3.4e38, -3e38]])
    totals = Totals.of("vector", x)
    assert from_items(to_items(totals), Inputs("vector", (2,), 2), 2) == totals


@pytest.mark.fuzz
def test_made_up_statistics_are_refused_or_possible() -> None:
    """Whatever arrives as totals ends in a sentence, or in a finite mean and a positive deviation."""
    inputs, honest = Inputs("vector", (2,), 2), Totals.of("vector", torch.randn(20, 2))
    dtypes = [torch.int64, torch.int64, torch.int64, torch.float64, torch.int32, torch.bool]
    for one in dice(100, 5000):
        items = to_items(honest)
        name = one.choice(list(items))
        draws = torch.Generator().manual_seed(one.getrandbits(40))
        size = one.choice([1, 2**16, 2**40, 2**62])
        shape = tuple(items[name].shape) if one.random() < 0.8 else (one.randint(0, 3), one.randint(0, 50))
        made = torch.randint(-size, size, shape, generator=draws).to(one.choice(dtypes))
        items[name] = (
            torch.where(made > 0, made, items[name])
            if one.random() < 0.3 and made.shape == items[name].shape
            else made
        )
        try:
            mean, std = from_items(items, inputs, one.choice([None, 20])).stats()
        except FedAlloyError:
            continue
        assert np.isfinite([*mean, *std]).all()
        assert min(std) > 0

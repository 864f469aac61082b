"""Sites with data of their own: other files, other classes, and no data set that anybody could deal."""

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from loopback import Loopback
from PIL import Image
from rich import console
from sklearn.datasets import load_digits

from fedalloy.cli import show
from fedalloy.data import load
from fedalloy.deploy.server import serve
from fedalloy.deploy.site import Desk
from fedalloy.errors import FedAlloyError
from fedalloy.experiment.folder import RunFolder
from fedalloy.report.html import write_run_report

NAMES = ",".join(str(digit) for digit in range(10))


@pytest.fixture(scope="module")
def rooms(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Half of the digits in a file, others as pictures in folders, one class alone, and the server's test set."""
    digits = load_digits()
    x, y = (digits.images * (255 / 16)).astype(np.uint8), digits.target
    rooms = [tmp_path_factory.mktemp(f"site{k}") for k in range(4)]
    low, high, only = np.flatnonzero(y < 5)[::2], np.flatnonzero(y >= 5)[::4], np.flatnonzero(y == 7)[1::4]
    np.savez(rooms[0] / "scans.npz", x=x[low], y=y[low])
    for position in high:
        folder = rooms[1] / "scans" / str(y[position])
        folder.mkdir(parents=True, exist_ok=True)
        Image.fromarray(x[position]).save(folder / f"{position}.png")
    np.savez(rooms[2] / "scans.npz", x=x[only], y=y[only])
    rest = np.flatnonzero(np.arange(len(y)) % 4 == 3)
    half = len(rest) // 2
    np.savez(
        rooms[3] / "exam.npz",
        x_train=x[rest[:half]], y_train=y[rest[:half]], x_test=x[rest[half:]], y_test=y[rest[half:]],
    )  # fmt: skip
    return rooms


def federation(rooms: list[Path], room: Path, **changes: Any) -> tuple[Loopback, dict[str, Any]]:
    settings = {
        "method": "fedavg",
        "clients": 3,
        "rounds": 6,
        "lr": 0.2,
        "data": "scans",
        "class_names": NAMES,
        "run_folder": str(room / "run"),
        "join_limit": 1.0,
        **changes,
    }
    nodes = [{"data-root": str(rooms[k])} for k in range(3)]
    return Loopback(settings, room / "state", nodes), settings


def test_they_train_together_and_judge_where_the_data_are(rooms: list[Path], tmp_path: Path) -> None:
    grid, settings = federation(rooms, tmp_path)
    assert [desk.hello()["samples"] for desk in grid.desks.values()] == [
        int(desk.federation.client(k).samples) for k, desk in enumerate(grid.desks.values())
    ]
    result = serve(grid, settings)
    last = result.history[-1]["metrics"]
    assert "global_acc" not in last
    assert result.summary["metric"] == "personal_local_acc"
    assert last["personal_local_acc"] > 0.6
    assert len(last["per_client"]) == 3
    assert not (result.folder / "partition.json").exists()  # who holds what is nobody's business
    page = write_run_report(result.folder).read_text()
    assert "Tested at the sites, own data" in page  # by whatever model the method has
    assert "Personal models" not in page
    assert "data of their own" in page
    shown = console.Console(width=200, record=True, file=io.StringIO())
    show.run(shown, result, result.folder / "report.html")
    assert "data of their own" in (words := shown.export_text())
    assert "dirichlet" not in words
    assert "Personal" not in words


def test_the_server_may_have_a_test_set_of_its_own(rooms: list[Path], tmp_path: Path) -> None:
    result = serve(*federation(rooms, tmp_path, test_data="exam", data_root=str(rooms[3])))
    assert result.summary["metric"] == "global_acc"
    assert result.summary["accuracy"]["final"] > 0.5


@pytest.mark.parametrize("method", ["scaffold", "feddw(mu=1)", "fedper", "fednova", "ccvr"])
def test_other_methods_need_no_more(rooms: list[Path], tmp_path: Path, method: str) -> None:
    result = serve(*federation(rooms, tmp_path, method=method, rounds=2))
    assert result.summary["status"] == "finished"
    assert all(not line["refused"] for line in result.history)


def test_what_crosses_the_wire_weighs_by_what_sites_hold(rooms: list[Path], tmp_path: Path) -> None:
    """One round of FedAvg is the mean of the sites' models by their training samples."""
    grid, settings = federation(rooms, tmp_path, rounds=1)
    sent: dict[int, torch.Tensor] = {}
    counts: dict[int, int] = {}

    def watch(question: Any, answer: Any) -> Any:
        if question.metadata.message_type == "train":
            facts = answer.content.config_records["facts"]
            sent[facts["client"]] = torch.from_numpy(
                answer.content.array_records["items"]["share.weights"].numpy()
            )
            counts[facts["client"]] = facts["samples"]
        return answer

    grid.tamper = watch
    result = serve(grid, settings)
    total = sum(counts.values())
    mean = sum(sent[k].double() * counts[k] for k in range(3)) / total
    state = RunFolder(result.folder).checkpoint()[1]
    assert torch.equal(state["server.weights"], torch.as_tensor(mean).float())


def test_a_restart_without_a_site_asks_the_same_clients(rooms: list[Path], tmp_path: Path) -> None:
    """Who is asked depends on who holds data; one that is away for now still does."""
    whole = serve(*federation(rooms, tmp_path / "whole", participation=0.67))
    grid, settings = federation(rooms, tmp_path / "cut", participation=0.67, least_sites=2, round_limit=0.3)

    def cut(question: Any, answer: Any) -> Any:
        if question.metadata.group_id == "2":
            raise KeyboardInterrupt
        return answer

    grid.tamper = cut
    with pytest.raises(KeyboardInterrupt):
        serve(grid, settings)
    again, _ = federation(rooms, tmp_path / "cut", participation=0.67, least_sites=2, round_limit=0.3)
    again.present.discard(102)
    carried_on = serve(again, settings)
    asked = [line["participants"] for line in carried_on.history]
    assert asked == [line["participants"] for line in whole.history]
    assert [2, "is not connected"] in [
        list(lost.values()) for line in carried_on.history for lost in line["refused"]
    ]


def test_sites_must_agree_on_the_classes(rooms: list[Path], tmp_path: Path) -> None:
    with pytest.raises(FedAlloyError, match="set class-names"):
        serve(*federation(rooms, tmp_path, class_names=""))
    with pytest.raises(FedAlloyError, match=r"label 4 is out of range; there are 3 class names"):
        load("scans", rooms[0], ("0", "1", "2"))
    with pytest.raises(FedAlloyError, match=r"label '5' is no class; the classes are 0, 1, 2"):
        load("scans", rooms[1], ("0", "1", "2"))


def test_labels_among_named_classes(rooms: list[Path]) -> None:
    names = tuple(NAMES.split(","))
    pictures = load("scans", rooms[1], names)
    assert pictures.classes == 10
    assert set(pictures.y.tolist()) == set(range(5, 10))
    assert set(load("scans", rooms[2], names).y.tolist()) == {7}
    with pytest.raises(FedAlloyError, match="must start at 0"):
        load("scans", rooms[2])


def test_the_name_of_the_data_is_the_sites_own_affair(rooms: list[Path], tmp_path: Path) -> None:
    settings = {"clients": 3, "data": "scans", "class_names": NAMES}
    own = Desk(settings, {"client": 0, "state": str(tmp_path), "data": "exam", "data-root": str(rooms[3])})
    assert own.federation.client(0).samples > 100
    with pytest.raises(FedAlloyError, match="no data set name"):
        Desk({**settings, "data": "../secrets"}, {"client": 0, "data-root": str(rooms[0])})

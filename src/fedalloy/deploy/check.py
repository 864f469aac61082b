"""Before a site joins: can its data be read, and do they fit what the server's operator planned?"""

import tempfile
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fedalloy.core.files import read_whole
from fedalloy.data import Dataset, load
from fedalloy.deploy.site import Desk
from fedalloy.errors import FedAlloyError

PLAN = "plan.toml"  # in a site's folder: the settings of the run as they were when the folder was made


@dataclass(frozen=True)
class Checked:
    """What a site would bring along."""

    data: str
    kind: str
    shape: tuple[int, ...]
    train: int
    test: int
    classes: dict[str, int]  # training samples by class


def check_site(bundle: Path, node: dict[str, Any]) -> Checked | None:
    """What this site holds, read as a run would read it; None where nobody said what a run will be.

    A plan comes from the server: it is believed no more than a message is.
    """
    if not (bundle / PLAN).exists():
        return _alone(node)
    try:
        settings = tomllib.loads(read_whole(bundle / PLAN).decode())
    except (ValueError, RecursionError):
        raise FedAlloyError(
            f"{bundle / PLAN} is damaged; ask the server's operator for it, or delete it"
        ) from None
    with tempfile.TemporaryDirectory() as room:
        try:
            desk = Desk(settings, {**node, "state": room})
        except FedAlloyError as error:
            raise FedAlloyError(
                f"{error} (held against {bundle / PLAN}; if the run is another by now, ask for a new one or delete it)"
            ) from None
        mine = desk.federation.client(desk.client)
        dataset = desk.federation.dataset
        return _found(desk.config.data, dataset, len(mine.y), len(mine.y_test), mine.counts.tolist())


def _alone(node: dict[str, Any]) -> Checked | None:
    if "data" not in node:
        return None
    dataset = load(node["data"], Path(node["data-root"]) if "data-root" in node else None)
    labels = dataset.y[: dataset.train].bincount(minlength=dataset.inputs.classes)
    return _found(node["data"], dataset, dataset.train, len(dataset.y) - dataset.train, labels.tolist())


def _found(name: str, dataset: Dataset, train: int, test: int, counts: list[int]) -> Checked:
    names = dataset.class_names or tuple(map(str, range(len(counts))))
    shape = tuple(dataset.inputs.shape)
    return Checked(name, dataset.kind, shape, train, test, dict(zip(names, counts, strict=True)))

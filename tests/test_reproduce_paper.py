"""Every item at the paper's own scale takes its first steps, on random samples of the right kind."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedalloy import reproduce
from fedalloy.config import Config
from fedalloy.data.catalogue import JOINED
from fedalloy.reproduce.costs import DATA
from fedalloy.reproduce.grid import by_seed
from fedalloy.run import start

EACH, TESTED = 40, 8


def first_steps() -> Iterator[tuple[str, Config]]:
    """One run of each item, of each method and of each model with each data set; no two alike."""
    seen: set[object] = set()
    for item, grid in reproduce.GRIDS.items():
        for config in by_seed(grid.cells("paper", seeds=grid.seeds[:1])):
            name = config.method.partition("(")[0]
            new = {item, (name, item.partition("/")[0]), (config.data, config.architectures)} - seen
            if new:
                seen |= new
                yield f"{item}-{name}-{config.data}-{config.architectures[0]}", config


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A few random samples under the name of every data set."""
    folder = tmp_path_factory.mktemp("data")
    draw = np.random.default_rng(0)
    for name, (_, _, inputs) in DATA.items():
        members = JOINED[name].members if name in JOINED else (name,)
        for member in (member.partition("|")[0] for member in members):
            y = np.arange(EACH) % inputs.classes
            if inputs.kind == "tokens":
                x = draw.integers(1, inputs.vocab, (EACH, *inputs.shape))
            else:
                channels, *sides = inputs.shape
                x = draw.integers(0, 256, (EACH, *sides, channels), dtype=np.uint8)
            np.savez(
                folder / f"{member}.npz",
                x_train=x, y_train=y, x_test=x[:TESTED], y_test=y[:TESTED],
            )  # fmt: skip
    return folder


@pytest.mark.parametrize(("name", "config"), [pytest.param(*one, id=one[0]) for one in first_steps()])
def test_the_first_steps(name: str, config: Config, root: Path, tmp_path: Path) -> None:
    small = {
        "clients": min(config.clients, 4),
        "participation": 1.0,
        "rounds": 1,
        "steps": 1,
        "batch": 4,
        "epochs": 1,
    }
    less = {"engine": "inline", "eval_every": 1, "personal_on_global": False, "data_root": str(root)}
    changed = Config.of(
        {**config.model_dump(), **small, **less, "skew": "domain" if config.skew == "domain" else "iid"}
    )
    result = start(changed, tmp_path / "run")
    assert result.summary["status"] == "finished"
    assert not result.history[0]["refused"]

"""The methods and models of every item at the paper's own scale take their first steps, on random samples."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from fedalloy.data.catalogue import JOINED
from fedalloy.experiment.config import Config
from fedalloy.experiment.run import start
from fedalloy.research import reproduce
from fedalloy.research.reproduce.costs import DATA
from fedalloy.research.reproduce.grid import by_seed

EACH, TESTED = 20, 8


LIGHT = ("cnn-fedrda", "cnn-feddw")  # methods take their first steps on these where a paper has them there
HEAVY = ("vit-b16", "resnet110")  # one run of these is enough; other methods take small nets in their place


def first_steps() -> Iterator[tuple[str, Config]]:
    """A run of each method, and of each model with each data set."""
    configs = [
        config for grid in reproduce.GRIDS.values() for config in by_seed(grid.cells("paper", seeds=[0]))
    ]
    seen: set[object] = set()
    for config in sorted(configs, key=lambda config: config.model not in LIGHT or bool(config.models)):
        name = config.method.partition("(")[0]
        heavy = next((model for model in HEAVY if model in config.architectures), None)
        new = {name, heavy or (config.data, config.architectures)} - seen
        if new:
            small = heavy in seen and ({"models": "cnn-bn,lenet"} if config.models else {"model": "cnn-bn"})
            seen |= new
            changed = config.model_copy(update=small or {})
            yield f"{name}-{changed.data}-{changed.architectures[0]}", changed


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


@pytest.mark.filterwarnings("ignore::fedalloy.errors.FedAlloyWarning")  # small nets are not what papers have
@pytest.mark.parametrize(("name", "config"), [pytest.param(*one, id=one[0]) for one in first_steps()])
def test_the_first_steps(name: str, config: Config, root: Path, tmp_path: Path) -> None:
    by_domain = config.skew == "domain"
    small = {"rounds": 1, "epochs": 1, "batch": 16, "participation": 1.0, "steps": None}
    dealt = {"steps": 1, "batch": 4} if by_domain else {"clients": 2, "skew": "iid", "limit": 16}
    less = {"engine": "inline", "eval_every": 1, "personal_on_global": False, "data_root": str(root)}
    changed = Config.of({**config.model_dump(), **small, **dealt, **less})
    result = start(changed, tmp_path / "run")
    assert result.summary["status"] == "finished"
    assert not result.history[0]["refused"]

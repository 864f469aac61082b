"""Many runs: one after the other or side by side, each carried on where it was."""

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from multiprocessing import get_context
from pathlib import Path

from fedalloy.analysis.diagnose import study
from fedalloy.core.imports import Imports
from fedalloy.experiment.config import Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import reopen
from fedalloy.experiment.series import Series, rounds_left
from fedalloy.research.reproduce.grid import place

Tick = Callable[[int, int], None]  # rounds played, rounds in all
LOOK = 1.0  # seconds between two looks at runs side by side


def play(
    root: Path, configs: Sequence[Config], on_round: Tick | None, jobs: int = 1, *, inside: bool = False
) -> None:
    """Play what is left of these runs; `inside` looks into each when it is finished."""
    tell = on_round or (lambda done, total: None)
    total = sum(config.rounds for config in configs)

    def played() -> int:
        return total - sum(rounds_left(root / place(config), config) for config in configs)

    count = itertools.count(played())
    tell(next(count), total)
    if jobs == 1:
        series = Series(Imports())  # names are ours, or were typed
        for config in configs:
            _play(root, config, series, lambda record: tell(next(count), total), inside=inside)
        return
    shared = [config.model_copy(update={"workers": max(1, config.processes // jobs)}) for config in configs]
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(_play, root, config, inside=inside) for config in shared}
        try:
            while running:
                done, running = wait(running, LOOK, FIRST_EXCEPTION)
                for one in done:
                    one.result()
                tell(played(), total)
        finally:
            for one in running:
                one.cancel()


def _play(
    root: Path, config: Config, series: Series | None = None, on_round: Callable[..., None] | None = None,
    *, inside: bool = False,
) -> None:  # fmt: skip
    path = root / place(config)
    (series or Series(Imports())).play(path, config, on_round)
    if inside and not (path / "diagnostics.json").exists():
        study(*reopen(path, allow_code=True), RunFolder.existing(path))

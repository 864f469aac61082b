"""Papers, run again: a command gives each of their tables and figures with our numbers beside theirs."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedalloy.core.expression import slug
from fedalloy.engines.processes import keep_memory, require_cores
from fedalloy.errors import FedAlloyError, unknown
from fedalloy.experiment.config import flag
from fedalloy.experiment.run import one_thread
from fedalloy.research.reproduce import costs, fedblade, feddw, fedrda, fedsce, matrix_report, ssf
from fedalloy.research.reproduce.grid import Grid, Judge, Scale, Settings, by_seed, named
from fedalloy.research.reproduce.playing import Tick, play
from fedalloy.research.reproduce.printed import Asked, Written, finished, write

__all__ = ["GRIDS", "MATRIX", "Written", "items", "listed", "reproduce"]

PAPERS = {"feddw": feddw, "fedblade": fedblade, "fedrda": fedrda, "fedsce": fedsce, "ssf": ssf}
GRIDS: dict[str, Grid] = {
    f"{paper}/{name}": grid for paper, module in PAPERS.items() for name, grid in module.ITEMS.items()
}
MATRIX = "ssf/matrix"


def items() -> dict[str, str]:
    """What can be reproduced, and a line on each.

    >>> items()["ssf/matrix"]
    'SSF, SCAFFOLD, FedAvg and FedSub on matrix regression: heterogeneity, rank, noise (about a minute)'
    """
    return {name: grid.says for name, grid in GRIDS.items()} | {MATRIX: matrix_report.SAYS}


def listed(scale: Scale, given: Settings | None = None) -> list[dict[str, Any]]:
    """The same with what each item takes here, one thread for each core: an estimate from a few timed steps."""
    rows = []
    keep_memory()  # as workers do
    with one_thread():
        for name, grid in GRIDS.items():
            configs = list(by_seed(grid.cells(scale, given)))
            rows.append(
                {
                    "item": name,
                    "says": grid.says,
                    "data": sorted({config.data for config in configs}),
                    "runs": len(configs),
                    "seconds": round(sum(map(costs.run_seconds, configs))),
                }
            )
    return [*rows, {"item": MATRIX, "says": matrix_report.SAYS, "data": [], "runs": 1, "seconds": 60}]


def reproduce(
    item: str,
    out: Path,
    only: Sequence[str] = (),
    on_round: Tick | None = None,
    *,
    scale: Scale = "cpu",
    given: Settings | None = None,
    seeds: Sequence[int] = (),
    judge: Judge | None = None,
    jobs: int = 1,
    missing: bool = True,
    images: bool = False,
) -> Written:
    """Play what is missing of an item, or of some of its rows and columns, and write what there is.

    Everything goes into `out`: each item into a folder of its own, runs into one for all items, for they share them.
    Settings that are ``given`` win over the item's; with ``judge`` other rounds count than the item's.
    ``on_round`` hears the rounds played and those there are in all.
    Without ``missing`` nothing is played: places whose runs are not finished stay empty.
    With ``images`` the figures are files beside the table too (extra ``images``, and a Chrome or Chromium).
    """
    if item not in items():
        raise unknown("study", item, items())
    if item == MATRIX:
        if judge:
            raise FedAlloyError("this item has no accuracies; leave --judge away")
        if not missing:
            raise FedAlloyError(f"{MATRIX} is always played, in about a minute; leave --no-play away")
        if given:
            raise FedAlloyError(f"{MATRIX} has settings of its own; leave {', '.join(map(flag, given))} away")
        return _matrix(out / slug(item), only, on_round, images=images)
    require_cores("--jobs", jobs)
    grid = GRIDS[item].judged(judge) if judge else GRIDS[item]
    named(only, grid, item)
    runs = out / "runs"
    chosen = grid.cells(scale, given, only, seeds)
    inside = "inside" in grid.drawn
    if missing:
        play(runs, list(by_seed(chosen)), on_round, jobs, inside=inside)
    elif not any(finished(runs, config) for config in by_seed(chosen)):
        raise FedAlloyError(f"no run of it is finished in {runs}; leave --no-play away to play them")
    asked = Asked(item, scale, given or {}, only, seeds, judge)
    return write(out / asked.folder, asked, grid, chosen, runs, images=images)


def _matrix(out: Path, only: Sequence[str], on_round: Tick | None, *, images: bool) -> Written:
    for name in only:
        if name not in matrix_report.PARTS:
            raise unknown(f"method of {MATRIX}", name, matrix_report.PARTS)
    out.mkdir(parents=True, exist_ok=True)
    return matrix_report.write(out, tuple(only) or matrix_report.PARTS, on_round, images=images)

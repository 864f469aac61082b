"""A fair comparison: the same partition, the same initial weights and the same batches for every method.

Fairness needs no bookkeeping: all of these are drawn from counters that do not contain the method.
"""

import hashlib
import json
import shlex
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from fedalloy.core import registry
from fedalloy.core.expression import parse, slug
from fedalloy.core.files import claim, unless_refused, write_whole
from fedalloy.core.imports import Imports
from fedalloy.errors import FedAlloyError, FedAlloyWarning, writing
from fedalloy.experiment.config import FREE, Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import OnReply, OnRound, Result
from fedalloy.experiment.series import Series, at_hand, check_settings, rounds_left, settled
from fedalloy.report import (
    read_comparison,
    write_comparison_report,
    write_run_report,
    write_tables,
)
from fedalloy.report.statistics import costs, results
from fedalloy.report.verdict import verdict

OnRun = Callable[[str, int], None]  # method, seed


@dataclass(frozen=True)
class Comparison:
    """Methods times seeds in one folder; what is finished is not run again."""

    folder: Path
    base: Config
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    target: float | None = None
    _series: Series = field(default_factory=Series, repr=False, compare=False)

    @classmethod
    def plan(
        cls,
        base: Config,
        methods: Sequence[str],
        seeds: Sequence[int],
        out: Path | None = None,
        target: float | None = None,
        *,
        fitting: bool = False,
        imports: Imports | None = None,
    ) -> "Comparison":
        """Check everything before anything is written; `fitting` leaves out what the settings do not allow.

        Without `out` the folder is named by the settings, so that the same command finds its own finished runs again,
        and one with another method adds to them.
        """
        if not methods:
            raise FedAlloyError(
                "name the methods to compare, such as: fedalloy compare fedavg 'fedprox(mu=0.1)'"
            )
        if target is not None and not 0 < target < 1:
            raise FedAlloyError(
                f"--target must be an accuracy between 0 and 1, not {target:g}; for example 0.5"
            )
        names = [registry.make(method, imports).expression for method in methods]
        forms = [parse(name) for name in names]  # fedprox(mu=1) is fedprox( mu=1.0 )
        if twice := [name for name, form in zip(names, forms, strict=True) if forms.count(form) > 1]:
            raise FedAlloyError(f"{twice[0]} is named twice; name every method once")
        base, folder = settled(base, _named, out)
        plan = cls(folder, base, tuple(names), tuple(dict.fromkeys(seeds)), target, Series(imports))
        if fitting:
            plan = replace(plan, methods=tuple(method for method in names if plan._fits(method)))
        plan._check()
        return plan

    def run(
        self,
        on_run: OnRun | None = None,
        on_round: OnRound | None = None,
        on_reply: OnReply | None = None,
    ) -> list[Result]:
        """Everything that is not finished yet, then tables and report."""
        with writing(self.folder):
            made = claim(self.folder)
        found = []
        with unless_refused(self.folder, made), writing(self.folder):
            self._describe()
        with unless_refused(self.folder, made), at_hand(self.base):
            for method, seed in [(method, seed) for seed in self.seeds for method in self.methods]:
                if on_run:
                    on_run(method, seed)
                place = self.folder / self.place(method, seed)
                result = self._series.play(place, self.config(method, seed), on_round, on_reply)
                if not (result.folder / "report.html").exists():
                    write_run_report(result.folder)
                found.append(result)
        write_tables(self.folder)
        write_comparison_report(self.folder)
        return found

    def config(self, method: str, seed: int) -> Config:
        return self.base.model_copy(update={"method": method, "seed": seed})

    def place(self, method: str, seed: int) -> str:
        return f"{slug(method)}/seed{seed}"

    def rounds_left(self) -> int:
        """Rounds that are still to be played, for a progress bar."""
        return sum(
            rounds_left(self.folder / self.place(method, seed), self.base)
            for method in self.methods
            for seed in self.seeds
        )

    @property
    def command(self) -> str:
        """What to type for this comparison, config file or not."""
        words = ["fedalloy", "compare", *self.methods, "--seeds", ",".join(map(str, self.seeds))]
        if self.target is not None:
            words += ["--target", str(self.target)]
        return shlex.join(words + self.base.typed("method", "seed"))

    def facts(self) -> dict[str, Any]:
        """What was found, as plain data."""
        read = read_comparison(self.folder)
        return {
            "folder": str(self.folder),
            "report": str(self.folder / "report.html"),
            "verdict": verdict(read),
            "results": {name: [asdict(row) for row in results(read, name)] for name in read.headlines},
            "costs": [asdict(row) for row in costs(read)],
            "runs": [
                {**(RunFolder(path).summary() or {}), "folder": str(path)}
                for path in (self.folder / self.place(m, s) for m in self.methods for s in self.seeds)
            ],
        }

    def _fits(self, method: str) -> bool:
        """Whether a method runs with these settings; if not, say so."""
        try:
            self._series.setup(self.config(method, self.seeds[0])).server()
        except FedAlloyError as error:
            warnings.warn(f"{method} is left out: {error}", FedAlloyWarning, stacklevel=2)
            return False
        return True

    def _check(self) -> None:
        """Build every method once, and look whether runs that lie in the folder are of this comparison."""
        for method in self.methods:
            self._series.setup(self.config(method, self.seeds[0])).server()
            for seed in self.seeds:
                check_settings(self.folder / self.place(method, seed), self.config(method, seed))

    def _describe(self) -> None:
        runs = {
            method: {str(seed): self.place(method, seed) for seed in self.seeds} for method in self.methods
        }
        facts = {
            "methods": self.methods,
            "seeds": self.seeds,
            "target": self.target,
            "runs": runs,
            "command": self.command,
        }
        write_whole(self.folder / "compare.json", (json.dumps(facts, indent=2) + "\n").encode())


def _named(base: Config) -> Path:
    return Path("runs") / f"compare-{slug(base.data)}-{slug(base.skew)}-{_digest(base)}"


def _digest(base: Config) -> str:
    """Of all that must be equal for two comparisons to share runs; other data may lie in another folder."""
    settings = base.model_dump(exclude=set(FREE - {"data_root"}) | {"method", "seed"})
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]

"""A fair comparison: the same partition, the same initial weights and the same batches for every method.

Fairness needs no bookkeeping: all of these are drawn from counters that do not contain the method.
"""

import hashlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from fedalloy import registry
from fedalloy.config import FREE, Config
from fedalloy.errors import FedAlloyError
from fedalloy.federation import Federation
from fedalloy.folder import RunFolder
from fedalloy.report import write_comparison_report, write_plotlyjs, write_run_report, write_tables
from fedalloy.run import Record, Result, Setup, play, resume
from fedalloy.storage import write_whole

OnRound = Callable[[str, int, Record], None]


@dataclass(frozen=True)
class Comparison:
    """Methods times seeds in one folder; what is finished is not run again."""

    folder: Path
    base: Config
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    target: float | None = None
    command: str = ""

    @classmethod
    def plan(
        cls,
        base: Config,
        methods: Sequence[str],
        seeds: Sequence[int],
        out: Path | None = None,
        target: float | None = None,
        command: str = "",
    ) -> "Comparison":
        """Check everything before anything runs. Without `out` the folder is named by the settings, so that the same
        command finds its own finished runs again, and one with another method adds to them."""
        if not methods:
            raise FedAlloyError(
                "name the methods to compare, such as: fedalloy compare fedavg 'fedprox(mu=0.1)'"
            )
        if not seeds:
            raise FedAlloyError("give at least one seed, such as --seeds 0,1,2")
        if target is not None and not 0 < target < 1:
            raise FedAlloyError(f"--target {target:g}: an accuracy between 0 and 1 is expected, such as 0.5")
        names = [registry.make(method).expression for method in methods]
        if len(set(names)) < len(names):
            twice = next(name for name in names if names.count(name) > 1)
            raise FedAlloyError(f"{twice} is named twice; name every method once")
        folder = out or Path("runs") / f"compare-{_slug(base.data)}-{_digest(base)}"
        plan = cls(folder, base, tuple(names), tuple(dict.fromkeys(seeds)), target, command)
        for method in names:
            Setup(plan.config(method, plan.seeds[0]))
        return plan

    def config(self, method: str, seed: int) -> Config:
        return self.base.model_copy(update={"method": method, "seed": seed})

    def place(self, method: str, seed: int) -> str:
        return f"{_slug(method)}/seed{seed}"

    def run(self, on_round: OnRound | None = None) -> list[Result]:
        """Everything that is not finished yet, then tables and report."""
        self.folder.mkdir(parents=True, exist_ok=True)
        self._describe()
        results = []
        for seed in self.seeds:
            federation: Federation | None = None  # dealt once per seed
            for method in self.methods:
                path, config = self.folder / self.place(method, seed), self.config(method, seed)

                def told(record: Record, method: str = method, seed: int = seed) -> None:
                    if on_round:
                        on_round(method, seed, record)

                if (path / "config.toml").exists():
                    results.append(resume(path, config, told))
                else:
                    setup = Setup(config, federation)
                    federation = setup.federation
                    results.append(play(setup, RunFolder.create(path, config), told))
        self.report()
        return results

    def report(self) -> Path:
        """Tables in Markdown and LaTeX, one HTML report for the comparison and one for each run."""
        write_plotlyjs(self.folder)
        for method in self.methods:
            for seed in self.seeds:
                write_run_report(self.folder / self.place(method, seed), plotlyjs="../../plotly.min.js")
        write_tables(self.folder)
        return write_comparison_report(self.folder)

    def rounds_left(self) -> int:
        """Rounds that are still to be played, for a progress bar."""
        left = 0
        for method in self.methods:
            for seed in self.seeds:
                folder = RunFolder(self.folder / self.place(method, seed))
                left += 0 if folder.summary() else self.base.rounds - len(folder.history())
        return left

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


def _slug(text: str) -> str:
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-")


def _digest(base: Config) -> str:
    settings = {k: v for k, v in base.model_dump().items() if k not in FREE | {"method", "seed"}}
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:8]

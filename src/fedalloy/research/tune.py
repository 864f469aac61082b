"""Hyper-parameters, chosen on held-out training samples; Optuna proposes, and every trial is an ordinary run.

What is tried next depends on nothing but the space and the trials before it: a search that was stopped carries on as if
it had not been.
"""

import hashlib
import importlib.util
import json
import os
import shlex
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from fedalloy.core.expression import slug
from fedalloy.core.files import claim, read_whole, unless_refused, write_whole
from fedalloy.core.imports import Imports
from fedalloy.core.random import seed_of
from fedalloy.errors import FedAlloyError, writing
from fedalloy.experiment.config import FREE, Config
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import OnReply, OnRound
from fedalloy.experiment.seals import facts_digest
from fedalloy.experiment.series import Series, at_hand, check_settings, rounds_left, settled
from fedalloy.research.compare import OnRun
from fedalloy.research.search import RATES, Point, Space

VALIDATION = 0.2  # where none is given


@dataclass(frozen=True)
class Trial:
    """A point and what came of it: accuracies by seed, None for a run that diverged; empty until all are finished."""

    number: int
    point: Point
    config: Config
    accuracies: tuple[float | None, ...] = ()

    @property
    def accuracy(self) -> float | None:
        """The mean over seeds; none if any of them diverged."""
        known = [accuracy for accuracy in self.accuracies if accuracy is not None]
        return statistics.fmean(known) if known and len(known) == len(self.accuracies) else None


@dataclass(frozen=True)
class Tuning:
    """A search in one folder; what is finished is not run again."""

    folder: Path
    base: Config
    space: Space
    seeds: tuple[int, ...]
    budget: int
    _series: Series = field(default_factory=Series, repr=False, compare=False)

    @classmethod
    def plan(
        cls,
        base: Config,
        method: str,
        seeds: Sequence[int],
        budget: int,
        rates: Sequence[float] = (),
        out: Path | None = None,
        imports: Imports | None = None,
    ) -> "Tuning":
        """Check everything before anything is written. Without rates those of the optimiser are tried, unless the
        settings name one; without `out` the folder is named by the settings."""
        if not rates and "lr" not in base.model_fields_set:
            rates = RATES[base.optimizer]
        space = Space.of(method, rates, imports)
        base = base.model_copy(update={"validation": base.validation or VALIDATION})
        seeds = tuple(dict.fromkeys(seeds))
        base, folder = settled(base, partial(_named, space=space, seeds=seeds), out)
        plan = cls(folder, base, space, seeds, budget, Series(imports))
        plan._check()
        return plan

    def run(
        self,
        on_run: OnRun | None = None,
        on_round: OnRound | None = None,
        on_reply: OnReply | None = None,
    ) -> list[Trial]:
        """All trials, in their order; those that are finished are only read."""
        with writing(self.folder):
            made = claim(self.folder)
        points = self._recorded()
        with unless_refused(self.folder, made), at_hand(self.base):
            for number in range(1, self.trials + 1):
                if number > len(points):
                    points.append(self._next([self.trial(n, point) for n, point in enumerate(points, 1)]))
                    self._record(points)
                point = points[number - 1]
                config = self.config(point)
                for seed in self.seeds:
                    if on_run:
                        on_run(f"{number} of {self.trials}: {config.method}, lr {config.lr:g}", seed)
                    place = self.folder / self.place(number, point, seed)
                    self._series.play(place, self.config(point, seed), on_round, on_reply)
        self._record(points)
        return self.done()

    @cached_property
    def trials(self) -> int:
        """How many there will be: never the same point twice."""
        return min(self.budget, len(self.space.grid))

    def config(self, point: Point, seed: int | None = None) -> Config:
        """The run of a point."""
        chosen: dict[str, Any] = {"method": self.space.at(point), "lr": point.get("lr", self.base.lr)}
        return self.base.model_copy(update={**chosen, "seed": self.seeds[0] if seed is None else seed})

    def place(self, number: int, point: Point, seed: int) -> str:
        config = self.config(point)
        return f"{number:03d}-{slug(config.method)}-lr-{config.lr:g}/seed{seed}"

    def trial(self, number: int, point: Point) -> Trial:
        """A trial as its run folders show it."""
        folders = [RunFolder(self.folder / self.place(number, point, seed)) for seed in self.seeds]
        found = [summary["accuracy"]["mean_last_10"] for folder in folders if (summary := folder.summary())]
        accuracies = tuple(found) if len(found) == len(folders) else ()
        return Trial(number, point, self.config(point), accuracies)

    def done(self) -> list[Trial]:
        """The finished trials within the budget, in their order."""
        listed = enumerate(self._recorded()[: self.trials], 1)
        return [trial for number, point in listed if (trial := self.trial(number, point)).accuracies]

    def best_first(self) -> list[Trial]:
        """Of trials that are equally good, the earlier one is the better."""
        return sorted(
            self.done(), key=lambda trial: -1 if trial.accuracy is None else trial.accuracy, reverse=True
        )

    def rounds_left(self) -> int:
        """Rounds that are still to be played, for a progress bar."""
        recorded = self._recorded()[: self.trials]
        begun = sum(
            rounds_left(self.folder / self.place(number, point, seed), self.base)
            for number, point in enumerate(recorded, 1)
            for seed in self.seeds
        )
        return begun + (self.trials - len(recorded)) * len(self.seeds) * self.base.rounds

    @property
    def command(self) -> str:
        """What to type for this search, config file or not."""
        words = ["fedalloy", "tune", self.space.method, "--trials", str(self.budget)]
        words += ["--seeds", ",".join(map(str, self.seeds))]
        if rates := self.space.axes.get("lr"):
            words += ["--lr-values", ",".join(map(str, rates))]
        else:
            words += ["--lr", str(self.base.lr)]  # the default too: without it, rates are searched
        return shlex.join([*words, *self.base.typed("method", "seed", "lr")])

    def commands(self, trial: Trial) -> dict[str, str]:
        """What to type to try a point on the test set."""
        flags = trial.config.typed("method", "seed", "validation")
        seeds = ",".join(map(str, self.seeds))
        method = trial.config.method
        seed = ["--seed", seeds] if len(self.seeds) == 1 and self.seeds != (0,) else []
        return {
            "run": shlex.join(["fedalloy", "run", "--method", method, *seed, *flags]),
            "compare": shlex.join(["fedalloy", "compare", method, "--seeds", seeds, *flags]),
        }

    def facts(self) -> dict[str, Any]:
        """What was found, as plain data."""
        ranked = self.best_first()
        best = next((trial for trial in ranked if trial.accuracy is not None), None)
        return {
            "folder": str(self.folder),
            **self._search,
            "validation": self.base.validation,
            "trials": [self._described(trial) for trial in ranked],
            "best": {**self._described(best), **self.commands(best)} if best else None,
        }

    @property
    def _search(self) -> dict[str, Any]:
        """What a folder holds one of."""
        return {"method": self.space.method, "space": self.space.axes, "seeds": self.seeds}

    def _next(self, tried: list[Trial]) -> Point:
        """All points in order if they can all be tried, else what Optuna proposes, beginning with the defaults."""
        known = [trial.point for trial in tried]
        left = [point for point in self.space.grid if point not in known]
        if self.trials == len(self.space.grid):
            return left[0]
        return _proposed(self.space, tried, left, self.seeds[0]) if tried else self.space.start

    def _check(self) -> None:
        """Build the method once, and look whether what lies in the folder is of this search."""
        if self.trials < len(self.space.grid) and importlib.util.find_spec("optuna") is None:
            raise FedAlloyError(
                f"trying {self.trials} of {len(self.space.grid)} points needs the library optuna: "
                f'pip install "fedalloy[tune]"; or try all of them with --trials {len(self.space.grid)}'
            )
        self._series.setup(self.config(self.space.start)).server()
        for number, point in enumerate(self._recorded(), 1):
            for seed in self.seeds:
                check_settings(self.folder / self.place(number, point, seed), self.config(point, seed))

    def _recorded(self) -> list[Point]:
        """The points of this search so far, in the order in which they were proposed."""
        file = self.folder / "tune.json"
        if not os.path.lexists(file):
            return []
        broken = FedAlloyError(f"{file} is damaged; give another --out")
        try:
            found = json.loads(read_whole(file))
            points = [trial["point"] for trial in found["trials"]]
            searched = {name: found[name] for name in self._search}
            seal = found.get("sha256")  # an earlier version wrote none
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            raise broken from None
        if searched != json.loads(json.dumps(self._search)):
            raise FedAlloyError(
                f"{self.folder} holds another search ({found.get('command')}); give another --out"
            )
        held = all(self.space.holds(point) and points.count(point) == 1 for point in points)
        if seal not in (None, facts_digest(found)) or not held:
            raise broken
        return points

    def _record(self, points: Sequence[Point]) -> None:
        trials = [self.trial(number, point) for number, point in enumerate(points, 1)]
        described = [self._described(trial) for trial in trials]
        facts = {**self._search, "command": self.command, "trials": described}
        facts["sha256"] = facts_digest(json.loads(json.dumps(facts)))
        write_whole(self.folder / "tune.json", (json.dumps(facts, indent=2) + "\n").encode())

    def _described(self, trial: Trial) -> dict[str, Any]:
        return {
            "number": trial.number,
            "point": trial.point,
            "method": trial.config.method,
            "lr": trial.config.lr,
            "accuracy": trial.accuracy,
            "accuracies": trial.accuracies,
            "runs": [self.place(trial.number, trial.point, seed) for seed in self.seeds],
        }


def _proposed(space: Space, tried: Sequence[Trial], left: Sequence[Point], seed: int) -> Point:
    """What Optuna would try next, or the untried point that is fewest steps of the grid away from it."""
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    steps: dict[str, optuna.distributions.BaseDistribution] = {
        name: optuna.distributions.IntDistribution(0, len(values) - 1) for name, values in space.axes.items()
    }

    def at(point: Point) -> dict[str, int]:
        return {name: values.index(point[name]) for name, values in space.axes.items()}

    counter = (seed, "tune", len(tried))
    sampler = optuna.samplers.TPESampler(seed=seed_of(*counter) % 2**32)
    study = optuna.create_study(direction="maximize", sampler=sampler)
    for trial in tried:
        value = trial.accuracy or 0.0  # a trial that diverged is as bad as can be
        study.add_trial(optuna.trial.create_trial(params=at(trial.point), distributions=steps, value=value))
    wanted = study.ask(steps).params

    def distance(point: Point) -> tuple[int, int]:
        far = sum(abs(place - wanted[name]) for name, place in at(point).items())
        return far, seed_of(*counter, str(point))

    return min(left, key=distance)


def _named(base: Config, space: Space, seeds: Sequence[int]) -> Path:
    name = f"tune-{slug(space.method)}-{slug(base.data)}-{slug(base.skew)}-{_digest(base, space, seeds)}"
    return Path("runs") / name


def _digest(base: Config, space: Space, seeds: Sequence[int]) -> str:
    """Of all that makes a search what it is, but for the number of trials."""
    settings = base.model_dump(exclude=set(FREE - {"data_root"}) | {"method", "seed"})
    facts = [settings, space.method, space.axes, seeds]
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:8]

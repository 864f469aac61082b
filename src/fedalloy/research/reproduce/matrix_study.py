"""The whole matrix regression: which methods, settings, rounds and seeds, and the error of every round."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from math import inf, isfinite
from statistics import median

import torch
from torch import Tensor

from fedalloy.core.random import generator
from fedalloy.research.reproduce.matrix import STEPS, Method, Problem, Run

RANKS = (20, 40, 60, 80, 100)
METHODS: dict[str, tuple[Method, ...]] = {
    "FedAvg": (Method("FedAvg"),),
    "SCAFFOLD": (Method("SCAFFOLD"),),
    "SSF": tuple(Method("SSF", rank) for rank in RANKS),
    "FedSub Gaussian": tuple(Method("FedSub", rank, "gaussian") for rank in RANKS),
    "FedSub Haar": tuple(Method("FedSub", rank) for rank in RANKS),
}
ZETAS = (0.1, 1.0, 5.0)  # low, medium and high heterogeneity
LEARNING_RATES = (0.01, 0.02, 0.05, 0.1)
RATE = 0.05  # where only one is tried
EXACT = (*((1.0, lr) for lr in LEARNING_RATES), (0.1, RATE), (5.0, RATE))  # heterogeneity and learning rate
ROUNDS, FEDSUB_ROUNDS, NOISY_ROUNDS = 300, 200, 400
SEEDS = (0, 1, 2)  # for noisy gradients at medium heterogeneity; else the first
NOISE = 0.05  # standard deviation, on every entry of every gradient
DIVERGED = 1e3
LEVEL = 20  # rounds at the end whose median is the level of a noisy run

OnRound = Callable[[int, int], None]  # rounds played, rounds in all


@dataclass(frozen=True)
class Curve:
    """The relative errors of one run, round by round."""

    method: str
    rank: int
    zeta: float
    lr: float
    noisy: bool
    seed: int
    errors: tuple[float, ...]

    @property
    def label(self) -> str:
        return f"{self.method} r={self.rank}" if self.rank else self.method

    @property
    def diverged(self) -> int | None:
        """The first round with an error above 1000."""
        return next((r for r, error in enumerate(self.errors, 1) if not error <= DIVERGED), None)

    @property
    def result(self) -> float:
        """The last error; with noise the median of the last rounds; infinite where it diverged."""
        if self.diverged:
            return inf
        return median(self.errors[-LEVEL:]) if self.noisy else self.errors[-1]

    @property
    def facts(self) -> dict[str, object]:
        """For JSON: every tenth error."""
        thinned = [float(f"{e:.4g}") if isfinite(e) else None for e in self.errors[9::10]]
        result = self.result if isfinite(self.result) else None
        known = {name: getattr(self, name) for name in ("method", "rank", "zeta", "lr", "noisy", "seed")}
        return {**known, "result": result, "diverged_round": self.diverged, "every_tenth": thinned}


@dataclass
class _Batch:
    """A method at one rank on several settings, advanced round by round."""

    label: str
    run: Run
    settings: Sequence[tuple[float, float]]
    rounds: int
    noisy: bool

    def __post_init__(self) -> None:
        self.errors: list[Tensor] = []

    def step(self, noise: Tensor | None) -> None:
        if len(self.errors) < self.rounds:
            self.run.step(noise)
            self.errors.append(self.run.errors)

    def curves(self) -> Iterator[Curve]:
        for (zeta, lr), errors in zip(self.settings, torch.stack(self.errors, 1).tolist(), strict=True):
            rank, seed = self.run.method.rank, self.run.seed
            yield Curve(self.label, rank, zeta, lr, self.noisy, seed, tuple(errors))


def study(labels: Iterable[str], on_round: OnRound | None = None) -> list[Curve]:
    """Every run of these methods, exact gradients first."""
    chosen = [(label, method) for label in labels for method in METHODS[label]]
    exact = [
        _batch(label, method, EXACT, FEDSUB_ROUNDS if method.name == "FedSub" else ROUNDS)
        for label, method in chosen
    ]
    noisy = {
        seed: [
            _batch(label, method, _noisy_settings(seed), NOISY_ROUNDS, noisy=True, seed=seed)
            for label, method in chosen
        ]
        for seed in SEEDS
    }
    total, played = ROUNDS + len(SEEDS) * NOISY_ROUNDS, 0
    for seed, batches in [(-1, exact), *noisy.items()]:  # all methods of a seed meet the same noise
        for round in range(1, (ROUNDS if seed < 0 else NOISY_ROUNDS) + 1):
            noise = None if seed < 0 else gradient_noise(batches[0].run, seed, round)
            for batch in batches:
                batch.step(noise)
            played += 1
            if on_round:
                on_round(played, total)
    return [curve for batches in (exact, *noisy.values()) for batch in batches for curve in batch.curves()]


def gradient_noise(run: Run, seed: int, round: int) -> Tensor:
    """K N D C."""
    clients, rows = run.g.shape[:2]
    shape = (STEPS, clients, rows, run.optimum.shape[2])
    draw = generator(seed, round, "gradient noise")
    return NOISE * torch.randn(shape, generator=draw, dtype=torch.float64)


def _noisy_settings(seed: int) -> list[tuple[float, float]]:
    return [(zeta, RATE) for zeta in (ZETAS if seed == SEEDS[0] else (1.0,))]


def _batch(
    label: str,
    method: Method,
    settings: Sequence[tuple[float, float]],
    rounds: int,
    *,
    noisy: bool = False,
    seed: int = 0,
) -> _Batch:
    run = Run(method, [_problem(zeta, seed) for zeta, _ in settings], [lr for _, lr in settings], seed)
    return _Batch(label, run, settings, rounds, noisy)


@cache
def _problem(zeta: float, seed: int) -> Problem:
    return Problem.drawn(zeta, seed)

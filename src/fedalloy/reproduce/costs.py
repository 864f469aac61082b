"""How long an item takes here: a few timed steps of its models, times all there are."""

import time
from functools import cache

import torch
from torch.nn.functional import cross_entropy

from fedalloy import nets
from fedalloy.config import Config
from fedalloy.nets.base import Inputs
from fedalloy.random import generator
from fedalloy.reproduce.grid import Grid, Scale, by_seed

TIMED = 8  # samples in a timed step
PASSES = {"ditto": 2.0, "fedkd": 2.0, "fml": 2.0, "fedsce": 2.2, "fedsol": 2.2, "perfedavg": 2.0, "moon": 1.6}
FORWARD = 1 / 3  # of a training step

# Training samples, test samples and what a sample is.
DATA: dict[str, tuple[int, int, Inputs]] = {
    "mnist": (60_000, 10_000, Inputs("image", (1, 28, 28), 10)),
    "fashion-mnist": (60_000, 10_000, Inputs("image", (1, 28, 28), 10)),
    "cifar10": (50_000, 10_000, Inputs("image", (3, 32, 32), 10)),
    "cifar100": (50_000, 10_000, Inputs("image", (3, 32, 32), 100)),
    "svhn": (73_257, 26_032, Inputs("image", (3, 32, 32), 10)),
    "tiny-imagenet": (100_000, 10_000, Inputs("image", (3, 64, 64), 200)),
    "gc10": (1_834, 460, Inputs("image", (3, 224, 224), 10)),
    "office10": (2_533, 0, Inputs("image", (3, 64, 64), 10)),
    "digit5": (215_000, 0, Inputs("image", (3, 32, 32), 10)),
    "imdb": (25_000, 25_000, Inputs("tokens", (200,), 2, 20_000)),
}


def seconds(grid: Grid, scale: Scale) -> float:
    """Of all runs of an item, one after the other."""
    return sum(run_seconds(config) for config in by_seed(grid.cells(scale)))


def run_seconds(config: Config) -> float:
    """Of one run with all its workers."""
    train, test, inputs = DATA[config.data]
    held = min(config.limit or train, train) * (1 - config.test_share)
    trained = (
        held * config.participation * config.epochs * config.rounds * PASSES.get(_name(config.method), 1.0)
    )
    tried = (test + (train - held if config.test_share else 0)) * config.rounds / config.eval_every
    each = [step_seconds(model, inputs) for model in config.architectures]
    return (trained + FORWARD * tried) * sum(each) / len(each) / config.processes


@cache
def step_seconds(model: str, inputs: Inputs) -> float:
    """Of one sample in a training step, on one thread."""
    with torch.random.fork_rng(devices=[]):
        net = nets.build(model, inputs)
    x = _samples(inputs)
    y = torch.arange(TIMED) % inputs.classes
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        torch.autograd.backward(cross_entropy(net(x).logits, y))
        best = min(best, time.perf_counter() - began)
    return best / TIMED


def _samples(inputs: Inputs) -> torch.Tensor:
    draw = generator(0, "costs")
    if inputs.kind == "image":
        return torch.randn(TIMED, *inputs.shape, generator=draw)
    return torch.randint(1, inputs.vocab or 2, (TIMED, *inputs.shape), generator=draw)


def _name(method: str) -> str:
    return method.partition("(")[0].partition("+")[0]

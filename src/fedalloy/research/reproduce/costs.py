"""How long an item takes here: a few timed steps of its models, times all there are."""

import time
from functools import cache

import torch
from torch.nn.functional import cross_entropy

from fedalloy import models
from fedalloy.core import registry
from fedalloy.core.imports import Imports
from fedalloy.core.net import Inputs, Net
from fedalloy.core.random import generator
from fedalloy.experiment.config import Config

TIMED = (8, 64)  # samples in a timed step; the second for nets that are quick
QUICK = 0.1  # seconds that such a net takes for the first
PASSES = {"ditto": 2.0, "fedkd": 2.0, "fml": 2.0, "fedsce": 2.2, "fedsol": 2.2, "perfedavg": 2.0, "moon": 1.4}
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


def run_seconds(config: Config) -> float:
    """Of one run with all its workers."""
    train, test, inputs = DATA[config.data]
    method = registry.method(config.method)
    participation = 1.0 if method.full_participation else config.participation
    whole = min(config.limit or train, train)
    held = whole * (1 - config.test_share)
    asked = max(1.0, config.clients * participation)
    a_round = held * participation * config.epochs
    if config.steps is not None:
        a_round = min(a_round, asked * config.steps * config.batch)
    trained = a_round * config.rounds * PASSES.get(_name(config.method), 1.0)
    evaluations = config.rounds / config.eval_every
    tried = (test + whole - held) * evaluations
    if config.personal_on_global and method.personal:
        tried += test * min(config.clients, config.eval_clients or config.clients) * evaluations
    each = [step_seconds(model, inputs) for model in config.architectures]
    return (trained + FORWARD * tried) * sum(each) / len(each) / config.processes


@cache
def step_seconds(model: str, inputs: Inputs) -> float:
    """Of one sample in a training step, on one thread."""
    with torch.random.fork_rng(devices=[]):
        net = models.build(model, inputs, Imports())
    few, many = TIMED
    took = _step(net, inputs, few)
    return took / few if took > QUICK else _step(net, inputs, many) / many


def _step(net: Net, inputs: Inputs, samples: int) -> float:
    x, y = _samples(inputs, samples), torch.arange(samples) % inputs.classes
    best = float("inf")
    for _ in range(3):
        began = time.perf_counter()
        torch.autograd.backward(cross_entropy(net(x).logits, y))
        best = min(best, time.perf_counter() - began)
    return best


def _samples(inputs: Inputs, samples: int) -> torch.Tensor:
    draw = generator(0, "costs")
    if inputs.kind == "image":
        return torch.randn(samples, *inputs.shape, generator=draw)
    return torch.randint(1, inputs.vocab or 2, (samples, *inputs.shape), generator=draw)


def _name(method: str) -> str:
    return method.partition("(")[0].partition("+")[0]

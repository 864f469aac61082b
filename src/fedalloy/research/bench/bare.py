"""The yardstick: what one would write by hand, and nothing else.

Ordinary modules in the default memory layout with the ReLU before the pool, torch.optim.SGD, batches sliced from float
tensors, an average of state dicts; clients are spread over two single-threaded processes, longest first. No evaluation.
"""

import multiprocessing
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from fedalloy import models
from fedalloy.core.net import Inputs
from fedalloy.data.federation import Federation, federate
from fedalloy.experiment.run import sample
from fedalloy.research.bench.cases import Case

PROCESSES = 2


def play(case: Case, room: Path, rounds: int, *, channels_last: bool = False) -> dict[str, float]:
    """Samples per second in the quickest round but the first."""
    torch.set_num_threads(1)
    config = case.config(room, rounds)
    fed = federate(**config.dealing)
    plan = [sample(fed, case.participation, config.seed, number) for number in range(1, rounds + 1)]
    context = multiprocessing.get_context("fork")
    barrier, ticks = context.Barrier(PROCESSES), context.Queue()
    team = [
        context.Process(
            target=_loop, args=(case, fed, _shares(fed, plan, place), channels_last, barrier, ticks)
        )
        for place in range(PROCESSES)
    ]
    for process in team:
        process.start()
    seconds: list[list[float]] = [ticks.get() for _ in team]
    for process in team:
        process.join()
    longest = [max(together) for together in zip(*seconds, strict=True)]
    trained = [int(fed.sizes[chosen].sum()) for chosen in plan]
    return {"samples_per_second": max(n / s for n, s in list(zip(trained, longest, strict=True))[1:])}


def _shares(fed: Federation, plan: list[list[int]], place: int) -> list[list[int]]:
    """The clients of one process in each round: longest first, to whoever has least."""
    mine = []
    for chosen in plan:
        shares: list[list[int]] = [[] for _ in range(PROCESSES)]
        for client in sorted(chosen, key=lambda client: -int(fed.sizes[client])):
            min(shares, key=lambda share: int(fed.sizes[share].sum())).append(client)
        mine.append(shares[place])
    return mine


def _loop(
    case: Case, fed: Federation, rounds: Iterable[list[int]], channels_last: bool, barrier: Any, ticks: Any
) -> None:
    torch.manual_seed(0)
    net = textbook(case.model, fed.dataset.inputs)
    if channels_last:
        net = net.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    start = {name: value.clone() for name, value in net.state_dict().items()}
    data = {client: _tensors(fed, client, channels_last) for client in {k for ks in rounds for k in ks}}
    seconds = []
    for clients in rounds:
        barrier.wait()
        began = time.perf_counter()
        mean = {name: torch.zeros_like(value, dtype=torch.float32) for name, value in start.items()}
        for client in clients:
            x, y = data[client]
            net.load_state_dict(start)
            optimiser = torch.optim.SGD(net.parameters(), lr=0.01, momentum=case.momentum)
            order = torch.randperm(len(y))
            x, y = x[order], y[order]
            for i in range(0, len(y), case.batch):
                optimiser.zero_grad()
                loss: Any = cross_entropy(net(x[i : i + case.batch]), y[i : i + case.batch])
                loss.backward()
                optimiser.step()
            for name, value in net.state_dict().items():
                mean[name] += value * (len(y) / fed.info.samples)
        barrier.wait()
        seconds.append(time.perf_counter() - began)
    ticks.put(seconds)


def _tensors(fed: Federation, client: int, channels_last: bool) -> tuple[Tensor, Tensor]:
    own = fed.client(client)
    x = own.prepare(own.x, None)
    return x.contiguous(memory_format=torch.channels_last) if channels_last else x, own.y


def textbook(model: str, inputs: Inputs) -> nn.Module:
    """The zoo's net as it stands in a tutorial; it yields logits."""
    if model != "cnn":
        net = models.build(model, inputs)
        return nn.Sequential(net.body, net.head)
    maps, side = inputs.shape[0], (((inputs.shape[1] - 4) // 2) - 4) // 2
    return nn.Sequential(
        nn.Conv2d(maps, 32, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * side * side, 512),
        nn.ReLU(),
        nn.Linear(512, inputs.classes),
    )

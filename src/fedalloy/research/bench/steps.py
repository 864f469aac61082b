"""What a local step of each method costs, as a multiple of FedAvg's: in seconds, measured in turn in one process, or in
operations, which are counted.
"""

import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from functools import cache

import torch
from torch.utils.flop_counter import FlopCounterMode

from fedalloy.core import registry
from fedalloy.core.net import Inputs
from fedalloy.core.training import Local
from fedalloy.core.views import ClientData, Info
from fedalloy.data import Prepare
from fedalloy.errors import FedAlloyWarning
from fedalloy.experiment.run import one_thread
from fedalloy.round.client import client_round
from fedalloy.round.replica import Replica
from fedalloy.round.server import Server

INPUTS = Inputs("image", (3, 32, 32), classes=10)
STEPS, BATCH = 8, 64  # an epoch
EPOCHS = (1, 5)
Step = Callable[[], float]


def step_costs(
    methods: Sequence[str], model: str = "cnn-bn", repeats: int = 5
) -> dict[str, dict[int, float]]:
    """CPU seconds of a client's round over those of FedAvg, by local epochs: the median of the ratios in each turn.

    A round holds what a client does once in it (prototypes, principal spaces): the more epochs, the less that counts.
    """
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FedAlloyWarning)
        names = list(dict.fromkeys(["fedavg", *methods]))
        found: dict[str, dict[int, float]] = {name: {} for name in names}
        for epochs in EPOCHS:
            rounds = {name: _round(name, model, epochs) for name in names}
            for play in rounds.values():
                play()  # allocations of the first time
            turns = [{name: play() for name, play in rounds.items()} for _ in range(repeats)]
            for name in names:
                found[name][epochs] = statistics.median(turn[name] / turn["fedavg"] for turn in turns)
    return found


@cache
def flops(method: str, model: str, epochs: int, samples: int = 8) -> int:
    """Floating-point operations of a client's second round, convolutions and matrix products: MOON needs a first."""
    with one_thread(), warnings.catch_warnings():
        warnings.simplefilter("ignore", FedAlloyWarning)
        play = _round(method, model, epochs, samples)
        play()
        with FlopCounterMode(display=False) as counter:
            play()
    return int(counter.get_total_flops())


def _round(text: str, model: str, epochs: int, samples: int = STEPS * BATCH) -> Step:
    """A function that plays one more round of a client with random images and returns the CPU seconds it took."""
    method = registry.make(text)
    replica = Replica(method, model, INPUTS, seed=0)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (samples, *INPUTS.shape), dtype=torch.uint8, generator=draw)
    y = torch.arange(len(x)) % INPUTS.classes
    data = ClientData(x, y, x[:0], y[:0], INPUTS.classes, Prepare("image", (0.5,) * 3, (0.25,) * 3))
    info, local = Info(1, len(x)), Local(batch=BATCH, lr=0.01, epochs=epochs)
    server = Server(method, replica, info, local, seed=0)
    keep: dict[str, torch.Tensor] = {}

    def play() -> float:
        nonlocal keep
        server.round += 1
        mail = server.send(0)
        began = time.process_time()
        reply, keep = client_round(method, replica, data, info, local, keep, mail, seed=0)
        seconds = time.process_time() - began
        server.receive([0], [reply])
        return seconds

    return play

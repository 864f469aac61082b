"""What a local step does, counted in operators: a needless copy or a second forward pass fails here.

The counts lie in operators.json; run this file as a script to write them anew, and read the difference before you
commit it.
"""

import json
import sys
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from fedalloy.core import registry
from fedalloy.core.net import Inputs
from fedalloy.core.training import Local
from fedalloy.core.views import ClientData, Info
from fedalloy.data import Prepare
from fedalloy.round.client import client_round
from fedalloy.round.replica import Replica
from fedalloy.round.server import Server

FILE = Path(__file__).with_name("operators.json")
INPUTS = Inputs("image", (1, 8, 8), classes=10)
BATCH = 4


class Counting(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts every operator, those of the backward pass included."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def counted(name: str, batches: int) -> Counter[str]:
    """The operators of a client's third round, when everything that a first round lacks is there."""
    method = registry.make(name)
    replica = Replica(method, "cnn-bn", INPUTS, seed=0)
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(0, 256, (batches * BATCH, 1, 8, 8), dtype=torch.uint8, generator=draw)
    y = torch.arange(len(x)) % 10
    data = ClientData(x, y, x[:0], y[:0], 10, Prepare("image", (0.5,), (0.25,)))
    info, local = Info(1, len(x)), Local(batch=BATCH, lr=0.01)
    server = Server(method, replica, info, local, seed=0)
    keep: dict[str, torch.Tensor] = {}
    counts: Counter[str] = Counter()
    for server.round in (1, 2, 3):
        mail = server.send(0)
        with Counting() as found:
            reply, keep = client_round(method, replica, data, info, local, keep, mail, seed=0)
        server.receive([0], [reply])
        counts = found.counts
    return counts


def summary(name: str) -> dict[str, int]:
    """Operators, and convolutions among them, that one more batch costs; and what a round costs without its batches."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        two, three = counted(name, 2), counted(name, 3)
    step = three.total() - two.total()
    passes = ("convolution", "convolution_backward")
    one, backward = (three[kind] - two[kind] for kind in passes)
    return {
        "step": step,
        "convolutions": one,
        "backward convolutions": backward,
        "round": two.total() - 2 * step,
    }


@pytest.mark.parametrize("name", registry.RECIPES)
def test_a_step_does_no_more_than_it_did(name: str) -> None:
    expected = json.loads(FILE.read_text())
    assert name in expected, f"python tests/{Path(__file__).name} writes the counts of new methods"
    assert summary(name) == expected[name], "if it must be so: run this file as a script"


def test_fedavg_is_one_pass() -> None:
    """Three convolutions forward, three backward: the yardstick of the table."""
    found = summary("fedavg")
    assert (found["convolutions"], found["backward convolutions"]) == (3, 3)


if __name__ == "__main__":
    chosen = sys.argv[1:] or list(registry.RECIPES)
    known = json.loads(FILE.read_text()) if FILE.exists() and sys.argv[1:] else {}
    FILE.write_text(
        json.dumps(known | {name: summary(name) for name in chosen}, indent=1, sort_keys=True) + "\n"
    )

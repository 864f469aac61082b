"""Where the time of a client goes when its model is tiny: bench T, taken apart beside a bare loop, in one process.

python benchmarks/tiny.py
"""

import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import cross_entropy

from fedalloy.core.state import Phase
from fedalloy.experiment.folder import RunFolder
from fedalloy.experiment.run import Setup, one_thread
from fedalloy.research.bench.bare import textbook
from fedalloy.research.bench.cases import CASES
from fedalloy.round.client import Client

REPEATS, CALLS = 7, 400


def microseconds(call: Callable[[], object]) -> float:
    best = float("inf")
    for _ in range(REPEATS):
        began = time.perf_counter()
        for _ in range(CALLS):
            call()
        best = min(best, (time.perf_counter() - began) / CALLS * 1e6)
    return best


def main() -> None:
    with tempfile.TemporaryDirectory() as room, one_thread():
        config = CASES["T"].config(Path(room), rounds=1)
        setup = Setup(config)
        shop = setup.runtime(RunFolder.create(Path(room) / "run", config))
        server = setup.server()
        server.round = 1
        fed = setup.federation
        client = int((fed.sizes - 20).abs().argmin())  # twenty samples: one step
        mail, data, replica = server.send(client), fed.client(client), shop.replicas.of(client)

        def made() -> Client:
            return Client(setup.method, replica, data, fed.info, shop.local, {}, mail, 0)

        one = made()
        oracle = one._onion()
        step = next(iter(one._steps(0, Phase(1), data)))
        optimiser = shop.local.optimiser(replica.weights.flat.detach(), 0.01)
        net = textbook("mlp", fed.dataset.inputs)
        start = {name: value.clone() for name, value in net.state_dict().items()}
        mean = {name: torch.zeros_like(value) for name, value in start.items()}
        x = data.prepare(data.x, None)

        def autograd() -> None:
            net.zero_grad()
            torch.autograd.backward(cross_entropy(net(x), data.y))

        def bare() -> None:
            net.load_state_dict(start)
            sgd = torch.optim.SGD(net.parameters(), lr=0.01, momentum=0.9)
            order = torch.randperm(len(data.y))
            batch, labels = x[order], data.y[order]
            sgd.zero_grad()
            torch.autograd.backward(cross_entropy(net(batch), labels))
            sgd.step()
            for name, value in net.state_dict().items():
                mean[name] += value * 0.1

        rows = {
            "a client of the bare loop": bare,
            "  of it, forward and backward": autograd,
            "a client here": lambda: shop.handle(mail),
            "  its data": lambda: fed.client(client),
            "  model, mail, drawers": made,
            "  order and batches": lambda: list(one._steps(0, Phase(1), data)),
            "  forward and backward": lambda: oracle(step),
            "  optimiser": lambda: optimiser(replica.weights.grad),
            "  reply": one.finish,
        }
        for name, call in rows.items():
            print(f"{name:34}{microseconds(call):8.0f} us")


if __name__ == "__main__":
    main()

"""The benches: what is trained, on how much, by whom."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fedalloy.data import load
from fedalloy.experiment.config import Config


@dataclass(frozen=True)
class Case:
    """One federation. Images are random pixels unless the data set is built in or lies in the user's folder."""

    says: str
    model: str
    data: str  # "noise", or a data set
    shape: tuple[int, int, int] = (28, 28, 1)
    train: int = 20_000
    test: int = 2_000
    clients: int = 20
    participation: float = 1.0
    skew: str = "dirichlet:0.1"
    batch: int = 64
    momentum: float = 0.9
    method: str = "fedavg"

    def config(self, room: Path, rounds: int, precision: str = "fp32") -> Config:
        """The case as a run; `room` holds the images."""
        values: dict[str, Any] = {
            "method": self.method,
            "data": self.data,
            "data_root": str(room),
            "model": self.model,
            "clients": self.clients,
            "participation": self.participation,
            "skew": self.skew,
            "batch": self.batch,
            "lr": 0.01,
            "momentum": self.momentum,
            "rounds": rounds,
            "workers": 2,
            "precision": precision,
        }
        return Config.of(values)

    def prepare(self, room: Path, data_root: Path | None) -> "Case":
        """Write the random images, or the part that is wanted of a data set of the user's."""
        if self.data == "digits":
            return self
        name = f"noise{'x'.join(map(str, self.shape))}-{self.train}"
        draw = np.random.default_rng(0)
        y = draw.permutation(np.arange(self.train + self.test) % 10)
        x = draw.integers(0, 256, (self.train + self.test, *self.shape), dtype=np.uint8)
        if data_root is not None and (data_root / "mnist.npz").exists() and self.shape == (28, 28, 1):
            found = load("mnist", data_root)
            x, y, name = found.x.squeeze(1).numpy(), found.y.numpy(), f"mnist-{self.train}"
            x = np.concatenate([x[: self.train], x[found.train :][: self.test]])
            y = np.concatenate([y[: self.train], y[found.train :][: self.test]])
        if not (room / f"{name}.npz").exists():
            cut = self.train
            np.savez(room / f"{name}.npz", x_train=x[:cut], y_train=y[:cut], x_test=x[cut:], y_test=y[cut:])
        return Case(**{**vars(self), "data": name})


CASES = {
    "A": Case("20 clients, all in a round, cnn", "cnn", "noise"),
    "B": Case("100 clients, 20 in a round, cnn", "cnn", "noise", clients=100, participation=0.2),
    "T": Case("100 clients, tiny mlp: all overhead", "mlp", "digits", clients=100, batch=32),
    "R": Case("resnet18, 32x32x3", "resnet18", "noise", (32, 32, 3), 512, 64, clients=4, skew="iid"),
    "M": Case("mobilenetv2, 32x32x3", "mobilenetv2", "noise", (32, 32, 3), 1024, 64, clients=4, skew="iid"),
}
"""Each is timed beside a bare loop."""

MANY = Case(
    "10,000 clients, 20 in a round, scaffold",
    "mlp",
    "noise",
    (8, 8, 1),
    100_000,
    100,
    clients=10_000,
    participation=0.002,
    skew="iid",
    batch=10,
    momentum=0.0,
    method="scaffold",
)
FEW = Case(
    **{**vars(MANY), "says": "the same with 100 clients", "train": 1000, "clients": 100, "participation": 0.2}
)

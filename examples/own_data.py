"""Data of your own: as an .npz file in a folder, or as a Dataset in memory."""

from pathlib import Path

import numpy as np
import torch

import fedalloy as fa
from fedalloy.data import load

# Three clouds of points; any numbers of shape (samples, features), with labels from 0.
draw = np.random.default_rng(0)
y = draw.integers(0, 3, 900)
x = draw.normal(size=(900, 6)) + 2.5 * np.eye(3, 6)[y]

# As a file: `fedalloy run --data clouds --data-root data` reads it too.
folder = Path("data")
folder.mkdir(exist_ok=True)
np.savez(folder / "clouds.npz", x=x, y=y, class_names=np.array(["red", "green", "blue"]))
fed = fa.federate("clouds", clients=6, skew="pathological:2", data_root=folder)
result = fa.train(fed, model="mlp(hidden=16)", method="fedavg", rounds=10, lr=0.1, engine="inline")
print(f"from a file: {load('clouds', folder).train} training samples, accuracy {result.accuracy:.1%}")

# In memory: training samples first, then the global test set; mean and std are what a net subtracts and divides by.
data = fa.Dataset(
    "clouds",
    torch.tensor(x, dtype=torch.float32),
    torch.tensor(y),
    train=700,
    kind="vector",
    classes=3,
    mean=tuple(x[:700].mean(0).tolist()),
    std=tuple(x[:700].std(0).tolist()),
)
fed = fa.federate(data, clients=6, skew=fa.Quantity(0.5))
result = fa.train(fed, model="mlp(hidden=16)", method="fedavg", rounds=10, lr=0.1, engine="inline")
print(f"from memory: {data.train} training samples, accuracy {result.accuracy:.1%}")

"""The comparisons of the seed papers: their methods, hyper-parameters and settings, to be changed by any flag."""

from dataclasses import dataclass, field
from typing import Any

from fedalloy import registry
from fedalloy.errors import unknown


@dataclass(frozen=True)
class Preset:
    """What a paper compares, and how."""

    says: str
    methods: tuple[str, ...]
    settings: dict[str, Any] = field(default_factory=dict)


PRESETS = {
    "feddw": Preset(
        "FedDW, Table I, CIFAR-10, practical setting; personal methods are judged on everybody's data",
        (
            "fedavg",
            "moon",
            "fedbabu(ft_epochs=0)",
            "feduv",
            "fedprox",
            "fedrep",
            "fedproto",
            "fedala",
            "perfedavg",
            "fedper",
            "local",
            "feddw(mu=0.1)",
        ),
        {
            "data": "cifar10",
            "model": "cnn-feddw",
            "clients": 10,
            "skew": "dirichlet:0.5",
            "rounds": 50,
            "epochs": 5,
            "batch": 128,
            "optimizer": "adam",
            "lr": 0.001,
        },
    ),
    "fedblade": Preset(
        "FedBlade, Table 1, CIFAR-10, 20 of 100 clients, MobileNetV2",
        (
            "fedavg",
            "fedprox(mu=0.01)",
            "fedlc(tau=10)",
            "feddecorr(beta=0.1)",
            "fedrcl(tau=0.1)",
            "fedavg+fedproto(lam=1, weighted=true, evaluate=head)",
            "fedfm",
            "fedetf",
            "fedblade",
        ),
        {
            "data": "cifar10",
            "model": "mobilenetv2",
            "clients": 100,
            "participation": 0.2,
            "skew": "dirichlet:0.1",
            "augment": "crop:4,flip",
            "rounds": 200,
            "epochs": 5,
            "batch": 64,
            "lr": 0.01,
            "momentum": 0.9,
            "weight_decay": 1e-5,
        },
    ),
    "fedrda": Preset(
        "FedRDA, Table I, CIFAR-10, SimpleCNN; the number of rounds is ours",
        (
            "fedavg",
            "fedprox",
            "moon",
            "fednova",
            "feduv",
            "fedsol",
            "fedfa",
            "fedfm",
            "fedpac",
            "fedrda",
        ),
        {
            "data": "cifar10",
            "model": "cnn-fedrda",
            "clients": 10,
            "skew": "dirichlet:0.1",
            "rounds": 100,
            "epochs": 3,
            "batch": 64,
            "lr": 0.01,
            "momentum": 0.9,
        },
    ),
    "fedsce": Preset(
        "FedSCE, Table 2, Office-Caltech-10, one client per domain, half of its images for testing",
        ("local", "fml", "fedkd", "feddistill", "fedproto", "fedtgp", "fedsce"),
        {
            "data": "office10",
            "models": "resnet18,resnet34,resnet50,vit-b16,vit-b32",
            "clients": 4,
            "skew": "domain",
            "test_share": 0.5,
            "rounds": 200,
            "epochs": 5,
            "batch": 64,
            "lr": 0.01,
        },
    ),
}


def preset(name: str) -> Preset:
    """A paper's comparison by name."""
    if name not in PRESETS:
        raise unknown("preset", name, PRESETS)
    return PRESETS[name]


def every_method(architectures: tuple[str, ...]) -> tuple[str, ...]:
    """All methods that a federation of these architectures allows, with their default parameters.

    >>> "fedavg" in every_method(("mlp",)), "fedavg" in every_method(("mlp", "cnn"))
    (True, False)
    """
    mixed = len(set(architectures)) > 1
    return tuple(
        name
        for name, recipe in registry.RECIPES.items()
        if not (mixed and "one architecture" in recipe.make().gives)
    )

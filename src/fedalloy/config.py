"""Everything that defines a run, under the names of the command line; TOML in, TOML out."""

import os
import tomllib
from pathlib import Path
from typing import Any, Literal, Self

import pydantic
import tomli_w
from pydantic import Field

from fedalloy.client import Local
from fedalloy.errors import FedAlloyError, unknown
from fedalloy.expression import split

# What may differ when a run is resumed: where it runs, never what it computes.
FREE = frozenset({"engine", "workers", "timeout", "data_root"})


class Config(pydantic.BaseModel):
    """A complete, re-runnable description of one run."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid")

    method: str = Field(
        "fedavg", description="A method, such as 'fedprox(mu=0.1)', or a sum such as 'moon+prox'."
    )
    data: str = Field("digits", description="A data set: digits is built in, others lie in --data-root.")
    data_root: str | None = Field(None, description="The folder with your data sets.")
    model: str = Field("mlp", description="A model, such as 'cnn', or your own as 'package.module:factory'.")
    models: str | None = Field(
        None, description="Several architectures, dealt by client id; in place of --model."
    )
    clients: int = Field(10, ge=1, description="How many clients.")
    skew: str = Field("dirichlet:0.1", description="iid, dirichlet:A, pathological:K, domain or quantity:B.")
    test_share: float = Field(
        0.0, ge=0, lt=1, description="Share of its data that each client holds out for testing."
    )
    augment: str = Field("none", description="none, or of crop:PADDING and flip, joined by a comma.")
    participation: float = Field(
        1.0, gt=0, le=1, description="Share of the clients that take part in a round."
    )
    rounds: int = Field(20, ge=1, description="How many rounds.")
    epochs: int = Field(1, ge=1, description="Local epochs in a round.")
    steps: int | None = Field(None, ge=1, description="Local steps in a round, in place of epochs.")
    batch: int = Field(32, ge=1, description="Batch size.")
    lr: float = Field(0.05, gt=0, allow_inf_nan=False, description="Learning rate of the clients.")
    lr_decay: float = Field(
        1.0, gt=0, le=1, description="The learning rate is multiplied by this every round."
    )
    momentum: float = Field(0.0, ge=0, lt=1, description="Momentum of SGD.")
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False, description="Weight decay.")
    optimizer: Literal["sgd", "adam", "adamw"] = Field("sgd", description="The clients' optimiser.")
    seed: int = Field(0, ge=0, description="Seed of everything that is drawn.")
    eval_every: int = Field(1, ge=1, description="Evaluate every so many rounds, and after the last.")
    eval_clients: int | None = Field(None, ge=1, description="Evaluate at most so many personal models.")
    personal_on_global: bool = Field(True, description="Also try personal models on the global test set.")
    checkpoint_every: int = Field(1, ge=1, description="Write a checkpoint every so many rounds.")
    engine: Literal["inline", "workers"] = Field("workers", description="One process, or one per core.")
    workers: int | None = Field(None, ge=1, description="Worker processes; one per core by default.")
    timeout: float = Field(3600.0, gt=0, description="Seconds that a client may take.")

    @classmethod
    def of(cls, values: dict[str, Any], source: str = "") -> Self:
        """Checked values, with errors that speak the command line's language."""
        for name in values:
            if name not in cls.model_fields:
                raise unknown(f"setting{f' in {source}' if source else ''}", name, cls.model_fields)
        try:
            return cls(**{name: value for name, value in values.items() if value is not None})
        except pydantic.ValidationError as error:
            raise FedAlloyError(complaint(error)) from None

    @classmethod
    def read(cls, path: Path) -> dict[str, Any]:
        """The settings in a TOML file, not yet checked."""
        try:
            with path.open("rb") as file:
                return tomllib.load(file)
        except FileNotFoundError:
            raise FedAlloyError(f"there is no config file {path}") from None
        except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise FedAlloyError(f"cannot read config file {path}: {error}") from None

    def toml(self) -> str:
        return tomli_w.dumps({name: value for name, value in self.model_dump().items() if value is not None})

    def differences(self, other: "Config") -> list[str]:
        """Settings that change the numbers and are not the same."""
        mine, theirs = self.model_dump(), other.model_dump()
        return [name for name in mine if name not in FREE and mine[name] != theirs[name]]

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(split(self.models)) if self.models else (self.model,)

    @property
    def local(self) -> Local:
        names = ("epochs", "steps", "batch", "lr", "momentum", "weight_decay", "optimizer", "lr_decay")
        return Local(**{name: getattr(self, name) for name in names})

    @property
    def processes(self) -> int:
        return self.workers or len(os.sched_getaffinity(0))


def complaint(error: pydantic.ValidationError) -> str:
    """The first of pydantic's findings as a sentence about a flag."""
    first = error.errors()[0]
    flag = "--" + str(first["loc"][-1]).replace("_", "-")
    return f"{flag} {first['input']}: {first['msg'][0].lower()}{first['msg'][1:]}"

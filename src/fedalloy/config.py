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

    method: str = "fedavg"
    data: str = "digits"
    data_root: str | None = None
    model: str = "mlp"
    models: str | None = None  # several architectures, dealt by client id; takes the place of `model`
    clients: int = Field(10, ge=1)
    skew: str = "dirichlet:0.1"
    test_share: float = Field(0.0, ge=0, lt=1)
    augment: str = "none"
    participation: float = Field(1.0, gt=0, le=1)
    rounds: int = Field(20, ge=1)
    epochs: int = Field(1, ge=1)
    steps: int | None = Field(None, ge=1)
    batch: int = Field(32, ge=1)
    lr: float = Field(0.05, gt=0, allow_inf_nan=False)
    lr_decay: float = Field(1.0, gt=0, le=1)
    momentum: float = Field(0.0, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, allow_inf_nan=False)
    optimizer: Literal["sgd", "adam", "adamw"] = "sgd"
    seed: int = Field(0, ge=0)
    eval_every: int = Field(1, ge=1)
    eval_clients: int | None = Field(None, ge=1)
    personal_on_global: bool = True
    checkpoint_every: int = Field(1, ge=1)
    engine: Literal["inline", "workers"] = "workers"
    workers: int | None = Field(None, ge=1)
    timeout: float = Field(3600.0, gt=0)

    @classmethod
    def of(cls, values: dict[str, Any], source: str = "") -> Self:
        """Checked values, with errors that speak the command line's language."""
        for name in values:
            if name not in cls.model_fields:
                raise unknown(f"setting{f' in {source}' if source else ''}", name, cls.model_fields)
        try:
            return cls(**{name: value for name, value in values.items() if value is not None})
        except pydantic.ValidationError as error:
            first = error.errors()[0]
            flag = "--" + str(first["loc"][0]).replace("_", "-")
            raise FedAlloyError(f"{flag} {first['input']}: {_said(first['msg'])}") from None

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


def _said(message: str) -> str:
    return message[0].lower() + message[1:]

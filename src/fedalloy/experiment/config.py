"""Everything that defines a run, under the names of the command line; TOML in, TOML out."""

import dataclasses
import sys
import tomllib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pydantic
import tomli_w
from annotated_types import Interval
from pydantic import Field

from fedalloy import models
from fedalloy.core.expression import parse, split
from fedalloy.core.parameters import (
    AtLeastOne,
    Few,
    Fraction,
    Momentum,
    NonNegative,
    Positive,
    Seed,
    expected,
)
from fedalloy.core.parameters import Share01 as Share
from fedalloy.core.training import Local
from fedalloy.engines.processes import cores
from fedalloy.errors import FedAlloyError, shown, unknown

# What may differ when a run is resumed: where it runs, never what it computes.
FREE = frozenset({"engine", "workers", "timeout", "data_root", "ray_address", "gpus_per_worker"})

LONGEST = 4096  # characters of a setting: as long as a path may be
Rest = Annotated[float, Interval(ge=0, lt=1)]


class Config(pydantic.BaseModel):
    """A complete, re-runnable description of one run."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    method: str = Field(
        default="fedavg",
        description="A method, such as 'fedprox(mu=0.1)', or a sum, such as 'moon+prox'; see 'fedalloy methods'.",
    )
    data: str = Field(
        default="digits", description="A data set: digits is built in, others lie in --data-root."
    )
    data_root: str | None = Field(
        default=None, description="The folder that holds NAME.npz, NAME/ (images), NAME.csv or NAME.parquet."
    )
    limit: AtLeastOne | None = Field(
        default=None, description="Train on so many samples of the data set, drawn at random; all by default."
    )
    model: str = Field(
        default="mlp",
        description="A model, such as 'cnn', or your own as 'package.module:factory'; see 'fedalloy models'.",
    )
    models: str | None = Field(
        default=None,
        description="Several models in place of one, such as 'mlp,cnn': client k gets number k, over and over.",
    )
    clients: AtLeastOne = Field(default=10, description="How many clients.")
    skew: str = Field(
        default="dirichlet:0.1",
        description="How unlike the clients' data are: iid, dirichlet:ALPHA (small is harsh), "
        "balanced-dirichlet:ALPHA, pathological:CLASSES, quantity:BETA or domain.",
    )
    test_share: Rest = Field(
        default=0.0, description="Share of its data that each client holds out for testing."
    )
    validation: Rest = Field(
        default=0.0,
        description="Share of the training samples that is held out and scored in place of the test set.",
    )
    augment: str = Field(default="none", description="none, crop:PIXELS, flip, or 'crop:4,flip'.")
    participation: Share = Field(default=1.0, description="Share of the clients that take part in a round.")
    rounds: AtLeastOne = Field(default=20, description="How many rounds.")
    epochs: AtLeastOne = Field(default=1, description="Local epochs in a round.")
    steps: AtLeastOne | None = Field(default=None, description="Local steps in a round, in place of epochs.")
    batch: AtLeastOne = Field(default=32, description="Batch size.")
    lr: Positive = Field(default=0.05, description="Learning rate of the clients.")
    lr_decay: Share = Field(
        default=1.0, description="The learning rate is multiplied by this after every round."
    )
    momentum: Momentum = Field(default=0.0, description="Momentum of SGD.")
    weight_decay: NonNegative = Field(default=0.0, description="Weight decay.")
    optimizer: Literal["sgd", "adam", "adamw"] = Field(default="sgd", description="The clients' optimiser.")
    precision: Literal["fp32", "bf16"] = Field(
        default="fp32", description="Of the body in training; weights, losses and evaluation stay in float32."
    )
    seed: Seed = Field(default=0, description="Seed of everything that is drawn.")
    eval_every: AtLeastOne = Field(
        default=1, description="Evaluate every so many rounds, and after the last."
    )
    eval_clients: AtLeastOne | None = Field(
        default=None, description="Evaluate at most so many personal models."
    )
    personal_on_global: bool = Field(
        default=True, description="Also try personal models on the global test set."
    )
    diagnose_every: AtLeastOne | None = Field(
        default=None, description="Record diagnostics every so many rounds, such as effective ranks."
    )
    checkpoint_every: AtLeastOne = Field(default=1, description="Write a checkpoint every so many rounds.")
    engine: Literal["inline", "workers", "ray"] = Field(
        default="workers" if sys.platform == "linux" else "inline",
        description="One process, one per core (on Linux), or Ray actors.",
    )
    workers: Few | None = Field(
        default=None,
        description="Worker processes or actors; by default one per core, here or of the cluster.",
    )
    ray_address: str | None = Field(
        default=None,
        description="With --engine ray, the cluster to work on, such as HOST:6379; by default a Ray of its own, here.",
    )
    gpus_per_worker: Fraction = Field(
        default=0.0, description="With --engine ray, the share of a GPU that each actor holds and trains on."
    )
    timeout: Positive = Field(default=3600.0, description="Seconds that a client may take.")

    @pydantic.field_validator("*")
    @classmethod
    def _short(cls, value: Any) -> Any:
        if isinstance(value, str) and len(value) > LONGEST:
            raise ValueError(f"is {len(value)} characters long; write {LONGEST} at most")
        return value

    @pydantic.field_validator("models")
    @classmethod
    def _some(cls, models: str | None) -> str | None:
        if models is not None and not split(models):
            raise ValueError("names no model; write for example 'mlp,cnn'")
        return models

    @classmethod
    def of(cls, values: dict[str, Any], source: str = "") -> Self:
        """Checked values, with errors that speak the command line's language, or that of the file they stand in."""
        for name, value in values.items():
            if isinstance(value, dict):
                raise FedAlloyError(f"{source}: settings stand at the top of the file, not under [{name}]")
            if name not in cls.model_fields:
                raise FedAlloyError(
                    f"{source}{': ' if source else ''}{unknown('setting', name, cls.model_fields)}"
                )
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return cls.model_validate(given, strict=bool(source))  # in a file, "5" is no number
        except pydantic.ValidationError as error:
            raise FedAlloyError(complaint(error, source)) from None

    @classmethod
    def read(cls, path: Path) -> dict[str, Any]:
        """The settings in a TOML file, not yet checked; names may be written with hyphens, as on the command line."""
        try:
            found = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise FedAlloyError(f"there is no config file {path}") from None
        except IsADirectoryError:
            raise FedAlloyError(
                f"{path} is a folder; give a file, such as --config {path}/config.toml"
            ) from None
        except UnicodeDecodeError:
            raise FedAlloyError(
                f"{path} is not a text file; a config holds lines such as rounds = 20"
            ) from None
        except (ValueError, RecursionError) as error:  # numbers of 5000 digits, brackets in brackets
            raise FedAlloyError(
                f"{path} is not valid TOML: {error}; a config holds lines such as rounds = 20"
            ) from None
        return {name.replace("-", "_"): value for name, value in found.items()}

    def toml(self) -> str:
        return tomli_w.dumps({name: value for name, value in self.model_dump().items() if value is not None})

    def typed(self, *but: str) -> list[str]:
        """What to type for the settings that are not the default, but for these."""
        return words(self.model_dump(exclude_defaults=True, exclude=set(but)))

    def spelled(self) -> Self:
        """The same with every model under its one name: new weights are drawn by that, however it was typed."""
        forms = {name: _form(name, getattr(self, name)) for name in ("model", "models")}
        return self.model_copy(
            update={name: form for name, form in forms.items() if form != getattr(self, name)}
        )

    def like(self, other: "Config") -> Self:
        """The same with the spelling of a run that has begun: its weights are drawn by the names it has."""
        both = {name: (getattr(self, name), getattr(other, name)) for name in ("method", "model", "models")}
        return self.model_copy(
            update={name: b for name, (a, b) in both.items() if a != b and _same(name, a, b)}
        )

    def differences(self, other: "Config") -> list[str]:
        """Settings that change the numbers and are not the same, as flags."""
        mine, theirs = self.model_dump(), other.model_dump()
        changed = [name for name in mine if name not in FREE and mine[name] != theirs[name]]
        return [f"{flag(name)} {mine[name]} instead of {theirs[name]}" for name in changed]

    @property
    def architectures(self) -> tuple[str, ...]:
        return tuple(split(self.models)) if self.models else (self.model,)

    @property
    def dealing(self) -> dict[str, Any]:
        """The settings that make the federation: the arguments of `federate`."""
        names = (
            "data",
            "clients",
            "skew",
            "seed",
            "test_share",
            "data_root",
            "augment",
            "limit",
            "validation",
        )
        return {name: getattr(self, name) for name in names}

    @property
    def local(self) -> Local:
        return Local(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Local)})

    @property
    def processes(self) -> int:
        return self.workers or cores()


def _form(name: str, text: str | None) -> Any:
    """What a method or model that was typed stands for, whatever its spelling."""
    if not text:
        return text
    if name == "method":
        return parse(text)
    return ",".join(map(models.spelled, split(text))) if name == "models" else models.spelled(text)


def _same(name: str, one: str | None, other: str | None) -> bool:
    try:
        return bool(_form(name, one) == _form(name, other))
    except FedAlloyError:  # one of them names nothing: whoever uses it says so
        return False


def flag(name: str) -> str:
    """A setting as it is typed."""
    return "--" + name.replace("_", "-")


def words(settings: Mapping[str, Any]) -> list[str]:
    """Settings as they are typed.

    >>> words({"lr": 0.1, "personal_on_global": False})
    ['--lr', '0.1', '--no-personal-on-global']
    """
    found = []
    for name, value in settings.items():
        if isinstance(value, bool):
            found.append(flag(name if value else f"no_{name}"))
        elif str(value).startswith("-"):  # it would be read as a flag
            found.append(f"{flag(name)}={value}")
        else:
            found += [flag(name), str(value)]
    return found


def complaint(
    error: pydantic.ValidationError, source: str = "", kind: type[pydantic.BaseModel] = Config
) -> str:
    """The first of pydantic's findings as a sentence about a flag, or about a line of a file."""
    first = error.errors()[0]
    name = str(first["loc"][0])
    subject = f"{source}: {name}" if source else flag(name)
    if own := first.get("ctx", {}).get("error"):
        return f"{subject} {own}"
    wanted = expected(typing.get_type_hints(kind, include_extras=True)[name]).removesuffix(", or none")
    default = kind.model_fields[name].default
    example = "" if default in (None, "") else f"; for example {default}"
    given = shown(first["input"], quoted=bool(source)) or "nothing"
    return f"{subject} must be {wanted}, not {given}{example}"

"""What a deployment is agreed on besides the config of a run: whose data, how long to wait, how many must be there."""

import math
from typing import Annotated, Any, Literal

import pydantic
from annotated_types import Interval
from pydantic import Field

from fedalloy.core.expression import split
from fedalloy.core.parameters import MOST, AtLeastOne, Positive
from fedalloy.errors import FedAlloyError, unknown
from fedalloy.experiment.config import Config, complaint

Settings = dict[str, Any]
Times = Annotated[float, Interval(ge=1, le=MOST)]


class Terms(pydantic.BaseModel):
    """The settings of a deployment that are not those of a run."""

    model_config = pydantic.ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sites: Literal["own", "dealt"] = Field(
        default="own",
        description="own: each site holds data of its own; dealt: each takes its share of one data set, "
        "as a simulation would.",
    )
    class_names: str = Field(
        default="",
        description="The classes of the federation, such as 'cat,dog'; needed where sites hold their own data.",
    )
    inputs: str = Field(
        default="",
        description="What a sample looks like, such as image:3x32x32, vector:30 or tokens:40:5000; "
        "without it, what more than half of all sites say.",
    )
    test_data: str = Field(
        default="",
        description="A data set in the server's own data root that global models are tried on; "
        "without one, sites try them.",
    )
    preprocessing: str = Field(
        default="",
        description="A file with mean, deviation or vocabulary for all sites, written by 'fedalloy preprocessing'; "
        "without one, sites send counts, sums and squares before round 1.",
    )
    mean: str = Field(
        default="",
        description="In place of a file: the mean of each channel (of pixels in [0, 1]) or column, such as '0.13,0.2'.",
    )
    std: str = Field(default="", description="The standard deviations that go with `mean`.")
    run_folder: str = Field(
        default="run",
        description="Where the server keeps checkpoint, history and report; in its own folder server/.",
    )
    join_limit: Positive = Field(default=300.0, description="Seconds in which enough sites must have joined.")
    round_limit: Positive = Field(
        default=600.0, description="Seconds after which a round goes on without late sites."
    )
    least_sites: AtLeastOne | None = Field(
        default=None, description="Start when so many sites are there; all of them by default."
    )
    least_replies: AtLeastOne = Field(default=1, description="A round with fewer usable replies is an error.")

    most_norm: Times = Field(
        default=100.0,
        description="A reply that is more than so many times as long as is usual in its round is refused.",
    )
    masked: bool = Field(
        default=False,
        description="Secure aggregation (SecAgg+): the server sees sums over sites, never one's update.",
    )

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(split(self.class_names))

    @property
    def given_mean(self) -> tuple[float, ...]:
        return _numbers("mean", self.mean)

    @property
    def given_std(self) -> tuple[float, ...]:
        return _numbers("std", self.std)

    @property
    def computed(self) -> bool:
        """Whether sites send statistics: nothing was given."""
        return self.sites == "own" and not (self.preprocessing or self.mean)


def read_settings(found: Settings) -> tuple[Config, Terms]:
    """A run's config and a deployment's terms, which stand together in a Flower app's configuration."""
    values = {name.replace("-", "_"): value for name, value in found.items()}
    known = Terms.model_fields
    for name in values:
        if name not in known and name not in Config.model_fields:
            raise FedAlloyError(str(unknown("setting", name, [*known, *Config.model_fields])))
    config = Config.of({name: value for name, value in values.items() if name not in known})
    try:
        terms = Terms.model_validate({name: value for name, value in values.items() if name in known})
    except pydantic.ValidationError as error:
        raise FedAlloyError(complaint(error, kind=Terms)) from None
    if terms.sites == "own" and not terms.class_names:
        raise FedAlloyError(
            "sites with data of their own must agree on the classes: set class-names = 'a,b,c'"
        )
    _check_given(terms)
    return config, terms


def _check_given(terms: Terms) -> None:
    """Statistics are given whole, once, and where they are used."""
    mean, std = terms.given_mean, terms.given_std
    if len(mean) != len(std) or any(value <= 0 for value in std):
        raise FedAlloyError("--mean and --std go together: as many numbers, and deviations above 0")
    if mean and terms.preprocessing:
        raise FedAlloyError("--preprocessing holds mean and deviation already; leave --mean and --std away")
    if terms.sites == "dealt" and (mean or terms.preprocessing):
        raise FedAlloyError(
            "a data set that is dealt has its own mean and deviation; leave --preprocessing, --mean, --std away"
        )


def _numbers(name: str, text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(word) for word in split(text))
    except ValueError:
        found = (math.nan,)
    if not all(map(math.isfinite, found)):
        raise FedAlloyError(
            f"--{name} {text[:40]!r} holds something else than numbers; type such as '0.13,0.2'"
        )
    return found

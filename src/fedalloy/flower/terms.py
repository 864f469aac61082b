"""What a deployment is agreed on besides the config of a run: whose data, how long to wait, how many must be there."""

from typing import Any, Literal

import pydantic
from pydantic import Field

from fedalloy.config import Config
from fedalloy.errors import FedAlloyError, unknown
from fedalloy.expression import split
from fedalloy.ranges import AtLeastOne, Positive

Settings = dict[str, Any]


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
    test_data: str = Field(
        default="",
        description="A data set in the server's own data root that global models are tried on; "
        "without one, sites try them.",
    )
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

    masked: bool = Field(
        default=False,
        description="Secure aggregation (SecAgg+): the server sees sums over sites, never one's update.",
    )

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(split(self.class_names))


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
        first = error.errors()[0]
        raise FedAlloyError(f"{first['loc'][0]}: {first['msg']}, not {first['input']!r}") from None
    if terms.sites == "own" and not terms.class_names:
        raise FedAlloyError(
            "sites with data of their own must agree on the classes: set class-names = 'a,b,c'"
        )
    return config, terms

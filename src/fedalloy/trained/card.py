"""What a model file says of its model: where it comes from, how it is built, what it reads."""

import json
from dataclasses import asdict, dataclass
from typing import Any, Literal, Self, cast, get_args

from fedalloy.core.expression import LONGEST, foreign
from fedalloy.data.preprocessing import Preprocessing
from fedalloy.errors import FedAlloyError

FORMAT = "fedalloy model 1"
MOST_BYTES = 32 * 1024 * 1024  # of JSON, vocabulary included
MOST_MODELS = 4096  # names of architectures

Which = Literal["global", "aux", "personal"]
Head = Literal["own", "prototypes"]


@dataclass(frozen=True)
class Card:
    """The origin and the architecture of a model; `models`, `seed` and `rounds` are those of its run."""

    method: str
    data: str
    model: str
    models: tuple[str, ...]
    seed: int
    rounds: int
    round: int  # after which the model was taken
    which: Which
    client: int | None  # whose model it is, if it is personal
    head: Head  # how classes are told apart: by the net's own head, or by the nearest prototype
    preprocessing: Preprocessing
    fedalloy: str  # the version that wrote it
    weights_sha256: str = ""

    @property
    def class_names(self) -> tuple[str, ...]:
        """The classes, by number where they have no names."""
        return self.preprocessing.class_names or tuple(map(str, range(self.preprocessing.classes)))

    @property
    def facts(self) -> dict[str, Any]:
        """Plain values, for JSON."""
        return {
            "format": FORMAT,
            **asdict(self),
            "models": list(self.models),
            "preprocessing": json.loads(self.preprocessing.to_json()),
        }

    @property
    def code(self) -> list[str]:
        """The names of code outside of FedAlloy that is needed to build the net."""
        return foreign([self.method, self.model, *self.models])

    @classmethod
    def read(cls, facts: object, source: str) -> Self:
        """The inverse of `facts`; anything else is refused."""
        if not isinstance(facts, dict) or facts.get("format") != FORMAT:
            raise FedAlloyError(
                f"{source} is no model of FedAlloy's ({FORMAT!r}); write one with 'fedalloy export'"
            )
        given = {name: value for name, value in facts.items() if name != "format"}
        if given.keys() != cls.__dataclass_fields__.keys():
            wrong = sorted(given.keys() ^ cls.__dataclass_fields__.keys())[0]
            raise FedAlloyError(f"{source}: {wrong[:40]!r} is missing or unknown")
        text = [given[name] for name in ("method", "data", "model", "fedalloy", "weights_sha256")]
        models = given["models"] if isinstance(given["models"], list) else [None]
        counts = [given[name] for name in ("seed", "rounds", "round")]
        client = 0 if given["client"] is None else given["client"]
        if not (
            all(type(one) is str and len(one) <= LONGEST for one in (*text, *models))
            and all(type(one) is int and 0 <= one < 2**63 for one in (*counts, client))
            and given["which"] in get_args(Which)
            and given["head"] in get_args(Head)
            and 1 <= len(models) <= MOST_MODELS
        ):
            raise FedAlloyError(f"{source}: what it says of its model makes no sense")
        agreed = Preprocessing.from_json(json.dumps(given["preprocessing"]), source)
        values = cast(dict[str, Any], {**given, "models": tuple(models), "preprocessing": agreed})
        return cls(**values)

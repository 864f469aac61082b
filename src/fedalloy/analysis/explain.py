"""What a method is made of, what it keeps, what crosses the wire and what that costs: read off the method itself."""

import inspect
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from fedalloy.analysis.papers import page
from fedalloy.core import registry
from fedalloy.core.alloy import CLAIMED_HOOKS, Alloy, Mechanism
from fedalloy.core.expression import Foreign, parse
from fedalloy.core.imports import Imports
from fedalloy.core.measure import samples
from fedalloy.core.net import Inputs
from fedalloy.core.parameters import expected, hints
from fedalloy.core.training import Local
from fedalloy.core.views import ClientData, Info
from fedalloy.core.wire import Slot, Spec
from fedalloy.data import Prepare
from fedalloy.errors import FedAlloyWarning
from fedalloy.models import size_of
from fedalloy.round.client import client_round
from fedalloy.round.replica import Replica
from fedalloy.round.server import Server

MOMENTS = {
    "build": "changes the model",
    "init_client": "prepares a new client",
    "install": "installs what was received",
    "before_training": "begins the round",
    "phases": "cuts up local training",
    "task": "replaces the task loss",
    "loss": "adds a loss term",
    "gradient": "wraps the gradient",
    "after_training": "has the last word on the model",
    "upload": "ends local training",
    "seal": "has the last word on what leaves",
    "answer": "asks clients about the new global model",
    "adapt": "adapts before evaluation",
    "predict": "predicts",
    "weigh": "weighs the replies",
    "on_reply": "looks at each reply",
    "folded": "has the last word on what was folded",
    "aggregate": "aggregates",
    "account": "adds to the history",
    "eval_models": "chooses what is evaluated",
}


ONCE = "once, at the end"


@dataclass(frozen=True)
class Explanation:
    """A method, taken apart for one model and one kind of input."""

    method: Alloy
    recipe: registry.Recipe | None
    model: str
    inputs: Inputs
    imports: Imports | None = None

    def facts(self) -> dict[str, Any]:
        """Everything as plain data."""
        replica = Replica(self.method, self.model, self.inputs, seed=0, imports=self.imports)
        server_state, client_state = _states(self.method, replica)
        down, up = replica.specs("down"), replica.specs("up")
        wire = _wire("down", down) + _wire("up", up) + _asked(self.method, replica)
        if not self.method.by_size:
            wire = [{**row, "reduce": "uniform"} if row["reduce"] == "mean" else row for row in wire]
        if self.method.weighed:
            wire.append({"direction": "up", "slot": "samples", "shape": [], "reduce": "all", "bytes": 8})
        size = size_of(self.model, self.inputs, self.imports)
        return {
            "method": self.method.expression,
            "title": self.method.title,
            "paper": self.recipe.paper if self.recipe else None,
            "family": self.recipe.family if self.recipe else None,
            "summary": _summary(self.recipe),
            "parameters": parameters_of(self.recipe) if self.recipe else [],
            "notes": list(page(self.recipe.title).notes) if self.recipe else [],
            "parts": [_part(piece) for piece in self.method],
            "algorithm": _algorithm(self.method, down, up),
            "gradient_order": [piece.label for piece in self.method.with_hook("gradient")],
            "wire": wire,
            "bytes_down": _total(wire, "down"),
            "bytes_up": _total(wire, "up"),
            "server_state": server_state,
            "client_state": client_state,
            "model": {
                "name": self.model,
                "parameters": len(replica.initial),
                "buffers": len(replica.initial_buffers),
                "flops_per_sample": size.flops,
            },
        }


def explain(text: str, model: str, inputs: Inputs, imports: Imports | None = None) -> Explanation:
    """Take a method apart."""
    method, terms = registry.make(text, imports), parse(text)
    name = terms[0].name if len(terms) == 1 and not isinstance(terms[0], Foreign) else ""
    return Explanation(method, registry.RECIPES.get(name), model, inputs, imports)


def parameters_of(recipe: registry.Recipe) -> list[dict[str, Any]]:
    """Name, default and range of every hyper-parameter, what the paper takes and what it does."""
    known = page(recipe.title)
    return [
        {
            "name": name,
            "default": recipe.parameters[name].default,
            "range": expected(hint),
            "paper": known.values.get(name, ""),
            "does": known.meanings.get(name, ""),
        }
        for name, hint in hints(recipe.make).items()
    ]


def recipes() -> list[dict[str, Any]]:
    """Every method there is."""
    return [
        {
            "name": recipe.name,
            "title": recipe.title,
            "family": recipe.family,
            "paper": recipe.paper,
            "summary": _summary(recipe).partition("\n")[0].removeprefix(f"{recipe.title}: "),
            "parameters": parameters_of(recipe),
            **traits(recipe.make()),
        }
        for recipe in registry.RECIPES.values()
    ]


def traits(method: Alloy) -> dict[str, Any]:
    """What a method asks of a federation, what it reveals and what it sends, as multiples of the model."""
    inputs = Inputs("image", (1, 8, 8), classes=10)
    with warnings.catch_warnings(record=True) as advice:
        warnings.simplefilter("always", FedAlloyWarning)
        replica = Replica(method, "mlp", inputs, seed=0)
    model = 4 * size_of("mlp", inputs).parameters
    seen = [*replica.specs("up").values(), *replica.specs("query").values()]
    return {
        "architectures": "one" if "one architecture" in method.gives else "any",
        "models": "personal" if method.personal else "global",
        "private_state": any(piece.implements("init_client") for piece in method) or bool(replica.own()),
        "reveals": list(dict.fromkeys(_revealed(spec) for spec in seen if spec.bytes)),
        "advice": [str(note.message) for note in advice],
        **{way: count / model for way, count in bytes_per_round(method, replica).items()},
    }


def bytes_per_round(method: Alloy, replica: Replica) -> dict[str, int]:
    """What crosses the wire for one client in one round, questions of every round included."""
    rows = [
        *_wire("down", replica.specs("down")),
        *_wire("up", replica.specs("up")),
        *_asked(method, replica),
    ]
    return {way: _total(rows, way) for way in ("down", "up")}


def _total(rows: Iterable[dict[str, Any]], direction: str) -> int:
    return sum(row["bytes"] for row in rows if row["direction"] == direction and row["reduce"] != ONCE)


def _revealed(spec: Spec) -> str:
    """What a server learns about a client from one slot, beyond the sum of all."""
    match spec.slot.shape:
        case ("classes",):
            return "label counts"
        case ("held" | "classes", "features" | "embedding"):
            return "class means of features"
        case ("held" | "classes", "features", "features"):
            return "class covariances of features"
        case ("held" | "classes", "classes"):
            return "class means of predictions"
        case ():
            return "a number"
        case _:
            return "weights"


def parts() -> list[dict[str, str]]:
    """Every part there is."""
    return [{"name": name, "says": _says(kind)} for name, kind in sorted(registry.parts().items())]


def _summary(recipe: registry.Recipe | None) -> str:
    """The page of a paper's file."""
    source = inspect.getmodule(inspect.unwrap(recipe.make)) if recipe else None
    return (inspect.getdoc(source) or "") if source else ""


def _says(kind: object) -> str:
    return (inspect.getdoc(kind) or "").split("\n\n")[0].replace("\n", " ")


def _algorithm(method: Alloy, down: Iterable[str], up: Iterable[str]) -> list[tuple[str, str]]:
    """One round, moment by moment: who does something, in the order in which it happens."""

    def named(*hooks: str) -> list[str]:
        return [piece.label for piece in method if any(piece.implements(hook) for hook in hooks)]

    loss = " + ".join([*(named("task") or ["cross-entropy"]), *named("loss")])
    wrappers = [piece.label for piece in method.with_hook("gradient")]
    moments = [
        ("once: change the model", named("build")),
        ("once: prepare a new client", named("init_client")),
        ("the server sends", list(down)),
        ("the client installs", named("install")),
        ("the client begins", named("before_training")),
        ("local training in phases", named("phases")),
        ("each step: loss", [loss]),
        ("each step: gradient", [" → ".join(["loss", *wrappers, "optimiser"])]),
        ("the client ends", named("upload")),
        ("the client seals", named("seal")),
        ("the client sends", list(up)),
        ("the server weighs", named("weigh")),
        ("the server aggregates", named("on_reply", "folded", "aggregate")),
        ("the server asks about the new model", [piece.label for piece in method.asking(last=False)]),
        ("after the last round: the server asks", [piece.label for piece in method if piece.asks_at_end]),
        ("evaluation", named("adapt", "predict", "eval_models")),
    ]
    return [(moment, ", ".join(who)) for moment, who in moments if who]


def _part(piece: Mechanism) -> dict[str, Any]:
    return {
        "name": piece.label,
        "settings": {f.name: _plain(getattr(piece, f.name)) for f in fields(piece)},
        "does": [said for hook, said in MOMENTS.items() if piece.implements(hook)],
        "claims": sorted(
            {*piece.claims, *(what for hook, what in CLAIMED_HOOKS.items() if piece.implements(hook))}
        ),
        "needs": sorted(piece.needs),
        "says": _says(piece),
    }


def _wire(direction: str, specs: dict[str, Spec]) -> list[dict[str, Any]]:
    return [
        {
            "direction": direction,
            "slot": key,
            "shape": list(spec.shape),
            "reduce": spec.slot.reduce if direction == "up" else "",
            "bytes": spec.bytes,
        }
        for key, spec in specs.items()
    ]


def _asked(method: Alloy, replica: Replica) -> list[dict[str, Any]]:
    """The new global model and what clients tell of it, where a mechanism asks."""
    rows, told = [], replica.specs("query")
    for piece in method.asking(last=True):
        model = {"weights": replica.initial, "buffers": replica.initial_buffers}
        down = {f"{piece.label}.{name}": Spec(Slot(), tuple(value.shape)) for name, value in model.items()}
        up = {key: told[key] for key in (f"{piece.label}.{name}" for name in piece.query)}
        asked = _wire("down", down) + _wire("up", up)
        rows += [{**row, "reduce": ONCE} for row in asked] if piece.asks_at_end else asked
    return rows


def _states(method: Alloy, replica: Replica) -> tuple[dict[str, int], dict[str, int]]:
    """Bytes that server and client keep between rounds, seen in a rehearsal on two made-up samples."""
    inputs = replica.inputs
    stored = (
        samples(inputs, 2) if inputs.kind != "image" else torch.zeros(2, *inputs.shape, dtype=torch.uint8)
    )
    width = inputs.shape[0] if inputs.kind != "tokens" else 0
    prepare = Prepare(inputs.kind, (0.0,) * width, (1.0,) * width)
    y = torch.arange(2) % inputs.classes
    data = ClientData(stored, y, stored[:0], y[:0], inputs.classes, prepare)
    info, local = Info(1, 2), Local(batch=2)
    server = Server(method, replica, info, local, seed=0)
    server.round = 1
    _, keep = client_round(method, replica, data, info, local, {}, server.send(0), seed=0)
    return _sizes(server.state()), _sizes(keep)


def _sizes(items: dict[str, Tensor]) -> dict[str, int]:
    return {key: value.numel() * value.element_size() for key, value in items.items()}


def _plain(value: Any) -> Any:
    return str(value) if isinstance(value, Mechanism) else value

"""A card per method, read off the registry, the paper index and the method itself."""

import re
import warnings
from typing import Any

from fedalloy.analysis.explain import explain, traits
from fedalloy.analysis.papers import page
from fedalloy.core import registry
from fedalloy.core.alloy import Alloy
from fedalloy.core.net import Inputs
from fedalloy.errors import FedAlloyError
from outside import ROOT

IMAGES = Inputs("image", (1, 8, 8), classes=10)
FAMILIES = {
    "floor": "Baseline without communication",
    "classic": "Classics",
    "representation": "One global model, better features",
    "calibration": "One global model, calibrated classifier",
    "optimisation": "One global model, other optimisation",
    "personal": "Personal models",
    "different models": "A different model per client",
    "communication": "Fewer bytes",
}
INTRODUCTION = """# A card per method

Each card says in plain words what a method does, what it sends, what clients keep, its parameters, what to type and
what it combines with. Cards are generated from the program itself. [The paper index](../papers.md) says for each method
what differs from its paper and from other code, and why. Sizes are those of one client in one round, as multiples of
the model (`mlp` on 8×8 images).

In a terminal: `fedalloy methods` lists them, `fedalloy explain METHOD` takes one apart for your model and data.
"""


def pages() -> dict[str, str]:
    """The index and every card, by their places on the site."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        facts = {name: _facts(name) for name in registry.RECIPES}
    cards = {f"methods/{name}.md": card(name, facts[name]) for name in facts}
    return {"methods/index.md": _index(facts), **cards}


def idea(title: str) -> str:
    """What the paper index says of a method in plain words."""
    opening = "In plain words. "
    return next((note.removeprefix(opening) for note in page(title).notes if note.startswith(opening)), "")


def card(name: str, facts: dict[str, Any]) -> str:
    """One method on one page."""
    recipe = registry.RECIPES[name]
    example = _example(facts)
    rows = {
        "paper": f"{recipe.paper} ([what differs](../papers.md#{_anchor(recipe.title)}))",
        "models": _models(facts),
        "expression": f"`{example}`",
        "defined in": _file(name),
    }
    return "\n\n".join(
        [
            f"# {recipe.title}",
            idea(recipe.title),
            "\n|---|---|\n".join(
                [
                    "| family | " + FAMILIES[recipe.family] + " |",
                    "\n".join(f"| {key} | {value} |" for key, value in rows.items()),
                ]
            ),
            f'```sh\nfedalloy explain "{example}"\nfedalloy run --method "{example}"\n```',
            "## Parameters",
            _parameters(facts),
            "## What is sent",
            _wire(facts),
            f"The server learns from a client: {', '.join(facts['reveals']) or 'nothing'}.",
            "## What clients keep",
            _kept(facts),
            "## Parts",
            "\n".join(f"- `{part['name']}`: {_escaped(part['says'])}" for part in facts["parts"]),
            "## Combines with",
            _combinations(name),
        ]
    )


def _facts(name: str) -> dict[str, Any]:
    found = explain(name, "mlp", IMAGES)
    return {**found.facts(), **traits(found.method)}


def _index(facts: dict[str, dict[str, Any]]) -> str:
    text = [INTRODUCTION]
    for family, title in FAMILIES.items():
        rows = [
            f"| [{one['title']}]({name}.md) | {idea(one['title'])} | {one['models']} "
            f"| {one['down']:.3g} / {one['up']:.3g} |"
            for name, one in facts.items()
            if one["family"] == family
        ]
        text += [
            f"## {title}",
            "| method | idea | models | down / up |\n|---|---|---|---|\n" + "\n".join(rows),
        ]
    return "\n\n".join(text)


def _models(facts: dict[str, Any]) -> str:
    kind = "a personal model for each client" if facts["models"] == "personal" else "one global model"
    return f"{kind}; {'one architecture for all' if facts['architectures'] == 'one' else 'architectures may differ'}"


def _example(facts: dict[str, Any]) -> str:
    """The method with its first numeric parameter spelled out, so that a reader sees how to set one."""
    numbers = [
        one
        for one in facts["parameters"]
        if isinstance(one["default"], int | float) and not isinstance(one["default"], bool)
    ]
    shown = f"({numbers[0]['name']}={numbers[0]['default']})" if numbers else ""
    return f"{facts['method']}{shown}"


def _parameters(facts: dict[str, Any]) -> str:
    if not facts["parameters"]:
        return "None."
    rows = [
        f"| `{one['name']}` | `{_typed(one['default'])}` | {one['range']} | {one['paper']} | {one['does']} |"
        for one in facts["parameters"]
    ]
    head = "| name | default | takes | in the paper | what it does |\n|---|---|---|---|---|\n"
    return head + "\n".join(_escaped(row) for row in rows)


def _typed(value: object) -> str:
    return str(value).lower() if value is None or isinstance(value, bool) else str(value)


def _wire(facts: dict[str, Any]) -> str:
    model = 4 * facts["model"]["parameters"]
    rows = [
        f"| {'to the client' if one['direction'] == 'down' else 'to the server'} | `{one['slot']}` "
        f"| {one['reduce'] or ''} | {one['bytes'] / model:.3g} |"
        for one in facts["wire"]
        if one["bytes"]
    ]
    if not rows:
        return "Nothing."
    return "| direction | item | how the server combines it | size |\n|---|---|---|---|\n" + "\n".join(rows)


def _kept(facts: dict[str, Any]) -> str:
    kept = {key: size for key, size in facts["client_state"].items() if size}
    if not kept:
        return "Nothing: a client may be a different one in every round."
    model = 4 * facts["model"]["parameters"]
    return "\n".join(f"- `{key}`, {size / model:.3g} of the model" for key, size in kept.items())


def _combinations(name: str) -> str:
    """The sums that the program accepts."""
    methods = [other for other in registry.RECIPES if other != name and accepted(f"{name}+{other}")]
    own = {type(piece).__name__.lower() for piece in registry.make(name)}
    parts = [part for part in sorted(registry.parts()) if part not in own and accepted(f"{name}+{part}")]
    listed = [
        f"- methods: {', '.join(f'[{other}]({other}.md)' for other in methods) or 'none'}",
        f"- parts: {', '.join(f'`{part}`' for part in parts) or 'none'}",
    ]
    why = f'`fedalloy explain "{name}+PART"` says of any other sum why it is refused.'
    return (
        f"Type `{name}+NAME`. With default parameters these sums are accepted:\n\n"
        + "\n".join(listed)
        + f"\n\n{why}"
    )


def accepted(text: str) -> bool:
    """Whether a sum of methods and parts is a method."""
    try:
        made = registry.make(text)
    except FedAlloyError:
        return False
    return isinstance(made, Alloy)


def _file(name: str) -> str:
    module = registry.RECIPES[name].make.__module__
    path = f"src/{module.replace('.', '/')}.py"
    assert (ROOT / path).is_file(), path
    return f"[{path}](../source/{path}.md)"


def _anchor(title: str) -> str:
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def _escaped(text: str) -> str:
    """Formulas as they are: no emphasis between two stars or underscores, no HTML."""
    return re.sub(r"(?<!`)([*_<])(?![^`]*`)", r"\\\1", text) if "`" not in text else text.replace("<", "&lt;")

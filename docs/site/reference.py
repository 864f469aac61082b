"""The Python API: everything that `import fedalloy as fa` offers, by what a reader wants to do."""

import inspect

import fedalloy

GROUPS = {
    "Run": ("federate", "train", "resume", "Federation", "Result", "Config"),
    "Compare and look": ("compare", "tune", "explain", "partition", "diagnose", "report", "reproduce"),
    "Data and partitions": (
        "Dataset",
        "IID",
        "Dirichlet",
        "BalancedDirichlet",
        "Pathological",
        "Quantity",
        "Domain",
    ),
    "Use a trained model": ("Model", "export", "load_model", "predict"),
    "Write a method": ("Mechanism", "Box", "State", "Slot", "Phase", "Alloy", "alloy", "recipe", "method"),
    "Errors": ("FedAlloyError", "AlloyConflict"),
}
INTRODUCTION = """# Python API

```python
import fedalloy as fa
```

Everything on this page is an attribute of `fa`. [The glossary](glossary.md) explains the words, and
[the design page](design.md) says when each hook of a mechanism is called. `fa.methods` holds one function per method,
with its parameters as keywords, such as `fa.methods.fedprox(mu=0.1)`; [the cards](methods/index.md) list them.
"""


def pages() -> dict[str, str]:
    """The reference as one page, grouped; what no group names comes last."""
    named = {name for names in GROUPS.values() for name in names}
    offered = [name for name in fedalloy.__all__ if not inspect.ismodule(getattr(fedalloy, name))]
    groups = {**GROUPS, "More": tuple(name for name in offered if name not in named)}
    text = [INTRODUCTION]
    for title, names in groups.items():
        listed = [name for name in names if name in offered]
        text += [f"## {title}", *(_entry(name) for name in listed)] if listed else []
    return {"reference.md": "\n\n".join(text) + "\n"}


def _entry(name: str) -> str:
    """Documented where it is defined: the public module may import names only when they are used."""
    value = getattr(fedalloy, name)
    if not hasattr(value, "__qualname__"):
        return f"### `{name}`\n\n`{type(value).__name__}`"
    members = "\n      members: false" if name == "Config" else ""
    return f"::: {value.__module__}.{value.__qualname__}\n    options:\n      heading: fa.{name}{members}"

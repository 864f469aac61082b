"""Names with parameters, as users type them: `fedprox(mu=0.1)`, `moon+dw(mu=1)`, `mlp(hidden=64)`.

Parsed, never evaluated: a name, optional keyword parameters that are plain literals, joined by `+`.
"""

import ast
import json
import re
from dataclasses import dataclass, field

from fedalloy.errors import FedAlloyError

Literal = bool | int | float | str | None | tuple[int | float | str, ...]

_WORDS: dict[str, Literal] = {"true": True, "false": False, "none": None}


@dataclass(frozen=True)
class Term:
    """One `name(key=value, ...)`; the name is lower case without hyphens and underscores."""

    name: str
    parameters: dict[str, Literal] = field(default_factory=dict)

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={_show(value)}" for key, value in self.parameters.items())
        return f"{self.name}({inside})" if inside else self.name


def parse(text: str) -> list[Term]:
    """The terms of an expression, in order.

    >>> parse("Per-FedAvg(alpha=1e-2, variant=hf) + dw")
    [Term(name='perfedavg', parameters={'alpha': 0.01, 'variant': 'hf'}), Term(name='dw', parameters={})]
    """
    joined = re.sub(
        r"(?<=\w)-(?=[A-Za-z])(?![^(]*\))", "", text.strip()
    )  # Per-FedAvg is one name; 1e-2 stays
    try:
        return [_term(node, text) for node in _summands(ast.parse(joined, mode="eval").body)]
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise error if isinstance(error, FedAlloyError) else _malformed(text) from None


def single(text: str) -> Term:
    """The one term of an expression that may not be a sum."""
    terms = parse(text)
    if len(terms) != 1:
        raise FedAlloyError(f"{text!r} names {len(terms)} things where one is expected")
    return terms[0]


def split(text: str, separator: str = ",") -> list[str]:
    """Cut at separators outside parentheses.

    >>> split("resnet18, mlp(hidden=64, depth=2)")
    ['resnet18', 'mlp(hidden=64, depth=2)']
    """
    pieces, depth = [""], 0
    for letter in text:
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == separator and depth <= 0:
            pieces.append("")
        else:
            pieces[-1] += letter
    return [piece.strip() for piece in pieces if piece.strip()]


def slug(text: str) -> str:
    """A name for a file or folder that still says what was typed.

    >>> slug("FedProx(mu=0.1) + dw")
    'fedprox-mu-0.1-dw'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:80]


def _summands(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        return [*_summands(node.left), *_summands(node.right)]
    return [node]


def _term(node: ast.expr, text: str) -> Term:
    if isinstance(node, ast.Name):
        return Term(_plain(node.id))
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and not node.args:
        parameters: dict[str, Literal] = {}
        for keyword in node.keywords:
            if keyword.arg is None or keyword.arg in parameters:
                raise _malformed(text)
            parameters[keyword.arg] = _literal(keyword.value, text)
        return Term(_plain(node.func.id), parameters)
    raise _malformed(text)


def _literal(node: ast.expr, text: str) -> Literal:
    if isinstance(node, ast.Name):  # variant=hf needs no quotes
        return _WORDS.get(node.id.lower(), node.id)
    if isinstance(node, ast.Constant) and isinstance(node.value, bool | int | float | str | None):
        return node.value
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
        value = _literal(node.operand, text)
        if isinstance(value, int | float) and not isinstance(value, bool):
            return -value
    if isinstance(node, ast.Tuple | ast.List):
        items = [_literal(item, text) for item in node.elts]
        if all(isinstance(item, int | float | str) for item in items):
            return tuple(items)  # type: ignore[arg-type]
    raise _malformed(text)


def _plain(name: str) -> str:
    return name.lower().replace("_", "").replace("-", "")


def _show(value: Literal) -> str:
    return json.dumps(value) if isinstance(value, str) else repr(value)


def _malformed(text: str) -> FedAlloyError:
    return FedAlloyError(
        f"cannot read {text!r}; write a name, or a name with parameters such as 'fedprox(mu=0.1)', "
        "joined by '+' as in 'moon+dw(mu=1)'"
    )

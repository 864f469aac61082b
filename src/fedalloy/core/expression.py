"""Names with parameters, as users type them: `fedprox(mu=0.1)`, `moon+dw(mu=1)`, `mlp(hidden=64)`, `my.module:net`.

Parsed, never evaluated, and nothing is imported: a name, optional keyword parameters that are plain literals, joined by
`+`. What a foreign name such as `my.module:net` stands for, `fedalloy.core.imports` finds, for those who may.
"""

import ast
import json
import re
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from fedalloy.errors import FedAlloyError, shown

Literal = bool | int | float | str | None | tuple[int | float | str, ...]

LONGEST = 2000  # letters of an expression: what a parser does with more may take long
_WORDS: dict[str, Literal] = {"true": True, "false": False, "none": None}
_FOREIGN = re.compile(r"\s*([a-z_]\w*(?:\.[a-z_]\w*)*)\s*:\s*([a-z_]\w*)\s*", re.ASCII | re.IGNORECASE)


@dataclass(frozen=True)
class Term:
    """One `name(key=value, ...)`; the name is lower case without hyphens and underscores."""

    name: str
    parameters: dict[str, Literal] = field(default_factory=dict)

    def __str__(self) -> str:
        inside = ", ".join(f"{key}={_show(value)}" for key, value in self.parameters.items())
        return f"{self.name}({inside})" if inside else self.name


@dataclass(frozen=True)
class Foreign(Term):
    """One `package.module:name(key=value, ...)`: code that is not FedAlloy's, under its exact name."""

    module: str = ""
    typed: str = ""

    def __str__(self) -> str:
        return self.typed


def parse(text: str) -> list[Term]:
    """The terms of an expression, in order.

    >>> parse("Per-FedAvg(alpha=1e-2, variant=hf) + dw")
    [Term(name='perfedavg', parameters={'alpha': 0.01, 'variant': 'hf'}), Term(name='dw', parameters={})]
    """
    if len(text) > LONGEST:
        raise FedAlloyError(
            f"cannot read an expression of {len(text)} letters ({text[:40]!r}...); write at most {LONGEST}"
        )
    terms = [_read(word, text) for word in split(text, "+")]
    if not terms:
        raise _malformed(text)
    return terms


def foreign(texts: Iterable[str]) -> list[str]:
    """The names in these expressions that stand for code outside of FedAlloy, also those inside of parameters.

    >>> foreign(["fedavg+my.module:part(mu=1)", "mlp", "fml(meme='other:net')", "share(part=':-1')"])
    ['my.module:part', 'other:net']
    """
    return list(dict.fromkeys(name for text in texts for term in parse(text) for name in _names(term)))


def single(text: str) -> Term:
    """The one term of an expression that may not be a sum."""
    terms = parse(text)
    if len(terms) != 1:
        raise FedAlloyError(f"{text!r} names {len(terms)} things where one is expected")
    return terms[0]


def split(text: str, separator: str = ",") -> list[str]:
    """Cut at separators outside of brackets and quotes.

    >>> split("resnet18, mlp(hidden=64, depth=2)")
    ['resnet18', 'mlp(hidden=64, depth=2)']
    """
    pieces, start, depth, quote = [], 0, 0, ""
    for place, letter in enumerate(text):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == separator and depth <= 0:
            pieces.append(text[start:place])
            start = place + 1
        else:
            depth += (letter in "([{") - (letter in ")]}")
    return [piece.strip() for piece in [*pieces, text[start:]] if piece.strip()]


def slug(text: str) -> str:
    """A name for a file or folder that still says what was typed.

    >>> slug("FedProx(mu=0.1) + dw")
    'fedprox-mu-0.1-dw'
    """
    return re.sub(r"[^a-z0-9.]+", "-", text.lower()).strip("-.")[:80]


def _read(word: str, text: str) -> Term:
    """What stands between two `+`."""
    head, bracket, rest = word.partition("(")
    if ":" not in head:
        return _plain_term(head.replace("-", "") + bracket + rest, text)  # Per-FedAvg is one name; 1e-2 stays
    found = _FOREIGN.fullmatch(head)
    if not found:
        raise FedAlloyError(f"cannot read {word!r}; write 'package.module:name' for code of your own")
    return Foreign(found[2], _plain_term(f"{found[2]}{bracket}{rest}", text).parameters, found[1], word)


def _plain_term(word: str, text: str) -> Term:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # such as those about odd escapes in a string
            return _term(ast.parse(word.strip(), mode="eval").body, text)
    except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
        raise error if isinstance(error, FedAlloyError) else _malformed(text) from None


def _names(term: Term) -> Iterator[str]:
    if isinstance(term, Foreign):
        yield f"{term.module}:{term.name}"
    for value in term.parameters.values():
        for item in value if isinstance(value, tuple) else (value,):
            if isinstance(item, str) and (found := _FOREIGN.search(item)):
                yield found[0].strip()


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
        f"cannot read {shown(text)}; write a name, or a name with parameters such as 'fedprox(mu=0.1)', "
        "joined by '+' as in 'moon+dw(mu=1)'"
    )

"""The pieces a report page is put together from; everything a user named is escaped here."""

from base64 import b64encode
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from html import escape
from importlib.resources import files
from string import Template

import plotly.graph_objects as go

from fedalloy.core.version import VERSION
from fedalloy.report.spec import as_json, spec_of
from fedalloy.report.tables import Table, to_html

SCRIPTS = ("axes.js", "marks.js", "figure.js")  # in drawing/, in the order in which they use each other


@dataclass(frozen=True)
class Picture:
    """A figure with its words; one without data is only named."""

    slug: str
    title: str
    caption: str
    figure: go.Figure | None


def page(title: str, sections: Iterable[str]) -> str:
    """The whole page. A browser runs one script in it, known by its digest, and loads nothing."""
    script = _script()
    digest = b64encode(sha256(script.encode()).digest()).decode()
    template = Template((files("fedalloy.report") / "page.html").read_text(encoding="utf-8"))
    body = "\n".join(filter(None, sections))
    return template.substitute(title=escape(title), body=body, version=VERSION, script=script, digest=digest)


@cache
def _script() -> str:
    folder = files("fedalloy.report") / "drawing"
    whole = "".join((folder / name).read_text(encoding="utf-8") for name in SCRIPTS)
    return f'(function () {{\n"use strict";\n{whole}}})();'


def header(title: str, facts: Mapping[str, str]) -> str:
    pairs = "".join(f"<div><dt>{escape(k)}</dt><dd>{escape(v)}</dd></div>" for k, v in facts.items())
    return f"<header><h1>{escape(title)}</h1>{card(f'<dl>{pairs}</dl>')}</header>"


def section(title: str, parts: Iterable[str]) -> str:
    return f"<section><h2>{escape(title)}</h2>\n{''.join(parts)}</section>"


def card(content: str) -> str:
    return f'<div class="card">{content}</div>\n'


def code(text: str) -> str:
    return f"<pre><code>{escape(text)}</code></pre>"


def tables(drawn: Iterable[Table]) -> list[str]:
    return [card(to_html(table)) for table in drawn]


def warnings(lines: Sequence[str]) -> str:
    """A list of what went wrong; nothing if nothing did."""
    items = "".join(f"<li>{escape(line)}</li>" for line in lines)
    return f'<div class="card warn"><h3>Please note</h3><ul>{items}</ul></div>' if lines else ""


def pictures(drawn: Sequence[Picture]) -> list[str]:
    """A card for each figure, and a line that names those left out."""
    missing = ", ".join(picture.title for picture in drawn if picture.figure is None)
    note = f'<p class="note">Not drawn, because there are no data for them: {escape(missing)}.</p>'
    cards = [_figure(picture, figure) for picture in drawn if (figure := picture.figure) is not None]
    return [*cards, note] if missing else cards


def _figure(picture: Picture, figure: go.Figure) -> str:
    data = f'<script type="application/json">{as_json(spec_of(figure))}</script>'
    plot = f'<div class="plot" id="{escape(picture.slug)}" aria-label="{escape(picture.title)}">{data}</div>'
    words = f"<figcaption><h3>{escape(picture.title)}</h3><p>{escape(picture.caption)}</p></figcaption>"
    return f'<figure class="card">{words}{plot}</figure>\n'

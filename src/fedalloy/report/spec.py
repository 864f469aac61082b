"""A figure as the page's own script draws it: plain data, from which everything that is not drawn is gone.

Plotly describes figures and writes them as SVG and PDF, but its script is 4.8 MB. A report needs four kinds of marks,
so a page draws them itself, with the scripts in ``drawing/``.
"""

import json
import math
import re
from collections.abc import Sequence
from html import unescape
from typing import Any

import plotly.graph_objects as go
from plotly.basedatatypes import BaseTraceType

Plain = dict[str, Any]

DIGITS = 6  # of a number; a screen has some thousand pixels
INK = "#7F7F7F"
_BREAK = re.compile(r"<br\s*/?>")


def spec_of(figure: go.Figure) -> Plain:
    """What the page's script needs to know."""
    layout = figure.layout
    cells: dict[tuple[str, str], list[Plain]] = {}
    for position, trace in enumerate(figure.data):
        place = getattr(trace, "xaxis", None) or "x", getattr(trace, "yaxis", None) or "y"
        cells.setdefault(place, []).append(_trace(trace, position))
    named = [trace for trace in figure.data if trace.showlegend is not False and trace.type != "heatmap"]
    return {
        "height": layout.height,
        "legend": layout.showlegend is not False and len(named) > 1,
        "stack": layout.barmode == "stack",
        "cells": [_cell(figure, place, traces) for place, traces in cells.items()],
        "notes": [
            {"text": _text(note.text), "x": note.x, "y": note.y, "side": note.textangle == 90}
            for note in layout.annotations
        ],
    }


def as_json(spec: Plain) -> str:
    """For a <script> element: no name in it can end the element or open another."""
    text = json.dumps(spec, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    return text.translate({ord(letter): f"\\u{ord(letter):04x}" for letter in "<>&\u2028\u2029"})


def _cell(figure: go.Figure, place: tuple[str, str], traces: list[Plain]) -> Plain:
    x, y = (figure.layout[f"{name[0]}axis{name[1:]}"] for name in place)
    domain = [*(x.domain or (0, 1)), *(y.domain or (0, 1))]
    return {
        "domain": domain,
        "x": _axis(x, traces, "x"),
        "y": _axis(y, traces, "y"),
        "traces": traces,
    }


def _axis(axis: Any, traces: Sequence[Plain], way: str) -> Plain:
    words = way == "y" and any(trace["kind"] == "box" for trace in traces)
    words = words or any(isinstance(value, str) for trace in traces for value in trace.get(way, ()))
    known = {"kind": "category" if words else "log" if axis.type == "log" else "linear"}
    said = {
        "title": _text(axis.title.text or ""),
        "format": axis.tickformat,
        "hover": axis.hoverformat,
        "reversed": axis.autorange == "reversed",
        "ticks": axis.showticklabels is not False,
    }
    return known | {name: value for name, value in said.items() if value}


def _trace(trace: BaseTraceType, position: int) -> Plain:
    """One of the four kinds of marks."""
    draw = {"scatter": _line, "bar": _bar, "box": _box, "heatmap": _heat}
    group = getattr(trace, "legendgroup", None) or f"own{position}"
    return {"name": _text(trace.name or ""), "group": group, **draw[trace.type](trace)}


def _line(trace: Any) -> Plain:
    y = _values(trace.y)
    mode = trace.mode or "lines+markers"
    shades = trace.marker.color
    several = shades is not None and not isinstance(shades, str)
    found = {
        "kind": "line",
        "x": _values(trace.x) if trace.x is not None else list(range(len(y))),
        "y": y,
        "color": trace.fillcolor or trace.line.color or (INK if several else shades) or INK,
        "colors": list(shades) if several else None,
        "lines": "lines" in mode,
        "width": trace.line.width,
        "dash": trace.line.dash,
        "size": (trace.marker.size or 6) if "markers" in mode else 0,
        "band": trace.fill == "toself",
        "error": _values(trace.error_y.array) if trace.error_y.array is not None else None,
        "said": _said(trace),
    }
    return {name: value for name, value in found.items() if value not in (None, False, 0)}


def _said(trace: Any) -> list[str] | None:
    """What a pointer reads where that is not the value on the axis."""
    if trace.customdata is not None:
        return [f"{value:.4g}" for value in trace.customdata]
    return None if trace.text is None else [_text(said) for said in trace.text]


def _bar(trace: Any) -> Plain:
    across = trace.orientation == "h"
    return {
        "kind": "bar",
        "x": _values(trace.x),
        "y": _values(trace.y),
        "color": trace.marker.color,
        "across": across,
    }


def _box(trace: Any) -> Plain:
    return {
        "kind": "box",
        "x": _values(trace.x),
        "color": trace.marker.color,
        "points": trace.boxpoints == "all",
    }


def _heat(trace: Any) -> Plain:
    rows = [_values(row) for row in trace.z]
    known = [value for row in rows for value in row if value is not None]
    low = min(known, default=0) if trace.zmin is None else trace.zmin
    return {
        "kind": "heat",
        "x": _values(trace.x if trace.x is not None else range(len(rows[0]))),
        "y": _values(trace.y if trace.y is not None else range(len(rows))),
        "z": rows,
        "range": [low, max(known, default=1)],
        "colors": [colour for _, colour in trace.colorscale],
        "title": _text(trace.colorbar.title.text or ""),
    }


def _values(values: Any) -> list[Any]:
    return [_value(value) for value in values]


def _value(value: Any) -> Any:
    if isinstance(value, str):
        return _text(value)
    if value is None or isinstance(value, int):
        return value
    number = float(value)
    return float(f"{number:.{DIGITS}g}") if math.isfinite(number) else None


def _text(text: str) -> str:
    """Plotly's little HTML as plain text, in which a line break is one."""
    return unescape(_BREAK.sub("\n", text))

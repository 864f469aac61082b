"""What the report writes."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import plotly.graph_objects as go
import plotly.io

from fedalloy.errors import FedAlloyError
from fedalloy.report.page import Picture
from fedalloy.report.tables import Table, to_markdown
from fedalloy.storage import write_whole


def write_text(path: Path, text: str) -> Path:
    """Write a whole file or none, and say where."""
    write_whole(path, text.encode())
    return path


def write_markdown(path: Path, command: str, drawn: Sequence[Table], shown: Sequence[Picture] = ()) -> Path:
    """A page for readers without scripts: what to type, tables, and the figures as images in files beside it."""
    names = _write_images(path.parent, shown)
    images = [f"![{picture.title}]({names[picture.slug]})\n" for picture in shown if picture.slug in names]
    told = f"```\n{command}\n```\n"
    return write_text(path, "\n".join([*map(to_markdown, drawn), told, *images]))


def _write_images(folder: Path, shown: Sequence[Picture]) -> dict[str, str]:
    """Every figure that has data as an SVG file; their names by slug."""
    figures = {
        picture.slug: go.Figure(picture.figure).update_layout(paper_bgcolor="white")  # also on a dark page
        for picture in shown
        if picture.figure is not None
    }
    names = {slug: f"{slug}.svg" for slug in figures}
    if not figures:
        return names
    if find_spec("kaleido") is None:
        raise FedAlloyError("images need the library kaleido; type: pip install 'fedalloy[images]'")
    try:
        plotly.io.write_images(list(figures.values()), [folder / name for name in names.values()])
    except RuntimeError as error:  # plotly's words for a browser that is not there
        raise FedAlloyError(f"images need Chrome or Chromium on the PATH: {error}") from error
    return names

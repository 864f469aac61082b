"""What the report writes."""

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

import plotly.graph_objects as go
import plotly.io

from fedalloy.core.files import write_whole
from fedalloy.errors import FedAlloyError
from fedalloy.report.page import Picture
from fedalloy.report.tables import Table, to_markdown

ImageForm = Literal["svg", "pdf"]


def write_text(path: Path, text: str) -> Path:
    """Write a whole file or none, and say where."""
    write_whole(path, text.encode())
    return path


def write_markdown(path: Path, command: str, drawn: Sequence[Table], shown: Sequence[Picture] = ()) -> Path:
    """A page for readers without scripts: what to type, tables, and the figures as images in files beside it."""
    names = {slug: file.name for slug, file in write_images(path.parent, shown, "svg").items()}
    images = [f"![{picture.title}]({names[picture.slug]})\n" for picture in shown if picture.slug in names]
    told = f"```\n{command}\n```\n"
    return write_text(path, "\n".join([*map(to_markdown, drawn), told, *images]))


def write_images(folder: Path, shown: Sequence[Picture], form: ImageForm) -> dict[str, Path]:
    """Every figure that has data as a file of its own, by its slug."""
    figures = {
        picture.slug: go.Figure(picture.figure).update_layout(paper_bgcolor="white")  # also on a dark page
        for picture in shown
        if picture.figure is not None
    }
    paths = {slug: folder / f"{slug}.{form}" for slug in figures}
    if not figures:
        return paths
    need_images()
    folder.mkdir(parents=True, exist_ok=True)
    try:
        plotly.io.write_images(list(figures.values()), list(paths.values()))
    except RuntimeError as error:  # plotly's words for a browser that is not there
        raise FedAlloyError(f"images need Chrome or Chromium on the PATH: {error}") from error
    return paths


def need_images() -> None:
    """Refuse to begin what could not be drawn at the end."""
    if find_spec("kaleido") is None:
        raise FedAlloyError("images need the library kaleido; type: pip install 'fedalloy[images]'")

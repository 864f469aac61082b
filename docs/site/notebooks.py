"""Notebooks as pages: each is executed when the site is built, and shown with what it printed."""

import html
import os
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from traitlets.config import Config

from outside import ROOT

FOLDER = ROOT / "examples" / "notebooks"
SECONDS = 300  # that one cell may take


def pages() -> dict[str, str]:
    """Every notebook as Markdown, by its place on the site."""
    return {uri: as_page(path.name, executed(path)) for path, uri in places().items()}


def places() -> dict[Path, str]:
    """Where on the site each notebook is shown."""
    return {path: f"notebooks/{path.stem}.md" for path in sorted(FOLDER.glob("*.ipynb"))}


def executed(path: Path) -> Any:
    """The notebook with its outputs; it runs in an empty folder, and the first error ends it."""
    notebook = nbformat.read(path, as_version=4)  # type: ignore[no-untyped-call]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        connection = {"transport": "ipc", "connection_file": f"{folder}/kernel.json"}  # no port is opened
        client = NotebookClient(
            notebook,
            timeout=SECONDS,
            config=Config({"ConnectionFileMixin": connection}),
            resources={"metadata": {"path": folder}},
        )
        return client.execute()


def as_page(name: str, notebook: Any) -> str:
    """Text, code and outputs, one below the other."""
    text: list[str] = []
    for cell in notebook.cells:
        if cell.cell_type == "markdown":
            text.append(cell.source)
        elif cell.source:
            text += [f"```python\n{cell.source}\n```", *(_shown(output) for output in cell.outputs)]
    title, rest = text[0], text[1:]
    offer = (
        f'<a href="{name}" download>Download this notebook</a> and run it yourself. '
        "Below each cell is what it printed when this page was built."
    )
    return "\n\n".join([title, offer, *rest]) + "\n"


def _shown(output: Any) -> str:
    if output.output_type == "stream":
        return _plain(output.text)
    data = output.get("data", {})
    if svg := data.get("image/svg+xml"):
        return f'<div markdown="0">\n{svg}\n</div>'
    if table := data.get("text/html"):
        return f'<div markdown="0">\n{table}\n</div>'
    return _plain(data.get("text/plain", ""))


def _plain(text: str) -> str:
    return f'<pre class="output"><code>{html.escape(text.rstrip())}</code></pre>' if text.strip() else ""

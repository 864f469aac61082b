"""What the report writes."""

from pathlib import Path

from plotly.offline import get_plotlyjs

from fedalloy.storage import write_whole


def write_text(path: Path, text: str) -> Path:
    """Write a whole file or none, and say where."""
    write_whole(path, text.encode())
    return path


def write_plotlyjs(folder: Path) -> Path:
    """Put plotly.min.js into a folder, once, for the reports of many runs to share."""
    path, script = folder / "plotly.min.js", get_plotlyjs()
    if path.is_file() and path.read_text(encoding="utf-8") == script:
        return path
    return write_text(path, script)

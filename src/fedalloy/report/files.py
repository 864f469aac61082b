"""Files that are either whole or not there."""

import os
from pathlib import Path

from plotly.offline import get_plotlyjs


def write_whole(path: Path, text: str) -> Path:
    """Write beside the target, then put it in place in one step: no reader sees half a file."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_text(text, encoding="utf-8")
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    return path


def write_plotlyjs(folder: Path) -> Path:
    """Put plotly.min.js into a folder, once, for the reports of many runs to share."""
    path, script = folder / "plotly.min.js", get_plotlyjs()
    if path.is_file() and path.read_text(encoding="utf-8") == script:
        return path
    return write_whole(path, script)

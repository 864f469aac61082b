"""Pages and files of the repository that are not in docs/, and links to them.

The same Markdown is read in the repository and on the site. So README.md becomes the first page, results/ is shown as
it is, and a source file that a page links to gets a page of its own.
"""

import ast
import posixpath
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"\]\(([^)\s#]+)(#[^)\s]*)?\)")
PLACES: dict[Path, str] = {}  # where on the site each file of the repository is, filled by the build


@dataclass(frozen=True)
class Source:
    """A file or folder of the repository as a page."""

    path: Path
    text: str


def pages() -> dict[Path, str]:
    """Markdown outside of docs/ and where it goes."""
    top = {"README.md": "index.md", "CONTRIBUTING.md": "contributing.md"}
    listed = [*ROOT.glob("*.md"), *(ROOT / "results").glob("*.md"), *(ROOT / "results").glob("*/*.md")]
    return {path: _place(path, top) for path in listed}


def _place(path: Path, top: dict[str, str]) -> str:
    uri = path.relative_to(ROOT).as_posix()
    return top.get(uri, uri if "/" in uri else uri.lower())


def attachments() -> dict[Path, str]:
    """Pictures and notebooks that those pages show or offer."""
    shown = [*(ROOT / "results").glob("*/*.svg"), *(ROOT / "examples/notebooks").glob("*.ipynb")]
    return {
        path: path.relative_to(ROOT).as_posix().replace("examples/notebooks", "notebooks") for path in shown
    }


def sources(written: Iterable[Path]) -> dict[str, Source]:
    """A page for each file or folder that is linked to but is no page itself."""
    on_site = {*written, *attachments()}
    named = {target for path in written for target in _targets(path)} - on_site
    listed = {file for folder in named if folder.is_dir() for file in folder.glob("*.py")}
    found = sorted(path for path in named | listed if path.exists())
    return {f"source/{path.relative_to(ROOT).as_posix()}.md": Source(path, _shown(path)) for path in found}


def relinked(markdown: str, uri: str) -> str:
    """The page at this place, with its links to files of the repository turned into links of the site."""
    origin = next((path for path, place in PLACES.items() if place == uri), None)
    if origin is None:
        return markdown

    def moved(match: re.Match[str]) -> str:
        target = _resolved(origin, match[1])
        place = PLACES.get(target) or attachments().get(target)
        if place is None:
            return match[0]
        return f"]({posixpath.relpath(place, posixpath.dirname(uri) or '.')}{match[2] or ''})"

    return LINK.sub(moved, markdown)


def _targets(page: Path) -> set[Path]:
    links = (match[0] for match in LINK.findall(page.read_text(encoding="utf-8")) if "://" not in match[0])
    return {_resolved(page, link) for link in links}


def _resolved(page: Path, link: str) -> Path:
    return (page.parent / link).resolve()


def _shown(path: Path) -> str:
    name = path.relative_to(ROOT).as_posix()
    if path.is_dir():
        return (
            f"# {name}/\n\n"
            + "\n".join(_row(path, file) for file in sorted(path.iterdir()) if _counts(file))
            + "\n"
        )
    kind = {".py": "python", ".toml": "toml", ".json": "json"}.get(path.suffix, "text")
    return f"# {name}\n\n````{kind}\n{path.read_text(encoding='utf-8')}````\n"


def _counts(path: Path) -> bool:
    return not path.name.startswith((".", "__pycache__"))


def _row(folder: Path, file: Path) -> str:
    if file.suffix != ".py":
        return f"- `{file.name}{'/' if file.is_dir() else ''}`"
    said = (ast.get_docstring(ast.parse(file.read_text(encoding="utf-8"))) or "").partition("\n")[0]
    return f"- [{file.name}]({folder.name}/{file.name}.md) {said}"

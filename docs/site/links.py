"""Check a built site: every link and anchor inside leads somewhere, and a browser fetches nothing from elsewhere."""

import re
from dataclasses import dataclass, field
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

FETCHED = {("script", "src"), ("img", "src"), ("iframe", "src"), ("source", "src"), ("link", "href")}
IN_CSS = re.compile(r"(?:@import\s+|url\(\s*)[\"']?(https?:)?//")


@dataclass
class Read(HTMLParser):
    """The anchors, links and fetched addresses of one page."""

    text: str
    anchors: set[str] = field(default_factory=set)
    links: list[str] = field(default_factory=list)
    fetched: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        super().__init__()
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        named = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := named.get(key))}
        for key in ("href", "src"):
            if (value := named.get(key)) is None or (tag == "link" and named.get("rel") == "canonical"):
                continue
            (self.fetched if (tag, key) in FETCHED else self.links).append(value)


def faults(site: Path) -> list[str]:
    """One sentence for each link that leads nowhere and each address outside that a page would load."""
    site = site.resolve()
    pages = {path: Read(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found: dict[str, None] = {}
    for path, page in pages.items():
        name = path.relative_to(site).as_posix()
        for address in [*page.links, *page.fetched]:
            if sentence := _broken(site, pages, path, address):
                found[f"{name}: {sentence}"] = None
        for address in page.fetched:
            if urlsplit(address).netloc:
                found[f"{name} would fetch {address} from another host"] = None
    for path in site.rglob("*.css"):
        if IN_CSS.search(path.read_text(encoding="utf-8")):
            found[f"{path.relative_to(site)} would fetch from another host"] = None
    return list(found)


def _broken(site: Path, pages: dict[Path, Read], page: Path, address: str) -> str:
    parts = urlsplit(address)
    if parts.scheme or parts.netloc:
        return ""
    if page.name == "404.html" and parts.path.startswith("/"):
        target = site / unquote(parts.path).lstrip("/")
    else:
        target = (page.parent / unquote(parts.path)).resolve() if parts.path else page
    target = target / "index.html" if target.is_dir() else target
    if not target.exists() or not target.is_relative_to(site):
        return f"the link {address} leads nowhere"
    anchor = unquote(parts.fragment)
    if anchor and target in pages and anchor not in pages[target].anchors:
        return f"the link {address} names an anchor that is not there"
    return ""

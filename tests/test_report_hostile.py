"""Whatever a run folder holds, its page is made of the elements that we wrote, and one script."""

import json
import tempfile
from collections.abc import Sequence
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedalloy.report import write_comparison_report, write_run_report
from fedalloy.report.page import page
from fuzzing import examples
from test_report_runs import fake_comparison, fake_run, write_history

PIECES = (
    *(
        "</script>",
        "<script>",
        "<img src=x onerror=a()>",
        "<!--",
        "-->",
        "]]>",
        "</title>",
        "</style>",
        '"',
        "'",
        "`",
        "<",
        ">",
    ),
    *(
        "&",
        "&lt;",
        "&#60;",
        "\\u003c",
        "\\",
        "\u2028",
        "\x00",
        "\n",
        "<br>",
        "<br",
        "%{x}",
        "$title",
        "javascript:a()",
        "\u202e",
        "δ",
    ),
)
NAMES = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=5)), min_size=1, max_size=6).map("".join)
OURS = {
    *(
        "html",
        "head",
        "meta",
        "link",
        "title",
        "style",
        "body",
        "main",
        "header",
        "section",
        "footer",
        "script",
        "div",
        "p",
    ),
    *("h1", "h2", "h3", "dl", "dt", "dd", "ul", "li", "a", "b", "u", "pre", "code", "figure", "figcaption"),
    *("table", "thead", "tbody", "tr", "th", "td"),
}
SCRIPT = page("", []).partition("<script>")[2].partition("</script>")[0]


class Read(HTMLParser):
    """What a browser would make of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.links: set[str] = set()
        self.scripts: list[tuple[str | None, str]] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        self.links |= {value or "" for name, value in attrs if name == "href"}
        if tag == "script":
            self.scripts.append((dict(attrs).get("type"), ""))

    def handle_data(self, data: str) -> None:
        if self.cdata_elem == "script":
            kind, text = self.scripts.pop()
            self.scripts.append((kind, text + data))


def assert_ours(text: str) -> None:
    read = Read(text)
    assert read.tags <= OURS
    assert not {name for name in read.attributes if name.startswith("on")} | (
        read.attributes & {"src", "style", "srcdoc"}
    )
    assert all(link == "data:," or link.endswith("/report.html") for link in read.links)
    run = [content for kind, content in read.scripts if kind is None]
    assert run == [SCRIPT]
    for kind, content in read.scripts:
        assert kind is None or (kind == "application/json" and json.loads(content)["cells"])


@pytest.mark.fuzz
@examples(8)
@given(st.lists(NAMES, min_size=6, max_size=6))
def test_names_of_any_kind_stay_names(names: list[str]) -> None:
    title, name, slot, why, number, matrix = names
    with tempfile.TemporaryDirectory() as place:
        folder = fake_run(Path(place) / "run", rounds=2, title=title, class_names=[name] * 5)
        entry = {
            "round": 1,
            "refused": [{"client": 1, "why": why}],
            "bytes_up": {slot: 9},
            "diagnostics": {number: 1.0},
            "metrics": {"global_acc": 0.5, "per_class": [0.5] * 5, "per_client": [0.5]},
        }
        write_history(folder, [entry])
        found = {"matrices": {matrix: [[1.0]], f"spectrum{number}": [1.0, 2.0]}}
        (folder / "diagnostics.json").write_text(json.dumps(found))
        assert_ours(write_run_report(folder).read_text())


@pytest.mark.fuzz
@examples(4)
@given(NAMES, NAMES)
def test_names_in_a_comparison_stay_names(title: str, command: str) -> None:
    with tempfile.TemporaryDirectory() as place:
        folder = fake_comparison(
            Path(place),
            ["a", "b"],
            [0],
            lambda place, method, seed: fake_run(place, method=method, title=title + method, rounds=2),
            command=command,
        )
        write_run_report(folder / "a/seed0")
        assert_ours(write_comparison_report(folder).read_text())

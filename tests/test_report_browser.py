"""The pages as a browser shows them: drawn, quiet, offline, and no wider than the screen."""

from collections.abc import Iterator
from html import escape
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, Page, Request

from browser import launched, needs_browser
from fedalloy.report import write_comparison_report, write_plotlyjs, write_run_report
from test_report_html import HOSTILE
from test_report_runs import fake_comparison, fake_run

pytestmark = needs_browser

RUN = ("accuracy", "loss", "sent", "partition", "clients", "classes", "time", "slots")
COMPARISON = (
    "accuracy-global_acc",
    "sent-global_acc",
    "accuracy-personal_local_acc",
    "sent-personal_local_acc",
    "partition",
    "clients",
    "classes-global_acc",
    "classes-personal_local_acc",
    "time",
    "slots",
)
TRACES = ".scatterlayer .trace, .barlayer .trace, .boxlayer .trace, .heatmaplayer .hm"


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison whose own page holds plotly, with one run's page that shares a copy."""
    folder = fake_comparison(tmp_path_factory.mktemp("compare"))
    write_plotlyjs(folder)
    write_run_report(folder / "fedavg/seed0", plotlyjs="../../plotly.min.js")
    write_comparison_report(folder)
    return folder


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A page that fails its test on any complaint or any request that leaves the machine."""
    complaints: list[str] = []

    def heard(message: ConsoleMessage) -> None:
        if message.type == "error":
            complaints.append(message.text)

    def asked(request: Request) -> None:
        if not request.url.startswith(("file:", "data:", "blob:")):
            complaints.append(request.url)

    with browser.new_context() as context:
        opened = context.new_page()
        opened.on("console", heard)
        opened.on("pageerror", lambda error: complaints.append(str(error)))
        opened.on("request", asked)
        yield opened
    assert complaints == []


def assert_drawn(page: Page, slugs: tuple[str, ...]) -> None:
    page.wait_for_function("document.querySelectorAll('.js-plotly-plot .main-svg').length > 0")
    for slug in slugs:
        boxes = page.locator(f"#{slug}").locator(TRACES)
        sizes = [box for trace in boxes.all() if (box := trace.bounding_box())]
        assert any(box["width"] > 20 and box["height"] > 5 for box in sizes), slug


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize(
    ("address", "slugs", "tables"),
    [("report.html", COMPARISON, 5), ("fedavg/seed0/report.html", RUN, 3)],
    ids=["comparison", "run"],
)
def test_a_report_in_a_browser(
    page: Page, comparison: Path, address: str, slugs: tuple[str, ...], tables: int, width: int
) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((comparison / address).as_uri())
    assert_drawn(page, slugs)
    assert page.locator("table:visible").count() == tables
    assert page.locator("table b").count() > 0 or address != "report.html"
    assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_hostile_names_do_nothing_but_show(page: Page, tmp_path: Path) -> None:
    folder = fake_run(
        tmp_path / "run", method=HOSTILE, title=HOSTILE, class_names=[f"{c}{HOSTILE}" for c in range(5)]
    )
    page.goto(write_run_report(folder).as_uri())
    assert_drawn(page, ("partition", "clients", "classes"))
    assert page.evaluate("window.hacked") is None
    assert HOSTILE in page.locator("h1").inner_text()
    assert escape(HOSTILE, quote=False) in page.locator("#partition .legendtext").first.inner_html()


def test_figures_are_legible_in_the_dark(page: Page, comparison: Path) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto((comparison / "fedavg/seed0/report.html").as_uri())
    inks = {
        page.locator(f"#accuracy {part}").first.evaluate("part => getComputedStyle(part).fill")
        for part in (".xtick text", ".ytick text", ".legendtext", ".xtitle", ".ytitle")
    }
    assert inks == {"rgb(230, 237, 243)"}

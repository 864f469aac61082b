"""The pages as a browser shows them: drawn, quiet, offline, and no wider than the screen."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser, ConsoleMessage, FloatRect, Page, Request, ViewportSize

from browser import launched, needs_browser
from fedalloy.report import write_comparison_report, write_run_report
from test_report_html import HOSTILE
from test_report_runs import fake_comparison, fake_run

pytestmark = needs_browser

RUN = ("accuracy", "loss", "traffic", "partition", "clients", "classes", "time", "slots")
COMPARISON = (
    "accuracy-global_acc",
    "traffic-global_acc",
    "accuracy-personal_local_acc",
    "traffic-personal_local_acc",
    "partition",
    "clients",
    "classes-global_acc",
    "classes-personal_local_acc",
    "time",
    "slots",
)
PHONE: ViewportSize = {"width": 390, "height": 844}


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with launched() as found:
        yield found


@pytest.fixture(scope="module")
def comparison(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A comparison with its page, and the page of one of its runs."""
    folder = fake_comparison(tmp_path_factory.mktemp("compare"))
    write_run_report(folder / "fedavg/seed0")
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
    for slug in slugs:
        boxes = page.locator(f"#{slug} .marks .trace")
        sizes = [box for trace in boxes.all() if (box := trace.bounding_box())]
        assert any(box["width"] > 20 and box["height"] > 5 for box in sizes), slug


def box_of(page: Page, selector: str) -> FloatRect:
    box = page.locator(selector).bounding_box()
    assert box is not None
    return box


@pytest.mark.parametrize("width", [1280, 390])
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
    assert page.locator("#undrawn").count() == 0


def test_hostile_names_do_nothing_but_show(page: Page, tmp_path: Path) -> None:
    folder = fake_run(
        tmp_path / "run", method=HOSTILE, title=HOSTILE, class_names=[f"{c}{HOSTILE}" for c in range(5)]
    )
    page.goto(write_run_report(folder).as_uri())
    assert_drawn(page, ("partition", "clients", "classes"))
    assert page.evaluate("window.hacked") is None
    assert HOSTILE in page.locator("h1").inner_text()
    assert HOSTILE in page.locator("#partition .key").first.inner_text()


def test_figures_are_legible_in_the_dark(page: Page, comparison: Path) -> None:
    page.emulate_media(color_scheme="dark")
    page.goto((comparison / "fedavg/seed0/report.html").as_uri())
    inks = {
        page.locator(f"#partition {part}").first.evaluate(
            f"part => getComputedStyle(part).{'color' if part == '.key' else 'fill'}"
        )
        for part in ("text.x", "text.y", "text.title", ".key")
    }
    assert inks == {"rgb(230, 237, 243)"}


@pytest.mark.parametrize("width", [1280, 390])
def test_nothing_lies_over_a_figure(page: Page, comparison: Path, width: int) -> None:
    page.set_viewport_size({"width": width, "height": 900})
    page.goto((comparison / "report.html").as_uri())
    for slug in COMPARISON:
        legend, stage = box_of(page, f"#{slug} .legend"), box_of(page, f"#{slug} .stage")
        assert legend["y"] + legend["height"] <= stage["y"]
        assert page.locator(f"#{slug} > *").evaluate_all("parts => parts.map(part => part.className)") == [
            "",  # the data
            "legend",
            *(
                found
                for found in page.locator(f"#{slug} .stage").evaluate_all("s => s.map(t => t.className)")
            ),
            "tip",
        ]


def test_many_methods_leave_room_for_the_figure_on_a_phone(page: Page, tmp_path: Path) -> None:
    def make(place: Path, method: str, seed: int) -> Path:
        return fake_run(place, method=method, title=f"A rather long method name {method}", rounds=4)

    folder = fake_comparison(tmp_path, [f"m{number}" for number in range(30)], [0], make)
    page.set_viewport_size(PHONE)
    page.goto(write_comparison_report(folder).as_uri())
    legend, drawn = box_of(page, "#accuracy-global_acc .legend"), box_of(page, "#accuracy-global_acc .marks")
    assert page.locator("#accuracy-global_acc .key:visible").count() == 30
    assert legend["height"] < 100
    assert drawn["height"] > 200
    assert drawn["width"] > 200
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_wide_tables_scroll_in_their_own_box(page: Page, comparison: Path) -> None:
    page.set_viewport_size(PHONE)
    page.goto((comparison / "report.html").as_uri())
    wide = page.locator(".scroll").first
    assert wide.evaluate("box => box.scrollWidth > box.clientWidth + 50")
    assert page.evaluate("document.documentElement.scrollWidth") <= 390


def test_a_pointer_reads_values(page: Page, comparison: Path) -> None:
    page.goto((comparison / "report.html").as_uri())
    for slug, said in {
        "accuracy-global_acc": ("FedProx", "round: 20", "accuracy: 79.13 %"),
        "partition": ("bee", "client: 11", "samples: 4"),
        "clients": ("FedPer", "accuracy of a client: "),
        "time": ("other", "FedPer", "seconds per round: 0.010"),
    }.items():
        mark = page.locator(f"#{slug} .trace :is(circle, rect)").last
        mark.scroll_into_view_if_needed()
        mark.hover(force=True)
        told = page.locator(f"#{slug} .tip").inner_text()
        assert all(word in told for word in said), (slug, told)


def test_a_finger_reads_values(browser: Browser, comparison: Path) -> None:
    with browser.new_context(viewport=PHONE, has_touch=True) as context:
        opened = context.new_page()
        opened.goto((comparison / "report.html").as_uri())
        tip = opened.locator("#time .tip")
        bar = opened.locator("#time .bar").first
        bar.scroll_into_view_if_needed()
        bar.tap(force=True)
        assert "train" in tip.inner_text()
        assert tip.is_visible()
        opened.locator("h3").first.tap()
        assert not tip.is_visible()


def test_a_legend_hides_and_shows(page: Page, comparison: Path) -> None:
    page.goto((comparison / "report.html").as_uri())
    lines = page.locator("#accuracy-global_acc .marks .line")
    key = page.locator("#accuracy-global_acc").get_by_role("button", name="FedAvg")
    assert lines.count() == 2
    key.click()
    assert (lines.count(), key.get_attribute("aria-pressed")) == (1, "false")
    key.click()
    assert lines.count() == 2


def test_a_mouse_zooms_and_comes_back(page: Page, comparison: Path) -> None:
    page.goto((comparison / "report.html").as_uri())
    plot = page.locator("#accuracy-global_acc")
    plot.scroll_into_view_if_needed()
    before = plot.locator("text.y").all_text_contents()
    box = box_of(page, "#accuracy-global_acc .stage")
    page.mouse.move(box["x"] + 0.6 * box["width"], box["y"] + 0.05 * box["height"])
    page.mouse.down()
    page.mouse.move(box["x"] + 0.9 * box["width"], box["y"] + 0.3 * box["height"], steps=3)
    page.mouse.up()
    ticks = plot.locator("text.y").all_text_contents()
    assert ticks != before
    assert len(set(ticks)) == len(ticks) > 2
    plot.get_by_role("button", name="Show all again").click()
    assert plot.locator("text.y").all_text_contents() == before


def test_a_figure_is_as_wide_as_the_screen(page: Page, comparison: Path) -> None:
    page.goto((comparison / "report.html").as_uri())
    page.set_viewport_size(PHONE)
    page.wait_for_timeout(200)
    assert 300 < box_of(page, "#time svg[role=img]")["width"] < 390


def test_what_slips_into_a_page_is_not_run(browser: Browser, comparison: Path, tmp_path: Path) -> None:
    """Names are escaped; if one were not, the page's policy would still hold."""
    whole = (comparison / "report.html").read_text()
    broken = tmp_path / "broken.html"
    broken.write_text(whole.replace("<footer>", f"{HOSTILE.removeprefix('</script>')}<footer>"))
    with browser.new_context() as context:
        opened = context.new_page()
        opened.goto(broken.as_uri())
        opened.wait_for_timeout(200)
        assert opened.locator("img").count() == 1
        assert opened.evaluate("window.hacked") is None
        assert_drawn(opened, ("time",))


def test_without_scripts_a_page_says_so_and_shows_its_tables(browser: Browser, comparison: Path) -> None:
    with browser.new_context(java_script_enabled=False) as context:
        opened = context.new_page()
        opened.goto((comparison / "report.html").as_uri())
        assert opened.get_by_text("The figures on this page are drawn by JavaScript").is_visible()
        assert opened.locator("table:visible").count() == 5

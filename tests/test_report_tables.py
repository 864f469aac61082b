"""One table, four renderings: marks, escaping, and what the tables of a comparison hold."""

import io
import re
from pathlib import Path

import pytest
from rich.console import Console

from fedalloy.report import (
    Cell,
    Table,
    comparison_tables,
    read_comparison,
    read_run,
    run_tables,
    to_html,
    to_latex,
    to_markdown,
    to_rich,
)
from fedalloy.report.figures import accuracy_by_traffic
from fedalloy.report.latex import latex
from test_report_runs import curve_run, fake_comparison, fake_run

HOSTILE = r"a|b_c*d&e%f$g#h{i}~^\<script>[x]"
TABLE = Table(
    "Accuracy (%)",
    ("Method", HOSTILE),
    ((Cell(HOSTILE), Cell("81.23 ± 0.45", "best")), (Cell("b"), Cell("80.00", "second"))),
    ("a_note",),
)


def terminal(table: Table) -> str:
    written = io.StringIO()
    Console(file=written, width=160, force_terminal=True, color_system="standard").print(to_rich(table))
    return written.getvalue()


def row(table: Table, method: str) -> dict[str, Cell]:
    found = next(cells for cells in table.rows if cells[0].text.startswith(method))
    return dict(zip(table.columns, found, strict=True))


def test_markdown() -> None:
    assert to_markdown(TABLE).splitlines() == [
        "### Accuracy (%)",
        "",
        r"| Method | a\|b\_c\*d\&e%f\$g\#h{i}\~^\\\<script\>\[x\] |",
        "| :-- | --: |",
        r"| a\|b\_c\*d\&e%f\$g\#h{i}\~^\\\<script\>\[x\] | **81.23 ± 0.45** |",
        "| b | <u>80.00</u> |",
        "",
        r"a\_note",
    ]


def test_latex() -> None:
    text = to_latex(TABLE)
    escaped = r"a\textbar{}b\_c{*}d\&e\%f\$g\#h\{i\}\textasciitilde{}\textasciicircum{}"
    escaped += r"\textbackslash{}$<$script$>${[}x{]}"
    assert rf"Method & {escaped} \\" in text
    assert rf"{escaped} & \textbf{{81.23 $\pm$ 0.45}} \\" in text
    assert r"b & \underline{80.00} \\" in text
    assert r"\caption{Accuracy (\%). a\_note.}" in text
    assert [line for line in text.splitlines() if line.endswith("rule")] == [
        r"\toprule",
        r"\midrule",
        r"\bottomrule",
    ]


def test_html() -> None:
    text = to_html(TABLE)
    assert "<script>" not in text
    assert "<td><b>81.23 ± 0.45</b></td>" in text
    assert "<td><u>80.00</u></td>" in text


def test_terminal() -> None:
    text = terminal(TABLE)
    assert HOSTILE in text
    assert "\x1b[1m81.23 ± 0.45\x1b[0m" in text
    assert "\x1b[4m80.00\x1b[0m" in text


def test_a_comparison_of_global_and_personal_methods(tmp_path: Path) -> None:
    comparison = read_comparison(fake_comparison(tmp_path))
    by_global, by_personal, cost, everything = comparison_tables(comparison)
    assert by_global.title == "Global model: accuracy (%)"
    assert [cells[0].text for cells in by_global.rows] == ["FedAvg", "FedProx"]
    assert row(everything, "FedPer")["Global model"] == Cell("—")
    assert row(by_personal, "FedPer")["Final"].text.count(".") == 2
    assert {row(by_global, name)["Final"].mark for name in ("FedAvg", "FedProx")} == {"best", "second"}
    assert "p vs FedAvg" in by_global.columns
    assert row(cost, "FedAvg")["Upload"].text == "23.30 MiB"
    assert len(everything.columns) == 4


def test_equal_methods_share_the_mark_and_misses_say_after_how_many_rounds(tmp_path: Path) -> None:
    ends = {"a": 0.70001, "b": 0.70002, "c": 0.4}
    folder = fake_comparison(
        tmp_path,
        list(ends),
        [0],
        lambda place, method, seed: curve_run(place, {3: ends[method]}, method=method, title=method),
    )
    table, *_ = comparison_tables(read_comparison(folder))
    assert [row(table, name)["Final"] for name in "abc"] == [
        Cell("70.00", "best"),
        Cell("70.00", "best"),
        Cell("40.00", "second"),
    ]
    assert [row(table, name)["Rounds to 60\u00a0%"].text for name in "abc"] == ["3", "3", "> 3"]
    assert row(table, "c")["Speedup"].text == "—"


def test_a_diverged_method_is_starred_and_not_ranked(tmp_path: Path) -> None:
    def make(place: Path, method: str, seed: int) -> Path:
        return fake_run(
            place, method=method, title=method, seed=seed, status="diverged" if method == "b" else "finished"
        )

    table, *_ = comparison_tables(read_comparison(fake_comparison(tmp_path, ["a", "b", "c"], [0, 1], make)))
    assert row(table, "b †")["Final"].mark == "none"
    assert any("diverged" in note for note in table.notes)


def test_a_comparison_with_nothing_to_show_yet(tmp_path: Path) -> None:
    folder = fake_comparison(tmp_path, ["a"], [0], lambda place, method, seed: place)
    table, *_ = comparison_tables(read_comparison(folder))
    assert row(table, "a") == {"Method": Cell("a"), "Seeds": Cell("0 of 1")}


def test_a_diverged_run_has_a_best_value_but_no_final_one(tmp_path: Path) -> None:
    accuracy, _ = run_tables(read_run(curve_run(tmp_path / "run", {1: 0.5, 2: 0.8}, status="diverged")))
    assert [cell.text for cell in accuracy.rows[0]] == ["Global model", "—", "80.00", "—", "2"]


def test_tables_of_one_run(tmp_path: Path) -> None:
    accuracy, cost = run_tables(read_run(curve_run(tmp_path / "run", {1: 0.5, 2: 0.8, 3: 0.6})))
    assert [cell.text for cell in accuracy.rows[0]] == ["Global model", "60.00", "80.00", "63.33", "2"]
    assert row(cost, "Upload")["Value"].text == "180 B"


def test_a_caption_is_made_of_sentences(tmp_path: Path) -> None:
    comparison = read_comparison(fake_comparison(tmp_path))
    for table in comparison_tables(comparison):
        text = to_latex(table, "Setting: data digits, skew dirichlet(0.3).")
        (caption,) = [line for line in text.splitlines() if line.startswith(r"\caption{")]
        assert caption.startswith(rf"\caption{{{latex(table.title)}. Setting: data digits")
        assert ".." not in caption
        assert caption.endswith(".}")
        assert all(latex(note) in caption for note in table.notes)


def test_captions_are_labelled_each_by_its_own_name(tmp_path: Path) -> None:
    text = "".join(map(to_latex, comparison_tables(read_comparison(fake_comparison(tmp_path)))))
    labels = re.findall(r"\\label\{(.*)\}", text)
    assert labels[0] == "tab:global-model-accuracy"
    assert len(set(labels)) == len(labels) == text.count(r"\begin{table}")


@pytest.mark.parametrize("name", ["[x]", "*", "a\n\nb", "--lr", "a\rb\x00c", "δ ζ ± × “q”", HOSTILE])
def test_latex_is_whole_whatever_a_name_is(name: str) -> None:
    text = to_latex(Table(name, (name, name), ((Cell(name), Cell(name)),), (name,)))
    plain = re.sub(r"\\text[a-z]+\{\}|\\[{}]", "", text)  # what the name's own braces became
    assert plain.count("{") == plain.count("}")
    assert text.count("$") - text.count(r"\$") == 2 * len(re.findall(r"(?<!\\)\$[^$]+(?<!\\)\$", text))
    assert text.count("\n") == 12  # no line of its own, empty or not
    assert not re.search(r"[\x00-\x09\x0b-\x1f]|[α-ω±×“”]", text)
    assert not re.search(r"(\\\\|rule)\n[\[*]", text)  # which LaTeX would take for an argument
    assert "--" not in text


def test_a_table_of_one_seed_speaks_of_no_deviation(tmp_path: Path) -> None:
    one, *_ = comparison_tables(read_comparison(fake_comparison(tmp_path / "one", seeds=[0])))
    several, *_ = comparison_tables(read_comparison(fake_comparison(tmp_path / "several")))
    assert one.notes[0].startswith("One seed.")
    assert several.notes[0].startswith("Mean ± sample standard deviation over seeds.")


def test_bytes_have_one_name_and_meaning_in_every_table(tmp_path: Path) -> None:
    """A target that is reached in the last round makes all tables count the same bytes: 60 up, 40 down a round."""
    folder = fake_comparison(
        tmp_path,
        ["a", "b"],
        [0, 1],
        lambda place, method, seed: curve_run(place, {1: 0.1, 2: 0.2, 3: 0.7}, method=method, title=method),
    )
    comparison = read_comparison(folder)
    accuracy, cost = comparison_tables(comparison)
    _, alone = run_tables(comparison.runs["a"][0])
    assert row(accuracy, "a")["Traffic to 60\u00a0%"].text == row(cost, "a")["Traffic"].text == "300 B"
    sums = {name: row(cost, "a")[name].text for name in ("Upload", "Download", "Traffic")}
    assert sums == {"Upload": "180 B", "Download": "120 B", "Traffic": "300 B"}
    assert sums == {name: row(alone, name)["Value"].text for name in sums}
    for table in (accuracy, cost, alone):
        words = " ".join(
            [table.title, *table.columns, *table.notes, *(cells[0].text for cells in table.rows)]
        )
        assert not re.search(r"\b(sent|bytes|up|down)\b", words, re.IGNORECASE)
        assert "all clients" in words
    figure = accuracy_by_traffic({"a": [comparison.runs["a"][0]]}, "global_acc")
    assert figure is not None
    assert max(figure.data[0].x) == 300
    assert figure.layout.xaxis.title.text == "traffic: upload + download (B)"

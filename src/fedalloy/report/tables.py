"""One neutral table, rendered for a terminal, Markdown, LaTeX and HTML."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from html import escape

import rich.box
import rich.table
from rich.text import Text

from fedalloy.report.latex import latex
from fedalloy.report.statistics import Mark

MARKDOWN = re.compile(r"([\\`*_\[\]<>|~$&#])")
ROW_NAME = 24  # letters of a row's name that a narrow terminal must not wrap
RICH: dict[Mark, str] = {"best": "bold", "second": "underline", "none": ""}


@dataclass(frozen=True)
class Cell:
    text: str
    mark: Mark = "none"


@dataclass(frozen=True)
class Table:
    """The first column names the row and is set left, the others hold values and are set right."""

    title: str
    columns: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    notes: tuple[str, ...] = ()


def to_rich(table: Table) -> rich.table.Table:
    """For a terminal: best bold, second underlined."""
    drawn = rich.table.Table(
        title=Text(table.title),
        caption=Text("\n".join(table.notes)),
        caption_justify="left",
        box=rich.box.SIMPLE_HEAD,
        pad_edge=False,
        collapse_padding=True,
    )
    names, *values = table.columns
    widest = max((len(row[0].text) for row in table.rows), default=0)
    drawn.add_column(Text(names), min_width=min(widest, ROW_NAME))
    for column in values:
        drawn.add_column(Text(column), justify="right")
    for row in table.rows:
        drawn.add_row(*(Text.assemble((cell.text, RICH[cell.mark])) for cell in row))
    return drawn


def to_markdown(table: Table) -> str:
    """A pipe table under a heading: **best**, <u>second</u>."""
    rules = [":--", *["--:"] * (len(table.columns) - 1)]
    marked = [[_marked(cell, markdown, "**{}**", "<u>{}</u>") for cell in row] for row in table.rows]
    lines = [f"| {' | '.join(cells)} |" for cells in ([markdown(c) for c in table.columns], rules, *marked)]
    notes = "".join(f"\n{markdown(note)}\n" for note in table.notes)
    return f"### {markdown(table.title)}\n\n" + "\n".join(lines) + "\n" + notes


def to_latex(table: Table, setting: str = "") -> str:
    r"""A booktabs table (needs ``\usepackage{booktabs}``): \textbf best, \underline second.

    The caption is the title, the setting and the notes, each a sentence of its own.
    """
    rows = [
        " & ".join(_marked(cell, latex, r"\textbf{{{}}}", r"\underline{{{}}}") for cell in row)
        for row in table.rows
    ]
    sentences = [text.removesuffix(".") + "." for text in (table.title, setting, *table.notes) if text]
    name = re.sub(r"[^a-z0-9]+", "-", table.title.lower()).strip("-")
    lines = [
        r"\begin{table}[t]",
        r"\centering",
        rf"\caption{{{latex(' '.join(sentences))}}}",
        rf"\label{{tab:{name}}}",
        rf"\begin{{tabular}}{{l{'r' * (len(table.columns) - 1)}}}",
        r"\toprule",
        " & ".join(map(latex, table.columns)) + r" \\",
        r"\midrule",
        *(rf"{row} \\" for row in rows),
        r"\bottomrule",
        r"\end{tabular}",
        r"\end{table}",
    ]
    return "\n".join(lines) + "\n"


def to_html(table: Table) -> str:
    """A <table> in a box that scrolls by itself on narrow screens."""
    head = "".join(f'<th scope="col">{escape(column)}</th>' for column in table.columns)
    body = "\n".join(f"<tr>{''.join(map(_html_cell, row))}</tr>" for row in table.rows)
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    return (
        f'<h3>{escape(table.title)}</h3><div class="scroll" tabindex="0"><table aria-label="{escape(table.title)}">'
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody></table></div>{notes}"
    )


def _marked(cell: Cell, escaped: Callable[[str], str], best: str, second: str) -> str:
    wrap: dict[Mark, str] = {"best": best, "second": second, "none": "{}"}
    return wrap[cell.mark].format(escaped(cell.text))


def _html_cell(cell: Cell) -> str:
    return f"<td>{_marked(cell, escape, '<b>{}</b>', '<u>{}</u>')}</td>"


def markdown(text: str) -> str:
    """Any text as Markdown prints it."""
    return MARKDOWN.sub(r"\\\1", text.replace("\n", " "))

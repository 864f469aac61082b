"""Reports: run folders read back, judged, and drawn as tables, figures and pages."""

from fedalloy.report.html import (
    write_comparison_report,
    write_figures,
    write_partition,
    write_run_report,
    write_tables,
)
from fedalloy.report.results import comparison_tables, run_tables
from fedalloy.report.runs import Comparison, Run, read_comparison, read_run
from fedalloy.report.tables import Cell, Table, to_html, to_latex, to_markdown, to_rich

__all__ = [
    "Cell",
    "Comparison",
    "Run",
    "Table",
    "comparison_tables",
    "read_comparison",
    "read_run",
    "run_tables",
    "to_html",
    "to_latex",
    "to_markdown",
    "to_rich",
    "write_comparison_report",
    "write_figures",
    "write_partition",
    "write_run_report",
    "write_tables",
]

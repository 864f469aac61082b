"""The pictures of a report. Each function returns a plotly figure, or None where nothing was recorded.

A group is a label with its runs, one for each seed. Colours are those of Okabe and Ito that stand out on
light and on dark ground alike; after the last colour the line style changes.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from html import escape
from statistics import fmean
from textwrap import wrap

import plotly.graph_objects as go
from plotly.colors import sample_colorscale

from fedalloy.report.runs import MEASURES, Partition, Run
from fedalloy.report.statistics import client_accuracies
from fedalloy.report.units import byte_unit

Groups = Mapping[str, Sequence[Run]]

PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#7F7F7F")
DASHES = ("solid", "dash", "dot", "dashdot")
PHASES = ("train", "evaluate", "aggregate", "other")
MOST_BARS = 60  # clients; beyond, a bar is too thin to read
MOST_COLOURS = 20  # classes; beyond, neighbouring colours cannot be told apart
MOST_MARKERS = 25
MOST_POINTS = 300
ROW_LABEL = 20  # letters on a line beside a bar
PERCENT = ".2%"


def curves(groups: Groups, measure: str) -> go.Figure | None:
    """One measure against rounds: the mean over seeds, and a band from the worst seed to the best."""
    figure = go.Figure()
    for position, (label, runs) in enumerate(groups.items()):
        rounds, values = _aligned(runs, measure)
        _add_line(figure, position, label, rounds, values)
    count_rounds(figure)
    return finished(figure, measure)


def accuracies(run: Run) -> go.Figure | None:
    """Every accuracy of one run against rounds."""
    figure = go.Figure()
    for position, (measure, name) in enumerate(run.measures.items()):
        rounds, values = _aligned([run], measure)
        _add_line(figure, position, name, rounds, values)
    count_rounds(figure)
    return finished(figure, "global_acc")


def accuracy_by_traffic(groups: Groups, measure: str) -> go.Figure | None:
    """The same against the traffic so far, upload and download; a method that sends nothing has no line."""
    unit, name = byte_unit(max((max(r.traffic.values(), default=0) for r in _all(groups)), default=0))
    figure = go.Figure()
    for position, (label, runs) in enumerate(groups.items()):
        rounds, values = _aligned(runs, measure)
        traffic = [run.traffic for run in runs if run.curve(measure)]
        so_far = [fmean(totals[number] for totals in traffic) for number in rounds]
        if any(so_far):
            _add_line(figure, position, label, [count / unit for count in so_far], values)
    figure.update_xaxes(title=f"traffic: upload + download ({name})", hoverformat=".2f")
    return finished(figure, measure)


def client_spread(groups: Groups) -> go.Figure | None:
    """Every client's accuracy in the last evaluation, all seeds together."""
    figure = go.Figure()
    for position, (label, runs) in enumerate(groups.items()):
        values = [value for run in runs for value in client_accuracies(run)]
        if values:
            figure.add_box(
                x=values,
                name=_row(label),
                marker={"color": colour(position), "size": 5, "opacity": 0.6},
                boxpoints="all" if len(values) <= MOST_POINTS else "outliers",
                pointpos=0,
                jitter=0.6,
            )
    figure.update_xaxes(title="accuracy of a client", tickformat=".0%", hoverformat=PERCENT)
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_layout(showlegend=False, height=_height([trace.name for trace in figure.data]))
    return finished(figure)


def class_accuracy(groups: Groups, measure: str) -> go.Figure | None:
    """Accuracy on each class in the last evaluation, mean over seeds, of the methods this measure heads."""
    figure = go.Figure()
    for position, (label, runs) in enumerate(groups.items()):
        last = [run.last_metrics for run in runs if run.metric == measure]
        rows = [metrics.per_class for metrics in last if metrics and metrics.per_class]
        if rows:
            means = [_mean_known(column) for column in zip(*rows, strict=True)]
            names = next((run.class_names for run in runs if run.class_names), ())
            figure.add_bar(
                x=_class_labels(names, len(means)), y=means, name=text(label), marker=_bar(position)
            )
    figure.update_xaxes(title="class", type="category")
    figure.update_yaxes(title="accuracy", tickformat=".0%", hoverformat=PERCENT)
    figure.update_layout(showlegend=len(figure.data) > 1)
    return finished(figure)


def partition_picture(partition: Partition | None) -> go.Figure | None:
    """Who holds what; nothing where nobody holds anything."""
    return drawn_partition(partition) if partition and any(map(any, partition.counts)) else None


def drawn_partition(partition: Partition) -> go.Figure:
    """Stacked bars of class counts, or a heat map where there would be too many."""
    classes = max(map(len, partition.counts))
    labels = _class_labels(partition.class_names, classes)
    clients = list(range(len(partition.counts)))
    columns = [[row[c] if c < len(row) else 0 for row in partition.counts] for c in range(classes)]
    figure = go.Figure()
    if len(clients) > MOST_BARS or classes > MOST_COLOURS:
        hover = "client %{x}<br>class %{y}<br>%{z} samples<extra></extra>"
        bar = {"title": {"text": "samples"}}
        figure.add_heatmap(
            x=clients, y=labels, z=columns, colorscale="Cividis", colorbar=bar, hovertemplate=hover
        )
        figure.update_yaxes(title="class", type="category", autorange="reversed")
    else:
        colours = sample_colorscale("Viridis", classes, low=0.12, high=0.95)
        for label, colour, column in zip(labels, colours, columns, strict=True):
            figure.add_bar(x=clients, y=column, name=label, marker={"color": colour, "line": {"width": 0}})
        figure.update_layout(barmode="stack")
        figure.update_yaxes(title="samples")
    figure.update_xaxes(title="client", tickformat="d")
    return finished(figure)


def time_by_round(run: Run) -> go.Figure | None:
    """Seconds of every round, split into what they were spent on."""
    rounds = [entry.round for entry in run.history]
    split = {phase: [entry.seconds.get(phase, 0.0) for entry in run.history] for phase in PHASES}
    figure = go.Figure()
    for position, (phase, seconds) in enumerate(split.items()):
        if any(seconds):
            figure.add_bar(x=rounds, y=seconds, name=phase, marker=_bar(position))
    count_rounds(figure)
    figure.update_yaxes(title="seconds", hoverformat=".3f")
    figure.update_layout(barmode="stack")
    return finished(figure)


def time_by_method(groups: Groups) -> go.Figure | None:
    """Seconds of a round by method, mean over rounds and seeds."""
    recorded = {
        label: entries for label, runs in groups.items() if (entries := [e for r in runs for e in r.history])
    }
    labels = [_row(label) for label in recorded]
    split = {
        phase: [fmean(e.seconds.get(phase, 0.0) for e in entries) for entries in recorded.values()]
        for phase in PHASES
    }
    figure = go.Figure()
    for position, (phase, seconds) in enumerate(split.items()):
        if any(seconds):
            figure.add_bar(y=labels, x=seconds, name=phase, orientation="h", marker=_bar(position))
    figure.update_xaxes(title="seconds per round", hoverformat=".3f")
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_layout(barmode="stack", height=_height(labels))
    return finished(figure)


def traffic_by_slot(groups: Groups) -> go.Figure | None:
    """Upload and download of the whole run by slot, mean over seeds."""
    totals: dict[str, Counter[str]] = {}
    for label, runs in groups.items():
        ups = [entry.bytes_up for run in runs for entry in run.history]
        downs = [entry.bytes_down for run in runs for entry in run.history]
        for direction, entries in (("upload", ups), ("download", downs)):
            whole = totals[_row(f"{label} {direction}") if len(groups) > 1 else direction] = Counter()
            for entry in entries:
                whole.update(entry)
            for slot in whole:
                whole[slot] //= len(runs)
    slots = [slot for slot, count in sum(totals.values(), Counter()).most_common() if count]
    unit, name = byte_unit(max((sum(whole.values()) for whole in totals.values()), default=0))
    figure = go.Figure()
    for position, slot in enumerate(slots):
        shares = [whole[slot] / unit for whole in totals.values()]
        figure.add_bar(y=list(totals), x=shares, name=text(slot), orientation="h", marker=_bar(position))
    figure.update_xaxes(title=name, hoverformat=".2f")
    figure.update_yaxes(autorange="reversed", type="category")
    figure.update_layout(barmode="stack", height=_height(list(totals)))
    return finished(figure)


def _aligned(runs: Sequence[Run], measure: str) -> tuple[list[int], list[list[float]]]:
    """The rounds in which every seed that recorded the measure has it, and the seeds' values there.

    A seed that stopped early ends the line of its method: a mean over fewer seeds would jump.
    """
    recorded = [curve for run in runs if (curve := run.curve(measure))]
    shared = [number for number in recorded[0] if all(number in c for c in recorded)] if recorded else []
    return shared, [[curve[number] for curve in recorded] for number in shared]


def _add_line(
    figure: go.Figure, position: int, label: str, x: Sequence[float], values: Sequence[Sequence[float]]
) -> None:
    if not x:
        return
    shade = colour(position)
    if len(values[0]) > 1:
        upper, lower = [max(seeds) for seeds in values], [min(seeds) for seeds in values]
        figure.add_scatter(
            x=[*x, *reversed(x)],
            y=[*upper, *reversed(lower)],
            fill="toself",
            fillcolor=shade,
            opacity=0.18,
            line={"width": 0},
            mode="lines",
            hoverinfo="skip",
            showlegend=False,
            legendgroup=str(position),
        )
    figure.add_scatter(
        x=x,
        y=[fmean(seeds) for seeds in values],
        name=text(label),
        mode="lines+markers" if len(x) <= MOST_MARKERS else "lines",
        line={"color": shade, "width": 2, "dash": DASHES[position // len(PALETTE) % len(DASHES)]},
        marker={"size": 5},
        legendgroup=str(position),
    )


def finished(figure: go.Figure, measure: str = "") -> go.Figure | None:
    if not figure.data:
        return None
    if measure in MEASURES:
        figure.update_yaxes(title="accuracy", tickformat=".0%", hoverformat=PERCENT)
    elif measure:
        title = {"train_loss": "training loss", "global_loss": "test loss"}.get(
            measure, measure.replace("_", " ")
        )
        figure.update_yaxes(title=title, hoverformat=".4f")
    figure.update_xaxes(automargin=True)
    figure.update_yaxes(automargin=True, ticks="outside", ticklen=6, tickcolor="rgba(0,0,0,0)")
    if figure.layout.height is None:
        named = sum(trace.showlegend is not False for trace in figure.data)
        figure.update_layout(height=400 + 14 * max(named - 4, 0))  # room for the legend on a narrow screen
    return figure.update_layout(
        template="plotly_white",
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        font={"family": "system-ui, sans-serif", "size": 13},
        margin={"l": 10, "r": 10, "t": 10, "b": 10},
        legend={"orientation": "h", "x": 0, "xanchor": "left", "y": 1.02, "yanchor": "bottom"},
        legend_traceorder="normal",
    )


def count_rounds(figure: go.Figure) -> None:
    """Rounds are whole numbers, however few there are."""
    last = max((max(trace.x) for trace in figure.data if trace.x), default=0)
    figure.update_xaxes(title="round", tickformat="d", dtick=1 if last <= 10 else None)


def text(name: str) -> str:
    """Plotly reads a little HTML in labels; a name is to be shown as it is."""
    return escape(name, quote=False)


def _row(name: str) -> str:
    """A name beside a bar, on lines short enough for a narrow screen, broken before its options."""
    return "<br>".join(map(text, wrap(name.replace("(", " ("), ROW_LABEL)))


def _class_labels(names: Sequence[str], classes: int) -> list[str]:
    return [text(names[c]) if c < len(names) else str(c) for c in range(classes)]


def colour(position: int) -> str:
    return PALETTE[position % len(PALETTE)]


def shades(count: int) -> list[str]:
    """As many colours as there are clouds of points, which have no line style to tell them apart."""
    return list(PALETTE) if count <= len(PALETTE) else sample_colorscale("Turbo", count)


def _bar(position: int) -> dict[str, object]:
    return {"color": colour(position), "line": {"width": 0}}


def _height(rows: Sequence[str]) -> int:
    lines = max((row.count("<br>") for row in rows), default=0) + 1
    return 150 + len(rows) * (24 + 18 * lines)


def _all(groups: Groups) -> list[Run]:
    return [run for runs in groups.values() for run in runs]


def _mean_known(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return fmean(known) if known else None

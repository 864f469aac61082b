"""Figures of what diagnostics found: numbers by round, spectra, matrices, and a map of the clients' features."""

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from fedalloy.report.figures import colour, count_rounds, finished, shades, text
from fedalloy.report.page import Picture
from fedalloy.report.runs import Diagnostics, Map, Panel, Run

SCALED = "Every curve is divided by its largest value, so that all fit on one axis."
ONE_MORE = "t-SNE of features after one more local round. A point is a sample."


def inside_pictures(run: Run) -> list[Picture]:
    """Every figure that there are findings for."""
    found = run.diagnostics or Diagnostics()
    pictures = [
        Picture(
            "diagnostics",
            "Diagnostics by round",
            SCALED,
            by_round(run),
        )
    ]
    spectra = {name: values for name, values in found.matrices.items() if name.startswith("spectrum")}
    pictures.append(
        Picture(
            "spectra", "Singular values", "At the last checkpoint, in descending order.", spectrum(spectra)
        )
    )
    for number, (name, rows) in enumerate(found.matrices.items()):
        if rows and isinstance(rows[0], tuple):
            pictures.append(
                Picture(f"matrix{number}", name.capitalize(), "At the last checkpoint.", heat_map(rows))
            )
    norms = "After one more local round. A point is one class at one client."
    pictures.append(
        Picture("norms", "Norm of class weights by share of the class", norms, norms_by_share(found))
    )
    for by in ("client", "label"):
        title = "Features by client" if by == "client" else "Features by class"
        pictures.append(
            Picture(
                f"map-{by}",
                title,
                ONE_MORE,
                feature_map(found.map, by),
            )
        )
    over = "t-SNE of each client's features, from its own model. Colours are classes. Every panel has its own axes."
    pictures.append(Picture("panels", "Features over rounds", over, panels(found.panels)))
    return [picture for picture in pictures if picture.figure is not None]


def by_round(run: Run) -> go.Figure | None:
    """Every number that was recorded during the run."""
    figure = go.Figure()
    names = dict.fromkeys(name for entry in run.history for name in entry.diagnostics)
    for position, name in enumerate(names):
        curve = {entry.round: entry.diagnostics[name] for entry in run.history if name in entry.diagnostics}
        largest = max(map(abs, curve.values())) or 1.0
        figure.add_scatter(
            x=list(curve),
            y=[value / largest for value in curve.values()],
            name=f"{text(name)} (largest {largest:.3g})",
            mode="lines+markers",
            line={"color": colour(position)},
            customdata=list(curve.values()),
            hovertemplate="%{customdata:.4g}",
        )
    count_rounds(figure)
    return finished(figure)


def spectrum(spectra: dict[str, tuple[float, ...] | tuple[tuple[float, ...], ...]]) -> go.Figure | None:
    figure = go.Figure()
    for position, (name, values) in enumerate(spectra.items()):
        figure.add_scatter(
            y=values, name=text(name.removeprefix("spectrum of ")), line={"color": colour(position)}
        )
    figure.update_yaxes(type="log", title="singular value", exponentformat="power")
    figure.update_xaxes(title="index")
    return finished(figure)


def heat_map(rows: tuple[tuple[float, ...], ...] | tuple[float, ...]) -> go.Figure | None:
    figure = go.Figure(go.Heatmap(z=rows, colorscale="Viridis", zmin=0))
    figure.update_yaxes(autorange="reversed", title="class")
    figure.update_xaxes(title="class")
    return finished(figure)


def norms_by_share(found: Diagnostics) -> go.Figure | None:
    figure = go.Figure()
    for position, (client, said) in enumerate(found.clients.items()):
        if "norms of class weights" in said:
            figure.add_scatter(
                x=said["class shares"],
                y=said["norms of class weights"],
                mode="markers",
                name=f"client {client}",
                marker={"color": colour(position)},
            )
    figure.update_xaxes(title="share of the class in the client's data", tickformat=".0%")
    figure.update_yaxes(title="norm of the class weight")
    return finished(figure)


def feature_map(drawn: Map | None, by: str) -> go.Figure | None:
    figure = go.Figure()
    if drawn is None:
        return None
    group = drawn.client if by == "client" else drawn.label
    groups = sorted(set(group))
    colours = shades(len(groups))
    for position, one in enumerate(groups):
        inside = [i for i, other in enumerate(group) if other == one]
        figure.add_scatter(
            x=[drawn.x[i] for i in inside],
            y=[drawn.y[i] for i in inside],
            mode="markers",
            name=f"{'client' if by == 'client' else 'class'} {one}",
            marker={"color": colours[position], "size": 4},
        )
    figure.update_xaxes(showticklabels=False)
    figure.update_yaxes(showticklabels=False)
    return finished(figure)


def panels(drawn: Sequence[Panel]) -> go.Figure | None:
    """A row for each client, a column for each round."""
    if not drawn:
        return None
    rounds, clients = (
        {one: place for place, one in enumerate(sorted(set(seen)), 1)}
        for seen in (
            [panel.round for panel in drawn],
            [panel.client[0] for panel in drawn],
        )
    )
    figure = make_subplots(
        rows=len(clients),
        cols=len(rounds),
        column_titles=[f"round {number}" for number in rounds],
        row_titles=[f"client {number}" for number in clients],
        horizontal_spacing=0.02,
        vertical_spacing=0.02,
    )
    colours = shades(1 + max(label for panel in drawn for label in panel.label))
    for panel in drawn:
        figure.add_scatter(
            x=panel.x,
            y=panel.y,
            mode="markers",
            marker={"color": [colours[label] for label in panel.label], "size": 3},
            text=[f"class {label}" for label in panel.label],
            hoverinfo="text",
            showlegend=False,
            row=clients[panel.client[0]],
            col=rounds[panel.round],
        )
    figure.update_xaxes(showticklabels=False)
    figure.update_yaxes(showticklabels=False)
    figure.update_layout(height=220 * len(clients) + 40)
    done = finished(figure)
    return done.update_layout(margin_t=30) if done else None  # room for the titles of the columns

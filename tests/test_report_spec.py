"""Figures as plain data for the page's script: all that is shown, nothing that a browser could run."""

import json

import plotly.graph_objects as go
import pytest

from fedalloy.report.figures import finished, traffic_by_slot
from fedalloy.report.page import Picture, page, pictures
from fedalloy.report.spec import as_json, spec_of

HOSTILE = "</script><script>x</script>&amp;<!--\u2028"


def drawn(figure: go.Figure) -> go.Figure:
    done = finished(figure)
    assert done is not None
    return done


def test_a_line_with_its_band_and_axes() -> None:
    figure = go.Figure()
    figure.add_scatter(
        x=[1, 2, 2, 1], y=[1, 2, 0, 0], fill="toself", fillcolor="#111111", showlegend=False, legendgroup="0"
    )
    figure.add_scatter(
        x=[1, 2], y=[0.123456789, float("nan")], name="a&lt;b", line={"color": "#222222"}, legendgroup="0"
    )
    figure.update_yaxes(title="accuracy", tickformat=".0%", hoverformat=".2%")
    spec = spec_of(drawn(figure))
    (cell,) = spec["cells"]
    band, line = cell["traces"]
    assert band["band"]
    assert (band["group"], line["group"]) == ("0", "0")
    assert (line["name"], line["y"]) == ("a<b", [0.123457, None])
    assert cell["y"] == {
        "kind": "linear",
        "title": "accuracy",
        "format": ".0%",
        "hover": ".2%",
        "ticks": True,
    }
    assert not spec["legend"]


def test_bars_beside_names_of_several_lines() -> None:
    figure = go.Figure().add_bar(
        y=["one<br>two"], x=[3], name="s", orientation="h", marker={"color": "#333333"}
    )
    figure.update_layout(barmode="stack").update_yaxes(autorange="reversed", type="category")
    spec = spec_of(drawn(figure))
    (cell,) = spec["cells"]
    assert spec["stack"]
    assert cell["traces"][0]["y"] == ["one\ntwo"]
    assert (cell["y"]["kind"], cell["y"]["reversed"]) == ("category", True)


def test_a_heat_map_knows_its_range() -> None:
    figure = go.Figure().add_heatmap(z=[[1, 2], [3, None]], colorscale="Viridis")
    (cell,) = spec_of(drawn(figure))["cells"]
    (heat,) = cell["traces"]
    assert (heat["range"], heat["x"], heat["y"]) == ([1, 3], [0, 1], [0, 1])
    assert heat["colors"][0].startswith("#")


def test_a_kind_that_the_page_cannot_draw_fails_at_once() -> None:
    with pytest.raises(KeyError, match="violin"):
        spec_of(go.Figure().add_violin(y=[1, 2]))


def test_no_name_ends_its_element() -> None:
    figure = go.Figure().add_bar(x=[HOSTILE], y=[1], name=HOSTILE)
    text = as_json(spec_of(drawn(figure)))
    assert not set("<>&\u2028") & set(text)
    whole = page("t", pictures([Picture("p", "t", "c", drawn(figure))]))
    assert whole.count("<script") == whole.count("</script>") == 2
    assert json.loads(text)["cells"][0]["traces"][0]["name"] == HOSTILE.replace("&amp;", "&")


def test_nothing_sent_is_no_figure() -> None:
    assert traffic_by_slot({}) is None

"""Colours, chart configuration and small Altair helpers that all figures share.

Colour maps are perceptually uniform (viridis); categories use the Okabe-Ito palette, which colour-blind readers can
tell apart, and never colour alone.
"""

from __future__ import annotations

import json
import math
from typing import Any

import altair as alt
import pandas as pd

from rotoscope.report.text import sample
from rotoscope.results import Result

INK = "#1c2430"
MUTED = "#5b6675"
MISSING = "#e3e6ea"
TENSOR_COLOURS = {"Q": "#0072b2", "K": "#d55e00", "V": "#009e73"}
SERIES = ["#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#1c2430", "#8a6d00"]
"""Okabe-Ito colours in an order that keeps neighbours apart; past the last one, shapes alone tell series apart."""

SHAPES = ["circle", "square", "triangle-up", "diamond", "cross", "triangle-down", "triangle-right", "triangle-left"]

WIDTH = 930

_FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"

CONFIG: dict[str, Any] = {
    "font": _FONT,
    "background": "white",
    "axis": {
        "labelColor": INK,
        "titleColor": INK,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": 500,
        "gridColor": "#e9ecef",
        "domainColor": "#8a94a3",
        "tickColor": "#8a94a3",
        "labelOverlap": "greedy",
        "labelLimit": 260,
        "titlePadding": 8,
    },
    "legend": {
        "labelColor": INK,
        "titleColor": INK,
        "labelFontSize": 11,
        "titleFontSize": 12,
        "titleFontWeight": 500,
        "titleLimit": 320,
        "gradientThickness": 12,
    },
    "header": {"labelColor": INK, "labelFontSize": 12, "labelFontWeight": 600, "titleColor": INK, "titleFontSize": 12},
    "title": {"color": INK, "fontSize": 13, "fontWeight": 600, "anchor": "start", "frame": "group"},
    "view": {"stroke": "#c9cfd6"},
}


def count_axis(field: str, count: int, title: str | None, width: int = WIDTH) -> alt.X:
    """An x axis over 0 … count - 1, each a band and as many labelled, evenly, as the width allows."""
    step = next(step for step in (1, 2, 4, 5, 8, 10, 16, 20, 32, 64, 128, count) if step * width >= 24 * count)
    return alt.X(
        f"{field}:O",
        title=title,
        scale=alt.Scale(domain=list(range(count))),
        axis=alt.Axis(labelAngle=0, values=list(range(0, count, step))),
    )


def layer_axis(result: Result, width: int = WIDTH, title: str | None = "layer") -> alt.X:
    """Layers from 0 to the last as an x axis; those without values stay visible as gaps."""
    return count_axis("layer", layer_count(result), title, width)


def ramp(form: str) -> alt.Legend:
    """A colour legend with few labels, in the given number format."""
    return alt.Legend(tickCount=4, format=form, gradientLength=130)


def powers(values: Any) -> alt.Axis:
    """An axis for a log scale with a tick at each power of ten that the values come near."""
    low, high = math.floor(math.log10(values.min())), math.ceil(math.log10(values.max()))
    return alt.Axis(values=[10.0**exponent for exponent in range(low, high + 1)], format=",~r")


def layer_count(result: Result) -> int:
    """The number of layers of the model, seen in any table of its own that has a `layer` column."""
    return 1 + max(
        int(table["layer"].max())
        for name, table in result.tables.items()
        if "layer" in table and not table.empty and not name.startswith("control_")
    )


def tensor_colour() -> alt.Color:
    """Q, K and V in their fixed colours."""
    scale = alt.Scale(domain=list(TENSOR_COLOURS), range=list(TENSOR_COLOURS.values()))
    return alt.Color("tensor:N", title="tensor", scale=scale)


def tensors(table: pd.DataFrame) -> list[str]:
    """Those of Q, K and V that a table speaks of, in this order."""
    return [tensor for tensor in TENSOR_COLOURS if tensor in set(table["tensor"])]


def tip(field: str, title: str, form: str | None = None) -> alt.Tooltip:
    """One line of a hover text; `form` is a d3 number format, and its absence means the value as it is."""
    if form is None:
        return alt.Tooltip(f"{field}:N", title=title)
    return alt.Tooltip(f"{field}:Q", title=title, format=form)


def sampled(chart: alt.Chart, result: Result) -> alt.Chart:
    """The chart with what its values rest on as a field, shown by `SAMPLE`."""
    return chart.transform_calculate(sample=json.dumps(sample(result.tables.get("texts"))))


SAMPLE = tip("sample", "measured on")


def choice(name: str, label: str, options: dict[str, str], value: str | None = None) -> alt.Parameter:
    """A drop-down list: `options` maps what the chart's expressions see to what the reader sees."""
    return alt.param(
        name=name,
        value=next(iter(options)) if value is None else value,
        bind=alt.binding_select(options=list(options), labels=list(options.values()), name=f"{label} "),
    )

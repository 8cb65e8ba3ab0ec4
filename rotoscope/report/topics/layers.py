"""Every layer side by side: additivity, massive values, entropy and sink mass."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from rotoscope.report.figure import Cell, Drawn, Grid, Listing, Plot, Topic
from rotoscope.report.style import SAMPLE, TENSOR_COLOURS, layer_axis, sampled, tensor_colour, tip
from rotoscope.report.text import fixed, percent
from rotoscope.results import Result

_PANEL = 440
_SINGLE = {
    "form1_within": ("form 1 r, within query", ".4f"),
    "form2_within": ("form 2 r, within query", ".4f"),
    "entropy": ("attention entropy (nats)", ".3f"),
    "sink_mass": ("attention to position 0", ".3f"),
}
_RATIOS = {f"max_ratio_{tensor.lower()}": tensor for tensor in TENSOR_COLOURS}
_SHARES = {f"massive_{tensor.lower()}": tensor for tensor in TENSOR_COLOURS}
_COLUMNS: dict[str, tuple[str, Any]] = {
    "form1": ("form 1 r", fixed),
    "form1_within": ("form 1 r within", fixed),
    "form2_within": ("form 2 r within", fixed),
    "predicted": ("predicted r", fixed),
    "max_ratio_q": ("max ratio Q", lambda value: fixed(value, 2)),
    "max_ratio_k": ("max ratio K", lambda value: fixed(value, 2)),
    "max_ratio_v": ("max ratio V", lambda value: fixed(value, 2)),
    "massive_q": ("massive heads Q", percent),
    "massive_k": ("massive heads K", percent),
    "massive_v": ("massive heads V", percent),
    "entropy": ("entropy (nats)", lambda value: fixed(value, 2)),
    "sink_mass": ("mass on position 0", fixed),
}


def multiples(result: Result) -> Drawn | None:
    """One small chart per quantity, all against the layer."""
    table = result.tables["layers"]
    panels = [
        _line(result, table, name, title, form)
        for name, (title, form) in _SINGLE.items()
        if name in table and table[name].notna().any()
    ]
    for columns, title, form in (
        (_RATIOS, "max ratio, mean over heads", ".2f"),
        (_SHARES, "heads with massive dims", ".0%"),
    ):
        long = table.melt("layer", [name for name in columns if name in table], "tensor")
        if long["value"].notna().any():
            panels.append(_tensors(result, long.assign(tensor=long["tensor"].map(columns)), title, form))
    if not panels:
        return None
    return Drawn(_reading(table), alt.concat(*panels, columns=2, spacing={"row": 62, "column": 66}, bounds="flush"))


def grid(result: Result) -> Grid | None:
    """The same as numbers."""
    table = result.tables["layers"]
    there = {name: entry for name, entry in _COLUMNS.items() if name in table}
    rows = []
    for _, row in table.sort_values("layer").iterrows():
        kind = row["position"] if row["kind"] == "attention" else "no attention"
        cells = [Cell(f"{row['layer']:.0f}", float(row["layer"])), Cell(str(kind))]
        for name, (_, form) in there.items():
            cells.append(Cell(form(row[name]), None if pd.isna(row[name]) else float(row[name])))
        rows.append(cells)
    names = [title for title, _ in there.values()]
    return Grid(["layer", "position", *names], rows, [True, False, *[True] * len(names)])


def _line(result: Result, table: pd.DataFrame, name: str, title: str, form: str) -> alt.Chart:
    panel: alt.Chart = (
        sampled(alt.Chart(table[["layer", name]], title=title, width=_PANEL, height=120), result)
        .mark_line(point=alt.OverlayMarkDef(size=28), color="#3b528b")
        .encode(
            x=layer_axis(result, _PANEL),
            y=alt.Y(f"{name}:Q", title=None, scale=alt.Scale(zero=False), axis=alt.Axis(tickCount=4)),
            tooltip=[tip("layer", "layer"), tip(name, title, form), SAMPLE],
        )
    )
    return panel


def _tensors(result: Result, long: pd.DataFrame, title: str, form: str) -> alt.Chart:
    shares = "%" in form
    panel: alt.Chart = (
        sampled(alt.Chart(long, title=title, width=_PANEL, height=120), result)
        .mark_line(point=alt.OverlayMarkDef(size=28))
        .encode(
            x=layer_axis(result, _PANEL),
            y=alt.Y(
                "value:Q",
                title=None,
                scale=alt.Scale(domain=[0, 1]) if shares else alt.Scale(),
                axis=alt.Axis(tickCount=4, format="%" if shares else "~g"),
            ),
            color=tensor_colour(),
            shape=alt.Shape("tensor:N", title="tensor", scale=alt.Scale(domain=list(TENSOR_COLOURS))),
            tooltip=[tip("tensor", "tensor"), tip("layer", "layer"), tip("value", title, form), SAMPLE],
        )
    )
    return panel


def _reading(table: pd.DataFrame) -> str:
    third = max(1, len(table) // 3)
    ordered = table.sort_values("layer")
    said = []
    for name, words, digits in (
        ("form1_within", "form 1 r within query", 3),
        ("entropy", "attention entropy in nats", 2),
        ("sink_mass", "attention to position 0", 2),
    ):
        if name not in ordered:
            continue
        early, late = ordered[name].head(third).mean(), ordered[name].tail(third).mean()
        if pd.notna(early) and pd.notna(late):
            said.append(f"{words}: {fixed(early, digits)} → {fixed(late, digits)}")
    if not said:
        return "Nothing was measured in both the first and the last third of the layers."
    return f"From the first third of the layers to the last: {'; '.join(said)}."


TOPIC = Topic(
    "layers",
    "Layers: side by side",
    "The same quantities side by side, each averaged over a layer's heads. Layers count from 0.",
    (
        Plot(
            "layers-multiples",
            "How the layers differ",
            "Each panel has its own vertical scale. A break in a line is a layer without attention.",
            ("layers",),
            multiples,
        ),
        Listing("layers-table", "All layers", "Click a column head to sort.", ("layers",), grid),
    ),
)

"""What a prefill that stops at layer k saves, beside what freezing there loses."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot, present
from rotoscope.report.labels import named
from rotoscope.report.style import MUTED, WIDTH, tip
from rotoscope.report.text import fixed, percent
from rotoscope.results import Result

_PANEL = WIDTH - 60
_SAVED, _TIMED, _LOST = "#0072b2", "#009e73", "#d55e00"


def chart(result: Result) -> Drawn | None:
    """FLOPs and time as shares of a full prefill, and below them the largest loss over tasks."""
    table = result.tables["depth_cost"].dropna(subset=["flops"]).sort_values("k")
    if table.empty:
        return None
    last = int(table["k"].max())
    timed = table.dropna(subset=["speedup"])
    timed = timed.assign(time=1 / timed["speedup"])
    lost = worst(result)
    x = alt.X(
        "k:Q",
        title=None if not lost.empty else _TITLE,
        scale=alt.Scale(domain=[0, last], nice=False),
        axis=alt.Axis(tickCount=min(last, 15), format="d"),
    )
    share = alt.Scale(domain=[0, max(1.0, float(timed["time"].max()) if len(timed) else 1.0)])
    tooltip = [tip("k", "k"), tip("share", "k as a share of the layers", ".0%"), tip("flops", "FLOPs", ".1%")]
    line = (
        alt.Chart(table.assign(what=_FLOPS))
        .mark_line(point=alt.OverlayMarkDef(size=30), strokeWidth=1.8)
        .encode(
            x=x,
            y=alt.Y("flops:Q", title="share of a full prefill", scale=share, axis=alt.Axis(format="%")),
            color=_what(),
            tooltip=tooltip,
        )
    )
    points = (
        alt.Chart(timed.assign(what=_TIME))
        .mark_point(filled=True, shape="diamond", size=130, opacity=1)
        .encode(
            x=x,
            y=alt.Y("time:Q", title="share of a full prefill", scale=share),
            color=_what(),
            tooltip=[
                *tooltip,
                tip("time", "time", ".1%"),
                tip("speedup", "times as fast", ".2f"),
                tip("seconds", "seconds", ".3~g"),
                tip("full_seconds", "seconds of a full prefill", ".3~g"),
                tip("tokens", "prompt tokens", ",d"),
            ],
        )
    )
    panels = [alt.layer(line, points).properties(width=_PANEL, height=180)]
    if not lost.empty:
        panels.append(_losses(lost, x))
    return Drawn(_reading(result, table, timed, lost), alt.vconcat(*panels, spacing=14))


def worst(result: Result) -> pd.DataFrame:
    """The row of the task that loses most at each k under freeze, with its `label` and how many `tasks` there are."""
    if not present(result, "depth"):
        return pd.DataFrame()
    table = named(result.tables["depth"])
    table = table[(table["manipulation"] == "freeze") & table["loss"].notna()]
    if table.empty:
        return table
    # A k at which one task was not tested says nothing about the largest loss.
    counts = table.groupby("k")["label"].nunique()
    table = table[table["k"].map(counts) == table["label"].nunique()]
    largest = table.loc[table.groupby("k")["loss"].idxmax()].sort_values("k")
    return largest.assign(tasks=counts.max())


def _losses(lost: pd.DataFrame, x: alt.X) -> alt.LayerChart | alt.FacetChart:
    base = alt.Chart(lost.assign(what=_LOSS)).encode(x=x.title(_TITLE))
    y = alt.Y("loss:Q", title=["largest loss over tasks", "(share of items)"], axis=alt.Axis(format="%"))
    band = base.mark_area(color=_LOST, opacity=0.16, tooltip=None).encode(y=alt.Y("loss_low:Q"), y2="loss_high:Q")
    line = base.mark_line(point=alt.OverlayMarkDef(size=36), strokeWidth=1.8).encode(
        y=y,
        color=_what(),
        tooltip=[
            tip("k", "k"),
            tip("label", "task that loses most"),
            tip("loss", "loss", "+.1%"),
            tip("loss_low", "95 % low", "+.1%"),
            tip("loss_high", "95 % high", "+.1%"),
            tip("clean", "clean accuracy", ".3f"),
            tip("n", "items"),
            tip("tasks", "tasks compared"),
        ],
    )
    zero = alt.Chart(lost.head(1)).mark_rule(color=MUTED, strokeDash=[4, 3]).encode(y=alt.datum(0))
    return alt.layer(zero, band, line).properties(width=_PANEL, height=160)


def _what() -> alt.Color:
    return alt.Color(
        "what:N",
        title=None,
        scale=alt.Scale(domain=[_FLOPS, _TIME, _LOSS], range=[_SAVED, _TIMED, _LOST]),
        legend=alt.Legend(orient="bottom", columns=3, symbolType="circle", symbolSize=90),
    )


def _reading(result: Result, table: pd.DataFrame, timed: pd.DataFrame, lost: pd.DataFrame) -> str:
    said = []
    safe = _safe(result)
    if safe is not None and (table["k"] == safe).any():
        row = table[table["k"] == safe].iloc[0]
        said.append(
            f"At k = {safe}, safe under freeze for every task that has a safe depth, a prefill needs "
            f"{percent(row['flops'])} of its FLOPs"
        )
    for row in timed.itertuples():
        loss = lost[lost["k"] == row.k] if not lost.empty else lost
        cost = (
            f", largest loss {fixed(100 * loss['loss'].iloc[0], 0)} points ({loss['label'].iloc[0]})"
            if len(loss)
            else ""
        )
        said.append(f"k = {row.k}: measured {fixed(row.speedup, 2)} × as fast on {row.tokens:,.0f} tokens{cost}")
    if not said:
        half = table.loc[(table["share"] - 0.5).abs().idxmin()]
        said = [f"At k = {int(half['k'])} a prefill needs {percent(half['flops'])} of its FLOPs; no time was measured"]
    return "; ".join(said) + "."


def _safe(result: Result) -> int | None:
    """The k from which on no task that has a safe depth loses under freeze."""
    if not present(result, "safe_depth"):
        return None
    table = result.tables["safe_depth"]
    depths = table.loc[table["manipulation"] == "freeze", "k"].dropna()
    return None if depths.empty else int(depths.max())


_TITLE = "k: layer from which on previous tokens are frozen"
_FLOPS, _TIME, _LOSS = "FLOPs (estimated)", "time (measured)", "largest loss under freeze"
PLOT = Plot(
    "depth-cost",
    "What stopping prefill at layer k saves, and costs",
    "Above: FLOPs and time of a prefill that runs the prompt's tokens fully only through the layers below k and above "
    "that computes nothing but their keys and values, as a share of a full prefill (diamonds: time measured here; "
    "hover for the speed-up). Below: the loss in accuracy of the task that loses most when states are frozen at k, "
    "with its 95 % interval (Agresti-Min) as a band; only k at which every task was tested.",
    ("depth_cost",),
    chart,
)

"""What the model loses when its logits are replaced by their additive fit."""

from __future__ import annotations

import re

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.labels import REPLACEMENTS, signed, task_words, worded
from rotoscope.report.series import Look, Measure, Series, symlog
from rotoscope.report.style import INK, MUTED, tip
from rotoscope.report.text import fixed, joined, percent
from rotoscope.results import Result

ALL = "all"
_LOOKS = {
    "full": Look("#8a6d00", "circle"),
    "form1": Look("#d55e00", "square"),
    "form1-centred": Look("#7f3b08", "stroke"),
    "form2": Look("#0072b2", "triangle-up"),
    "form2-causal": Look("#56b4e9", "diamond"),
    "permuted": Look("#1c2430", "cross"),
    "f": Look("#cc79a7", "triangle-right"),
    "g": Look("#009e73", "triangle-left"),
    "form1-random-means": Look("#e69f00", "triangle-down"),
    "clean": Look("#5b6675", "circle"),
}
_LINEAR = 0.05
_SAID = {"clean": "as it is", "form1": "form 1", "permuted": "its residual permuted", "f": "f alone", "g": "g alone"}
"""What the claim compares, in few words."""


def bars(result: Result) -> Drawn | None:
    """ΔNLL of every arm: a bar for all layers, marks for ranges and single layers."""
    table = worded(result.tables["replace"].dropna(subset=["dnll"]), "arm", REPLACEMENTS)
    if table.empty:
        return None
    table = table.assign(layers=table["layers"].astype(str))
    table["shown"] = [signed(row.dnll, row.low, row.high) for row in table.itertuples()]
    whole, some = table[table["layers"] == ALL], table[table["layers"] != ALL]
    tooltip = [
        tip("words", "logits replaced by"),
        tip("layers", "layers"),
        tip("dnll", "ΔNLL (nats a token)", "+.4f"),
        tip("low", "95 % low", "+.4f"),
        tip("high", "95 % high", "+.4f"),
        tip("ratio", "ratio to the permuted control", ".3f"),
        tip("ratio_low", "95 % low", ".3f"),
        tip("ratio_high", "95 % high", ".3f"),
        tip("n", "texts"),
    ]
    panels = []
    if not whole.empty:
        panels.append(_whole(whole, table, tooltip))
    single = some["layers"].str.fullmatch(r"\d+")
    for part in (some[~single], some[single]):
        if not part.empty:
            panels.append(_few(part, table, tooltip))
    return Drawn(_cost(table), alt.vconcat(*panels, spacing=24))


def tasks(result: Result) -> Drawn | None:
    """Accuracy of every arm on every task, with Wilson intervals and chance."""
    table = worded(result.tables["replace_tasks"].dropna(subset=["accuracy"]), "arm", REPLACEMENTS)
    if table.empty:
        return None
    pairs = zip(table["task"], table["variant"].fillna(""), strict=True)
    table = table.assign(label=[task_words(str(task), str(variant)) for task, variant in pairs])
    series = _series(table)
    y = alt.Y(
        "words:N",
        title=None,
        scale=alt.Scale(domain=list(series.looks)),
        axis=alt.Axis(labelLimit=260, labelOverlap=False),
    )
    panels: list[alt.LayerChart | alt.FacetChart] = []
    for label in dict.fromkeys(table["label"]):
        own = table[table["label"] == label]
        base = alt.Chart(own).encode(y=y if not panels else y.axis(None), color=series.colour().legend(None))
        scale = alt.Scale(domain=[0, 1])
        spans = base.mark_rule(strokeWidth=2, tooltip=None).encode(x=alt.X("low:Q", title="accuracy"), x2="high:Q")
        dots = base.mark_point(filled=True, size=70, opacity=1).encode(
            x=alt.X(
                "accuracy:Q",
                title="accuracy",
                scale=scale,
                axis=alt.Axis(format="%", values=[0, 0.5, 1]),
            ),
            tooltip=[
                tip("words", "logits replaced by"),
                tip("label", "task"),
                tip("n", "items"),
                tip("accuracy", "accuracy", ".3f"),
                tip("low", "95 % (Wilson), low", ".3f"),
                tip("high", "95 % (Wilson), high", ".3f"),
                tip("chance", "chance", ".3f"),
                tip("dlogprob", "change of gold log-likelihood (nats)", "+.3f"),
                tip("dlogprob_low", "95 % low", "+.3f"),
                tip("dlogprob_high", "95 % high", "+.3f"),
            ],
        )
        chance = alt.Chart(own.head(1)).mark_rule(color=MUTED, strokeDash=[1, 3], strokeWidth=1.5).encode(x="chance:Q")
        panels.append(alt.layer(chance, spans, dots).properties(width=205, height=26 * len(series.looks), title=label))
    chart = alt.concat(*panels, columns=3, spacing=18) if len(panels) > 3 else alt.hconcat(*panels, spacing=18)
    return Drawn(_kept(table), chart)


def _whole(whole: pd.DataFrame, table: pd.DataFrame, tooltip: list[alt.Tooltip]) -> alt.LayerChart | alt.FacetChart:
    axis = _axis(whole, "more NLL than the model as it is (nats a token, symlog), all layers replaced")
    names = list(dict.fromkeys(whole["words"]))
    base = alt.Chart(whole).encode(
        y=alt.Y("words:N", title=None, scale=alt.Scale(domain=names), axis=alt.Axis(labelLimit=260, labelOverlap=False))
    )
    bar = base.mark_bar(height=15, opacity=0.85).encode(
        x=axis.x("dnll"), color=_series(table).colour(), tooltip=tooltip
    )
    span = base.mark_rule(color=INK, strokeWidth=1.6, tooltip=None).encode(x=axis.x("low"), x2="high:Q")
    said = base.mark_text(align="left", dx=8, color=INK, fontSize=11, tooltip=None).encode(
        x=axis.x("high"), text="shown:N"
    )
    return alt.layer(bar, span, said).properties(width=560, height=26 * len(names))


def _few(some: pd.DataFrame, table: pd.DataFrame, tooltip: list[alt.Tooltip]) -> alt.LayerChart | alt.FacetChart:
    """Marks for ranges of layers, or for single ones."""
    order = sorted(set(some["layers"]), key=_first)
    ranges = "-" in order[0]
    series = _series(table)
    axis = _axis(some, ["more NLL", "(nats a token, symlog)"])
    title = "layers replaced" if ranges else "the one layer replaced"
    base = alt.Chart(some).encode(
        x=alt.X("layers:N", title=title, scale=alt.Scale(domain=order), axis=alt.Axis(labelAngle=0)),
        xOffset=series.beside(table),
        color=series.colour(),
    )
    zero = alt.Chart(some.head(1)).mark_rule(color=MUTED, strokeDash=[4, 3]).encode(y=alt.datum(0))
    spans = base.mark_rule(strokeWidth=2, tooltip=None).encode(y=axis.y("low"), y2="high:Q")
    dots = base.mark_point(filled=True, size=50, opacity=1).encode(
        y=axis.y("dnll"), shape=series.shape(), tooltip=tooltip
    )
    return alt.layer(zero, spans, dots).properties(
        width=max(300, min(840, (130 if ranges else 40) * len(order))), height=220
    )


def _series(table: pd.DataFrame) -> Series:
    return Series.of(table, {REPLACEMENTS[arm]: look for arm, look in _LOOKS.items()})


def _axis(table: pd.DataFrame, title: str | list[str]) -> Measure:
    ends = pd.concat([table[column] for column in ("dnll", "low", "high")] + [pd.Series([0.0])])
    return symlog(ends, _LINEAR, title)


def _first(layers: str) -> int:
    """The first layer of a range."""
    found = re.search(r"\d+", layers)
    return int(found.group()) if found else -1


def _cost(table: pd.DataFrame) -> str:
    whole = table[table["layers"] == ALL]
    if whole.empty:
        return f"{len(table)} values; no arm replaced all layers."
    rows = whole[whole["arm"].isin(_SAID)]
    each = [f"{_SAID[row.arm]} {signed(row.dnll, row.low, row.high)}" for row in rows.itertuples()]
    n = int(whole["n"].min())
    if not each:
        return f"{len(whole)} values; none of the arms that the claim compares."
    said = f"More NLL with all layers’ logits replaced, nats a token: {joined(each)} (n = {n} texts)"
    form1 = whole[whole["arm"] == "form1"]
    if len(form1) and pd.notna(form1["ratio"].iloc[0]):
        said += f"; form 1 costs {fixed(form1['ratio'].iloc[0], 2)} times what its permuted residual costs"
    return said + "."


def _kept(table: pd.DataFrame) -> str:
    said = []
    for label, own in table.groupby("label", sort=False):
        own = own[own["arm"].isin(_SAID)]
        if own.empty:
            continue
        each = [f"{_SAID[row.arm]} {percent(row.accuracy)}" for row in own.itertuples()]
        said.append(f"{label} (n = {int(own['n'].min())}): {joined(each)}")
    if not said:
        return f"{len(table)} values; none of the arms that the claim compares."
    return f"Accuracy with all layers’ logits replaced: {'; '.join(said)}."


BARS = Plot(
    "generalization-replace",
    "Is the additive form what the model uses?",
    "In the running model the logits of attention are replaced: by the fit of form 1, f(query, distance) + "
    "g(query, key), or of form 2, a + b + c, with means taken from other texts; by one of form 1’s terms alone; or "
    "(◆, the control) by the real logits less form 1’s residual in random order, centred. ◇ is fitted "
    "to the very text, so it only describes. Position 0 keeps its logits. Black lines: 95 % over texts (t). If the "
    "additive form is what is used, form 1 costs little and the control much. Below: only some layers replaced.",
    ("replace",),
    bars,
)
TASKS = Plot(
    "generalization-replace-tasks",
    "And on tasks?",
    "Accuracy when the logits of all layers are replaced; bars: 95 % Wilson interval; dotted: chance. If the "
    "additive form is what is used, form 1 stays near the model as it is, and the control (◆) does not.",
    ("replace_tasks",),
    tasks,
)

"""What quantized models keep of tasks: answers in the prompt against answers in the weights."""

from __future__ import annotations

from typing import Any

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.labels import filler, named
from rotoscope.report.series import Measure, Series, rule
from rotoscope.report.style import MUTED, tip
from rotoscope.report.text import joined, percent
from rotoscope.report.topics.quantization_methods import caution, kinds, measured_methods, series, span
from rotoscope.results import Result

_CONTEXT, _WEIGHTS = "contextual", "parametric"
_LEAST, _MOST = -0.25, 1.5
_TICKS = (-0.25, 0, 0.25, 0.5, 0.75, 1, 1.25, 1.5)
_SIDES = {"retention": "", "low": "_low", "high": "_high", "span": "_span", "label": "_label", "n": "_n"}


def scatter(result: Result) -> Drawn | None:
    """Retention of a task whose answer is in the prompt against that of its partner, one point a method."""
    parts = pairs(answered(result))
    if not parts:
        return None
    every = pd.concat(parts)
    looks = series(every.sort_values("rank", kind="stable"), kinds(result))
    ends = pd.concat([every[axis + end] for axis in "xy" for end in ("", "_low", "_high")])
    domain = [max(_LEAST, min(0.0, float(ends.min()))), min(_MOST, max(1.05, float(ends.max())))]
    panels = [_panel(part, looks, domain, 420 if len(parts) == 1 else 375) for part in parts]
    chart = alt.concat(*panels, columns=2, spacing={"row": 30, "column": 50})
    return Drawn(_balance(parts) + caution(result), chart)


def by_method(result: Result) -> Drawn | None:
    """The same retentions, one row a method and one panel a task."""
    table = answered(result)
    table = table[table["retention"].notna()]
    if table.empty:
        return None
    looks = series(table, kinds(result))
    ends = pd.concat([table[name] for name in ("retention", "low", "high")])
    scale = alt.Scale(
        domain=[max(_LEAST, min(0.0, float(ends.min()))), min(_MOST, max(1.05, float(ends.max())))],
        clamp=True,
        nice=False,
    )
    measure = Measure("kept", scale, alt.Axis(format="%", values=[0, 0.5, 1]))
    order = alt.Scale(domain=list(looks.looks))
    y = alt.Y("words:N", title=None, scale=order, axis=alt.Axis(labelLimit=220, labelOverlap=False))
    panels: list[alt.LayerChart | alt.FacetChart] = []
    for i, (_, own) in enumerate(table.sort_values("place", kind="stable").groupby("place")):
        base = alt.Chart(own).encode(y=y if i % 3 == 0 else y.axis(None), color=looks.colour().legend(None))
        spans = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_rule(
            strokeWidth=2, tooltip=None
        )
        dots = base.mark_point(filled=True, size=60, opacity=1).encode(
            x=measure.x("retention"),
            shape=looks.shape().legend(None),
            tooltip=[
                tip("words", "method"),
                tip("label", "task"),
                tip("retention", "kept above chance", ".1%"),
                tip("span", "95 %"),
                tip("accuracy", "accuracy", ".3f"),
                tip("n", "items"),
            ],
        )
        first = own.iloc[0]
        title = alt.Title(first["label"], subtitle=f"{first['knowledge']}, n = {own['n'].min():.0f}")
        marks = [rule(own, x=alt.datum(1)), spans.encode(x=measure.x("low"), x2="high:Q"), dots]
        panels.append(alt.layer(*marks).properties(width=225, height=21 * len(looks.looks), title=title))
    return Drawn(_least(table), alt.concat(*panels, columns=3, spacing={"row": 22, "column": 18}))


def answered(result: Result) -> pd.DataFrame:
    """Methods × tasks, with `label` and `place` of tasks, and intervals as text (`span`).

    There is no retention where the model itself is at chance.
    """
    table = measured_methods(
        result, ["task", "knowledge"], ["retention", "variant", "accuracy", "low", "high", "items"]
    )
    table = table[table["task"] != ""]
    if table.empty:
        return table
    spans = [span(low, high, ".0%") for low, high in zip(table["low"], table["high"], strict=True)]
    return named(table.assign(span=spans, n=table["items"].fillna(0)))


def pairs(table: pd.DataFrame) -> list[pd.DataFrame]:
    """For each task read from context, each method's retention of it (`y`) and of its partner in the weights (`x`).

    The partner is of the same name and as much filler, as far as there is one, else a task that is nobody's.
    """
    if table.empty:
        return []
    tasks = list(table.drop_duplicates("place").sort_values("place").itertuples())
    contextual = [task for task in tasks if task.knowledge == _CONTEXT]
    parametric = [task for task in tasks if task.knowledge == _WEIGHTS]
    free = [other for other in parametric if not any(_same(task, other) for task in contextual)]
    known = table[table["retention"].notna()]
    found = []
    for task in contextual:
        others = [other for other in parametric if _same(task, other)] or free
        if not others:
            continue
        partner = min(others, key=lambda other: abs(filler(str(task.variant)) - filler(str(other.variant))))
        x, y = (
            known[known["place"] == place].rename(columns={old: axis + new for old, new in _SIDES.items()})
            for axis, place in (("x", partner.place), ("y", task.place))
        )
        both = y.merge(x[["method", *(f"x{new}" for new in _SIDES.values())]], on="method")
        if len(both):
            found.append(both.sort_values("rank", kind="stable"))
    return found


def _same(task: Any, other: Any) -> bool:
    """Whether one task's name begins with the other's: `cities_in_context` and `cities`."""
    return str(task.task).startswith(str(other.task))


def _panel(part: pd.DataFrame, looks: Series, domain: list[float], size: int) -> alt.LayerChart | alt.FacetChart:
    scale = alt.Scale(domain=domain, clamp=True, nice=False)
    axis = alt.Axis(format="%", values=[tick for tick in _TICKS if domain[0] <= tick <= domain[1]])
    across, up = (Measure(f"{part[f'{side}_label'].iloc[0]}: kept", scale, axis) for side in "xy")
    base = alt.Chart(part).encode(color=looks.colour())
    x_spans, y_spans = (
        base.transform_filter(f"isValid(datum.{side}_low) && isValid(datum.{side}_high)").mark_rule(
            strokeWidth=1.3, opacity=0.4, tooltip=None
        )
        for side in "xy"
    )
    points = base.mark_point(filled=True, size=80, opacity=1).encode(
        x=across.x("x"),
        y=up.y("y"),
        shape=looks.shape(),
        tooltip=[
            tip("words", "method"),
            tip("y", "kept, answer in the prompt", ".1%"),
            tip("y_span", "95 % (prompt)"),
            tip("x", "kept, answer in the weights", ".1%"),
            tip("x_span", "95 % (weights)"),
            tip("y_n", "items (prompt)"),
            tip("x_n", "items (weights)"),
        ],
    )
    equal = alt.Chart(pd.DataFrame({"x": domain, "y": domain})).mark_line(
        color=MUTED, strokeDash=[5, 4], strokeWidth=1.2, tooltip=None
    )
    corner = alt.Chart(pd.DataFrame({"x": domain[1:], "y": domain[:1]})).mark_text(
        text="context suffers more", align="right", baseline="bottom", dx=-8, dy=-8, color=MUTED, tooltip=None
    )
    return alt.layer(
        equal.encode(x=across.x("x"), y=up.y("y")),
        corner.encode(x=across.x("x"), y=up.y("y")),
        x_spans.encode(x=across.x("x_low"), x2="x_high:Q", y=up.y("y")),
        y_spans.encode(x=across.x("x"), y=up.y("y_low"), y2="y_high:Q"),
        points,
    ).properties(width=size, height=size)


def _balance(parts: list[pd.DataFrame]) -> str:
    """On each pair, which method's context suffers most beyond its knowledge."""
    said = []
    for part in parts:
        gap = part["y"] - part["x"]
        row = part.loc[gap.idxmin()]
        said.append(
            f"{row['y_label']} against {row['x_label']}: context suffers more under {(gap < 0).sum()} of {len(part)} "
            f"methods, most under {row['words']} (keeps {percent(row['y'])} against {percent(row['x'])}; "
            f"n = {row['y_n']:.0f} and {row['x_n']:.0f})"
            if (gap < 0).any()
            else f"{row['y_label']} against {row['x_label']}: context suffers more under none of {len(part)} methods"
        )
    return f"Answers in the prompt against answers in the weights: {'; '.join(said)}."


def _least(table: pd.DataFrame) -> str:
    said = []
    for _, own in table.groupby("place"):
        row = own.loc[own["retention"].idxmin()]
        if row["retention"] < 1:
            said.append(f"{row['label']} under {row['words']} ({percent(row['retention'])}, 95 % {row['span']})")
    return f"Least is kept of {joined(said)}." if said else "No method answers fewer items than the model as it is."


SCATTER = Plot(
    "quantization-tasks",
    "Which methods keep context?",
    "One point a method. Across: the share of accuracy above chance that is kept where the answer is in the weights; "
    "up: where it is in the prompt, in prompts of the same form. On the dashed line both suffer alike; below it, "
    "reading from context suffers more. 100 %: as good as the model as it is. Colour: what is quantized (blue: "
    "weights; vermilion: weights and activations; green: the cache). Bars: 95 %, paired bootstrap over items.",
    ("quantization",),
    scatter,
)
BY_METHOD = Plot(
    "quantization-kept",
    "And task by task",
    "The same, one row a method. Dashed: as good as the model as it is. Tasks on which the model itself is at chance "
    "are left out: there is nothing to lose.",
    ("quantization",),
    by_method,
)

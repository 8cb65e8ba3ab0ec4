"""Disruption as curves: over the length of the context, over the dose, over the layer disrupted."""

from __future__ import annotations

from typing import Any

import altair as alt
import numpy as np
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.labels import CONTROL, broken, control_arm, filler, main_arm, named, sizes, within
from rotoscope.report.style import MUTED, SERIES, SHAPES, WIDTH, layer_axis, tip
from rotoscope.report.text import fixed, joined, percent
from rotoscope.report.topics.disrupt_matrix import cells
from rotoscope.results import Result

_WHERE = {"parametric": "in the weights", "contextual": "in the prompt"}
_KINDS = {"top": "the k largest dims of each head", "lambda": "every dim above λ times its head's mean"}
_ACCURACY = ("accuracy", "low", "high")
_LOGPROB = ("dlogprob", "dlogprob_low", "dlogprob_high")


def selectivity(result: Result) -> Drawn | None:
    """The loss of parametric and of in-context capitals as filler grows, one panel an arm."""
    table = matched(result)
    if table.empty:
        return None
    places = sorted(table["filler"].unique())
    order = list(dict.fromkeys(table.sort_values("rank")["words"]))
    domain, colours = list(_WHERE.values()), SERIES[:2]
    # Intervals beside each other, not over each other.
    x = alt.X("filler:O", title="tokens of filler", scale=alt.Scale(domain=places), axis=alt.Axis(labelAngle=0))
    aside = alt.XOffset("where:N", scale=alt.Scale(domain=domain, paddingOuter=1))
    low = min(0.0, float(table["low"].min()))
    y = alt.Y("loss:Q", title="loss", axis=alt.Axis(format="%"), scale=alt.Scale(domain=[low, 1.0], clamp=True))
    legend = alt.Legend(orient="bottom", symbolOpacity=1)
    colour = alt.Color("where:N", title="the capital is", scale=alt.Scale(domain=domain, range=colours), legend=legend)
    base = alt.Chart().encode(x=x, xOffset=aside, color=colour)
    tooltip = [
        tip("words", "arm"),
        tip("label", "task"),
        tip("n", "items"),
        tip("loss", "loss", ".1%"),
        tip("low", "95 % low", ".1%"),
        tip("high", "95 % high", ".1%"),
        tip("accuracy", "accuracy", ".3f"),
        tip("change", "change (share of Q/K energy)", ".2~%"),
    ]
    marks = base.mark_point(filled=True, size=60, opacity=1).encode(
        y=y, shape=alt.Shape("where:N", title="the capital is", scale=alt.Scale(domain=domain)), tooltip=tooltip
    )
    lines = base.mark_line(strokeWidth=1.5, opacity=0.7).encode(y=y)
    bars = base.mark_rule(strokeWidth=2, clip=True).encode(y=alt.Y("low:Q", title="loss"), y2="high:Q")
    zero = alt.Chart().mark_rule(color=MUTED, strokeDash=[4, 3]).encode(y=alt.datum(0))
    columns = 3
    panel = (WIDTH - 40) // columns
    chart = (
        alt.layer(zero, bars, lines, marks, data=table)
        .properties(width=panel - 30, height=130)
        .facet(
            facet=alt.Facet(
                "words:N",
                title=None,
                sort=alt.EncodingSortField("rank", op="min"),
                header=alt.Header(labelExpr=broken("datum.value"), labelLimit=panel, labelFontSize=11),
            ),
            columns=min(columns, len(order)),
            spacing={"row": 18, "column": 24},
        )
    )
    return Drawn(_gap(result, table), chart)


def matched(result: Result) -> pd.DataFrame:
    """Capitals recalled and capitals read, for arms of the grid: `loss`, its interval, `filler`, `where`."""
    table = cells(result)
    if table.empty:
        return table
    meant = table["task"].isin(("capitals", "capitals_in_context"))
    shown = (table["judged"].astype(bool) | table["words"].str.startswith(CONTROL)) & (table["group"] == "grid")
    table = table[meant & shown & (table["arm"] != "clean") & table["retention"].notna()]
    # One task of a kind for each length of filler: the plainest that was run.
    plainest = table.assign(length=table["variant"].map(filler), more=table["variant"].str.len()).sort_values("more")
    table = table.loc[plainest.drop_duplicates(["arm", "knowledge", "length"]).index.sort_values()]
    if set(table["knowledge"]) != set(_WHERE):
        return table.head(0)
    return table.assign(
        filler=[filler(variant) for variant in table["variant"]],
        where=table["knowledge"].map(_WHERE),
        loss=1 - table["retention"],
        low=1 - table["retention_high"],
        high=1 - table["retention_low"],
    )


def dose(result: Result) -> Drawn | None:
    """Accuracy and log-likelihood against how many dims are disrupted, by count and by threshold."""
    table = named(result.tables["dose"].dropna(subset=["accuracy"]))
    if table.empty:
        return None
    reading = _strongest(table)
    table = _with_clean(result, table)
    rows = []
    for measure in (_ACCURACY, _LOGPROB):
        panels = []
        for kind, words in _KINDS.items():
            own = table[table["kind"] == kind].sort_values("step")
            if own.empty:
                continue
            steps = list(dict.fromkeys(own["shown"]))
            title = ("k" if kind == "top" else "λ") if measure is _LOGPROB else None
            x = alt.X("shown:N", title=title, scale=alt.Scale(domain=steps), axis=alt.Axis(labelAngle=0))
            extra = [tip("shown", "k" if kind == "top" else "λ"), tip("dims", "dims changed per head", ".2~f")]
            panels.append(
                curves(own, x, measure, list(dict.fromkeys(table.sort_values("place")["label"])), extra).properties(
                    width=370, height=170, title=words if measure is _ACCURACY else ""
                )
            )
        rows.append(alt.hconcat(*panels, spacing=40).resolve_scale(y="shared"))
    return Drawn(reading, alt.vconcat(*rows, spacing=14))


def by_layer(result: Result) -> Drawn | None:
    """What disrupting a single layer costs."""
    table = named(result.tables["disrupt_layers"].dropna(subset=["accuracy"]))
    if table.empty:
        return None
    order = list(dict.fromkeys(table.sort_values("place")["label"]))
    extra = [tip("layer", "layer disrupted")]
    width = WIDTH - 60
    panels = [
        curves(table, layer_axis(result, width, title), measure, order, extra).properties(width=width, height=170)
        for measure, title in ((_ACCURACY, None), (_LOGPROB, "the one layer disrupted"))
    ]
    said = []
    for label in order:
        own = table[table["label"] == label]
        worst = own.loc[own["dlogprob"].idxmin()]
        said.append(
            f"{label}: layer {int(worst['layer'])} ({_nats(worst)}, accuracy {fixed(worst['accuracy'], 2)}, "
            f"median over layers {fixed(own['accuracy'].median(), 2)}, n = {int(worst['n'])})"
        )
    return Drawn(f"The layer that costs most: {'; '.join(said)}.", alt.vconcat(*panels, spacing=14))


def curves(
    table: pd.DataFrame, x: alt.X, measure: tuple[str, str, str], order: list[str], extra: list[alt.Tooltip]
) -> alt.LayerChart | alt.FacetChart:
    """One line a task with its interval as a band; `measure` names the value and the ends of its interval."""
    value, low, high = measure
    shares = value == "accuracy"
    y = alt.Y(
        f"{value}:Q",
        title="accuracy" if shares else ["change of the gold answer's", "log-likelihood (nats)"],
        scale=alt.Scale(domain=[0, 1]) if shares else alt.Scale(),
        axis=alt.Axis(format="%", tickCount=5) if shares else alt.Axis(tickCount=5),
    )
    legend = alt.Legend(orient="bottom", columns=3, labelLimit=280, symbolSize=80, symbolOpacity=1)
    colour = alt.Color("label:N", title=None, scale=alt.Scale(domain=order, range=_cycle(SERIES, order)), legend=legend)
    shape = alt.Shape("label:N", title=None, scale=alt.Scale(domain=order, range=_cycle(SHAPES, order)), legend=legend)
    base = alt.Chart().encode(x=x, color=colour)
    bands = base.mark_area(opacity=0.14, tooltip=None).encode(y=alt.Y(f"{low}:Q"), y2=f"{high}:Q")
    lines = base.mark_line(strokeWidth=1.8).encode(y=y)
    dots = base.mark_point(filled=True, size=42, opacity=1).encode(
        y=y, shape=shape, tooltip=[tip("label", "task"), *extra, *measured()]
    )
    zero = [] if shares else [alt.Chart().mark_rule(color=MUTED, strokeDash=[4, 3]).encode(y=alt.datum(0))]
    return alt.layer(*zero, bands, lines, dots, data=table)


def measured() -> list[Any]:
    """Hover lines of a curve's point: items, accuracy and log-likelihood with their intervals."""
    return [
        tip("n", "items"),
        tip("accuracy", "accuracy", ".3f"),
        tip("low", "95 % (Wilson), low", ".3f"),
        tip("high", "95 % (Wilson), high", ".3f"),
        tip("dlogprob", "change of gold log-likelihood (nats)", "+.3f"),
        tip("dlogprob_low", "95 % low", "+.3f"),
        tip("dlogprob_high", "95 % high", "+.3f"),
    ]


def _with_clean(result: Result, table: pd.DataFrame) -> pd.DataFrame:
    """The doses with the clean model as the smallest one, where table `disrupt` has it on the same tasks."""
    table = table.assign(step=table["dose"].astype(float), shown=[f"{dose:g}" for dose in table["dose"]])
    if "disrupt" not in result.tables:
        return table
    clean = result.tables["disrupt"]
    clean = clean[clean["arm"] == "clean"].assign(variant=clean["variant"].fillna(""))
    keys = ["task", "variant"]
    clean = clean.merge(table[[*keys, "label", "place"]].drop_duplicates(), on=keys)
    clean = clean.assign(dims=0.0, dlogprob=0.0, dlogprob_low=0.0, dlogprob_high=0.0, shown="clean")
    ends = [
        clean.assign(kind=kind, step=-np.inf if kind == "top" else np.inf)
        for kind in _KINDS
        if (table["kind"] == kind).any()
    ]
    return pd.concat([table, *(end[[c for c in table if c in end]] for end in ends)], ignore_index=True)


def _gap(result: Result, table: pd.DataFrame) -> str:
    said = []
    disrupt = result.tables["disrupt"]
    for arm, name in ((main_arm(disrupt), ""), (control_arm(disrupt), "the control of equal change")):
        own = table[table["arm"] == arm]
        sides = [set(own.loc[own["where"] == where, "filler"]) for where in _WHERE.values()]
        both = sides[0] & sides[1]
        if not both:
            continue
        at = max(both)
        losses = own[own["filler"] == at].set_index("where")
        values = [
            f"{percent(losses.at[where, 'loss'])} ({within(losses.at[where, 'low'], losses.at[where, 'high'])}) of "
            f"capitals {where}"
            for where in _WHERE.values()
        ]
        subject = name or f"“{own['words'].iloc[0]}”"
        said.append(f"behind {at} tokens of filler {subject} loses {joined(values)}")
    if not said:
        return f"{len(table)} losses; no length of filler has both kinds of capitals."
    sentence = "; ".join(said)
    return f"{sentence[0].upper()}{sentence[1:]}; {sizes(table)}."


def _strongest(table: pd.DataFrame) -> str:
    said = []
    for label in dict.fromkeys(table.sort_values("place")["label"]):
        own = table[(table["label"] == label) & (table["kind"] == "top")].sort_values("dose")
        if own.empty:
            continue
        first, last = own.iloc[0], own.iloc[-1]
        said.append(
            f"{label} {fixed(first['accuracy'], 2)} at k = {first['dose']:g}, {fixed(last['accuracy'], 2)} at "
            f"k = {last['dose']:g}"
        )
    if not said:
        return f"{len(table)} values; only thresholds were tried."
    return f"Accuracy with the k largest dims of each head disrupted: {'; '.join(said)} ({sizes(table)})."


def _nats(row: pd.Series) -> str:
    return f"{row['dlogprob']:+.2f} nats".replace("-", "−")


def _cycle(values: list[str], order: list[str]) -> list[str]:
    return [values[i % len(values)] for i in range(len(order))]


SELECTIVITY = Plot(
    "disrupt-selectivity",
    "Is the loss selective for context, and does it grow with length?",
    "Two tasks of one form behind the same filler sentences: capitals of real countries, known from training, and "
    "capitals of invented countries, stated in the prompt. Loss: 1 − (accuracy − chance) / (clean − chance), so 0 is "
    "as good as clean and 100 % is lost; vertical bars: 95 % paired bootstrap over items. The paper's claim is that "
    f"“in the prompt” lies far above “in the weights”, and further than under the control ({CONTROL}: random dims that "
    "change the values as much).",
    ("disrupt",),
    selectivity,
)
DOSE = Plot(
    "disrupt-dose",
    "Dose: how many dims must be disrupted",
    "Left: the k largest dims of each Q and K head; more damage to the right. Right: every dim whose root mean square "
    "exceeds λ times its head's mean; fewer dims to the right. Band: 95 % interval (Wilson for accuracy, paired for "
    "log-likelihood). “clean”: nothing disrupted; dashed: no change. Hover for n and the number of dims changed.",
    ("dose",),
    dose,
)
LAYERS = Plot(
    "disrupt-layers",
    "One layer at a time",
    "Only the layer on the x axis has its largest Q and K dims disrupted. Above: accuracy; below: the finer measure, "
    "the change of the gold answer's log-likelihood against clean on the same items. Band: 95 % interval. Hover for n.",
    ("disrupt_layers",),
    by_layer,
)

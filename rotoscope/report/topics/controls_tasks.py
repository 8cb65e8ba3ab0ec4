"""The matched controls on tasks: what disruption takes from each, and from which layer on others' states matter."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.labels import CONTROL, KNOWLEDGE, MANIPULATIONS, named, sizes
from rotoscope.report.series import Measure, Series
from rotoscope.report.style import MUTED, choice, tip
from rotoscope.report.text import joined, percent
from rotoscope.report.topics.disrupt_curves import measured
from rotoscope.report.topics.variants import LOOKS, controlled, seeded
from rotoscope.results import Result

_MAIN = "top-1"


def disrupt(result: Result) -> Drawn | None:
    """Loss of each task under each arm, one point a model."""
    table = _losses(result)
    if table.empty:
        return None
    series = Series.of(table, LOOKS)
    order = list(dict.fromkeys(table["arm_words"]))
    left = float(table["low"].min(skipna=True))
    scale = alt.Scale(domain=[max(-1.0, min(-0.1, left)), 1.0], clamp=True)
    x = alt.X("loss:Q", title="loss", scale=scale, axis=alt.Axis(format="%", tickCount=4))
    seeds = alt.Scale(domain=sorted(set(table["seed"])), paddingOuter=0.3)
    base = alt.Chart().encode(
        y=alt.Y("rank:O", title=None, scale=alt.Scale(domain=sorted(set(table["rank"]))), axis=None),
        yOffset=alt.YOffset("seed:O", sort="ascending", scale=seeds),
    )
    some = base.transform_filter("isValid(datum.loss)").encode(color=series.colour())
    bars = some.mark_rule(strokeWidth=2, tooltip=None, clip=True).encode(x=alt.X("low:Q", title="loss"), x2="high:Q")
    dots = some.mark_point(filled=True, size=56, opacity=1).encode(
        x=x,
        shape=series.shape(),
        tooltip=[
            tip("words", "positions"),
            tip("seed", "seed"),
            tip("arm_words", "arm"),
            tip("label", "task"),
            tip("n", "items"),
            tip("loss", "loss", ".1%"),
            tip("low", "95 % low", ".1%"),
            tip("high", "95 % high", ".1%"),
            tip("accuracy", "accuracy", ".3f"),
            tip("clean", "clean accuracy", ".3f"),
            tip("chance", "chance", ".3f"),
            tip("change", "change (share of energy)", ".2~%"),
        ],
    )
    floor = (
        base.transform_filter("!isValid(datum.loss)")
        .mark_text(align="left", color=MUTED, fontSize=9, tooltip=None)
        .encode(x=alt.datum(0.02), text=alt.value("clean at chance"))
    )
    zero = alt.Chart().transform_filter("datum.once").mark_rule(color=MUTED, strokeDash=[4, 3]).encode(x=alt.datum(0))
    chart = (
        alt.layer(zero, bars, dots, floor, data=table)
        .properties(width=210, height=108)
        .facet(
            row=alt.Row(
                "arm_words:N",
                title=None,
                sort=order,
                header=alt.Header(labelAngle=0, labelAlign="left", labelLimit=200, labelFontSize=11),
            ),
            column=alt.Column(
                "label:N",
                title=None,
                sort=alt.EncodingSortField("place", op="min"),
                header=alt.Header(labelExpr="split(datum.value, ' · ')"),
            ),
            spacing={"row": 10, "column": 18},
        )
    )
    return Drawn(_gap(table), chart)


def depth(result: Result) -> Drawn | None:
    """Accuracy, or log-likelihood, against k, one line a model."""
    table = controlled(result, "control_depth", "accuracy")
    if table.empty:
        return None
    table = named(table).sort_values(["place", "rank", "seed", "k"], kind="stable")
    table = table.assign(manipulated=table["manipulation"].map(lambda name: MANIPULATIONS.get(name, name)))
    deepest = int(table["k"].max())
    measure = choice("curve", "measure", {"accuracy": "accuracy", "dlogprob": "log-likelihood of the gold answer"})
    scale = alt.Scale(domain=[0, deepest], nice=False)
    axis = alt.Axis(values=list(range(0, deepest + 1, max(1, deepest // 8))), format="d")
    x = alt.X("k:Q", title="k: first layer disturbed", scale=scale, axis=axis)
    y = Measure(None, axis=alt.Axis(tickCount=4))
    tooltip = [
        tip("words", "positions"),
        tip("seed", "seed"),
        tip("label", "task"),
        tip("manipulated", "manipulation"),
        tip("k", "k"),
        *measured(),
        tip("clean", "clean accuracy", ".3f"),
        tip("chance", "chance", ".2f"),
    ]
    marks = Series.of(table.sort_values("rank", kind="stable"), LOOKS).lines(x, "value", y, tooltip, detail=["seed:N"])
    rows = []
    kinds = [words for words in MANIPULATIONS.values() if words in set(table["manipulated"])]
    kinds += sorted(set(table["manipulated"]) - set(kinds))
    for label in dict.fromkeys(table["label"]):
        panels = []
        for kind in kinds:
            own = table[(table["label"] == label) & (table["manipulated"] == kind)]
            panel = alt.layer(*marks, data=own).transform_calculate(value="datum[curve]")
            panels.append(panel.properties(width=190, height=110, title=[f"{label},", kind]))
        rows.append(alt.hconcat(*panels, spacing=18).resolve_scale(y="shared"))
    return Drawn(_kept(table, deepest), alt.vconcat(*rows, spacing=12).add_params(measure))


def _losses(result: Result) -> pd.DataFrame:
    table = controlled(result, "control_disrupt", "accuracy")
    if table.empty:
        return table
    table = named(table)
    keys = ["positions", "seed", "task", "variant"]
    clean = table.loc[table["arm"] == "clean", [*keys, "accuracy"]].rename(columns={"accuracy": "clean"})
    table = table[(table["arm"] != "clean") & (table["group"] != "dose")].merge(clean, on=keys, how="left")
    if table["retention"].notna().sum() == 0:
        return table.head(0)
    arms = [_arm(row) for row in table[["arm", "selection", "judged"]].itertuples()]
    kind = table["knowledge"].map(lambda name: KNOWLEDGE.get(name, name))
    table = table.assign(
        arm_words=arms,
        task_words=table["label"],
        label=table["label"] + " · " + kind,
        loss=1 - table["retention"],
        low=1 - table["retention_high"],
        high=1 - table["retention_low"],
        place=table["knowledge"].map(lambda name: name != "parametric") * 100 + table["place"],
        once=~table.duplicated(["arm", "task", "variant"]),
    )
    return table.sort_values(["rank", "seed"], kind="stable")


def _arm(row: pd.Series) -> str:
    """An arm by its own short name, marked as in the section on disruption."""
    return f"{CONTROL} {row.arm}" if row.selection == "change-matched" else str(row.arm)


def _gap(table: pd.DataFrame) -> str:
    own = table[(table["arm"] == _MAIN) & table["loss"].notna()].sort_values(["rank", "place"])
    said = []
    for words, rows in own.groupby("words", sort=False):
        mean = rows.groupby("task_words", sort=False)["loss"].mean()
        said.append(f"{words} {joined([f'{percent(loss)} of {task}' for task, loss in mean.items()])}")
    missing = [words for words in dict.fromkeys(table["words"]) if words not in set(own["words"])]
    if missing:
        said.append(f"{joined(missing)} nothing, being at chance when clean")
    seeds = seeded(table["seed"].nunique())
    return f"Lost under “{_MAIN}”, mean over {seeds}: {'; '.join(said)}; {sizes(table)}."


def _kept(table: pd.DataFrame, deepest: int) -> str:
    at = (deepest + 1) // 2
    mean = table[table["k"] == at].groupby(["manipulated", "words"], sort=False)[["accuracy", "clean"]].mean()
    said = []
    for kind, rows in (mean["accuracy"] / mean["clean"].where(mean["clean"] > 0)).groupby(level=0, sort=False):
        said.append(f"{kind}: {joined([f'{words} {percent(share)}' for (_, words), share in rows.items()])}")
    return (
        f"Share of clean accuracy kept when layer {at} of {deepest} is the first disturbed, over tasks and seeds: "
        f"{'; '.join(said)} ({sizes(table)})."
    )


DISRUPT = Plot(
    "rope-disrupt",
    "Does disruption hit context, and only with RoPE?",
    "One row an arm, one column a task with where its answer is. Each mark is one model; its bar is the 95 % paired "
    "bootstrap over items. Loss: 1 − (accuracy − chance) / (clean − chance). top-1, top-2: the largest dims of each "
    "head of Q and K, position 0 exempt unless “all”; V: of V. "
    f"{CONTROL}: random dims that change the values as much. If massive values carry context, RoPE’s marks lie far "
    "right in the contextual columns and near 0 in the parametric one, and its control near 0 in both.",
    ("control_disrupt",),
    disrupt,
)
DEPTH = Plot(
    "rope-depth",
    "Up to which layer earlier tokens matter",
    "One line a model: accuracy, or change of the gold answer’s log-likelihood, when earlier tokens’ states are "
    "disturbed at the input of layer k (noise, shuffle), held from there on (freeze), or attention is left out from "
    "there on (skip). k = number of layers changes nothing. Hover for n and intervals.",
    ("control_depth",),
    depth,
)

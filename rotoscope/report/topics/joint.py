"""Additivity, massive energy, attention and depth damage of every layer side by side, and how they go together."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Cell, Drawn, Grid, Listing, Plot
from rotoscope.report.labels import QUANTITIES, signed
from rotoscope.report.series import Measure, rule
from rotoscope.report.style import INK, MISSING, SERIES, choice, layer_axis, tip
from rotoscope.report.text import KINDS, joined, number
from rotoscope.results import Result

_WIDTH = 690


def ranks(result: Result) -> Drawn | None:
    """Every quantity by layer, coloured by where a layer stands among the others."""
    table = result.tables["joint"]
    there = [name for name in _quantities(table) if table[name].notna().any()]
    if not there:
        return None
    long = table.melt("layer", there, "quantity", "value").dropna(subset=["value"])
    long = long.assign(words=long["quantity"].map(_words), stands=_standing(long))
    order = [_words(name) for name in there]
    chart = (
        alt.Chart(long)
        .mark_rect()
        .encode(
            x=layer_axis(result, _WIDTH),
            y=alt.Y(
                "words:N",
                title=None,
                scale=alt.Scale(domain=order),
                axis=alt.Axis(labelLimit=220, labelOverlap=False),
            ),
            color=alt.Color(
                "stands:Q",
                title="rank",
                scale=alt.Scale(scheme="viridis", domain=[0, 1]),
                legend=alt.Legend(values=[0, 1], labelExpr="datum.value ? 'highest' : 'lowest'", gradientLength=110),
            ),
            tooltip=[
                tip("layer", "layer"),
                tip("words", "quantity"),
                tip("value", "value", ".4~g"),
                tip("stands", "layers below it", ".0%"),
            ],
        )
        .properties(width=_WIDTH, height=28 * len(order), view=alt.ViewBackground(fill=MISSING))
    )
    return Drawn(_extremes(table, there), chart)


def values(result: Result) -> Grid | None:
    """The same as a table that sorts."""
    table = result.tables["joint"].sort_values("layer")
    there = [name for name in _quantities(table) if table[name].notna().any()]
    if not there:
        return None
    rows = [
        [Cell(str(int(row["layer"])), float(row["layer"])), *(_cell(row[name]) for name in there)]
        for _, row in table.iterrows()
    ]
    return Grid(["layer", *map(_words, there)], rows, [True] * (1 + len(there)))


def correlations(result: Result) -> Drawn | None:
    """Spearman's ρ of every two quantities, plain or with depth held fixed, over layers or over heads."""
    table = result.tables["joint_correlations"].dropna(subset=["rho"])
    if table.empty:
        return None
    table = table.assign(task=table["task"].fillna(""))
    views = _views(table)
    shown = pd.concat([rows.assign(view=str(i)) for i, rows in enumerate(views.values())], ignore_index=True)
    shown = shown.assign(left=shown["b"].map(_words), above=shown["a"].map(_words))
    order = [_words(name) for name in QUANTITIES]
    view = choice("view", "over", {str(i): words for i, words in enumerate(views)})
    kind = choice("kind", "correlation", {"rho": "plain", "partial": "depth held fixed"})
    labels = alt.Axis(labelAngle=-35, labelLimit=230, labelOverlap=False)
    above, left = ([name for name in order if name in set(shown[side])] for side in ("above", "left"))
    base = (
        alt.Chart(shown)
        .transform_filter("datum.view == view")
        .transform_calculate(
            value="datum[kind]",
            sure="kind == 'rho' ? datum.low * datum.high > 0 : datum.partial_low * datum.partial_high > 0",
        )
        .encode(
            x=alt.X("above:N", title=None, scale=alt.Scale(domain=above), axis=labels),
            y=alt.Y(
                "left:N",
                title=None,
                scale=alt.Scale(domain=left),
                axis=alt.Axis(labelLimit=230, labelOverlap=False),
            ),
        )
    )
    cells = base.mark_rect(stroke="white", strokeWidth=2).encode(
        color=alt.Color(
            "value:Q",
            title="Spearman’s ρ",
            scale=alt.Scale(domain=[-1, 0, 1], range=["#e69f00", "#ffffff", "#56b4e9"], interpolate="rgb"),
            legend=alt.Legend(values=[-1, 0, 1], gradientLength=110),
        ),
        tooltip=[
            tip("above", "quantity"),
            tip("left", "and"),
            tip("over", "over"),
            tip("task", "task of the damage"),
            tip("rho", "Spearman’s ρ", "+.3f"),
            tip("low", "95 % low", "+.3f"),
            tip("high", "95 % high", "+.3f"),
            tip("partial", "with depth held fixed", "+.3f"),
            tip("partial_low", "95 % low", "+.3f"),
            tip("partial_high", "95 % high", "+.3f"),
            tip("n", "n"),
        ],
    )
    said = alt.Text("value:Q", format="+.2f")
    strong = base.transform_filter("datum.sure").mark_text(fontWeight="bold", fontSize=11, color=INK, tooltip=None)
    weak = base.transform_filter("!datum.sure").mark_text(fontSize=11, color=INK, tooltip=None)
    chart = alt.layer(cells, weak.encode(text=said), strong.encode(text=said))
    size = {"width": 84 * len(above), "height": 34 * len(left)}
    return Drawn(_together(table), chart.properties(**size).add_params(view, kind))


def disrupted(result: Result) -> Drawn | None:
    """How r changes under each arm of disruption, one panel a kind of r."""
    table = result.tables["joint_disrupted"].dropna(subset=["change"])
    table = table[table["arm"] != "clean"]
    if table.empty:
        return None
    panels: list[alt.LayerChart | alt.FacetChart] = []
    arms = list(dict.fromkeys(table["arm"]))
    kinds = [kind for kind in KINDS if kind in set(table["kind"])]
    x = Measure("change of r", alt.Scale(zero=True), alt.Axis(tickCount=4, format="+~r"))
    for kind in kinds:
        own = table[table["kind"] == kind].assign(words=KINDS[kind])
        axis = None if panels else alt.Axis(labelLimit=200, labelOverlap=False)
        base = alt.Chart(own).encode(y=alt.Y("arm:N", title=None, scale=alt.Scale(domain=arms), axis=axis))
        spans = base.mark_rule(strokeWidth=2, color=SERIES[0], tooltip=None).encode(x=x.x("low"), x2="high:Q")
        dots = base.mark_point(filled=True, size=70, opacity=1, color=SERIES[0]).encode(
            x=x.x("change"),
            tooltip=[
                tip("arm", "arm"),
                tip("words", "r of"),
                tip("value", "r", ".4f"),
                tip("change", "change from clean", "+.4f"),
                tip("low", "95 % low", "+.4f"),
                tip("high", "95 % high", "+.4f"),
                tip("n", "layers"),
            ],
        )
        panel = alt.layer(rule(own, x=alt.datum(0)), spans, dots)
        panels.append(panel.properties(width=235, height=30 * len(arms), title=KINDS[kind]))
    if not panels:
        return None
    first = table[table["kind"] == kinds[0]]
    each = [f"{row.arm} {signed(row.change, row.low, row.high, 3)}" for row in first.itertuples()]
    reading = f"Change of r of {KINDS[kinds[0]]} from clean: {joined(each)} (n = {int(first['n'].min())} layers)."
    return Drawn(reading, alt.hconcat(*panels, spacing=18))


def _views(table: pd.DataFrame) -> dict[str, pd.DataFrame]:
    """What can be looked at at once: layers with the damage on one task, and heads."""
    layers = table[table["over"] == "layers"]
    plain = layers[layers["task"] == ""]
    tasks = [task for task in dict.fromkeys(layers["task"]) if task]
    views = {f"layers; damage on {task}": pd.concat([plain, layers[layers["task"] == task]]) for task in tasks}
    if not tasks and len(plain):
        views["layers"] = plain
    heads = table[table["over"] == "heads"]
    return views | ({"heads": heads} if len(heads) else {})


def _quantities(table: pd.DataFrame) -> list[str]:
    """Columns in the order of `QUANTITIES`, then any others."""
    numeric = [name for name in table.select_dtypes("number").columns if name != "layer"]
    return [name for name in QUANTITIES if name in numeric] + [name for name in numeric if name not in QUANTITIES]


def _words(name: str) -> str:
    if name.startswith("form1_within_"):
        return f"form 1 r under {name.removeprefix('form1_within_')}"
    return QUANTITIES.get(name, name.replace("_", " "))


def _cell(value: float) -> Cell:
    return Cell("") if pd.isna(value) else Cell(number(value), float(value))


def _standing(long: pd.DataFrame) -> pd.Series:
    """Share of the other layers with a lower value; half of those with an equal one."""
    groups = long.groupby("quantity")["value"]
    count = groups.transform("size")
    return ((groups.rank() - 1) / (count - 1)).where(count > 1, 0.5)


def _extremes(table: pd.DataFrame, names: list[str]) -> str:
    said = []
    for name in names:
        own = table.dropna(subset=[name])
        high = own.loc[own[name].idxmax()]
        said.append(f"{_words(name)} {number(high[name])} in layer {int(high['layer'])}")
    task = f"; damage on {table['task'].dropna().iloc[0]}" if "task" in table and table["task"].notna().any() else ""
    return f"Highest of {len(table)} layers: {'; '.join(said)}{task}."


def _together(table: pd.DataFrame) -> str:
    known = table.dropna(subset=["partial"])
    sure = known[known["partial_low"] * known["partial_high"] > 0]
    said = (
        f"{(table['low'] * table['high'] > 0).sum()} of {len(table)} intervals leave out 0, {len(sure)} with depth "
        "held fixed"
    )
    strongest = sure.reindex(sure["partial"].abs().sort_values(ascending=False).index).head(3)
    each = [
        f"{_words(row.a)} with {_words(row.b)}{f' ({row.task})' if row.task else ''} over {row.n} {row.over} "
        f"{signed(row.partial, row.partial_low, row.partial_high)}"
        for row in strongest.itertuples()
    ]
    return f"{said}; strongest of these: {'; '.join(each)}." if each else f"{said}."


RANKS = Plot(
    "generalization-joint",
    "Does additivity go with massive values and with depth?",
    "One column a layer. Colour: where the layer stands among all layers in that quantity (bright: highest), since "
    "their units differ; hover for values. Rows that brighten together belong together. Grey: not measured. Damage: "
    "nats of the right answer’s log-likelihood lost when states are frozen, or attention skipped, from that layer on.",
    ("joint",),
    ranks,
)
VALUES = Listing(
    "generalization-joint-table", "The same in numbers", "Click a column head to sort.", ("joint",), values
)
CORRELATIONS = Plot(
    "generalization-joint-correlations",
    "How the quantities go together",
    "Spearman’s rank correlation. Blue: they rise together; orange: one rises as the other falls; bold: the 95 % "
    "interval (bootstrap of whole layers) leaves out 0. What grows with depth correlates with all else that does, so "
    "look at “depth held fixed”, which takes the rank of the layer out of both. A hint, not a cause.",
    ("joint_correlations",),
    correlations,
)
DISRUPTED = Plot(
    "generalization-joint-disrupted",
    "Are massive values what makes logits additive?",
    "Change of r, mean over layers, when the arm’s dims of Q and K are disrupted: top-1, the largest dim of each head, "
    "position 0 exempt unless “all”; change-matched: random dims that change the values as much. Bars: 95 % bootstrap "
    "of layers; dashed: no change. Far left under top-1 but not under the control: massive values carry additivity.",
    ("joint_disrupted",),
    disrupted,
)

"""Massive dims as a set: their offsets, their stability over texts, their sign at position 0."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.style import MISSING, TENSOR_COLOURS, choice, layer_axis, powers, tensors, tip
from rotoscope.report.text import fixed, joined, number, percent
from rotoscope.results import Result

_RULES = {"lambda-5": "every dim above λ", "top-1": "the largest dim of each head"}
_KEYS = ["layer", "head", "tensor", "dim"]
_LEAST_OFFSET, _FEWEST = 0.01, 10
_GROUPS = ["massive", "other dims"]
# One domain in both, so that they share one legend.
_COLOUR = alt.Color("group:N", title=None, scale=alt.Scale(domain=_GROUPS, range=["#d55e00", "#5b6675"]))
_SHAPE = alt.Shape("group:N", title=None, scale=alt.Scale(domain=_GROUPS, range=["circle", "square"]))


def offsets(result: Result) -> Drawn | None:
    """How the offset strength of massive dims compares with all others."""
    table = _marked(result)
    table = table[(table["offset"] > 0) & np.isfinite(table["offset"])]
    if not (table["group"] == "massive").any():
        return None
    exponent = np.log10(table["offset"].clip(lower=_LEAST_OFFSET))
    table = table.assign(bin=(exponent * 5).round() / 5)
    counts = table.groupby(["tensor", "group", "bin"]).size().rename("dims").reset_index()
    totals = counts.groupby(["tensor", "group"])["dims"].transform("sum")
    counts = counts.assign(share=counts["dims"] / totals, offset=10 ** counts["bin"])[totals >= _FEWEST]
    if counts.empty:
        return None
    chart = (
        alt.Chart(counts, width=275, height=190)
        .mark_line(point=alt.OverlayMarkDef(size=40), interpolate="monotone")
        .encode(
            x=alt.X(
                "offset:Q",
                title="|mean| / std over tokens",
                scale=alt.Scale(type="log"),
                axis=powers(counts["offset"]),
            ),
            y=alt.Y("share:Q", title="share of dims", axis=alt.Axis(format="%")),
            color=_COLOUR,
            shape=_SHAPE,
            tooltip=[
                tip("tensor", "tensor"),
                tip("group", "dims"),
                tip("offset", "|mean| / std, about", ".2~g"),
                tip("share", "share of them", ".1%"),
                tip("dims", "n"),
            ],
        )
        .facet(column=alt.Column("tensor:N", title=None, sort=list(TENSOR_COLOURS)), spacing=24)
    )
    medians = table.groupby(["tensor", "group"])["offset"].median().unstack()
    sizes = table.groupby(["tensor", "group"]).size().unstack()
    said = [
        f"{tensor} {number(medians.at[tensor, 'massive'])} ({sizes.at[tensor, 'massive']:,.0f} dims) against "
        f"{number(medians.at[tensor, 'other dims'])}"
        for tensor in tensors(table[table["group"] == "massive"])
    ]
    return Drawn(f"Median offset strength of massive dims against the others: {joined(said)}.", chart)


def stability(result: Result) -> Drawn | None:
    """Jaccard index of the sets found on different texts."""
    table = result.tables["stability"]
    # A rule that finds no dim in any text leaves nothing to compare.
    table = table[table.groupby("rule")["jaccard"].transform("count") > 0]
    if table.empty:
        return None
    table = table.assign(text_a=table["text_a"].map(_text), text_b=table["text_b"].map(_text))
    mirrored = table.rename(columns={"text_a": "text_b", "text_b": "text_a", "n_a": "n_b", "n_b": "n_a"})
    both = pd.concat([table, mirrored], ignore_index=True)
    texts = list(dict.fromkeys(both["text_a"]))
    domain = alt.Scale(domain=texts)
    cell = max(24, min(64, 256 // len(texts)))
    rules = {rule: _RULES.get(rule, rule) for rule in dict.fromkeys(table["rule"])}
    base = (
        alt.Chart()
        .transform_filter("datum.rule == rule")
        .encode(
            x=alt.X("text_a:N", title=None, scale=domain, axis=alt.Axis(labelAngle=-40, labelLimit=90)),
            y=alt.Y("text_b:N", title=None, scale=domain, axis=alt.Axis(labelLimit=120)),
        )
    )
    cells = base.mark_rect().encode(
        color=alt.Color("jaccard:Q", title="Jaccard", scale=alt.Scale(scheme="viridis", domain=[0, 1])),
        tooltip=[
            tip("tensor", "tensor"),
            tip("text_a", "text"),
            tip("text_b", "other text"),
            tip("jaccard", "Jaccard", ".3f"),
            tip("n_a", "dims in the text"),
            tip("n_b", "dims in the other"),
        ],
    )
    words = (
        base.transform_filter("isValid(datum.jaccard)")
        .mark_text(fontSize=11, tooltip=None)
        .encode(
            text=alt.Text("jaccard:Q", format=".2f"),
            color=alt.condition("datum.jaccard > 0.6", alt.value("#1c2430"), alt.value("white")),
        )
    )
    size = cell * len(texts)
    chart = (
        alt.layer(cells, words, data=both, view=alt.ViewBackground(fill=MISSING))
        .properties(width=size, height=size)
        .facet(column=alt.Column("tensor:N", title=None, sort=list(TENSOR_COLOURS)), spacing=24)
        .add_params(choice("rule", "set", rules))
    )
    return Drawn(_agreement(table), chart)


def signs(result: Result) -> Drawn | None:
    """Whether position 0 has the other sign in massive dims, by layer."""
    table = _marked(result).dropna(subset=["sign0"])
    table = table[table["tensor"].isin(["Q", "K"])]
    if not (table["group"] == "massive").any():
        return None
    table = table.assign(opposite=table["sign0"] < 0)
    by_layer = table.groupby(["tensor", "layer", "group"])["opposite"].agg(share="mean", dims="size").reset_index()
    base = alt.Chart().encode(
        x=layer_axis(result, 440),
        y=alt.Y(
            "share:Q",
            title=["dims whose sign at", "position 0 is opposite"],
            axis=alt.Axis(format="%"),
            scale=alt.Scale(domain=[0, 1]),
        ),
        color=_COLOUR,
    )
    dots = base.mark_point(filled=True, opacity=0.9).encode(
        shape=_SHAPE,
        size=alt.Size(
            "dims:Q",
            title="dims in the layer",
            scale=alt.Scale(domain=[1, 20], range=[14, 90], clamp=True),
            legend=alt.Legend(values=[1, 5, 20], labelExpr="datum.value == 20 ? '20 or more' : datum.label"),
        ),
        tooltip=[
            tip("tensor", "tensor"),
            tip("layer", "layer"),
            tip("group", "dims"),
            tip("share", "opposite sign", ".0%"),
            tip("dims", "n"),
        ],
    )
    lines = base.mark_line(strokeWidth=1, opacity=0.6)
    chart = (
        alt.layer(lines, dots, data=by_layer)
        .properties(width=440, height=170)
        .facet(column=alt.Column("tensor:N", title=None, sort=list(TENSOR_COLOURS)), spacing=24)
    )
    shares = table.groupby(["tensor", "group"])["opposite"].mean().unstack()
    sizes = table.groupby(["tensor", "group"]).size().unstack()
    said = [
        f"{percent(shares.at[tensor, 'massive'])} of {sizes.at[tensor, 'massive']:,.0f} massive {tensor} dims "
        f"({percent(shares.at[tensor, 'other dims'])} of its others)"
        for tensor in tensors(table[table["group"] == "massive"])
    ]
    return Drawn(f"Position 0 has the opposite sign in {joined(said)}.", chart)


def _text(name: str | int) -> str:
    return name if isinstance(name, str) else f"text {name}"


def _marked(result: Result) -> pd.DataFrame:
    massive = result.tables["massive"].set_index(_KEYS).index
    table = result.tables["magnitudes"]
    return table.assign(group=np.where(table.set_index(_KEYS).index.isin(massive), "massive", "other dims"))


def _agreement(table: pd.DataFrame) -> str:
    said = []
    for rule, own in table.groupby("rule", sort=False):
        means = own.groupby("tensor")["jaccard"].mean().dropna()
        values = ", ".join(f"{tensor} {fixed(means[tensor], 2)}" for tensor in TENSOR_COLOURS if tensor in means)
        said.append(f"{_RULES.get(str(rule), rule)}: {values}")
    return f"Mean Jaccard index between two texts; {'; '.join(said)} (1: the same set, 0: nothing in common)."


OFFSETS = Plot(
    "massive-offsets",
    "Offsets: how constant are massive dims?",
    "A dim with a large |mean| / std hardly depends on the token: it is a constant offset. Un-rotated values where "
    "the layer rotates. Values below .01 count as .01; a curve needs at least 10 dims.",
    ("magnitudes", "massive"),
    offsets,
)
STABILITY = Plot(
    "massive-stability",
    "Are they the same dims in every text?",
    "Jaccard index of the (layer, head, dim) sets found on two texts. Grey: the same text, or both sets are empty.",
    ("stability",),
    stability,
)
SIGNS = Plot(
    "massive-signs",
    "Sign at position 0",
    "Share of dims whose value at position 0 has the opposite sign to the mean of the other positions. Where it is "
    "high, replacing position 0 by the token mean would remove the attention sink.",
    ("magnitudes", "massive"),
    signs,
)

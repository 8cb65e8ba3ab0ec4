"""Where massive values sit: by layer and head, by channel, and by the pair's wavelength."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot, Topic
from rotoscope.report.style import (
    INK,
    MISSING,
    MUTED,
    SAMPLE,
    TENSOR_COLOURS,
    WIDTH,
    choice,
    count_axis,
    layer_axis,
    powers,
    sampled,
    tensor_colour,
    tensors,
    tip,
)
from rotoscope.report.text import joined, number, percent
from rotoscope.report.topics import massive_sets, surfaces
from rotoscope.results import Result

_TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000)


def heat_map(result: Result) -> Drawn | None:
    """The largest ratio of each head, Q, K and V on one colour scale."""
    heads = result.tables["massive_heads"].dropna(subset=["max_ratio"])
    if heads.empty:
        return None
    limit = threshold(result)
    # Where nothing was rotated, un-rotated values are the values themselves.
    table = heads.assign(max_ratio_pre=heads["max_ratio_pre"].fillna(heads["max_ratio"]))
    side = choice("side", "values", {"max_ratio": "as attention sees them (post-RoPE)", "max_ratio_pre": "un-rotated"})
    highest = float(table[["max_ratio", "max_ratio_pre"]].max().max())
    panels = []
    for tensor in tensors(table):
        own = table[table["tensor"] == tensor]
        count = int(own["head"].max()) + 1
        base = (
            sampled(alt.Chart(own, title=tensor), result)
            .transform_calculate(shown="datum[side]")
            .encode(
                x=layer_axis(result, title="layer" if tensor == "V" else None),
                y=alt.Y(
                    "head:O",
                    title="head" if tensor == "Q" else "kv head",
                    scale=alt.Scale(domain=list(range(count))),
                ),
            )
        )
        cells = base.mark_rect().encode(
            color=alt.Color(
                "shown:Q",
                title="max ratio",
                scale=alt.Scale(scheme="viridis", type="sqrt", domain=[1, max(highest, limit)]),
                legend=alt.Legend(values=[tick for tick in _TICKS if tick <= highest], gradientLength=130),
            ),
            tooltip=[
                tip("tensor", "tensor"),
                tip("layer", "layer"),
                tip("head", "head"),
                tip("max_ratio", "max ratio", ".2f"),
                tip("max_ratio_pre", "max ratio, un-rotated", ".2f"),
                tip("count", f"dims above {limit:g}"),
                tip("energy_share", "their share of energy", ".1%"),
                tip("top_dim", "top dim"),
                tip("top_pair", "its pair (−1: none)"),
                SAMPLE,
            ],
        )
        marks = base.transform_filter(f"datum.shown > {limit}").mark_point(
            shape="circle", size=14, fill="white", stroke=INK, strokeWidth=0.6, opacity=0.9, tooltip=None
        )
        height = max(40, count * (18 if count <= 16 else 8))
        panels.append(
            alt.layer(cells, marks).properties(width=WIDTH, height=height, view=alt.ViewBackground(fill=MISSING))
        )
    return Drawn(_shares(heads, limit), alt.vconcat(*panels, spacing=12).add_params(side))


def wavelengths(result: Result) -> Drawn | None:
    """How many massive Q and K dims each rotary pair holds, against its wavelength."""
    massive = result.tables["massive"]
    massive = massive[(massive["pair"] >= 0) & massive["wavelength_ratio"].notna()]
    if massive.empty:
        return None
    counts = massive.groupby(["tensor", "pair"]).agg(
        dims=("dim", "size"),
        wavelength=("wavelength", "mean"),
        wavelength_ratio=("wavelength_ratio", "mean"),
        largest=("ratio", "max"),
    )
    table = counts.reset_index()
    trained = float((massive["wavelength"] / massive["wavelength_ratio"]).median())
    every = _every_pair(result, massive, trained)
    x = count_axis("pair", int(every["pair"].max()) + 1, "rotary pair (0 turns fastest)")
    tooltip = [
        tip("tensor", "tensor"),
        tip("pair", "pair"),
        tip("dims", "massive dims"),
        tip("wavelength", "wavelength (tokens)", ",.1f"),
        tip("wavelength_ratio", "wavelength / trained length", ".3~g"),
        tip("largest", "largest ratio", ".2f"),
    ]
    bars = (
        alt.Chart(table, width=WIDTH, height=130)
        .mark_bar()
        .encode(x=x.title(None), y=alt.Y("dims:Q", title="massive dims"), color=tensor_colour(), tooltip=tooltip)
    )
    sizes = alt.Legend(values=sorted({1, int(table["dims"].max() + 1) // 2, int(table["dims"].max())}))
    dots = (
        alt.Chart(table)
        .mark_point(filled=False, strokeWidth=2)
        .encode(
            x=x,
            y=alt.Y(
                "wavelength_ratio:Q",
                title=["wavelength", "/ trained length"],
                scale=alt.Scale(type="log"),
                axis=powers(every["wavelength_ratio"]),
            ),
            size=alt.Size("dims:Q", title="massive dims", scale=alt.Scale(range=[25, 500]), legend=sizes),
            color=tensor_colour(),
            shape=alt.Shape("tensor:N", title="tensor", scale=alt.Scale(domain=list(TENSOR_COLOURS))),
            tooltip=tooltip,
        )
    )
    line = alt.Chart(pd.DataFrame({"one": [1.0]})).mark_rule(color=MUTED, strokeDash=[5, 4]).encode(y="one:Q")
    curve = alt.Chart(every).mark_line(color=MUTED, opacity=0.6).encode(x=x, y="wavelength_ratio:Q")
    lower = alt.layer(line, curve, dots).properties(width=WIDTH, height=230)
    return Drawn(_slow(massive, trained), alt.vconcat(bars, lower, spacing=10))


def threshold(result: Result) -> float:
    """The ratio above which a dim counts as massive."""
    return float(result.provenance.get("lambda") or 5.0)


def _shares(heads: pd.DataFrame, limit: float) -> str:
    said = []
    for tensor in tensors(heads):
        own = heads[heads["tensor"] == tensor]
        said.append(f"{tensor} {percent((own['max_ratio'] > limit).mean())} of {len(own):,}")
    top = heads.loc[heads["max_ratio"].idxmax()]
    return (
        f"Heads with at least one dim above {limit:g} times their mean: {joined(said)}; the largest ratio is "
        f"{number(top['max_ratio'])} ({top['tensor']}, layer {int(top['layer'])}, head {int(top['head'])}, "
        f"dim {int(top['top_dim'])})."
    )


def _slow(massive: pd.DataFrame, trained: float) -> str:
    counts = massive.groupby("pair").size()
    top = int(counts.idxmax())
    ratio = massive.loc[massive["pair"] == top, "wavelength_ratio"].mean()
    return (
        f"{percent((massive['wavelength_ratio'] >= 1).mean())} of the {len(massive):,} massive dims sit in pairs that "
        f"do not finish one turn within the trained length ({trained:,.0f} tokens); the most used is pair {top} "
        f"({counts.max():,} dims, wavelength {number(ratio)} × trained length)."
    )


def _every_pair(result: Result, massive: pd.DataFrame, trained: float) -> pd.DataFrame:
    """Each pair with its wavelength, also those without massive values where the run knows them."""
    table = result.tables.get("pairs", massive)
    table = table if not table.empty else massive
    every = table.groupby("pair", as_index=False)["wavelength"].mean()
    return every.assign(wavelength_ratio=every["wavelength"] / trained)


TOPIC = Topic(
    "massive",
    "Massive: values that tower over their head",
    "A head's dim is massive when its root mean square over tokens is more than λ times the mean over the head's dims.",
    (
        Plot(
            "massive-heads",
            "Largest ratio by layer and head",
            "Bright: one dim towers over the rest of its head. White dot: above the threshold λ. The three tensors "
            "share one colour scale (square root): bright Q and K panels next to a dark V panel are what the paper "
            "reports.",
            ("massive_heads",),
            heat_map,
        ),
        surfaces.PLOT,
        Plot(
            "massive-wavelengths",
            "Which rotary pairs hold massive values",
            "Bars: number of massive dims per pair, over all layers and heads. Below: the wavelength of every pair "
            "(line) and of those with massive dims (marks, size: how many); above the dashed line a pair does not "
            "finish one turn within the trained length.",
            ("massive",),
            wavelengths,
        ),
        massive_sets.OFFSETS,
        massive_sets.STABILITY,
        massive_sets.SIGNS,
    ),
)

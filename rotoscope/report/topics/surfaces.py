"""Head × dim magnitudes of Q, K and V at any layer."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.style import (
    MISSING,
    SAMPLE,
    WIDTH,
    choice,
    count_axis,
    ramp,
    sampled,
    tensors,
    tip,
)
from rotoscope.report.text import joined, percent
from rotoscope.results import Result

MAX_CELLS = 250_000
"""More than this would make the page slow and large; then only each layer's most massive heads are drawn."""

_HEAD = ["tensor", "layer", "head"]
_MEASURES = {
    "ratio": "RMS / mean of the head, post-RoPE",
    "ratio_pre": "RMS / mean of the head, un-rotated",
    "rms": "RMS, post-RoPE",
    "rms_pre": "RMS, un-rotated",
}


def chart(result: Result) -> Drawn | None:
    """The magnitude maps, with the layer and the measure to choose."""
    whole = result.tables["magnitudes"]
    # Whole heads only: a dim's place in its head's list is its number.
    whole = whole[whole["rms"].notna().groupby([whole[name] for name in _HEAD]).transform("any")]
    if whole.empty:
        return None
    # Where nothing was rotated, un-rotated values are the values themselves.
    whole = whole.fillna({"rms_pre": whole["rms"], "ratio_pre": whole["ratio"]})
    table = _largest_heads(whole)
    attending = sorted(int(layer) for layer in table["layer"].unique())
    layer = alt.param(
        name="layer",
        value=attending[len(attending) // 2],
        bind=alt.binding_range(min=attending[0], max=attending[-1], step=1, name="layer "),
    )
    # One scale for all layers, so that moving the slider shows growth with depth.
    highest = " : ".join(f"measure == '{name}' ? {float(table[name].max()):.5g}" for name in _MEASURES)
    scale = alt.Scale(scheme="viridis", type="sqrt", domainMin=0, domainMax=alt.ExprRef(f"{highest} : 1"))
    heads, pairs = _by_head(table)
    panels = []
    for tensor in tensors(table):
        own = table[table["tensor"] == tensor]
        rows = int(own.groupby("layer")["head"].nunique().max())
        x = count_axis("dim", int(own["dim"].max()) + 1, "dim" if tensor == "V" else None)
        panel = _cells(sampled(alt.Chart(heads, title=tensor), result), pairs, tensor, x, scale)
        height = max(44, rows * (18 if rows <= 16 else 10))
        panels.append(panel.properties(width=WIDTH, height=height, view=alt.ViewBackground(fill=MISSING)))
    measure = choice("measure", "values", _MEASURES)
    return Drawn(_reading(whole, table), alt.vconcat(*panels, spacing=12).add_params(layer, measure))


def _cells(base: alt.Chart, pairs: pd.DataFrame, tensor: str, x: alt.X, scale: alt.Scale) -> alt.Chart:
    cells: alt.Chart = (
        base.transform_filter(f"datum.layer == layer && datum.tensor == '{tensor}'")
        .transform_flatten(["rms", "rms_pre"])
        .transform_window(number="row_number()", groupby=["head"])
        # The ratios follow from the root mean squares, which halves what the page has to carry.
        .transform_joinaggregate(mean="mean(rms)", mean_pre="mean(rms_pre)", groupby=["head"])
        .transform_calculate(
            dim="datum.number - 1",
            place="datum.pairing + '/' + (datum.number - 1)",
            ratio="datum.rms / datum.mean",
            ratio_pre="datum.rms_pre / datum.mean_pre",
        )
        .transform_calculate(shown="datum[measure]")
        .transform_lookup(lookup="place", from_=alt.LookupData(pairs, "place", ["pair"]))
        .mark_rect()
        .encode(
            x=x,
            y=alt.Y("head:O", title="head" if tensor == "Q" else "kv head"),
            color=alt.Color("shown:Q", title="magnitude", scale=scale, legend=ramp("~r")),
            tooltip=[
                tip("tensor", "tensor"),
                tip("layer", "layer"),
                tip("head", "head"),
                tip("dim", "dim"),
                tip("pair", "pair (−1: none)"),
                tip("ratio", "ratio to the head's mean", ".2f"),
                tip("ratio_pre", "ratio, un-rotated", ".2f"),
                tip("rms", "RMS", ".3~g"),
                tip("rms_pre", "RMS, un-rotated", ".3~g"),
                SAMPLE,
            ],
        )
    )
    return cells


def _by_head(table: pd.DataFrame) -> tuple[pd.DataFrame, pd.DataFrame]:
    """One row a head with its values in lists, and the pair of each dim for each way that heads pair their dims.

    A row per cell would repeat tensor, layer, head, dim and pair a hundred thousand times.
    """
    groups = table.sort_values([*_HEAD, "dim"]).groupby(_HEAD)
    heads = groups[["rms", "rms_pre"]].agg(list)
    pairings = groups["pair"].agg(tuple)
    known = {pairing: number for number, pairing in enumerate(dict.fromkeys(pairings))}
    places = [(f"{number}/{dim}", pair) for pairing, number in known.items() for dim, pair in enumerate(pairing)]
    return heads.assign(pairing=pairings.map(known)).reset_index(), pd.DataFrame(places, columns=["place", "pair"])


def _largest_heads(table: pd.DataFrame) -> pd.DataFrame:
    if len(table) <= MAX_CELLS:
        return table
    ratios = table.groupby(_HEAD)["ratio"].max()
    kept = max(1, len(ratios) * MAX_CELLS // (len(table) * ratios.groupby(level=["tensor", "layer"]).ngroups))
    largest = ratios.groupby(level=["tensor", "layer"], group_keys=False).nlargest(kept).index
    return table[table.set_index(_HEAD).index.isin(largest)]


def _reading(whole: pd.DataFrame, shown: pd.DataFrame) -> str:
    said = []
    known = whole.dropna(subset=["ratio"])
    for tensor in tensors(known):
        own = known[known["tensor"] == tensor]
        tops = own.loc[own.groupby(["layer", "head"])["ratio"].idxmax(), "dim"]
        dim = int(tops.mode().iloc[0])
        said.append(f"{tensor} dim {dim} ({percent((tops == dim).mean())} of heads)")
    sentence = f"The dim that is most often the largest of its head: {joined(said)}."
    if len(shown) < len(whole):
        sentence += (
            f" Drawn are each layer's heads with the largest ratios ({percent(len(shown) / len(whole))} of all)."
        )
    return sentence


PLOT = Plot(
    "massive-surfaces",
    "Magnitude of every channel, at any layer",
    "Move the slider through the layers. A bright column is a channel that is large in many heads at once. One colour "
    "scale (square root) holds for Q, K, V and all layers.",
    ("magnitudes",),
    chart,
)

"""Why logits are additive: key concentration and rotation per rotary pair."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.style import MUTED, SAMPLE, WIDTH, choice, powers, sampled, tip
from rotoscope.report.text import percent
from rotoscope.results import Result

SLOW = 0.5
CONCENTRATED = 1.0


def chart(result: Result) -> Drawn | None:
    """Concentration against rotation spread, one dot a layer and pair."""
    pairs = result.tables["pairs"].dropna(subset=["query_energy", "concentration", "rotation_spread"])
    if pairs.empty:
        return None
    table = _by_layer(pairs)
    shown = {"all": "all"} | {str(layer): str(layer) for layer in sorted(table["layer"].unique())}
    dots = (
        sampled(alt.Chart(table), result)
        .transform_filter("shown == 'all' || toString(datum.layer) == shown")
        .mark_circle(opacity=0.8)
        .encode(
            x=alt.X(
                "wavelength:Q",
                title="wavelength of the pair (tokens): fast on the left, slow on the right",
                scale=alt.Scale(type="log", nice=False, padding=12),
                axis=powers(table["wavelength"]),
            ),
            y=alt.Y(
                "concentration:Q",
                title="key concentration κ, median over heads",
                scale=alt.Scale(type="log"),
                axis=powers(table["concentration"]),
            ),
            size=alt.Size("query_energy:Q", title="share of query energy", scale=alt.Scale(range=[8, 260])),
            color=alt.Color("query_energy:Q", title="share of query energy", scale=alt.Scale(scheme="viridis")),
            tooltip=[
                tip("layer", "layer"),
                tip("pair", "pair"),
                tip("wavelength", "wavelength (tokens)", ",.1f"),
                tip("rotation_spread", "rotation spread F", ".3f"),
                tip("concentration", "concentration κ", ".3~g"),
                tip("query_energy", "share of query energy", ".2%"),
                tip("heads", "heads"),
                SAMPLE,
            ],
        )
        .add_params(choice("shown", "layer", shown))
    )
    lines = pd.DataFrame({"slow": [_slow_from(table)], "concentrated": [CONCENTRATED]})
    rule = alt.Chart(lines).mark_rule(color=MUTED, strokeDash=[5, 4])
    both = alt.layer(dots, rule.encode(x="slow:Q"), rule.encode(y="concentrated:Q"))
    return Drawn(_reading(pairs), both.properties(width=WIDTH, height=360))


def _slow_from(table: pd.DataFrame) -> float:
    """The wavelength from which on pairs turn little, between the last that does not and the first that does."""
    fast = table.loc[table["rotation_spread"] >= SLOW, "wavelength"].max()
    slow = table.loc[table["rotation_spread"] < SLOW, "wavelength"].min()
    ends = [end for end in (fast, slow) if pd.notna(end)]
    return float(np.sqrt(ends[0] * ends[-1]))


def _by_layer(pairs: pd.DataFrame) -> pd.DataFrame:
    groups = pairs.groupby(["layer", "pair"])
    table = groups[["wavelength", "rotation_spread", "query_energy"]].mean()
    table["concentration"] = groups["concentration"].median()
    table["heads"] = groups.size()
    # A log axis has no place for 0 (a pair whose keys average out) or infinity (keys that never vary).
    positive = table["concentration"].where((table["concentration"] > 0) & np.isfinite(table["concentration"]))
    return table.assign(concentration=positive).dropna().reset_index()


def _reading(pairs: pd.DataFrame) -> str:
    additive = (pairs["rotation_spread"] < SLOW) | (pairs["concentration"] > CONCENTRATED)
    by_layer = (pairs["query_energy"] * additive).groupby(pairs["layer"]).sum()
    by_layer /= pairs.groupby("layer")["query_energy"].sum()
    lowest = int(by_layer.idxmin())
    return (
        f"{percent(by_layer.mean())} of query energy lies in pairs that turn little (F < {SLOW}) or whose keys are "
        f"nearly constant (κ > {CONCENTRATED:.0f}), the two ways to be additive; least in layer {lowest} "
        f"({percent(by_layer.min())})."
    )


PLOT = Plot(
    "position-pairs",
    "Concentration and rotation of each rotary pair",
    "One dot a layer and pair. Right of the vertical line a pair turns little over the distances fitted (F below one "
    "half), above the horizontal one its keys are nearly constant; only large dots at the lower left keep logits from "
    "being additive.",
    ("pairs",),
    chart,
)

"""Whose answer is given when another prompt's states are swapped in at layer k."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.style import INK, tip
from rotoscope.report.text import fixed, percent
from rotoscope.results import Result

_ANSWERS = {"donor": "#d55e00", "original": "#0072b2", "other": "#5b6675"}
_SHAPES = ["square", "circle", "triangle-up"]
_DASHES = [[1, 0], [1, 0], [3, 3]]


def chart(result: Result) -> Drawn | None:
    """Share of donor, original and other answers against k, one panel a set of pairs."""
    table = result.tables["swap"].dropna(subset=["original", "donor"])
    if table.empty:
        return None
    sets = list(dict.fromkeys(table["set"]))
    crossings = {kind: crossing(table[table["set"] == kind]) for kind in sets}
    long = _long(table, sets, crossings)
    names = list(_ANSWERS)
    legend = alt.Legend(orient="bottom", symbolOpacity=1, symbolSize=80)
    colour = alt.Color(
        "answer:N", title="answer", scale=alt.Scale(domain=names, range=list(_ANSWERS.values())), legend=legend
    )
    shape = alt.Shape("answer:N", title="answer", scale=alt.Scale(domain=names, range=_SHAPES))
    dash = alt.StrokeDash("answer:N", title="answer", scale=alt.Scale(domain=names, range=_DASHES))
    x = alt.X(
        "k:Q",
        title="k: layer at whose input states are swapped",
        scale=alt.Scale(domain=[0, int(table["k"].max())], nice=False),
        axis=alt.Axis(tickCount=6, format="d"),
    )
    y = alt.Y("share:Q", title="share of pairs", scale=alt.Scale(domain=[0, 1]), axis=alt.Axis(format="%", tickCount=5))
    base = alt.Chart().encode(x=x, color=colour)
    bands = (
        base.transform_filter("isValid(datum.low)")
        .mark_area(opacity=0.15, tooltip=None)
        .encode(y=alt.Y("low:Q"), y2="high:Q")
    )
    lines = base.mark_line(strokeWidth=1.8).encode(y=y, strokeDash=dash)
    dots = base.mark_point(filled=True, size=45, opacity=1).encode(
        y=y,
        shape=shape,
        tooltip=[
            tip("set", "pairs"),
            tip("answer", "answer"),
            tip("k", "k"),
            tip("n", "pairs of prompts"),
            tip("share", "share", ".3f"),
            tip("low", "95 % low", ".3f"),
            tip("high", "95 % high", ".3f"),
        ],
    )
    crossed = (
        alt.Chart()
        .transform_filter("datum.once && isValid(datum.crossing)")
        .mark_rule(color=INK, strokeDash=[5, 4])
        .encode(x=alt.X("crossing:Q"))
    )
    width = 270 if len(sets) > 2 else 380
    panels = (
        alt.layer(bands, crossed, lines, dots, data=long)
        .properties(width=width, height=200)
        .facet(column=alt.Column("set:N", title=None, sort=alt.EncodingSortField("place", op="min")), spacing=20)
    )
    layers = len(result.tables["anatomy"]) if "anatomy" in result.tables else int(table["k"].max()) + 1
    return Drawn(_reading(table, crossings, layers), panels)


def crossing(table: pd.DataFrame) -> tuple[int, int, float] | None:
    """Where the original answer overtakes the donor's for good.

    Returns
    -------
    tuple or None
        The last tested k at which the donor's share is the larger one, the next tested k, and where the two lines
        meet between them. None where the donor never leads or always does.
    """
    table = table.sort_values("k")
    lead = (table["donor"] - table["original"]).to_numpy()
    ks = table["k"].to_numpy()
    ahead = (lead > 0).nonzero()[0]
    if len(ahead) == 0 or ahead[-1] == len(lead) - 1:
        return None
    i = int(ahead[-1])
    return int(ks[i]), int(ks[i + 1]), float(ks[i] + (ks[i + 1] - ks[i]) * lead[i] / (lead[i] - lead[i + 1]))


def _long(table: pd.DataFrame, sets: list[str], crossings: dict[str, tuple[int, int, float] | None]) -> pd.DataFrame:
    parts = []
    for answer in _ANSWERS:
        part = table[["set", "k", "n"]].assign(answer=answer, share=table[answer])
        ends = {end: table.get(f"{answer}_{end}", float("nan")) for end in ("low", "high")}
        parts.append(part.assign(**ends))
    long = pd.concat(parts, ignore_index=True)
    found = {kind: None if cross is None else cross[2] for kind, cross in crossings.items()}
    return long.assign(
        crossing=long["set"].map(found).astype(float), place=long["set"].map(sets.index), once=~long.duplicated("set")
    )


def _reading(table: pd.DataFrame, crossings: dict[str, tuple[int, int, float] | None], layers: int) -> str:
    said = []
    for kind, cross in crossings.items():
        own = table[table["set"] == kind].sort_values("k")
        if cross is not None:
            at = (
                f"the donor's answer leads up to k = {cross[0]}, the original's from k = {cross[1]} on "
                f"(crossing at {fixed(cross[2], 1)}, {percent(cross[2] / layers)} of the layers)"
            )
        elif own["donor"].iloc[-1] > own["original"].iloc[-1]:
            at = f"the donor's answer still leads at the deepest k tested ({own['k'].iloc[-1]})"
        else:
            at = "the donor's answer never leads"
        said.append(f"{kind} (n = {int(own['n'].min())} pairs): {at}")
    sentence = "; ".join(said)
    return f"{sentence[0].upper()}{sentence[1:]}."


PLOT = Plot(
    "depth-swap",
    "Swap: whose answer is it?",
    "At the input of layer k the states of the words that differ are replaced by those of another prompt, the donor "
    "(another country, month or number). Orange squares: the donor's answer is given; blue circles: the prompt's own; "
    "grey: neither. Band: 95 % Wilson interval. Dashed vertical: where the original overtakes for good. Only pairs "
    "whose two prompts are both answered rightly without a swap.",
    ("swap",),
    chart,
)

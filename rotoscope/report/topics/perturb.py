"""How much disorder a model bears: ΔNLL against the share of tokens disturbed, and what a dummy distance moves."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.labels import PERTURBATIONS, signed, worded
from rotoscope.report.series import Look, Series, rule, symlog
from rotoscope.report.style import INK, MISSING, MUTED, WIDTH, choice, layer_axis, tip
from rotoscope.report.text import fixed, joined, percent
from rotoscope.results import Result

HARM = 0.05
"""Nats a token; what the claim counts as minor ends here."""

FEW, MANY = 0.05, 0.20
_MARKED = (FEW, 0.10, MANY)
_JUDGED = {"swap-arbitrary": "swaps", "jitter-arbitrary": "jitter"}
"""What the claim is about, in a word."""

_LOOKS = {
    "swap-adjacent": Look("#0072b2", "circle", 1.6, (5, 3)),
    "swap-arbitrary": Look("#0072b2", "square", 2.4),
    "jitter-adjacent": Look("#d55e00", "triangle-up", 1.6, (5, 3)),
    "jitter-arbitrary": Look("#d55e00", "diamond", 2.4),
    "rotate-arbitrary": Look("#009e73", "cross", 2.4),
}


def doses(result: Result) -> Drawn | None:
    """One line a kind of disorder, with intervals over texts."""
    table = result.tables["perturb"].dropna(subset=["dnll"])
    if table.empty:
        return None
    table = worded(table, "kind", PERTURBATIONS).sort_values(["rank", "share"])
    looks = {PERTURBATIONS[kind]: look for kind, look in _LOOKS.items()}
    shares = sorted(set(table["share"]) | {0.0, *_MARKED})
    scale = alt.Scale(type="symlog", constant=0.01, domain=[0, max(shares)], nice=False)
    ticks = alt.Axis(values=shares, format="~%", grid=False, labelOverlap=False)
    x = alt.X("share:Q", title="share of tokens disturbed (symlog, linear up to 1 %)", scale=scale, axis=ticks)
    ends = pd.concat([table["dnll"], table["low"], table["high"], pd.Series([0.0, 2 * HARM])])
    axis = symlog(ends, HARM, ["more NLL on undisturbed targets", "(nats a token, symlog)"])
    tooltip = [
        tip("words", "disturbed by"),
        tip("share", "share asked for", "~%"),
        tip("achieved", "share achieved", ".2%"),
        tip("mean_shift", "mean |shift| of the disturbed (tokens)", ",.1f"),
        tip("dnll", "ΔNLL (nats a token)", "+.4f"),
        tip("low", "95 % low", "+.4f"),
        tip("high", "95 % high", "+.4f"),
        tip("n", "texts"),
        tip("targets", "targets scored", ",d"),
    ]
    marked = alt.Chart(pd.DataFrame({"share": _MARKED})).encode(x=x)
    verticals = marked.mark_rule(color=MUTED, strokeDash=[2, 3], tooltip=None)
    names = marked.mark_text(dy=-7, color=INK, tooltip=None).encode(
        y=alt.value(0), text=alt.Text("share:Q", format="~%")
    )
    minor = rule(table, y=alt.datum(HARM))
    said = minor.mark_text(text=f"{HARM:g} nats", align="left", dx=5, dy=-7, color=INK).encode(x=alt.value(0))
    zero = alt.Chart(table.head(1)).mark_rule(color=MUTED, opacity=0.6).encode(y=alt.datum(0))
    marks = Series.of(table, looks).lines(x, "dnll", axis, tooltip, ("low", "high"))
    lines = alt.layer(*marks, data=table)
    chart = alt.layer(verticals, names, zero, minor, said, lines).properties(width=WIDTH - 110, height=320)
    return Drawn(_harm(table), chart)


def controlled_distance(result: Result) -> Drawn | None:
    """How far the key axis and the distance axis of every head move when all pairs stand at a dummy distance."""
    table = result.tables["distance"].dropna(subset=["key_axis_shift", "distance_axis_shift"])
    table = table.assign(share=_square_share(table)).dropna(subset=["share"])
    if table.empty:
        return None
    longest = int(table["d"].max())
    dummy = choice("dummy", "dummy distance d", {str(d): f"{d:,}" for d in sorted(set(table["d"]))}, str(longest))
    tooltip = [
        tip("layer", "layer"),
        tip("head", "head"),
        tip("d", "dummy distance", ",d"),
        tip("key_axis_shift", "shift of the key axis (sd)", ".3f"),
        tip("distance_axis_shift", "shift of the distance axis (sd)", ".3f"),
        tip("share", "distance axis’ share of the change", ".1%"),
    ]
    chosen = alt.Chart(table).transform_filter("toString(datum.d) == dummy")
    top = 1.05 * float(table[["key_axis_shift", "distance_axis_shift"]].to_numpy().max())
    scale = alt.Scale(domain=[0, top], nice=False)
    x = alt.X("key_axis_shift:Q", title="shift of the key axis (sd of a query’s logits)", scale=scale)
    y = alt.Y("distance_axis_shift:Q", title="shift of the distance axis (sd)", scale=scale)
    dots = chosen.mark_circle(size=42, opacity=0.8).encode(
        x=x,
        y=y,
        color=alt.Color("layer:Q", title="layer", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(format="d")),
        tooltip=tooltip,
    )
    ends = pd.DataFrame({"key_axis_shift": [0.0, top], "distance_axis_shift": [0.0, top]})
    equal = alt.Chart(ends).mark_line(color=MUTED, strokeDash=[5, 4]).encode(x=x, y=y)
    scatter = alt.layer(equal, dots).properties(width=300, height=280, title="one dot a head")
    count = int(table["head"].max()) + 1
    width = 400
    heads = chosen.mark_rect().encode(
        x=layer_axis(result, width),
        y=alt.Y("head:O", title="head", scale=alt.Scale(domain=list(range(count)))),
        color=alt.Color(
            "share:Q",
            title="share",
            scale=alt.Scale(scheme="viridis", domain=[0, 1]),
            legend=alt.Legend(tickCount=4, format="%", gradientLength=130),
        ),
        tooltip=tooltip,
    )
    grid = heads.properties(
        width=width,
        height=max(60, min(280, 24 * count)),
        title="distance axis’ share of the change",
        view=alt.ViewBackground(fill=MISSING),
    )
    chart = alt.hconcat(scatter, grid, spacing=30).resolve_scale(color="independent").add_params(dummy)
    return Drawn(_axes(table), chart)


def _square_share(table: pd.DataFrame) -> pd.Series:
    """The part of a head's mean squared change that all keys of a query share."""
    key, distance = table["key_axis_shift"] ** 2, table["distance_axis_shift"] ** 2
    return distance / (key + distance)


def _harm(table: pd.DataFrame) -> str:
    said = []
    for share in (FEW, MANY):
        rows = table[(table["share"] == share) & table["kind"].isin(_JUDGED)]
        if rows.empty:
            continue
        each = [f"{_JUDGED[row.kind]} {signed(row.dnll, row.low, row.high, 3)}" for row in rows.itertuples()]
        n, targets = int(rows["n"].min()), int(rows["targets"].min())
        said.append(f"with {percent(share)} of the tokens disturbed {joined(each)} ({n} texts, {targets:,} targets)")
    if not said:
        return f"{len(table)} values; neither {percent(FEW)} nor {percent(MANY)} was tried with swaps or jitter."
    return f"More NLL, nats a token: {'; '.join(said)}."


def _axes(table: pd.DataFrame) -> str:
    longest = table[table["d"] == table["d"].max()]
    key, distance = longest["key_axis_shift"].median(), longest["distance_axis_shift"].median()
    more = (longest["distance_axis_shift"] > longest["key_axis_shift"]).mean()
    return (
        f"From dummy distance 0 to {int(table['d'].max()):,}, in the median head the distance axis shifts by "
        f"{fixed(distance, 2)} sd and the key axis by {fixed(key, 2)} sd; in {percent(more)} of {len(longest)} heads "
        f"the distance axis shifts more."
    )


DOSES = Plot(
    "generalization-perturb",
    "How much disorder does the model bear?",
    "All kinds disturb the same tokens of a text: two tokens change places, position ids are shifted as far as the "
    "tokens would move, or queries and keys are turned as far, anew in every layer. Scored are targets that are not "
    "disturbed and follow on two tokens that are not. Band: 95 % over texts (t). Dashed horizontal: .05 nats, where "
    "minor harm ends. Dotted verticals: 5, 10 and 20 %; the claim is that lines stay below .05 up to 5 % and are "
    "clearly above it past 10 % (judged at 20 %).",
    ("perturb",),
    doses,
)
DISTANCE = Plot(
    "generalization-distance",
    "With distance held fixed, which axis moves?",
    "All pairs of a text are put at one dummy distance d. What the logits change from d = 0 is taken apart into each "
    "query’s mean over keys (the distance axis) and the rest (the key axis), in standard deviations of a query’s "
    "logits over keys. If logits are position + semantics, dots lie high and to the left, and the map is bright: the "
    "distance axis moves, the key axis stays. Dashed: both move alike. Grey: no rotation there.",
    ("distance",),
    controlled_distance,
)

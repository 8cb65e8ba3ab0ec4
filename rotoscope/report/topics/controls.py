"""The matched controls' own audit: what all studies find on each of them."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Listing, Plot
from rotoscope.report.scorecard import SYMBOLS
from rotoscope.report.series import Measure, Series, rule, trained
from rotoscope.report.style import INK, WIDTH, tensors, tip
from rotoscope.report.text import fixed, joined, percent
from rotoscope.report.topics import controls_tasks
from rotoscope.report.topics.variants import LAMBDA, LOOKS, controlled, seeded
from rotoscope.results import CATALOGUE, Result

TRAINED = 256
"""Tokens of a row that the controls were trained on."""

_VERDICTS = {"holds": "#bfe3d3", "partly": "#f7dfa9", "fails": "#f0bcb9", "not tested": "#eef0f3"}


def claims(result: Result) -> Drawn | None:
    """Verdicts, one row a claim and one column a control."""
    table = controlled(result, "control_claims", "verdict")
    if table.empty:
        return None
    order = list(CATALOGUE)
    table = table.assign(
        place=[order.index(name) if name in order else len(order) for name in table["id"]],
        control=table["words"] + " " + table["seed"].astype(str),
        statement=[CATALOGUE.get(name, ("", ""))[1] for name in table["id"]],
        symbol=table["verdict"].map(SYMBOLS),
    )
    columns = list(dict.fromkeys(table.sort_values(["rank", "seed"])["control"]))
    rows = list(dict.fromkeys(table.sort_values("place")["id"]))
    base = alt.Chart(table).encode(
        x=alt.X(
            "control:N",
            title=None,
            scale=alt.Scale(domain=columns),
            axis=alt.Axis(orient="top", labelAngle=0, labelOverlap=False, labelExpr=_TWO_LINES, labelPadding=14),
        ),
        y=alt.Y("id:N", title=None, scale=alt.Scale(domain=rows), axis=alt.Axis(labelOverlap=False)),
    )
    verdicts = list(_VERDICTS)
    cells = base.mark_rect(stroke="white", strokeWidth=2).encode(
        color=alt.Color(
            "verdict:N",
            title="verdict",
            scale=alt.Scale(domain=verdicts, range=list(_VERDICTS.values())),
            legend=alt.Legend(orient="bottom", symbolType="square", symbolSize=160),
        ),
        tooltip=[
            tip("control", "control (positions, seed)"),
            tip("id", "claim"),
            tip("statement", "statement"),
            tip("verdict", "verdict"),
            tip("value", "value", ".4~g"),
            tip("low", "95 % low", ".4~g"),
            tip("high", "95 % high", ".4~g"),
            tip("null", "null or control", ".4~g"),
            tip("n", "n"),
            tip("reason", "reason"),
        ],
    )
    symbols = base.mark_text(fontSize=13, color=INK, tooltip=None).encode(text="symbol:N")
    chart = alt.layer(cells, symbols).properties(width=96 * len(columns), height=26 * len(rows))
    return Drawn(_verdicts(table, columns), chart)


def shares(result: Result) -> Drawn | None:
    """Share of heads with massive dims, and mean largest ratio, with intervals."""
    table = controlled(result, "control_shares", "share")
    if table.empty:
        return None
    parts = list(dict.fromkeys(table["part"]))
    part = alt.param(
        name="layers",
        value=parts[-1],
        bind=alt.binding_select(options=parts, name="layers "),
    )
    tooltip = [
        tip("words", "positions"),
        tip("tensor", "tensor"),
        tip("part", "layers"),
        tip("share", f"heads with a dim above {LAMBDA:g}", ".1%"),
        tip("low", "95 % low", ".1%"),
        tip("high", "95 % high", ".1%"),
        tip("ratio", "mean largest ratio", ".3f"),
        tip("ratio_low", "95 % low", ".3f"),
        tip("ratio_high", "95 % high", ".3f"),
        tip("heads", "heads"),
        tip("seeds", "seeds"),
    ]
    top = max(LAMBDA, float(table["ratio_high"].max()))
    panels = []
    for value, low, high, title, scale, form in (
        ("share", "low", "high", f"heads with a dim above λ = {LAMBDA:g}", alt.Scale(domain=[0, 1]), "%"),
        (
            "ratio",
            "ratio_low",
            "ratio_high",
            "largest dim / mean of its head",
            alt.Scale(domain=[1, 1.04 * top], zero=False),
            "~r",
        ),
    ):
        axis = Measure(title, scale, alt.Axis(format=form, tickCount=5))
        marks = _beside(Series.of(table, LOOKS), table, axis, (value, low, high), tooltip)
        limit = [rule(table, y=alt.datum(LAMBDA))] if value == "ratio" else []
        layers = [*limit, *(mark.transform_filter("datum.part == layers") for mark in marks)]
        panels.append(alt.layer(*layers, data=table).properties(width=400, height=210))
    return Drawn(_shared(table, parts[-1]), alt.hconcat(*panels, spacing=40).add_params(part))


def heads(result: Result) -> Drawn | None:
    """Largest ratio of every head by layer, variants beside each other."""
    table = controlled(result, "control_massive_heads", "max_ratio")
    if table.empty:
        return None
    series = Series.of(table, LOOKS)
    layers = list(range(int(table["layer"].max()) + 1))
    panels: list[alt.LayerChart | alt.FacetChart] = []
    for tensor in tensors(table):
        own = table[table["tensor"] == tensor]
        axis = alt.Axis(labelAngle=0)
        chart = alt.Chart(own, title=tensor).encode(
            x=alt.X("layer:O", title="layer", scale=alt.Scale(domain=layers), axis=axis),
            xOffset=series.beside(table),
            y=alt.Y(
                "max_ratio:Q",
                title=None if panels else "largest dim / mean of its head",
                scale=alt.Scale(type="log", domain=[1, 1.1 * max(LAMBDA, float(table["max_ratio"].max()))], nice=False),
                axis=alt.Axis(values=[1, 2, 3, 5, 10, 20, 50, 100], format="~r"),
            ),
        )
        dots = chart.mark_point(size=34, strokeWidth=1.4).encode(
            color=series.colour(),
            shape=series.shape(),
            tooltip=[
                tip("words", "positions"),
                tip("seed", "seed"),
                tip("layer", "layer"),
                tip("head", "head"),
                tip("max_ratio", "largest ratio", ".3f"),
                tip("count", f"dims above {LAMBDA:g}"),
                tip("energy_share", "their share of energy", ".1%"),
            ],
        )
        panels.append(alt.layer(rule(own, y=alt.datum(LAMBDA)), dots).properties(width=264, height=210))
    return Drawn(_largest(table), alt.hconcat(*panels, spacing=24))


def length(result: Result) -> Drawn | None:
    """Negative log-likelihood by position, past the trained length."""
    table = controlled(result, "control_length", "nll")
    if table.empty:
        return None
    tooltip = [
        tip("words", "positions"),
        tip("position", "position, from", ",d"),
        tip("nll", "nats a token", ".4f"),
        tip("low", "95 % low", ".4f"),
        tip("high", "95 % high", ".4f"),
        tip("n", "texts × seeds"),
    ]
    scale = alt.Scale(domain=[0, max(TRAINED, int(table["position"].max()))], nice=False)
    x = alt.X("position:Q", title="position (start of each stretch)", scale=scale, axis=alt.Axis(format=",d"))
    axis = Measure("nats a token", alt.Scale(zero=False))
    marks = Series.of(table, LOOKS).lines(x, "nll", axis, tooltip, ("low", "high"))
    chart = alt.layer(*trained(table, TRAINED), *marks, data=table).properties(width=WIDTH - 90, height=240)
    return Drawn(_beyond(table), chart)


def _beside(
    series: Series, table: pd.DataFrame, axis: Measure, columns: tuple[str, str, str], tooltip: list[alt.Tooltip]
) -> list[alt.Chart]:
    """Points with intervals, the variants of a tensor side by side."""
    value, low, high = columns
    base = alt.Chart().encode(
        x=alt.X("tensor:N", title=None, scale=alt.Scale(domain=tensors(table)), axis=alt.Axis(labelAngle=0)),
        xOffset=series.beside(table),
        color=series.colour(),
    )
    bars = base.mark_rule(strokeWidth=2, tooltip=None).encode(y=axis.y(low), y2=f"{high}:Q")
    dots = base.mark_point(filled=True, size=70, opacity=1).encode(
        y=axis.y(value), shape=series.shape(), tooltip=tooltip
    )
    return [bars, dots]


def _verdicts(table: pd.DataFrame, columns: list[str]) -> str:
    said = []
    for name, own in table.sort_values("place").groupby("id", sort=False):
        held = {words: set(rows["verdict"]) for words, rows in own.groupby("words", sort=False)}
        # What separates RoPE from the rest on every seed is what the controls are for.
        if held.get("RoPE") == {"holds"} and all("holds" not in other for w, other in held.items() if w != "RoPE"):
            said.append(str(name))
    counts = [f"{(table['verdict'] == verdict).sum()} {verdict}" for verdict in _VERDICTS]
    only = f"holds on every seed with RoPE and on none without: {joined(said)}" if said else (
        "no claim holds on every seed with RoPE and on none without"
    )  # fmt: skip
    return f"{table['id'].nunique()} claims on {len(columns)} controls: {', '.join(counts)}; {only}."


def _shared(table: pd.DataFrame, part: str) -> str:
    own = table[table["part"] == part]
    said = []
    for tensor in tensors(own):
        rows = own[own["tensor"] == tensor]
        said.append(f"{tensor} {joined([f'{row.words} {percent(row.share)}' for row in rows.itertuples()])}")
    fewest = f"{int(own['heads'].min())} heads a variant and tensor, {seeded(int(own['seeds'].min()))}"
    return f"Heads with a dim above {LAMBDA:g}, layers: {part}. {'; '.join(said)} ({fewest})."


def _largest(table: pd.DataFrame) -> str:
    said = []
    for words, own in table.groupby("words", sort=False):
        top = own.loc[own["max_ratio"].idxmax()]
        said.append(
            f"{words} {fixed(top['max_ratio'], 2)} ({top['tensor']}, layer {top['layer']}, head {top['head']}, "
            f"seed {top['seed']})"
        )
    return f"The largest ratio of all heads: {joined(said)}."


def _beyond(table: pd.DataFrame) -> str:
    said = []
    for words, own in table.groupby("words", sort=False):
        own = own.sort_values("position")
        inside, outside = own[own["position"] < TRAINED], own[own["position"] >= TRAINED]
        if inside.empty:
            continue
        text = f"{words} {_at(inside.iloc[-1])}"
        said.append(text + (f" to {_at(outside.iloc[-1])}" if len(outside) else " (ends there)"))
    n = int(table["n"].min())
    return f"Nats a token, last stretch within the trained length to last beyond: {'; '.join(said)}; n ≥ {n} texts."


def _at(row: pd.Series) -> str:
    """A row's value with its position: `2.41 (at 192)`."""
    return f"{fixed(row['nll'], 2)} (at {int(row['position'])})"


_SPACE = "lastindexof(datum.label, ' ')"
_TWO_LINES = f"[slice(datum.label, 0, {_SPACE}), 'seed ' + slice(datum.label, {_SPACE} + 1)]"
PARTS: tuple[Plot | Listing, ...] = (
    Plot(
        "rope-claims",
        "Every claim on every control",
        "One column a model, one row a claim; ✓ holds, ◐ partly, ✗ fails, ○ not tested. Hover for value, interval, n "
        "and reason. A row that holds with RoPE and fails without speaks for RoPE as the cause.",
        ("control_claims",),
        claims,
    ),
    Plot(
        "rope-shares",
        "Massive heads at the end of training",
        "Left: share of heads with at least one dim above λ = 5 times the mean of its head. Right: mean over heads of "
        "the largest ratio; dashed: λ. Vertical bars: 95 %, bootstrap of whole layers of whole models.",
        ("control_shares",),
        shares,
    ),
    Plot(
        "rope-heads",
        "Where the largest ratios sit",
        "One mark a head of a seed, on the study’s own texts; log scale. Dashed: λ = 5.",
        ("control_massive_heads",),
        heads,
    ),
    controls_tasks.DISRUPT,
    controls_tasks.DEPTH,
    Plot(
        "rope-length",
        "Past the trained length",
        "Mean negative log-likelihood of the tokens in each stretch of positions; dashed: the trained length. Band: "
        "95 % over texts of all seeds. A learned table ends there; a line that rises beyond it does not generalize.",
        ("control_length",),
        length,
    ),
)

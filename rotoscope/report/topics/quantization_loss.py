"""What bits cost: likelihood lost by each method, and by quantizing one layer alone."""

from __future__ import annotations

from dataclasses import replace

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.series import Measure, rule, symlog
from rotoscope.report.style import INK, WIDTH, layer_axis, tip
from rotoscope.report.text import fixed, joined
from rotoscope.report.topics.quantization_methods import (
    LOSS,
    caution,
    having,
    in_line,
    kinds,
    measured_methods,
    series,
    span,
)
from rotoscope.results import Result

_LINEAR = 0.01
_NEAR, _APART = 0.15, 0.12
_CACHE = "cache"
_PLACES = {False: "bits a weight", True: "bits a value in the KV cache"}


def by_bits(result: Result) -> Drawn | None:
    """ΔNLL against bits, weights and cache in a panel each."""
    more = ["dnll_low", "dnll_high", "kl", "share_changed", "n"]
    table = measured_methods(result, ["bits", "dnll"], more).drop_duplicates("method")
    if table.empty:
        return None
    table = table.rename(columns={"dnll_low": "low", "dnll_high": "high"})
    table = table.assign(span=_spans(table), cached=table["kind"] == _CACHE)
    looks = series(table, kinds(result))
    ends = pd.concat([table["dnll"], table["low"], table["high"], pd.Series([0.0, LOSS])])
    measure = symlog(ends, _LINEAR, "more NLL (nats a token, symlog)")
    untitled = replace(measure, title=None)
    count = table["cached"].nunique()
    panels: list[alt.LayerChart | alt.FacetChart] = []
    for cached, own in table.groupby("cached"):
        axis = untitled if panels else measure
        own = own.assign(at=_side_by_side(own["bits"]))
        scale = alt.Scale(domain=[own["at"].min() - 0.5, own["at"].max() + 0.5], nice=False)
        whole = list(range(int(own["bits"].min()), int(own["bits"].max()) + 1))
        x = alt.X("at:Q", title=_PLACES[bool(cached)], scale=scale, axis=alt.Axis(values=whole, format="d"))
        base = alt.Chart(own).encode(x=x, color=looks.colour())
        spans = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_rule(
            strokeWidth=2, tooltip=None
        )
        dots = base.mark_point(filled=True, size=75, opacity=1).encode(
            y=axis.y("dnll"),
            shape=looks.shape(),
            tooltip=[
                tip("words", "method"),
                tip("bits", "bits, scales included", ".3f"),
                tip("dnll", "ΔNLL (nats a token)", "+.4f"),
                tip("span", "95 %"),
                tip("n", "texts"),
            ],
        )
        limit = rule(own, y=alt.datum(LOSS))
        name = limit.mark_text(text=f"{LOSS:g} nats", align="right", dx=-4, dy=-6, color=INK, tooltip=None).encode(
            x=alt.value("width")
        )
        marks = [limit, name, spans.encode(y=axis.y("low"), y2="high:Q"), dots]
        panels.append(alt.layer(*marks).properties(width=400 if count > 1 else 700, height=300))
    return Drawn(_lossless(table) + caution(result), alt.hconcat(*panels, spacing=30))


def by_layer(result: Result) -> Drawn | None:
    """ΔNLL with one layer quantized, a panel a method, each on its own scale."""
    table = having(result, "quantization_layers", ["layer", "method", "dnll"], ["low", "high", "n"])
    if table.empty:
        return None
    of = kinds(result)
    table = in_line(table, of)
    table = table.assign(span=_spans(table)).sort_values(["rank", "layer"])
    looks = series(table, of)
    names = list(dict.fromkeys(table["words"]))
    tooltip = [
        tip("words", "method"),
        tip("layer", "the one layer quantized"),
        tip("dnll", "ΔNLL (nats a token)", "+.5f"),
        tip("span", "95 %"),
        tip("n", "texts"),
    ]
    panels = []
    for name in names:
        own = table[table["words"] == name]
        x = layer_axis(result, WIDTH - 70, "the one layer quantized" if name == names[-1] else None)
        base = alt.Chart(own).encode(x=x, color=alt.value(looks.looks[name].colour))
        measure = Measure(["more NLL", "(nats a token)"], alt.Scale(zero=True), alt.Axis(tickCount=4, format="~g"))
        spans = base.transform_filter("isValid(datum.low) && isValid(datum.high)").mark_rule(
            strokeWidth=1.6, opacity=0.5, tooltip=None
        )
        dots = base.mark_point(filled=True, size=45, opacity=1, shape=looks.looks[name].shape)
        marks = [
            rule(own, y=alt.datum(0)),
            spans.encode(y=measure.y("low"), y2="high:Q"),
            base.mark_line(strokeWidth=1.2, opacity=0.7).encode(y=measure.y("dnll")),
            dots.encode(y=measure.y("dnll"), tooltip=tooltip),
        ]
        panels.append(alt.layer(*marks).properties(width=WIDTH - 70, height=115, title=name))
    return Drawn(_sensitive(table, names), alt.vconcat(*panels, spacing=16))


def _side_by_side(bits: pd.Series) -> pd.Series:
    """Where to draw points: those of nearly equal bits beside each other, around their mean."""
    ordered = bits.sort_values(kind="stable")
    groups = (ordered.diff() > _NEAR).cumsum()
    place = groups.groupby(groups).cumcount()
    middle = (groups.groupby(groups).transform("size") - 1) / 2
    return (ordered.groupby(groups).transform("mean") + _APART * (place - middle)).reindex(bits.index)


def _spans(table: pd.DataFrame) -> list[str]:
    return [span(low, high, "+.4f") for low, high in zip(table["low"], table["high"], strict=True)]


def _lossless(table: pd.DataFrame) -> str:
    said = []
    for cached, own in table.groupby("cached"):
        sure = own[own["high"].fillna(own["dnll"]) <= LOSS]
        what = "the cache" if cached else "weights"
        if sure.empty:
            said.append(f"no method of {what} is sure to lose at most {LOSS:g} nats a token")
            continue
        row = sure.loc[sure["bits"].idxmin()]
        said.append(
            f"the fewest bits of {what} that lose at most {LOSS:g} nats a token are {fixed(row['bits'], 2)} "
            f"({row['words']}, {fixed(row['dnll'], 4)}, 95 % {row['span']})"
        )
    sentence = joined(said)
    return f"{sentence[0].upper()}{sentence[1:]}{_texts(table)}."


def _sensitive(table: pd.DataFrame, names: list[str]) -> str:
    said = []
    for name in names:
        own = table[table["words"] == name]
        row = own.loc[own["dnll"].idxmax()]
        share = f", the median layer {fixed(own['dnll'].median(), 4)}"
        said.append(
            f"{name} costs most in layer {row['layer']:.0f} ({fixed(row['dnll'], 4)}, 95 % {row['span']}{share})"
        )
    return f"Nats a token with a single layer quantized: {'; '.join(said)}{_texts(table)}."


def _texts(table: pd.DataFrame) -> str:
    return "" if table["n"].isna().all() else f" (n = {table['n'].min():.0f} texts)"


BITS = Plot(
    "quantization-bits",
    "What do bits cost?",
    "More negative log-likelihood than the model as it is, against what is stored for a weight or for a cached value, "
    f"scales and zero points included; methods of equal bits are drawn side by side. Dashed: {LOSS:g} nats, "
    "what claim P5 calls minor. Weights: all tokens of a text. Cache: the second half of a text, behind a quantized "
    "first half. Bars: 95 % over texts (t).",
    ("quantization",),
    by_bits,
)
LAYERS = Plot(
    "quantization-layers",
    "Which layers bear quantization?",
    "One layer is quantized and all others stay as they are. A high point is a layer to keep in higher precision. Each "
    "panel has its own scale. Bars: 95 % over texts (t).",
    ("quantization_layers",),
    by_layer,
)

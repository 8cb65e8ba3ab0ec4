"""What quantization does inside: errors of logits by channel, and massive values and additivity measured again."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.labels import EFFECTS, worded
from rotoscope.report.series import Look, Measure, Series
from rotoscope.report.style import INK, WIDTH, choice, layer_axis, tip
from rotoscope.report.text import fixed, joined, percent
from rotoscope.report.topics.quantization_methods import REFERENCE, having, in_line, kinds, series
from rotoscope.results import Result

_PARTS = {"massive": "massive channels", "other": "all other channels", "total": "all together"}
_LOOKS = {
    "massive channels": Look("#d55e00", "square"),
    "all other channels": Look("#0072b2", "circle"),
    "all together": Look("#1c2430", "diamond", 1.4, (5, 3)),
}
_SHARES = 3


def logits(result: Result) -> Drawn | None:
    """The error of logits over their size: by method over all layers, and layer by layer for one method."""
    table = having(result, "quantization_logits", ["method", "layer", "signal", *_PARTS])
    table = table[table["signal"] > 0]
    if table.empty:
        return None
    table = in_line(table, kinds(result))
    whole = _over_layers(table)
    if (whole["error"] <= 0).all():
        return None
    drawn = whole[whole["error"] > 0]
    names = list(dict.fromkeys(table["words"]))
    looks = Series(_LOOKS, "error of logits made by", "part")
    measure = Measure(
        "error / logits (root mean squares, log)", alt.Scale(type="log", nice=True), alt.Axis(format="~%", tickCount=5)
    )
    y = alt.Y("words:N", title=None, scale=alt.Scale(domain=names), axis=alt.Axis(labelLimit=220, labelOverlap=False))
    tips = [tip("part", "error made by"), tip("error", "error / logits", ".3~%")]
    dots = (
        alt.Chart(drawn)
        .mark_point(filled=True, size=75, opacity=0.9)
        .encode(
            x=measure.x("error"),
            y=y,
            color=looks.colour(),
            shape=looks.shape(),
            tooltip=[tip("words", "method"), *tips],
        )
        .properties(width=640, height=24 * len(names), title="over all layers")
    )
    chosen = choice("method", "layer by layer", {str(name): str(name) for name in names})
    lines = looks.lines(
        layer_axis(result, WIDTH - 70),
        "error",
        Measure(["error / logits"], alt.Scale(zero=True), alt.Axis(format="~%", tickCount=5)),
        [tip("layer", "layer"), *tips],
    )
    below = (
        alt.layer(*lines, data=_by_layer(table))
        .transform_filter("datum.words == method")
        .properties(width=WIDTH - 70, height=170)
    )
    return Drawn(_split(whole, names), alt.vconcat(dots, below, spacing=30).add_params(chosen))


def effects(result: Result) -> Drawn | None:
    """What is measured again, a panel a quantity and a row a method; the clean value as a line."""
    table = having(result, "quantization_effects", ["method", "measure", "value", "clean"])
    table = table[table["method"] != REFERENCE]
    if table.empty:
        return None
    of = kinds(result)
    table = in_line(table, of)
    looks = series(table, of)
    y = alt.Y(
        "words:N",
        title=None,
        scale=alt.Scale(domain=list(looks.looks)),
        axis=alt.Axis(labelLimit=220, labelOverlap=False),
    )
    panels: list[alt.LayerChart | alt.FacetChart] = []
    quantities = worded(table.drop(columns=["words", "rank"]), "measure", EFFECTS)
    for i, (_, some) in enumerate(quantities.groupby("rank")):
        own = table.loc[some.index]
        shares = str(own["measure"].iloc[0]).startswith("massive")
        form = ".1%" if shares else ".4f"
        measure = Measure(
            None,
            alt.Scale(domain=[0, 1]) if shares else alt.Scale(zero=False, padding=12),
            alt.Axis(format="%" if shares else ".3~f", tickCount=3),
        )
        base = alt.Chart(own).encode(y=y if i == 0 else y.axis(None), color=looks.colour().legend(None))
        ways = base.mark_rule(strokeWidth=2, tooltip=None).encode(x=measure.x("clean"), x2="value:Q")
        dots = base.mark_point(filled=True, size=60, opacity=1).encode(
            x=measure.x("value"),
            shape=looks.shape().legend(None),
            tooltip=[
                tip("words", "method"),
                tip("value", "under this method", form),
                tip("clean", "the model as it is", form),
            ],
        )
        clean = base.mark_tick(color=INK, thickness=1.5, size=15, tooltip=None).encode(
            x=measure.x("clean"), color=alt.value(INK)
        )
        title = str(some["words"].iloc[0])
        panels.append(alt.layer(ways, clean, dots).properties(width=165, height=21 * len(looks.looks), title=title))
    return Drawn(_moved(table, quantities), alt.hconcat(*panels, spacing=18))


def _over_layers(table: pd.DataFrame) -> pd.DataFrame:
    """Method × part: root of the mean square error over layers, over that of the logits."""
    squares = table.assign(**{name: table[name] ** 2 for name in (*_PARTS, "signal")})
    mean = squares.groupby(["words", "rank"])[[*_PARTS, "signal"]].mean().reset_index().sort_values("rank")
    return _long(mean.assign(**{name: np.sqrt(mean[name]) for name in (*_PARTS, "signal")}), ["words", "rank"])


def _by_layer(table: pd.DataFrame) -> pd.DataFrame:
    return _long(table, ["words", "layer"]).sort_values(["words", "layer"], kind="stable")


def _long(table: pd.DataFrame, by: list[str]) -> pd.DataFrame:
    long = table.melt([*by, "signal"], list(_PARTS), "name", "size")
    return long.assign(error=long["size"] / long["signal"], part=long["name"].map(_PARTS))[[*by, "part", "error"]]


def _split(whole: pd.DataFrame, names: list[str]) -> str:
    share = whole.pivot_table(index="words", columns="part", values="error", aggfunc="first").reindex(names)
    massive, other, total = (share[words] for words in _PARTS.values())
    worst = str(total.idxmax())
    return (
        f"Massive channels make more of the error than all others under {(massive > other).sum()} of {len(names)} "
        f"methods. The largest error is that of {worst}: {percent(total[worst])} of the size of the logits over all "
        f"layers, {percent(massive[worst])} made by massive channels and {percent(other[worst])} by the others."
    )


def _moved(table: pd.DataFrame, quantities: pd.DataFrame) -> str:
    said = []
    for _, some in quantities.groupby("rank"):
        own = table.loc[some.index]
        far = own.loc[(own["value"] - own["clean"]).abs().idxmax()]
        if far["value"] == far["clean"]:
            continue
        form = percent if str(far["measure"]).startswith("massive") else fixed
        said.append(f"{some['words'].iloc[0]} under {far['words']} ({form(far['clean'])} → {form(far['value'])})")
    return f"Moved furthest: {joined(said)}." if said else f"Nothing moved, in {len(table)} values."


LOGITS = Plot(
    "quantization-logits",
    "Where do errors of logits come from?",
    "Root mean square change of the products of queries and keys over causal pairs, as a share of the products’ own: "
    "what massive channels add to them, what all other channels add, and all together. The two parts need not add up, "
    "as they may go along with each other or against. Below: layer by layer, for the method chosen.",
    ("quantization_logits",),
    logits,
)
EFFECTS_AGAIN = Plot(
    "quantization-effects",
    "Are massive values and additivity still there?",
    "Measured again under each method. Black tick: the model as it is, on the same tokens; the bar is the way from "
    "there. A cache changes only the keys that are read from it, so that nothing else is measured of it.",
    ("quantization_effects",),
    effects,
)

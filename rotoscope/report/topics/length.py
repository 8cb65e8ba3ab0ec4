"""Past the trained length: NLL and attention by position, for each way to extend a model."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.labels import EXTENSIONS, worded
from rotoscope.report.series import Look, Measure, Series, trained
from rotoscope.report.style import WIDTH, choice, tip
from rotoscope.report.text import fixed, joined
from rotoscope.results import Result

_LOOKS = {
    "plain": Look("#1c2430", "circle", 2.0),
    "lambda": Look("#0072b2", "square", 1.6, (5, 3)),
    "cap": Look("#56b4e9", "triangle-up", 1.6, (5, 3)),
    "lambda+cap": Look("#d55e00", "diamond", 2.8),
    "dynamic-ntk": Look("#009e73", "triangle-down", 1.6),
    "yarn": Look("#cc79a7", "cross", 1.6),
    "reference": Look("#5b6675", "circle", 1.4, (2, 3)),
}
_ATTENTION = {
    "entropy": ("attention entropy (nats)", ".3f"),
    "sink_mass": ("attention to position 0", ".3f"),
    "largest_logit": ("largest logit", ".2f"),
}
_SAID = ("plain", "lambda+cap")
"""What the claim compares."""

_MEAN = -1
"""Stands for the mean over layers where a layer is chosen."""


def nll(result: Result) -> Drawn | None:
    """Negative log-likelihood by position, one line a variant."""
    table = worded(result.tables["length"].dropna(subset=["nll"]), "variant", EXTENSIONS)
    if table.empty:
        return None
    tooltip = [
        tip("words", "variant"),
        tip("position", "position, from", ",d"),
        tip("nll", "nats a token", ".4f"),
        tip("low", "95 % low", ".4f"),
        tip("high", "95 % high", ".4f"),
        tip("n", "texts"),
    ]
    # Plain RoPE leaves the others so far below that only a log scale shows how they differ.
    ends = table[["nll", "low", "high"]].clip(lower=0.01)
    scale = alt.Scale(type="log", domain=[float(ends.min().min()), float(ends.max().max())], nice=False, clamp=True)
    axis = Measure("nats a token (log)", scale, alt.Axis(format="~r", tickCount=6))
    marks = Series.of(table, _looks()).lines(_positions(table), "nll", axis, tooltip, ("low", "high"))
    lines = alt.layer(*marks, data=table)
    chart = alt.layer(*_trained(result, table), lines).properties(width=WIDTH - 90, height=290)
    return Drawn(_beyond(result, table), chart)


def attention(result: Result) -> Drawn | None:
    """Entropy, sink mass and largest logit by position, mean over layers or of one."""
    table = result.tables["length_attention"]
    measures = {name: told for name, told in _ATTENTION.items() if name in table and table[name].notna().any()}
    if not measures:
        return None
    table = table.dropna(subset=list(measures), how="all")
    means = table.groupby(["variant", "position"], as_index=False, sort=False)[list(measures)].mean()
    every = worded(pd.concat([means.assign(layer=_MEAN), table]), "variant", EXTENSIONS)
    layers = {str(_MEAN): "mean over layers"} | {str(layer): str(layer) for layer in sorted(set(table["layer"]))}
    layer = choice("of_layer", "layer", layers)
    series = Series.of(every, _looks())
    tooltip = [
        tip("words", "variant"),
        tip("layer", f"layer ({_MEAN}: mean)"),
        tip("position", "position, from", ",d"),
        *(tip(name, title, form) for name, (title, form) in measures.items()),
    ]
    panels = []
    for name, (title, _) in measures.items():
        axis = Measure(None, alt.Scale(zero=name == "sink_mass"), alt.Axis(tickCount=5))
        x = _positions(every) if name == list(measures)[-1] else _positions(every).title(None)
        marks = [
            mark.transform_filter("toString(datum.layer) == of_layer") for mark in series.lines(x, name, axis, tooltip)
        ]
        # Data of their own for each panel would be the same three times over; they share one entry of the page.
        panels.append(
            alt.layer(*_trained(result, every), alt.layer(*marks, data=every)).properties(
                width=WIDTH - 90, height=130, title=title
            )
        )
    return Drawn(_attending(result, means, measures), alt.vconcat(*panels, spacing=14).add_params(layer))


def _looks() -> dict[str, Look]:
    return {EXTENSIONS[name]: look for name, look in _LOOKS.items()}


def _positions(table: pd.DataFrame) -> alt.X:
    scale = alt.Scale(domain=[0, int(table["position"].max())], nice=False)
    axis = alt.Axis(format=",d", tickCount=10)
    return alt.X("position:Q", title="position (start of each stretch)", scale=scale, axis=axis)


def _length(result: Result) -> int | None:
    """The trained length, where the run knows it."""
    found = result.provenance.get("trained_length")
    return int(found) if found else None


def _trained(result: Result, table: pd.DataFrame) -> list[alt.Chart]:
    """The trained length as a line, where the positions reach it."""
    length = _length(result)
    return [] if length is None or length > table["position"].max() else trained(table, length)


def _sides(result: Result, table: pd.DataFrame) -> list[tuple[str, pd.DataFrame]]:
    """What lies within the trained length and what beyond, as far as there is either."""
    length = _length(result)
    if length is None:
        return [("over all positions", table)]
    within, beyond = table[table["position"] < length], table[table["position"] >= length]
    sides = [(f"up to {length:,} tokens", within), (f"beyond {length:,} tokens", beyond)]
    return [(words, own) for words, own in sides if not own.empty]


def _beyond(result: Result, table: pd.DataFrame) -> str:
    said = []
    for words, own in _sides(result, table):
        means = own.groupby("words", sort=False)["nll"].mean()
        said.append(f"{words}: {joined([f'{name} {fixed(value, 2)}' for name, value in means.items()])}")
    return f"Mean nats a token, {'; '.join(said)} (n = {int(table['n'].min())} texts)."


def _attending(result: Result, means: pd.DataFrame, measures: dict[str, tuple[str, str]]) -> str:
    table = worded(means, "variant", EXTENSIONS)
    said = []
    for name, (title, _) in measures.items():
        sides = [own.groupby("words", sort=False)[name].mean() for _, own in _sides(result, table)]
        each = [
            f"{words} {' → '.join(fixed(side[words], 2) for side in sides if words in side)}"
            for words in (EXTENSIONS[name] for name in _SAID)
            if any(words in side for side in sides)
        ]
        if each:
            said.append(f"{title}: {joined(each)}")
    where = " → ".join(words for words, _ in _sides(result, table))
    if not said:
        return f"{table['words'].nunique()} variants at {table['position'].nunique()} positions."
    return f"Means over layers, {where}: {'; '.join(said)}."


NLL = Plot(
    "generalization-length",
    "Does clamping distances carry the model past its trained length?",
    "Mean negative log-likelihood of the tokens in each stretch of positions; lower is better. Λ-mask: only the first "
    "tokens and the nearest are attended to. Distance cap: pairs further apart count as that far apart. Both together "
    "are LM-Infinite. Dynamic NTK and YaRN rescale the rotation. Reference: the same targets given only as many of the "
    "tokens before them as the model was trained on. Dashed vertical: the trained length. Band: 95 % over texts. A "
    "line that stays level beyond the dashed one generalizes.",
    ("length",),
    nll,
)
ATTENTION = Plot(
    "generalization-length-attention",
    "What attention does there",
    "Means over queries of a stretch and over heads. Where plain RoPE breaks, look for entropy that rises (attention "
    "spreads out), weight on position 0 that vanishes, or logits larger than any within the trained length.",
    ("length_attention",),
    attention,
)

"""How additive the logits are: r by layer and head, and how far the moments predict it."""

from __future__ import annotations

import math

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot, Topic
from rotoscope.report.style import MISSING, MUTED, SAMPLE, WIDTH, choice, layer_axis, layer_count, ramp, sampled, tip
from rotoscope.report.text import ARMS, KINDS, fixed, joined, layers, number, sample
from rotoscope.report.topics import explanation, pairs
from rotoscope.results import Result


def heat_map(result: Result) -> Drawn | None:
    """Draw r of every head, for each kind of r and each arm of the explanation table."""
    heads = result.tables["heads"].rename(columns=lambda name: name.replace("__random_causal", "__random"))
    kinds = {kind: words for kind, words in KINDS.items() if kind in heads and heads[kind].notna().any()}
    if not kinds:
        return None
    arms = {arm: words for arm, words in ARMS.items() if arm == "as_it_is" or f"form1__{arm}" in heads}
    values = [c for c in heads if c in kinds or any(c == f"{kind}__{arm}" for kind in kinds for arm in arms)]
    first = "form1_within" if "form1_within" in kinds else next(iter(kinds))
    kind = choice("kind", "r of", kinds, first)
    arm = choice("arm", "arm", arms)
    chart = (
        sampled(alt.Chart(heads[["layer", "head", "kv_head", "position", *values]]), result)
        .transform_calculate(r="datum[arm == 'as_it_is' ? kind : kind + '__' + arm]")
        .transform_filter("isValid(datum.r)")
        .mark_rect()
        .encode(
            x=layer_axis(result),
            y=alt.Y("head:O", title="query head", scale=alt.Scale(domain=_range(heads["head"]))),
            color=alt.Color("r:Q", title="r", scale=alt.Scale(scheme="viridis", zero=False), legend=ramp(".4~f")),
            tooltip=[
                tip("layer", "layer"),
                tip("head", "head"),
                tip("kv_head", "kv head"),
                tip("position", "position encoding"),
                tip("r", "r", ".4f"),
                *[tip(name, f"{words}, as it is", ".4f") for name, words in kinds.items()],
                SAMPLE,
            ],
        )
        .add_params(kind, arm)
        .properties(width=WIDTH, height=_height(heads), view=alt.ViewBackground(fill=MISSING))
    )
    return Drawn(_extremes(result, heads, first), chart)


def predicted(result: Result) -> Drawn | None:
    """Measured r against what per-pair concentration and rotation alone predict."""
    columns = ["layer", "head", "predicted", "form1_within", "slow_query_share", "phase_resultant"]
    # Columns that no head has belong to a model without rotary pairs.
    heads = result.tables["heads"].reindex(columns=columns).dropna(subset=["predicted", "form1_within"])
    if heads.empty:
        return None
    low = math.floor(50 * float(heads[["predicted", "form1_within"]].min().min())) / 50
    ends = pd.DataFrame({"predicted": [low, 1.0], "form1_within": [low, 1.0]})
    measured = alt.Y("form1_within:Q", title="measured r (form 1, within query)", scale=alt.Scale(domain=[low, 1]))
    layer = alt.Color(
        "layer:Q", title="layer", scale=alt.Scale(scheme="viridis"), legend=alt.Legend(format="d", tickMinStep=1)
    )
    points = (
        sampled(alt.Chart(heads, width=400, height=340), result)
        .mark_circle(size=45, opacity=0.75)
        .encode(
            y=measured,
            color=layer,
            tooltip=[
                tip("layer", "layer"),
                tip("head", "head"),
                tip("form1_within", "measured r", ".4f"),
                tip("predicted", "predicted r", ".4f"),
                tip("slow_query_share", "query energy in slow pairs", ".3f"),
                tip("phase_resultant", "resultant length of key phases", ".3f"),
                SAMPLE,
            ],
        )
    )
    identity = alt.Chart(ends).mark_line(color=MUTED, strokeDash=[5, 4]).encode(x="predicted:Q", y=measured)
    left = alt.layer(
        identity,
        points.encode(
            x=alt.X("predicted:Q", title="predicted r", scale=alt.Scale(domain=[low, 1]), axis=alt.Axis(tickCount=6))
        ),
    ).properties(title="prediction from concentration and rotation")
    right = points.encode(
        x=alt.X(
            "slow_query_share:Q",
            title="share of query energy in slow pairs",
            scale=alt.Scale(zero=False),
            axis=alt.Axis(tickCount=6),
        )
    ).properties(title="for comparison: slow pairs alone")
    return Drawn(_prediction(heads), alt.hconcat(left, right, spacing=40))


def _extremes(result: Result, heads: pd.DataFrame, kind: str) -> str:
    by_layer = heads.groupby("layer")[kind].mean().dropna()
    # A run of neighbours says more about a model than its single best layer.
    width = max(1, round(layer_count(result) / 6))
    runs = by_layer.rolling(width).mean().dropna()
    last = int(runs.idxmax())
    positions = list(by_layer.index)
    first = int(positions[positions.index(last) - width + 1])
    lowest = heads.loc[heads[kind].idxmin()]
    return (
        f"r of {KINDS[kind]}: highest in {layers(first, last)} (mean r = {fixed(runs.max())}), "
        f"lowest in layer {int(lowest['layer'])}, head {int(lowest['head'])} (r = {fixed(lowest[kind])}); "
        f"mean over {len(heads)} heads {fixed(heads[kind].mean())} ({sample(result.tables.get('texts'))})."
    )


def _prediction(heads: pd.DataFrame) -> str:
    error = (heads["predicted"] - heads["form1_within"]).abs().mean()
    said = [f"the prediction misses by {number(error)} on average over {len(heads)} heads"]
    for column, words in (("predicted", "ranks them with Spearman ρ"), ("slow_query_share", "slow pairs alone with ρ")):
        rank = heads[column].corr(heads["form1_within"], method="spearman")
        if pd.notna(rank):
            said.append(f"{words} = {fixed(rank, 2)}")
    sentence = joined(said)
    return sentence[0].upper() + sentence[1:] + "."


def _range(heads: pd.Series) -> list[int]:
    return list(range(int(heads.max()) + 1))


def _height(heads: pd.DataFrame) -> int:
    count = int(heads["head"].max()) + 1
    return max(60, count * (20 if count <= 16 else 10))


TOPIC = Topic(
    "position",
    "Position: logits as position + semantics",
    "How far each head's attention logits are the sum of a term for distance and a term for content. "
    "Every value is a correlation r between the logits and their least-squares fit, position 0 left out.",
    (
        Plot(
            "position-heads",
            "r by layer and head",
            "Bright: logits are nearly additive. The arm takes something away from queries and keys, or replaces the "
            "weights by random ones, and shows what is left of r. Grey: no value (no attention there, or the arm is "
            "not computed for this kind of r). The colour scale follows the choice.",
            ("heads",),
            heat_map,
        ),
        explanation.CHART,
        explanation.TABLE,
        Plot(
            "position-predicted",
            "Predicted against measured r",
            "One dot a head. Dashed: prediction and measurement agree. The prediction sees only, per rotary pair, how "
            "concentrated the keys are, how far the pair turns and how much query energy it carries.",
            ("heads",),
            predicted,
        ),
        pairs.PLOT,
    ),
)

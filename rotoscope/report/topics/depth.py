"""Depth: up to which layer the states of earlier tokens matter."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from rotoscope.report.figure import Cell, Drawn, Grid, Listing, Plot, Topic, present
from rotoscope.report.labels import MANIPULATIONS, named, sizes
from rotoscope.report.style import INK, MUTED, SERIES, choice, tip
from rotoscope.report.text import fixed, joined, percent
from rotoscope.report.topics import depth_cost, depth_swap
from rotoscope.report.topics.disrupt_curves import measured
from rotoscope.results import Result

EPSILON = 0.05
_WIDTH, _HEIGHT = 190, 130
_TWO_LINES = "split(datum.value, ', ')"
_KEYS = ["task", "variant", "manipulation"]


def curves(result: Result) -> Drawn | None:
    """Accuracy, or log-likelihood, against k: one row a task, one column a manipulation."""
    table = _prepared(result)
    if table.empty:
        return None
    last = int(table["k"].max())
    measure = choice("measure", "measure", {"accuracy": "accuracy", "likelihood": "log-likelihood of the gold answer"})
    values = alt.Chart().transform_calculate(
        value="measure == 'accuracy' ? datum.accuracy : datum.dlogprob",
        bottom="measure == 'accuracy' ? datum.low : datum.dlogprob_low",
        top="measure == 'accuracy' ? datum.high : datum.dlogprob_high",
        reference="measure == 'accuracy' ? datum.clean : 0",
        within="measure == 'accuracy' ? datum.clean - datum.epsilon : 0",
        guess="measure == 'accuracy' ? datum.chance : 0",
    )
    base = values.encode(
        x=alt.X(
            "k:Q",
            title="k: first layer disturbed",
            scale=alt.Scale(domain=[0, last], nice=False),
            axis=alt.Axis(tickCount=6, format="d"),
        )
    )
    y = alt.Y("value:Q", title=None, axis=alt.Axis(tickCount=4))
    once = values.transform_filter("datum.once")
    # The band in which a loss counts as none.
    margin = once.mark_rect(color="#009e73", opacity=0.18).encode(
        x=alt.X(datum=0), x2=alt.datum(last), y=alt.Y("within:Q"), y2="reference:Q"
    )
    band = base.mark_area(color=SERIES[0], opacity=0.18, tooltip=None).encode(y=alt.Y("bottom:Q"), y2="top:Q")
    line = base.mark_line(color=SERIES[0], strokeWidth=1.8).encode(y=y)
    clean = once.mark_rule(color=INK, strokeDash=[6, 3]).encode(y=alt.Y("reference:Q"))
    guess = once.mark_rule(color=MUTED, strokeDash=[1, 3], strokeWidth=1.5).encode(y=alt.Y("guess:Q"))
    safe = (
        once.transform_filter(f"isValid(datum.safe) && datum.safe < {last}")
        .mark_rule(color=SERIES[1], strokeWidth=1.8)
        .encode(x=alt.X("safe:Q"))
    )
    dots = base.mark_point(filled=True, size=22, color=SERIES[0], opacity=1).encode(
        y=y,
        tooltip=[
            tip("label", "task"),
            tip("words", "manipulation"),
            tip("k", "k"),
            tip("share", "k as a share of the layers", ".0%"),
            *measured(),
            tip("clean", "clean accuracy", ".3f"),
            tip("loss", "loss (clean − changed)", "+.3f"),
            tip("loss_low", "95 % low", "+.3f"),
            tip("loss_high", "95 % high", "+.3f"),
            tip("chance", "chance", ".2f"),
        ],
    )
    chart = (
        alt.layer(margin, band, clean, guess, safe, line, dots, data=_every_panel(table))
        .properties(width=_WIDTH, height=_HEIGHT)
        .facet(
            row=alt.Row(
                "label:N",
                title=None,
                sort=alt.EncodingSortField("place", op="min"),
                header=alt.Header(labelExpr=_TWO_LINES, labelLimit=_HEIGHT + 16, labelFontSize=11),
            ),
            column=alt.Column("words:N", title=None, sort=alt.EncodingSortField("column", op="min")),
            spacing={"row": 16, "column": 18},
        )
        .add_params(measure)
    )
    return Drawn(_reading(table), chart)


def safe_depths(result: Result) -> Grid | None:
    """The smallest k from which on nothing is lost, or why there is none."""
    table = named(result.tables["safe_depth"])
    order = {name: place for place, name in enumerate(MANIPULATIONS)}
    table = table.assign(column=table["manipulation"].map(lambda name: order.get(name, len(order))))
    rows = []
    for row in table.sort_values(["place", "column"]).itertuples():
        found = pd.notna(row.k)
        rows.append(
            [
                Cell(row.label, float(row.place)),
                Cell(MANIPULATIONS.get(row.manipulation, row.manipulation), float(row.column)),
                Cell(f"{row.k:.0f}" if found else "none", float(row.k) if found else None),
                Cell(percent(row.share), float(row.share)) if found else Cell(""),
                _points(row.loss),
                _points(row.loss_high),
                Cell("") if pd.isna(row.dlogprob) else Cell(fixed(row.dlogprob, 2), float(row.dlogprob)),
                Cell(f"{row.n:.0f}", float(row.n)),
                _points(row.epsilon),
                Cell(str(row.reason or "") if pd.notna(row.reason) else ""),
            ]
        )
    names = ["task", "manipulation", "safe k", "share of layers", "loss at k (points)", "its upper bound"]
    names += ["Δ log-likelihood (nats)", "n", "ε (points)", "reason"]
    return Grid(names, rows, [False, False, *[True] * 7, False]) if rows else None


def _prepared(result: Result) -> pd.DataFrame:
    table = result.tables["depth"].dropna(subset=["accuracy"])
    if table.empty:
        return table
    table = named(table).sort_values(["place", "manipulation", "k"])
    order = {name: place for place, name in enumerate(MANIPULATIONS)}
    table = table.assign(
        words=table["manipulation"].map(lambda name: MANIPULATIONS.get(name, name)),
        column=table["manipulation"].map(lambda name: order.get(name, len(order))),
        share=table["k"] / table["k"].max(),
        # Lines of a panel are drawn from one of its rows.
        once=~table.duplicated(_KEYS),
    )
    if not present(result, "safe_depth"):
        return table.assign(safe=np.nan, epsilon=EPSILON)
    safe = result.tables["safe_depth"].rename(columns={"k": "safe"})[[*_KEYS, "safe", "epsilon"]]
    safe = safe.assign(variant=safe["variant"].fillna("").astype(str))
    return table.merge(safe, on=_KEYS, how="left").fillna({"epsilon": EPSILON})


def _every_panel(table: pd.DataFrame) -> pd.DataFrame:
    """The table with an empty row for each task that a manipulation was not tried on: charts count panels by rows."""
    rows, columns = (table[list(pair)].drop_duplicates() for pair in (("label", "place"), ("words", "column")))
    there = set(zip(table["label"], table["words"], strict=True))
    every = rows.merge(columns, how="cross")
    missing = [pair not in there for pair in zip(every["label"], every["words"], strict=True)]
    return pd.concat([table, every[missing].assign(once=False)], ignore_index=True)


def _reading(table: pd.DataFrame) -> str:
    last = int(table["k"].max())
    said = []
    for words, own in table.sort_values("column").groupby("words", sort=False):
        panels = own[own["once"]]
        # At k = L nothing is disturbed, so being safe there says nothing.
        found = panels[panels["safe"] < last].sort_values("place")
        each = [f"{row.label} from k = {row.safe:.0f} ({percent(row.safe / last)})" for row in found.itertuples()]
        none = list(panels[~(panels["safe"] < last)].sort_values("place")["label"])
        if none:
            each.append(f"none below {last} for {joined(none)}")
        said.append(f"{words}: {', '.join(each)}")
    return f"Safe depth, of {last} layers ({sizes(table)}). {'; '.join(said)}."


def _points(share: float) -> Cell:
    """A share of items in percentage points; blank, which sorts last, where there is none."""
    return Cell("") if pd.isna(share) else Cell(fixed(100 * share, 1), float(share))


_WHAT = (
    "Noise: at the input of layer k the state of every previous token becomes a random vector of equal length. "
    "Shuffle: each state's own coordinates are permuted. Freeze: from layer k on previous tokens keep the state they "
    "had there. Skip: from layer k on no token attends at all. k = number of layers changes nothing."
)
_FEW = " (with fewer than 100 items, that of the log-likelihood lost below 0.1 nats besides)"
TOPIC = Topic(
    "depth",
    "Depth: up to which layer earlier tokens matter",
    "The states of all tokens but the last are disturbed at the input of layer k, or held or cut off from there on. "
    "Where an answer survives, it no longer needed them; where it survives freezing, prefill could have stopped there.",
    (
        Plot(
            "depth-curves",
            "What survives a disturbance at layer k",
            f"{_WHAT} Blue: the measure chosen, with its 95 % interval as a band (Wilson for accuracy; paired change "
            "against clean, in nats, for log-likelihood). Dashed: the clean model. Dotted: chance. Green: within ε of "
            "clean, a loss that counts as none. Orange line: safe depth, the smallest k from which on the upper bound "
            f"of the loss stays below ε{_FEW}; no line: none below the last layer. Hover for n.",
            ("depth",),
            curves,
        ),
        Listing(
            "depth-safe",
            "Safe depths",
            "Safe k: at it and at all deeper k tested, the upper 95 % bound (Agresti-Min) of the loss in accuracy "
            f"against clean, on the same items, is below ε{_FEW}. Share: k / number of layers. Δ log-likelihood: of "
            "the gold answer at that k. Where there is none, the reason. Click a column head to sort.",
            ("safe_depth",),
            safe_depths,
        ),
        depth_swap.PLOT,
        depth_cost.PLOT,
    ),
)

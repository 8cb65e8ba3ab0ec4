"""The explanation table: r after something is taken away, beside nulls and a check."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Cell, Drawn, Grid, Listing, Plot
from rotoscope.report.style import INK, tip
from rotoscope.report.text import ARMS, KINDS, ROLES, fixed, joined
from rotoscope.results import Result

_COLOURS = {"the model": INK, "arm": "#0072b2", "null": "#d55e00", "check": "#009e73"}
_TWO_LINES = "split(datum.value, ', ')"
_SHAPES = ["diamond", "circle", "square", "triangle-up"]


def chart(result: Result) -> Drawn | None:
    """One row an arm, one panel a kind of r: mean over heads with both intervals."""
    table = _named(result)
    if table.empty:
        return None
    arms, kinds = _order(table["arm"], ARMS), _order(table["kind"], KINDS)
    # The order as a domain, not as a sort: Vega-Lite would write sorted names into an expression.
    y = alt.Y("arm:N", title=None, scale=alt.Scale(domain=arms))
    base = alt.Chart().encode(y=y)
    role = alt.Color(
        "role:N",
        title=None,
        scale=alt.Scale(domain=list(_COLOURS), range=list(_COLOURS.values())),
        legend=alt.Legend(orient="bottom", columns=4, symbolSize=90),
    )
    shape = alt.Shape("role:N", title=None, scale=alt.Scale(domain=list(_COLOURS), range=_SHAPES))
    tooltip = [
        tip("arm", "arm"),
        tip("role", "role"),
        tip("kind", "kind"),
        tip("value", "mean r over heads", ".4f"),
        tip("low", "95 % over texts, low", ".4f"),
        tip("high", "95 % over texts, high", ".4f"),
        tip("low_heads", "95 % over layers, low", ".4f"),
        tip("high_heads", "95 % over layers, high", ".4f"),
        tip("n_heads", "heads"),
        tip("n_texts", "texts"),
    ]
    span = alt.Scale(domain=[min(0.0, float(table["value"].min())), 1.0])
    x = alt.X("value:Q", title="r", scale=span, axis=alt.Axis(values=[0, 0.5, 1], format=".1f"))
    heads = base.mark_rule(opacity=0.9).encode(x=alt.X("low_heads:Q", scale=span), x2="high_heads:Q", color=role)
    texts = base.mark_rule(strokeWidth=5, opacity=0.4).encode(x=alt.X("low:Q", scale=span), x2="high:Q", color=role)
    own = alt.Chart().transform_filter(alt.datum.role == ROLES["model"])
    own = own.mark_rule(color=INK, opacity=0.35, strokeDash=[3, 3]).encode(x=x)
    dots = base.mark_point(filled=True, size=55, opacity=1).encode(x=x, color=role, shape=shape, tooltip=tooltip)
    panels = (
        alt.layer(own, heads, texts, dots, data=table)
        .properties(width=126, height=21 * len(arms))
        .facet(column=alt.Column("kind:N", title=None, sort=kinds, header=alt.Header(labelExpr=_TWO_LINES)), spacing=14)
    )
    return Drawn(_reading(result.tables["explanation"]), panels)


def grid(result: Result) -> Grid | None:
    """All arms × all kinds with intervals, as numbers."""
    table = _named(result)
    if table.empty:
        return None
    kinds = _order(table["kind"], KINDS)
    rows = []
    for arm in _order(table["arm"], ARMS):
        own = table[table["arm"] == arm].drop_duplicates("kind").set_index("kind")
        cells = [Cell(arm), Cell(str(own["role"].iloc[0]))]
        cells += [_cell(own.loc[kind]) if kind in own.index else Cell("") for kind in kinds]
        rows.append(cells)
    return Grid(["arm", "role", *kinds], rows, [False, False, *[True] * len(kinds)])


def _cell(row: pd.Series) -> Cell:
    span = "" if pd.isna(row["low"]) else f"[{fixed(row['low'])}, {fixed(row['high'])}]"
    return Cell(fixed(row["value"]), float(row["value"]), span)


def _named(result: Result) -> pd.DataFrame:
    table = result.tables["explanation"].copy()
    # The causal fit of random weights is the same null as the full-grid one, so it shares its row.
    table["arm"] = table["arm"].replace("random_causal", "random").map(lambda arm: ARMS.get(arm, arm))
    table["kind"] = table["kind"].map(lambda kind: KINDS.get(kind, kind))
    table["role"] = table["role"].map(lambda role: ROLES.get(role, role))
    return table.dropna(subset=["value"])


def _order(values: pd.Series, names: dict[str, str]) -> list[str]:
    there = set(values)
    return [words for words in names.values() if words in there] + sorted(there - set(names.values()))


def _reading(table: pd.DataFrame) -> str:
    form1 = table[table["kind"] == "form1"].set_index("arm")["value"]
    words = {
        "as_it_is": "the model as it is",
        "both_means_removed": "with both means removed",
        "random": "random weights as they are",
        "random_both_means_removed": "random weights with means removed",
        "isotropic": "an isotropic Gaussian",
    }
    said = [f"{text} {fixed(form1[arm])}" for arm, text in words.items() if arm in form1]
    if not said:
        return f"{len(table)} values; form 1 was not computed."
    sentence = f"Form 1 r: {joined(said)}"
    if {"both_means_removed", "random_both_means_removed"} <= set(form1.index):
        gap = form1["both_means_removed"] - form1["random_both_means_removed"]
        sentence += f". With means removed, training adds {fixed(gap)} to random weights"
    return sentence + "."


_HOW = (
    "An arm takes something away from queries and keys before the fit; a null shows what a model without learned "
    "structure reaches; the matched Gaussian has the model's own first and second moments and must agree with it."
)
CHART = Plot(
    "position-explanation",
    "What explains r",
    f"{_HOW} Mark: mean over heads. Thick bar: 95 % interval over texts. Thin line: 95 % over layers. Dashed: the "
    "model as it is.",
    ("explanation",),
    chart,
)
TABLE = Listing(
    "position-explanation-table",
    "The explanation table in numbers",
    "Mean r over heads with its 95 % interval over texts (over seeds for random weights). Without query means form 2 "
    "keeps nothing but a constant per query, so its within-query r is 0 by construction; without both means it is 0 "
    "altogether.",
    ("explanation",),
    grid,
)

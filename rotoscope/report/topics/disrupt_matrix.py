"""Arms × tasks: how much of a task survives each disruption, as a map and as numbers."""

from __future__ import annotations

import altair as alt
import numpy as np
import pandas as pd

from rotoscope.report.figure import Cell, Drawn, Grid, Listing, Plot
from rotoscope.report.labels import CONTROL, KNOWLEDGE, SHOWN, arms, broken, main_arm, named, sizes, within
from rotoscope.report.style import INK, MISSING, MUTED, tip
from rotoscope.report.text import fixed, joined, percent
from rotoscope.results import Result

_STEP, _ROW = 58, 34
_ABSENT = "#ffffff"


def chart(result: Result) -> Drawn | None:
    """One row an arm, one column a task, grouped by where the task's answer is."""
    table = cells(result)
    if table.empty:
        return None
    order = list(dict.fromkeys(table.sort_values("rank")["words"]))
    kinds = [kind for kind in KNOWLEDGE if kind in set(table["knowledge"])]
    kinds += sorted(set(table["knowledge"]) - set(kinds))
    panels = [_panel(table[table["knowledge"] == kind], kind, order, first=kind == kinds[0]) for kind in kinds]
    return Drawn(_reading(result, table), alt.hconcat(*panels, spacing=14, bounds="flush"))


def grid(result: Result) -> Grid | None:
    """The same numbers as a table that sorts."""
    table = cells(result)
    if table.empty:
        return None
    rows = [
        [
            Cell(row.words, float(row.rank)),
            Cell(row.label, float(row.place)),
            Cell(str(row.knowledge)),
            Cell(f"{row.n:.0f}", float(row.n)),
            _measured(row.accuracy, row.low, row.high, 2),
            Cell(fixed(row.chance, 2), float(row.chance)),
            Cell("at chance") if row.floor else _measured(row.retention, row.retention_low, row.retention_high, 2),
            _measured(row.dlogprob, row.dlogprob_low, row.dlogprob_high, 2),
            _p(row.p),
            _p(row.p_holm),
            Cell(percent(row.change), float(row.change)) if pd.notna(row.change) else Cell(""),
        ]
        for row in table.sort_values(["place", "rank"]).itertuples()
    ]
    names = ["arm", "task", "answer is", "n", "accuracy", "chance", "retention", "Δ log-likelihood"]
    names += ["p", "p (Holm)", "change"]
    return Grid(names, rows, [False, False, False, *[True] * (len(names) - 3)])


def cells(result: Result) -> pd.DataFrame:
    """The matrix's cells: table `disrupt` without doses, with `words`, `label`, their order, and `floor`.

    `floor` marks tasks on which the untouched model is not above chance, so that nothing can be lost.
    """
    table = result.tables["disrupt"]
    table = table[(table["group"] != "dose") & table["accuracy"].notna()]
    if table.empty:
        return table
    words = arms(table)
    table = named(table)
    table = table.assign(words=table["arm"].map(words), rank=table["arm"].map(list(words).index))
    lossy = table[table["retention"].notna()]["place"]  # the clean model's own is 1, or none at chance
    floor = ~table["place"].isin(set(lossy))
    retention = table["retention"].where(table["arm"] != "clean", np.where(floor, np.nan, 1.0))
    ends = {end: table[end].where(table["arm"] != "clean") for end in ("retention_low", "retention_high")}
    return table.assign(floor=floor, retention=retention, **ends)


def _panel(table: pd.DataFrame, kind: str, order: list[str], *, first: bool) -> alt.LayerChart | alt.FacetChart:
    labels = list(dict.fromkeys(table.sort_values("place")["label"]))
    muted = {"test": f"substring(datum.label, 0, 1) == '{SHOWN}'", "value": MUTED}
    base = alt.Chart().encode(
        x=alt.X(
            "label:N",
            title=None,
            scale=alt.Scale(domain=labels),
            axis=alt.Axis(labelAngle=-40, labelLimit=190, labelOverlap=False),
        ),
        y=alt.Y(
            "words:N",
            title=None,
            scale=alt.Scale(domain=order),
            axis=alt.Axis(
                labelExpr=broken("datum.label"),
                labelLimit=260,
                labelColor={"condition": muted, "value": INK},
                labelOverlap=False,
            )
            if first
            else None,
        ),
    )
    cell = base.mark_rect(stroke="white", strokeWidth=1.5).encode(
        tooltip=[
            tip("words", "arm"),
            tip("label", "task"),
            tip("knowledge", "its answer is"),
            tip("n", "items"),
            tip("accuracy", "accuracy", ".3f"),
            tip("low", "95 % (Wilson), low", ".3f"),
            tip("high", "95 % (Wilson), high", ".3f"),
            tip("chance", "chance", ".2f"),
            tip("retention", "kept above chance", ".1%"),
            tip("retention_low", "95 %, low", ".1%"),
            tip("retention_high", "95 %, high", ".1%"),
            tip("dlogprob", "change of gold log-likelihood (nats)", "+.3f"),
            tip("dlogprob_low", "95 % low", "+.3f"),
            tip("dlogprob_high", "95 % high", "+.3f"),
            tip("p", "McNemar p against clean", ".2~g"),
            tip("p_holm", "p, Holm-corrected", ".2~g"),
            tip("change", "change (share of Q/K energy)", ".2~%"),
            tip("counts", "in the verdict"),
        ],
    )
    kept = cell.encode(
        color=alt.Color(
            "retention:Q",
            title="share of clean accuracy above chance that is kept",
            scale=alt.Scale(scheme="viridis", domain=[0, 1], clamp=True),
            legend=alt.Legend(format="%", tickCount=3, gradientLength=220, orient="bottom"),
        )
    )
    # Marks without a value on a colour scale are not drawn, so these have a layer of their own.
    floor = cell.transform_filter("datum.floor").encode(color=alt.value(MISSING))
    # Light cells need dark words.
    ink = alt.condition("datum.floor || datum.retention > 0.62", alt.value(INK), alt.value("white"))
    figures = base.mark_text(fontSize=12, dy=-6, fontWeight=600, tooltip=None).encode(text="shown:N", color=ink)
    spans = base.mark_text(fontSize=9, dy=8, tooltip=None).encode(text="span:N", color=ink)
    data = table.assign(
        shown=[_short(value) for value in table["accuracy"]],
        span=[
            "at chance" if floor else f"{_short(low)} – {_short(high)}"
            for floor, low, high in zip(table["floor"], table["low"], table["high"], strict=True)
        ],
        counts=np.where(table["judged"].astype(bool), "yes", "no: shown only"),
    )
    return alt.layer(kept, floor, figures, spans, data=data).properties(
        title=KNOWLEDGE.get(kind, kind),
        width=_STEP * len(labels),
        height=_ROW * len(order),
        view=alt.ViewBackground(fill=_ABSENT, stroke=None),
    )


def _reading(result: Result, table: pd.DataFrame) -> str:
    arm = main_arm(table)
    clean = table[table["arm"] == "clean"]
    floors = list(dict.fromkeys(clean[clean["floor"]].sort_values("place")["label"]))
    said = []
    own = table[(table["arm"] == arm) & ~table["floor"]].sort_values("place")
    if not own.empty:
        least, most = own.loc[own["retention"].idxmin()], own.loc[own["retention"].idxmax()]
        said.append(
            f"“{own['words'].iloc[0]}” keeps least on {least['label']} ({percent(least['retention'])} of what clean "
            f"has above chance, {within(least['retention_low'], least['retention_high'])}) and most on "
            f"{most['label']} ({percent(most['retention'])})"
        )
    tested = table[(table["arm"] != "clean") & ~table["floor"] & table["p_holm"].notna()]
    if not tested.empty:
        said.append(
            f"{(tested['p_holm'] < 0.05).sum()} of {len(tested)} arm × task cells differ from clean after Holm's "
            "correction"
        )
    if floors:
        said.append(f"at chance even when clean, so not judged: {joined(floors)}")
    return "; ".join([*said, sizes(table)]) + "."


def _measured(value: float, low: float, high: float, digits: int) -> Cell:
    # A blank sorts last.
    if pd.isna(value):
        return Cell("")
    span = "" if pd.isna(low) or pd.isna(high) else f"[{fixed(low, digits)}, {fixed(high, digits)}]"
    return Cell(fixed(value, digits), float(value), span)


def _p(value: float) -> Cell:
    if pd.isna(value):
        return Cell("")
    return Cell("< .001" if value < 0.001 else fixed(value), float(value))


def _short(value: float) -> str:
    """Two decimals without the leading zero, as cells are narrow."""
    return f"{value:.2f}".removeprefix("0") if value < 1 else "1"


_MARKS = (
    f"{CONTROL}: the control, random dims blended in until the values change by as much as in the main arm. {SHOWN}: "
    "shown, but in no verdict (dims of equal energy change far more; the smallest dims are harmless by construction)."
)
CHART = Plot(
    "disrupt-matrix",
    "What breaks under which disruption",
    "One row an arm: which tensors, which dims of each head, what they are replaced by, at which positions. Large "
    "number: accuracy; below it the 95 % Wilson interval. Colour: share of the clean model's accuracy above chance "
    "that is kept (dark: lost). Grey: the clean model itself is at chance, so there is nothing to lose. Columns: the "
    f"answer is in the weights (parametric), in the prompt (contextual), or to be worked out (reasoning). {_MARKS}",
    ("disrupt",),
    chart,
)
TABLE = Listing(
    "disrupt-table",
    "All arms and tasks in numbers",
    "Retention: (accuracy − chance) / (clean − chance), 95 % paired bootstrap. Δ log-likelihood: of the gold answer "
    "against clean on the same items, in nats. p: exact McNemar test against clean; Holm: corrected over arms. Change: "
    f"mean squared change as a share of the energy of the tensors changed. {_MARKS} Click a column head to sort.",
    ("disrupt",),
    grid,
)

"""Does it help to keep massive channels exact? Against as many random ones, at equal bits."""

from __future__ import annotations

import altair as alt
import pandas as pd

from rotoscope.report.figure import Drawn, Plot
from rotoscope.report.labels import PROTECTED, named, worded
from rotoscope.report.series import Look, Measure, Series, rule
from rotoscope.report.style import tip
from rotoscope.report.text import fixed
from rotoscope.report.topics.quantization_methods import having, in_line, kinds
from rotoscope.results import Result

_LOOKS = {
    "plain": Look("#5b6675", "circle"),
    "massive": Look("#d55e00", "square"),
    "random": Look("#0072b2", "diamond"),
    "layers": Look("#e69f00", "triangle-up"),
    "random-layers": Look("#56b4e9", "triangle-down"),
}
_MASSIVE, _RANDOM = "massive", "random"
_COLUMNS = 2


def chart(result: Result) -> Drawn | None:
    """A block a width, a panel a task, a row an arm; each seed of a random arm has a point of its own."""
    table = protected(result)
    if table.empty:
        return None
    looks = Series.of(table, {PROTECTED[arm]: look for arm, look in _LOOKS.items()})
    blocks = [_block(own, looks) for _, own in table.groupby("width_rank")]
    return Drawn(_said(table), alt.vconcat(*blocks, spacing=26))


def protected(result: Result) -> pd.DataFrame:
    """The table in words: `words` of arms, `width_words`, `label` of tasks, and where each stands in line."""
    more = ["seed", "bits", "variant", "nll", "n"]
    table = having(result, "protected", ["width", "arm", "knowledge", "task", "dnll"], more)
    if table.empty:
        return table
    widths = in_line(table.assign(method=table["width"]), kinds(result))
    table = named(widths.assign(width_words=widths["words"], width_rank=widths["rank"]))
    table = worded(table, "arm", PROTECTED)
    seeded = table["arm"].astype(str).str.startswith(_RANDOM) & table["seed"].notna()
    return table.assign(draw=[f"{seed:.0f}" if some else "–" for seed, some in zip(table["seed"], seeded, strict=True)])


def _block(table: pd.DataFrame, looks: Series) -> alt.ConcatChart:
    """One width."""
    bits = table.groupby("words")["bits"].mean()
    table = table.assign(
        row=[f"{words} ({bits[words]:.2f} bits)" if pd.notna(bits[words]) else str(words) for words in table["words"]]
    )
    rows = list(dict.fromkeys(table.sort_values("rank", kind="stable")["row"]))
    low, high = min(0.0, float(table["dnll"].min())), max(0.0, float(table["dnll"].max()))
    room = 0.04 * (high - low or 1)
    # One scale for all tasks of a width, so that context and knowledge compare.
    scale = alt.Scale(domain=[low - room, high + room], nice=False)
    measure = Measure("nats lost of the right answer", scale, alt.Axis(tickCount=5, format="~g"))
    y = alt.Y("row:N", title=None, scale=alt.Scale(domain=rows), axis=alt.Axis(labelLimit=290, labelOverlap=False))
    panels = []
    for i, (_, own) in enumerate(table.groupby("place")):
        base = alt.Chart(own).encode(y=y if i % _COLUMNS == 0 else y.axis(None), color=looks.colour().legend(None))
        mean = base.transform_aggregate(mean="mean(dnll)", count="count()", groupby=["row", "words"])
        ticks = mean.transform_filter("datum.count > 1").mark_tick(thickness=3, size=20, tooltip=None)
        dots = base.mark_point(filled=True, size=65, opacity=0.75).encode(
            x=measure.x("dnll"),
            shape=looks.shape().legend(None),
            tooltip=[
                tip("words", "arm"),
                tip("draw", "seed"),
                tip("bits", "bits", ".3f"),
                tip("label", "task"),
                tip("dnll", "nats lost, an item", "+.4f"),
                tip("n", "items"),
            ],
        )
        first = own.iloc[0]
        title = alt.Title(f"{first['width_words']} · {first['label']}", subtitle=str(first["knowledge"]))
        marks = [rule(own, x=alt.datum(0)), ticks.encode(x=alt.X("mean:Q", title=measure.title, scale=scale)), dots]
        panels.append(alt.layer(*marks).properties(width=290, height=25 * len(rows), title=title))
    return alt.concat(*panels, columns=_COLUMNS, spacing={"row": 85, "column": 24}, bounds="flush")


def _said(table: pd.DataFrame) -> str:
    """On every task, massive against random at each width."""
    said = []
    for _, task in table.groupby("place"):
        each = []
        for _, own in task.groupby("width_rank"):
            massive, random = (own[own["arm"] == arm]["dnll"] for arm in (_MASSIVE, _RANDOM))
            if len(massive) and len(random):
                better = f"better than {(random > massive.mean()).sum()} of {len(random)} draws"
                values = f"{_signed(massive.mean())} against {_signed(random.mean())}"
                each.append(f"{own['width_words'].iloc[0]} {values}, {better}")
        if each:
            said.append(f"On {task['label'].iloc[0]}: {'; '.join(each)}")
    if not said:
        return f"{len(table)} values; no width has both massive and random channels kept."
    return f"Nats lost of the right answer, massive against random channels kept. {'. '.join(said)}."


def _signed(value: float) -> str:
    value = round(value, 3) + 0.0
    return f"{'+' if value >= 0 else ''}{fixed(value)}"


CHART = Plot(
    "quantization-protected",
    "Does it help to keep massive channels?",
    "Log-likelihood of the right answer that is lost against the model as it is, by what stays in higher precision. "
    "◆: the control, as many channels (or layers) drawn at random, so that bits are equal; each seed has its point, "
    "and the bar is their mean. Massive layers: those whose massive channels hold most of their "
    "keys’ energy. If massive channels carry context, ■ lies left of ◆ where the answer is in the prompt, "
    "and less so where it is in the weights. Panels of one width share a scale.",
    ("protected",),
    chart,
)

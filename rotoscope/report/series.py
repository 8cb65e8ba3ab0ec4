"""Named lines: a name has the same colour, shape and width wherever it is drawn."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import altair as alt
import pandas as pd

from rotoscope.report.style import INK, MUTED, SERIES, SHAPES


@dataclass(frozen=True)
class Look:
    """How one line looks."""

    colour: str
    shape: str = "circle"
    width: float = 1.8
    dash: tuple[int, int] = (1, 0)


@dataclass(frozen=True)
class Measure:
    """What an axis looks like, whichever column is drawn along it and whichever way it lies."""

    title: str | list[str] | None
    scale: alt.Scale = field(default_factory=alt.Scale)
    axis: alt.Axis = field(default_factory=alt.Axis)

    def x(self, column: str) -> alt.X:
        return alt.X(f"{column}:Q", title=self.title, scale=self.scale, axis=self.axis)

    def y(self, column: str) -> alt.Y:
        return alt.Y(f"{column}:Q", title=self.title, scale=self.scale, axis=self.axis)


@dataclass(frozen=True)
class Series:
    """The lines of a figure.

    Attributes
    ----------
    looks
        Name in words to its look, in the order of the legend.
    title
        Of the legend.
    column
        The column that holds the names.
    """

    looks: Mapping[str, Look]
    title: str | None = None
    column: str = "words"

    @classmethod
    def of(cls, table: pd.DataFrame, looks: Mapping[str, Look], title: str | None = None) -> Series:
        """The names of a table in their order there; those without a look of their own get colours in turn."""
        taken = {look.colour for look in looks.values()}
        free = [colour for colour in SERIES if colour not in taken] or SERIES
        names = list(dict.fromkeys(table["words"]))
        others = [name for name in names if name not in looks]
        given = {name: Look(free[i % len(free)], SHAPES[i % len(SHAPES)]) for i, name in enumerate(others)}
        return cls({name: looks[name] if name in looks else given[name] for name in names}, title)

    def beside(self, table: pd.DataFrame) -> alt.XOffset:
        """Names side by side, by their place in line (`rank`)."""
        scale = alt.Scale(domain=sorted(set(table["rank"])), paddingOuter=0.7)
        # Without an order of its own it takes the colours', as an expression with the names in it, not all escaped.
        return alt.XOffset("rank:O", sort="ascending", scale=scale)

    def colour(self) -> alt.Color:
        legend = alt.Legend(orient="bottom", columns=4, labelLimit=300, symbolSize=90, symbolOpacity=1)
        return alt.Color(f"{self.column}:N", title=self.title, scale=self._scale("colour"), legend=legend)

    def shape(self) -> alt.Shape:
        return alt.Shape(f"{self.column}:N", title=self.title, scale=self._scale("shape"))

    def lines(
        self,
        x: alt.X,
        y: str,
        measure: Measure,
        tooltip: Sequence[alt.Tooltip],
        ends: tuple[str, str] | None = None,
        detail: Sequence[str] = (),
    ) -> list[alt.Chart]:
        """Bands, lines and dots, one line a name (and value of `detail`).

        Parameters
        ----------
        x
            The horizontal encoding.
        y
            The column drawn.
        measure
            The vertical axis of all of them.
        tooltip
            What a dot says.
        ends
            Columns of the lower and upper end of the band; none where there is none.
        """
        base = alt.Chart().encode(x=x, color=self.colour(), detail=list(detail))
        bands = [
            base.mark_area(opacity=0.13, tooltip=None).encode(y=measure.y(ends[0]), y2=f"{ends[1]}:Q")
        ] if ends else []  # fmt: skip
        line = base.mark_line().encode(
            y=measure.y(y),
            strokeWidth=alt.StrokeWidthValue(1.8, condition=self._conditions("width")),
            strokeDash=alt.StrokeDashValue([1, 0], condition=self._conditions("dash")),
        )
        dots = base.mark_point(filled=True, size=42, opacity=1).encode(
            y=measure.y(y), shape=self.shape(), tooltip=list(tooltip)
        )
        return [*bands, line, dots]

    def _scale(self, what: str) -> alt.Scale:
        return alt.Scale(domain=list(self.looks), range=[getattr(look, what) for look in self.looks.values()])

    def _conditions(self, what: str) -> list[dict[str, Any]]:
        """Fixed by name and without a scale, so that legends show whole marks and not dashed ones."""
        return [
            {"test": f"datum.{self.column} === {json.dumps(name)}", "value": getattr(look, what)}
            for name, look in self.looks.items()
        ]


def spread(table: pd.DataFrame, by: Sequence[str], column: str, units: Sequence[str]) -> pd.DataFrame:
    """Mean of a column over all rows of a group, and the smallest and largest mean of its units.

    Returns
    -------
    pandas.DataFrame
        One row a group, with `value`, `low`, `high` and `n` (rows).
    """
    by = list(by)
    each = table.groupby([*by, *units], sort=False)[column].mean()
    ends = each.groupby(by, sort=False).agg(low="min", high="max")
    return table.groupby(by, sort=False)[column].agg(value="mean", n="size").join(ends).reset_index()


def rule(table: pd.DataFrame, **encoding: Any) -> alt.Chart:
    """A dashed line at a fixed value, drawn once."""
    chart: alt.Chart = alt.Chart(table.head(1)).mark_rule(color=MUTED, strokeDash=[5, 4]).encode(**encoding)
    return chart


def trained(table: pd.DataFrame, length: int) -> list[alt.Chart]:
    """The trained length as a line with its name above, on an axis of positions."""
    line = rule(table, x=alt.datum(length))
    said = line.mark_text(text=f"trained up to {length:,}", dy=-7, color=INK, tooltip=None).encode(y=alt.value(0))
    return [line, said]


def symlog(values: pd.Series, linear: float, title: str | list[str]) -> Measure:
    """An axis through 0, linear up to `linear` on both sides and logarithmic beyond, with ticks that say so."""
    low, high = float(values.min()), float(values.max())
    steps = [0.0, *(digit * 10.0**power for power in range(-2, 3) for digit in (1, 2, 5))]
    ticks = sorted({sign * step for step in steps if step == 0 or step >= linear for sign in (-1, 1)})
    shown = [tick for tick in ticks if low <= tick <= high]
    scale = alt.Scale(type="symlog", constant=linear, domain=[min(low, 0.0), max(high, 0.0)], nice=False)
    axis = alt.Axis(values=shown, format="~r", labelOverlap=True)
    return Measure(title, scale, axis)

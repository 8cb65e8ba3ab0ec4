"""What a report is made of: topics, each a list of plots and listings that read a result's tables."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import altair as alt

from rotoscope.report.style import CONFIG
from rotoscope.results import Result


@dataclass(frozen=True)
class Drawn:
    """What a plot's function returns: a one-line reading computed from the data, and the chart."""

    reading: str
    chart: alt.TopLevelMixin


@dataclass(frozen=True)
class Plot:
    """A figure as a topic declares it.

    Attributes
    ----------
    id
        Unique in the report; also the anchor in the page.
    title
        What is drawn.
    how
        How to read it: marks, colours, what a high value means.
    tables
        The tables it reads. The figure is left out when one of them is absent or empty.
    draw
        From the result to the reading and the chart, or None when the tables hold nothing to draw.
    """

    id: str
    title: str
    how: str
    tables: tuple[str, ...]
    draw: Callable[[Result], Drawn | None]


@dataclass(frozen=True)
class Cell:
    """One table cell: the text shown, the value that sorting uses, and a second, smaller line."""

    text: str
    sort: float | None = None
    below: str = ""


@dataclass(frozen=True)
class Grid:
    """A table for reading. `numeric` says per column whether it is right-aligned."""

    columns: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    numeric: Sequence[bool]


@dataclass(frozen=True)
class Listing:
    """A table as a topic declares it; the attributes are those of `Plot`, `build` gives the rows."""

    id: str
    title: str
    how: str
    tables: tuple[str, ...]
    build: Callable[[Result], Grid | None]


@dataclass(frozen=True)
class Topic:
    """One section of the report.

    Attributes
    ----------
    id, title, intro
        Anchor, heading, and the sentences below it.
    parts
        Figures and listings in order.
    optional
        Whether parts whose tables this run does not have are left out without a word, and the whole section with the
        last of them. Else the report says in their place what is missing.
    """

    id: str
    title: str
    intro: str
    parts: tuple[Plot | Listing, ...]
    optional: bool = False

    def shown(self, result: Result) -> tuple[Plot | Listing, ...]:
        """The parts that have a place in the report of this result."""
        if not self.optional:
            return self.parts
        return tuple(part for part in self.parts if all(name in result.tables for name in part.tables))


@dataclass(frozen=True)
class Figure:
    """A finished figure. `chart` is a complete Altair chart: it can be saved as SVG, PDF or PNG by itself."""

    id: str
    title: str
    reading: str
    chart: Any
    how: str
    tables: tuple[str, ...]


def finish(plot: Plot, result: Result) -> Figure | None:
    """The plot drawn from this result, or None where its tables are absent, empty or hold nothing to draw."""
    if not all(present(result, name) for name in plot.tables):
        return None
    drawn = plot.draw(result)
    if drawn is None:
        return None
    chart = drawn.chart.properties(description=f"{plot.title}. {drawn.reading}").configure(**CONFIG)
    return Figure(plot.id, plot.title, drawn.reading, chart, plot.how, plot.tables)


def present(result: Result, table: str) -> bool:
    """Whether the result has this table with at least one row."""
    return table in result.tables and not result.tables[table].empty

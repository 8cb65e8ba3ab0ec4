"""The page: a template filled with a result, its figures and everything they need to be drawn without a network."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import altair as alt
import pandas as pd
import vl_convert
from jinja2 import Environment, StrictUndefined
from markupsafe import Markup

from rotoscope.report import scorecard
from rotoscope.report.data import inert, pack
from rotoscope.report.figure import Cell, Figure, Grid, Listing, Plot, finish, present
from rotoscope.report.text import NOTHING, number, sample
from rotoscope.report.topics import TOPICS
from rotoscope.results import Result, write_atomic


@dataclass(frozen=True)
class Part:
    """A figure or a listing as the template sees it; `missing` says why there is none."""

    id: str
    title: str
    how: str
    source: str
    figure: Figure | None = None
    grid: Grid | None = None
    missing: str = ""


def figures(result: Result) -> dict[str, Figure]:
    """All figures that this result's tables allow, by id, in the order of the report.

    Parameters
    ----------
    result
        A finished run.
    """
    plots = (part for topic in TOPICS for part in topic.parts if isinstance(part, Plot))
    finished = (finish(plot, result) for plot in plots)
    return {figure.id: figure for figure in finished if figure is not None}


def write(result: Result, path: Path | str) -> Path:
    """Write the report: one HTML file that makes no network request.

    Parameters
    ----------
    result
        A finished run; tables may be absent or empty, the report then says so in their place.
    path
        The file to write, atomically; folders above it are made.

    Raises
    ------
    BadInput
        If the file cannot be written.
    """
    path = Path(path)
    write_atomic(path, render(result))
    return path


def render(result: Result) -> str:
    """The report as a string."""
    drawn = figures(result)
    facts = result.provenance
    template = _environment().from_string(_asset("template.html"))
    return template.render(
        title=str(facts.get("model") or "model"),
        facts=list(_facts(result)),
        command=str(facts.get("command") or ""),
        claims=scorecard.rows(result),
        tally=scorecard.tally(result.scorecard()),
        headline=[(str(name), _plain(value)) for name, value in result.headline.items()],
        sections=[
            (topic, [_part(part, result, drawn) for part in parts])
            for topic in TOPICS
            if (parts := topic.shown(result))
        ],
        texts=_texts(result),
        anatomy=_anatomy(result),
        decisions=_decisions(result),
        provenance=json.dumps(result.summary()["provenance"], indent=2, ensure_ascii=False),
        style=Markup(_asset("page.css")),
        script=Markup(_asset("page.js")),
        bundle=Markup(_bundle()),
        data=Markup(inert(pack(drawn.values()))),
    )


def _environment() -> Environment:
    return Environment(autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True)


def _asset(name: str) -> str:
    return files("rotoscope.report").joinpath(name).read_text("utf-8")


def _bundle() -> str:
    """Vega, Vega-Lite and Vega-Embed in one script, of the version that Altair writes for."""
    version = ".".join(alt.SCHEMA_VERSION.removeprefix("v").split(".")[:2])
    bundle: str = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;", version)
    # Inside a script element only these two sequences can end or change it; neither form occurs outside strings.
    return bundle.replace("</script", "<\\/script").replace("<!--", "<\\!--")


def _part(part: Plot | Listing, result: Result, drawn: Mapping[str, Figure]) -> Part:
    source = ", ".join(f"tables/{name}.parquet" for name in part.tables)
    absent = [name for name in part.tables if not present(result, name)]
    figure = drawn.get(part.id) if isinstance(part, Plot) else None
    grid = part.build(result) if isinstance(part, Listing) and not absent else None
    missing = ""
    if figure is None and grid is None:
        missing = "Not shown: the tables hold no values for it."
        for name in absent:
            missing = f"Not shown: this run has {'an empty' if name in result.tables else 'no'} table “{name}”."
    return Part(part.id, part.title, part.how, source, figure, grid, missing)


def _facts(result: Result) -> Iterator[tuple[str, str]]:
    """What the header says of the run, name and value; what the provenance lacks is left out."""
    facts = {**result.provenance, "texts": sample(result.tables.get("texts"))}
    if isinstance(versions := facts.get("versions"), Mapping):
        facts["versions"] = ", ".join(f"{name} {version}" for name, version in versions.items())
    for key in (
        "source",
        "revision",
        "file_hash",
        "dtype",
        "device",
        "texts",
        "seed",
        "size",
        "time",
        "platform",
        "versions",
    ):
        if facts.get(key) not in (None, ""):
            yield key.replace("_", " "), str(facts[key])


def _texts(result: Result) -> Grid | None:
    if not present(result, "texts"):
        return None
    table = result.tables["texts"]
    rows = [
        [Cell(str(row.text)), Cell(f"{row.tokens:,}"), Cell(str(row.sha256)[:16]), Cell(str(row.start))]
        for row in table.itertuples()
    ]
    return Grid(["text", "tokens", "sha256 (first 16)", "starts with"], rows, [False, True, False, False])


def _anatomy(result: Result) -> Grid | None:
    """The anatomy table, with neighbours that differ in nothing but their number in one row."""
    if not present(result, "anatomy"):
        return None
    table = result.tables["anatomy"].sort_values("layer").reset_index(drop=True)
    names = [name for name in table.columns if name != "layer"]
    shown = table[names].map(_plain)
    starts = (shown != shown.shift()).any(axis=1) | (table["layer"].diff() != 1)
    rows = []
    for _, block in table.groupby(starts.cumsum()):
        first, last = int(block["layer"].iloc[0]), int(block["layer"].iloc[-1])
        span = f"{first}-{last}" if first < last else f"{first}"
        rows.append(
            [
                Cell(span),
                *(Cell(shown.at[block.index[0], name]) for name in names),
            ]
        )
    return Grid(["layers", *(name.replace("_", " ") for name in names)], rows, [False] * (1 + len(names)))


def _decisions(result: Result) -> Grid | None:
    if not result.decisions:
        return None
    names = list(dict.fromkeys(name for decision in result.decisions for name in decision))
    rows = [[Cell(str(decision.get(name, ""))) for name in names] for decision in result.decisions]
    return Grid(names, rows, [False] * len(names))


def _plain(value: Any) -> str:
    if isinstance(value, str | bool):
        return str(value) or NOTHING
    if isinstance(value, list | tuple | dict):
        return json.dumps(value, ensure_ascii=False, default=str)
    if value is None or pd.isna(value):
        return NOTHING
    return number(value) if isinstance(value, int | float) or hasattr(value, "dtype") else str(value)

"""Charts as JSON that can stand inside a page: data shared, in columns, rounded, and inert as markup."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable
from typing import Any

import altair as alt

from rotoscope.report.figure import Figure

SIGNIFICANT_DIGITS = 4


def pack(figures: Iterable[Figure]) -> dict[str, Any]:
    """Specifications and data of all figures.

    Returns
    -------
    dict
        `specs`: figure id to `{spec, datasets}`, the Vega-Lite specification without data and the names of the data
        it uses. `datasets`: name to `{column: values}`; figures that draw from equal data share one entry.
    """
    specs: dict[str, Any] = {}
    datasets: dict[str, Any] = {}
    for figure in figures:
        with alt.data_transformers.enable("default", max_rows=None, consolidate_datasets=True):
            spec = figure.chart.to_dict()
        own = spec.pop("datasets", {})
        specs[figure.id] = {"spec": spec, "datasets": list(own)}
        for name, rows in own.items():
            if name not in datasets:
                datasets[name] = columns(rows)
    return {"specs": specs, "datasets": datasets}


def columns(rows: list[dict[str, Any]]) -> dict[str, list[Any]]:
    """Records turned into columns, with floats at `SIGNIFICANT_DIGITS`."""
    names = dict.fromkeys(name for row in rows for name in row)
    return {name: [_rounded(row.get(name)) for row in rows] for name in names}


def inert(value: Any) -> str:
    """JSON that no HTML parser can take for markup, for the inside of a `<script>` element."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    # ASCII only, so U+2028 and U+2029 are escaped already.
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _rounded(value: Any) -> Any:
    if isinstance(value, list):
        return [_rounded(item) for item in value]
    if not isinstance(value, float):
        return value
    if not math.isfinite(value):
        return None
    value = float(f"{value:.{SIGNIFICANT_DIGITS}g}")
    return int(value) if value.is_integer() else value

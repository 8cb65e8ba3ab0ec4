"""What a finished run says in a terminal."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pandas as pd
from rich.console import Console
from rich.table import Table
from rich.text import Text

if TYPE_CHECKING:
    from rotoscope.results import Result


def show(result: Result, page: Path) -> None:
    """Print the claims, how additivity is explained, and the headline numbers."""
    table = Table("claim", "verdict", "value", "95 % interval", "null", "n", title=str(result.provenance["model"]))
    for c in result.claims:
        interval = "" if c.interval is None else "{:.3f} … {:.3f}".format(*c.interval)
        numbers = ["" if x is None else f"{x:.3f}" for x in (c.value, c.null)]
        row = (c.id, c.verdict, numbers[0], interval, numbers[1], c.n or c.reason)
        table.add_row(*(Text(cell) for cell in row))
    console = Console()
    console.print(table)
    if (explained := result.tables.get("explanation")) is not None:
        console.print(_explanation(explained))
    if (methods := result.tables.get("quantization")) is not None:
        console.print(_methods(methods))
    for key, value in result.headline.items():
        console.print(Text(f"{key}: {value:.3f}"))
    console.print(Text(f"report: {page}"), soft_wrap=True)


def _methods(rows: pd.DataFrame) -> Table:
    table = Table("method", "bits", "share changed", "ΔNLL [95 %]", "retention by task", title="quantization")
    for method, of in rows.groupby("method", sort=False):
        first = of.iloc[0]
        share = "" if pd.isna(first.share_changed) else f"{first.share_changed:.1%}"
        lost = "" if pd.isna(first.dnll) else f"{first.dnll:+.3f} [{first.dnll_low:+.3f}, {first.dnll_high:+.3f}]"
        kept = [f"{of_task.task} {of_task.retention:.2f}" for of_task in of.itertuples() if pd.notna(of_task.retention)]
        cells = (str(method), f"{first.bits:.2f}", share, lost, ", ".join(kept) or str(first.note))
        table.add_row(*map(Text, cells))
    return table


def _explanation(rows: pd.DataFrame) -> Table:
    kinds = {"form1": "form 1", "form1_within": "within", "form2": "form 2", "form2_within": "within"}
    table = Table("mean r [95 % over heads]", *kinds.values(), title="with moments taken away; and random weights")
    for arm, of_arm in rows.groupby("arm", sort=False):
        cells = of_arm.set_index("kind")
        if not set(kinds) <= set(cells.index):
            continue
        found = [cells.loc[kind] for kind in kinds]
        table.add_row(arm.replace("_", " "), *(f"{c.value:.3f} [{c.low_heads:.3f}, {c.high_heads:.3f}]" for c in found))
    return table

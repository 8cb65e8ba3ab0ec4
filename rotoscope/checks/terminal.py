"""What doctor found, as text for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from io import StringIO
from itertools import groupby
from typing import Any

import pandas as pd

SHORT = {"exact": "exact", "not reached": "no", "undefined": "–", "none": "–", "wrong": "WRONG"}


def layers(table: pd.DataFrame, width: int) -> str:
    """One line for each run of layers that differ in their number only."""
    rows: list[list[Any]] = []
    same = [str(row) for row in table.drop(columns=["layer", "why"]).itertuples(index=False)]
    for _, one in groupby(range(len(same)), key=same.__getitem__):
        run = table.iloc[list(one)]
        a, last = run.iloc[0], run.layer.iloc[-1]
        heads = f"{a.heads}/{a.kv_heads}" if a.heads else "–"
        dims = f"{a.head_dim}" + (f"/{a.v_head_dim}" if a.v_head_dim != a.head_dim else "") if a.heads else "–"
        rotary = f"{a.rotary_dims} {a.pairing}" if a.rotary_dims else "–"
        also = [
            *([f"window {a.window}"] if pd.notna(a.window) else []),
            *([f"softcap {a.softcap:g}"] if pd.notna(a.softcap) else []),
            *(["sinks"] if a.sinks else []),
            *([f"{a.calls} calls"] if a.calls > 1 else []),
        ]
        number = f"{a.layer}" if last == a.layer else f"{a.layer}-{last}"
        kind = a.position if a.kind == "attention" else "no attention"
        reach = [SHORT[a[name]] for name in ("qkv", "logits", "pre_rope", "boundary")]
        rows.append([number, kind, heads, dims, rotary, ", ".join(also) or "–", *reach])
    names = ["layers", "positions", "heads", "dims", "rotary", "also", "Q K V", "logits", "pre-RoPE", "h[l]"]
    return _table(names, rows, width)


def checks(frame: pd.DataFrame, width: int) -> str:
    """One line for each check, and one more for each verdict that needs a look; the worst case is shown."""
    fine = {"exact", "rounding"}
    shared = frame.verdict.where(~frame.verdict.isin(fine), "fine")
    rows = []
    for _, some in frame.groupby([frame.check, shared], sort=False):
        worst = some.loc[some.difference.idxmax()] if some.difference.notna().any() else some.iloc[0]
        cases = f"{len(some)} ways, worst: {worst.case}" if len(some) > 1 and worst.difference else worst.case
        if len(some) > 1 and not worst.difference:
            cases = f"{len(some)} ways"
        numbers = [_number(x) for x in (worst.difference, worst.allowed, worst.float64)]
        rows.append([worst.check, cases, *numbers, worst.verdict])
    return _table(["check", "on", "worst", "allowed", "float64", "verdict"], rows, width)


def sentences(lines: Iterable[str], mark: str, width: int) -> str:
    """One paragraph a sentence, the rest of each indented."""
    from textwrap import fill

    return "\n".join(fill(line, width, initial_indent=f"{mark} ", subsequent_indent="  ") for line in lines)


def _number(x: float) -> str:
    return "–" if pd.isna(x) else f"{x:.1e}" if x else "0"


def _table(names: Sequence[str], rows: Sequence[Sequence[Any]], width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for name in names:
        table.add_column(Text(name))
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    console = Console(file=(out := StringIO()), width=width, color_system=None)
    console.print(table)
    return "\n".join(line.rstrip() for line in out.getvalue().strip().splitlines())

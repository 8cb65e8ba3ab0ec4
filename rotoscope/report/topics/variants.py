"""The matched controls as figures show them: each variant in its words and with its own look."""

from __future__ import annotations

import pandas as pd

from rotoscope.report.labels import VARIANTS, worded
from rotoscope.report.series import Look
from rotoscope.results import Result

LAMBDA = 5.0
"""The ratio above which a dim counts as massive."""

LOOKS = {
    "RoPE": Look("#d55e00", "circle", 3.2),
    "learned table": Look("#0072b2", "square", 1.6),
    "ALiBi": Look("#009e73", "triangle-up", 1.6),
    "no positions": Look("#5b6675", "diamond", 1.6, (5, 3)),
}


def controlled(result: Result, name: str, column: str) -> pd.DataFrame:
    """A table of the controls without rows that lack `column`; `words`: the variant, `rank`: its place in line."""
    return worded(result.tables[name].dropna(subset=[column]), "positions", VARIANTS)


def seeded(count: int) -> str:
    """`1 seed`, `2 seeds`."""
    return f"{count} seed{'' if count == 1 else 's'}"

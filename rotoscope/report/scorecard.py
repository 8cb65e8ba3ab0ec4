"""Claims as rows of the scorecard: what is shown, and the exact numbers behind it."""

from __future__ import annotations

import json
from dataclasses import dataclass

from rotoscope.report.text import interval, number
from rotoscope.results import Claim, Result

SYMBOLS = {"holds": "✓", "partly": "◐", "fails": "✗", "not tested": "○"}


@dataclass(frozen=True)
class Row:
    """One claim. `exact` holds the numbers of `summary.json` as JSON, by field, for scripts and tests."""

    claim: Claim
    symbol: str
    value: str
    interval: str
    null: str
    detectable: str
    exact: dict[str, str]

    @property
    def verdict_class(self) -> str:
        """The verdict as a CSS class."""
        return self.claim.verdict.replace(" ", "-")


def rows(result: Result) -> list[Row]:
    """The scorecard's rows, in the order of the catalogue."""
    return [
        Row(
            claim,
            SYMBOLS[claim.verdict],
            number(plain["value"]),
            interval(*plain["interval"]) if plain["interval"] else "",
            number(plain["null"]),
            number(plain["detectable"]),
            {name: json.dumps(plain[name]) for name in ("value", "interval", "null", "detectable")},
        )
        for claim, plain in zip(result.scorecard(), result.summary()["claims"], strict=True)
    ]


def tally(claims: list[Claim]) -> list[tuple[str, str, int]]:
    """Verdict, its symbol and how many claims have it."""
    return [(verdict, symbol, sum(claim.verdict == verdict for claim in claims)) for verdict, symbol in SYMBOLS.items()]

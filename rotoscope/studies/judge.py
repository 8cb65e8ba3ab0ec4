"""Verdicts from conditions, and what they would be at half and at double the thresholds.

A condition is *met* when the worse end of its 95 % interval satisfies it, *missed* when even the better end does not,
and open in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from rotoscope.results import CATALOGUE, Claim, Verdict, not_tested
from rotoscope.stats import intervals

Ruling = tuple[Verdict, str]


@dataclass(frozen=True)
class Condition:
    """One requirement: what it is about, its value and interval, and the bound it must keep."""

    label: str
    value: float
    interval: tuple[float, float]
    op: str
    threshold: float

    @property
    def met(self) -> bool:
        return intervals.met(self.interval, self.op, self.threshold) is True

    @property
    def missed(self) -> bool:
        return intervals.met(self.interval, self.op, self.threshold) is False

    def __str__(self) -> str:
        state = "met" if self.met else "missed" if self.missed else "open"
        low, high = self.interval
        sign = {">=": "≥", "<=": "≤"}.get(self.op, self.op)
        return f"{self.label} {self.value:.3g} [{low:.3g}, {high:.3g}] {sign} {self.threshold:.3g}: {state}"


def scaled(threshold: float, factor: float) -> float:
    """A threshold at half (0.5) or double (2) its size."""
    return threshold * factor


def scaled_from_one(threshold: float, factor: float) -> float:
    """The same for a high bound on a quantity that ends at 1 (a correlation, a share): its distance from 1 is scaled.

    .95 becomes .975 or .90; half of .95 would ask nothing, and its double cannot be reached.
    """
    return 1 - (1 - threshold) * factor


def reasons(*conditions: Condition) -> str:
    """All conditions in one line, with their state."""
    return "; ".join(map(str, conditions))


def claim(
    claim_id: str,
    rule: str,
    decide: Callable[[float], Ruling],
    *,
    value: float,
    interval: tuple[float, float],
    null: float | None,
    null_name: str,
    n: str,
    **extra: Any,
) -> Claim:
    """A tested claim; ``decide(factor)`` gives verdict and reason with every threshold scaled by ``factor``.

    Without an interval of its value nothing was tested.
    """
    if any(map(math.isnan, interval)):
        return not_tested(claim_id, f"no interval of {value:.3g}: too few layers, heads or texts ({n})", rule)
    paper, statement = CATALOGUE[claim_id]
    verdict, reason = decide(1.0)
    return Claim(
        claim_id, paper, statement, verdict, value, interval, null, null_name, rule, reason, n,
        at_half=decide(0.5)[0], at_double=decide(2.0)[0], detectable=intervals.detectable(interval) or None, **extra,
    )  # fmt: skip

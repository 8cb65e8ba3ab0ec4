"""Numbers and names as readers see them."""

from __future__ import annotations

import math
from typing import Any

import pandas as pd

NOTHING = "–"

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")

KINDS = {
    "form1": "form 1",
    "form1_within": "form 1, within query",
    "form2": "form 2",
    "form2_within": "form 2, within query",
    "causal": "causal form 2",
    "causal_within": "causal form 2, within query",
}
"""The kinds of r: column name to words."""

ARMS = {
    "as_it_is": "trained, as it is",
    "key_means_removed": "key means removed",
    "query_means_removed": "query means removed",
    "both_means_removed": "both means removed",
    "energies_equalised": "pair energies equalised",
    "no_means_equal_energies": "no means, equal energies",
    "isotropic_covariance": "covariance isotropic, means kept",
    "matched_gaussian": "matched Gaussian",
    "random": "random weights, as they are",
    "random_key_means_removed": "random, key means removed",
    "random_both_means_removed": "random, both means removed",
    "random_energies_equalised": "random, energies equalised",
    "random_no_means_equal_energies": "random, no means, equal energies",
    "isotropic": "isotropic Gaussian",
    "with_position_0": "position 0 included",
}
"""The arms of the explanation table, in the order shown: name in the tables to words."""

ROLES = {"model": "the model", "arm": "arm", "null": "null", "check": "check"}


def number(value: Any) -> str:
    """A number at a reader's precision: three decimals near 1, fewer above, powers of ten at the extremes."""
    if value is None or pd.isna(value):
        return NOTHING
    value = float(value)
    size = abs(value)
    if math.isinf(value):
        text = "∞" if value > 0 else "-∞"
    elif value.is_integer() and size < 1e7:
        text = f"{value:,.0f}"
    elif size >= 1e7 or size < 5e-4:
        mantissa, exponent = f"{value:.2e}".split("e")
        text = f"{mantissa} × 10{str(int(exponent)).translate(_RAISED)}"
    elif size >= 1000:
        text = f"{value:,.0f}"
    else:
        text = f"{value:.1f}" if size >= 100 else f"{value:.2f}" if size >= 10 else f"{value:.3f}"
    return text.replace("-", "−")


def fixed(value: Any, digits: int = 3) -> str:
    """A number with a fixed number of decimals, for columns that are compared downwards."""
    if value is None or pd.isna(value):
        return NOTHING
    return f"{value:,.{digits}f}".replace("-", "−")


def percent(share: Any) -> str:
    """A share of 1 in whole per cent, with a decimal where whole ones would say 0 or 100."""
    if share is None or pd.isna(share):
        return NOTHING
    return f"{100 * share:.1f} %" if 0 < share < 0.01 or 0.99 < share < 1 else f"{100 * share:.0f} %"


def interval(low: Any, high: Any) -> str:
    """A 95 % interval in brackets."""
    return f"[{number(low)}, {number(high)}]"


def joined(parts: list[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def layers(first: int, last: int) -> str:
    """`layer 4` or `layers 4-9`."""
    return f"layer {first}" if first == last else f"layers {first}-{last}"


def sample(texts: pd.DataFrame | None) -> str:
    """What the numbers rest on: texts and tokens."""
    if texts is None or texts.empty:
        return "the texts of this run"
    count = len(texts)
    return f"{count} text{'' if count == 1 else 's'}, {int(texts['tokens'].sum()):,} tokens"

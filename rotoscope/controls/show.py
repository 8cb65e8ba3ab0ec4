"""What a set of controls holds, in a table."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rotoscope.controls import sets

SHOWN = {
    "name": "{}",
    "parameters": "{:,}",
    "loss": "{:.4f}",
    "one_pair": "{:.2f}",
    "key_value": "{:.2f}",
    "known_values": "{:.2f}",
    "passkey": "{:.2f}",
    "Q": "{:.1f}",
    "K": "{:.1f}",
    "V": "{:.1f}",
    "cpu_minutes": "{:.1f}",
}


def rows(root: Path | None = None) -> list[dict[str, Any]]:
    """One for each model: name, parameters, held-out loss (nats a token), accuracies, processor minutes, how to load,
    the command that trained it; for Q, K and V largest over mean dim, averaged over heads of the upper half of layers.
    """
    found = []
    for control in sets.members(root):
        record = control.record
        ratios = sets.curves([control])["control_ratios"]
        last = sets.upper_half(ratios[ratios.step == ratios.step.max()])
        kept = ("name", "parameters", "loss", "one_pair", "key_value", "known_values", "passkey")
        found.append(
            {
                **{name: record[name] for name in kept},
                **{tensor: float(of.max_ratio.mean()) for tensor, of in last.groupby("tensor")},
                "cpu_minutes": record["cpu_seconds"] / 60,
                "load": control.source,
                "command": record["command"],
            }
        )
    return found


def text(found: list[dict[str, Any]]) -> str:
    """The same for a terminal."""
    lines = [[name.replace("_", " ") for name in SHOWN]]
    lines += [[form.format(row[name]) for name, form in SHOWN.items()] for row in found]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    table = ["  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)) for line in lines]
    loads = [f'rotoscope.load("{row["load"]}")  trained by: {row["command"]}' for row in found]
    return "\n".join([*table, "", *loads])

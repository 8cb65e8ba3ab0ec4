"""A trained set of controls as it lies on disk: its models, and what was measured in training."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pandas as pd

from rotoscope.errors import BadInput
from rotoscope.model.shipped import POSITIONS, PREFIX, shipped_set

RECORD = "train.json"
CURVES = ("losses", "ratios", "additivity")


@dataclass(frozen=True)
class Control:
    """One model of a set: its folder, and the record of its training."""

    folder: Path
    record: dict[str, Any]

    @property
    def name(self) -> str:
        return str(self.record["name"])

    @property
    def labels(self) -> dict[str, Any]:
        """The columns that name it in tables."""
        return {"positions": self.record["positions"], "seed": self.record["seed"]}

    @property
    def source(self) -> str:
        """What `rotoscope.load` takes."""
        return f"{PREFIX}{self.name}" if self.folder.parent == shipped_set() else str(self.folder)


def members(root: Path | None = None) -> list[Control]:
    """The finished models of a set, by seed and then in the order rope, learned, alibi, none.

    Parameters
    ----------
    root : Path, optional
        What ``rotoscope controls train`` wrote; by default the set that comes with rotoscope.

    Raises
    ------
    BadInput
        If there is none.
    """
    root = root or shipped_set()
    found = []
    for path in sorted(root.glob(f"*/{RECORD}")):
        try:
            found.append(Control(path.parent, json.loads(path.read_text("utf-8"))))
        except ValueError as error:
            raise BadInput(f"{path} cannot be read ({error}); train it again") from None
    if not found:
        raise BadInput(f"{root} holds no finished controls; make them with rotoscope controls train --out {root}")
    return sorted(found, key=lambda c: (c.record["seed"], POSITIONS.index(c.record["positions"])))


def curves(some: Sequence[Control]) -> dict[str, pd.DataFrame]:
    """What was measured in training: ``control_losses``, ``control_ratios`` and ``control_additivity``.

    Returns
    -------
    dict
        All with positions, seed and step; ratios by layer, tensor and head, additivity by layer and head.
    """
    out = {}
    for name in CURVES:
        parts = []
        for control in some:
            rows = pd.read_parquet(control.folder / f"{name}.parquet")
            for at, (column, value) in enumerate(control.labels.items()):
                rows.insert(at, column, value)
            parts.append(rows)
        out[f"control_{name}"] = pd.concat(parts, ignore_index=True)
    return out


def upper_half(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows of the upper half of layers, where massive values are looked for."""
    return rows[rows.layer >= (rows.layer.max() + 1) / 2]

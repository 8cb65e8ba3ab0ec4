"""The control models that come with the package: their names and where they lie. Nothing heavy is imported here."""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

from rotoscope.errors import BadInput

MODEL_TYPE = "rotoscope_control"
POSITIONS = ("rope", "learned", "alibi", "none")
PREFIX = "control:"
"""What the name of a shipped one begins with: ``control:rope``, or ``control:rope-1`` for the second seed."""


def shipped(name: str) -> Path:
    """The folder of a control that comes with the package.

    Raises
    ------
    BadInput
        If there is none of this name.
    """
    positions, _, seed = name.removeprefix(PREFIX).partition("-")
    folder = shipped_set() / f"{positions}-{seed or 0}"
    if not (folder / "config.json").is_file():
        there = ", ".join(PREFIX + p.parent.name for p in sorted(shipped_set().glob("*/config.json")))
        raise BadInput(f"there is no {name}; the controls are {there} (without a number: seed 0)")
    return folder


def shipped_set() -> Path:
    """The folder of all of them."""
    return Path(str(files("rotoscope"))) / "controls" / "small"

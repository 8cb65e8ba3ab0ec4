"""Arguments of an intervention as users type them: ``selection=top-2:layers=3-7``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any

from rotoscope.errors import BadInput

_LISTS = ("layers", "positions", "donor_positions")


def arguments(kind: type, text: str) -> dict[str, Any]:
    """Keyword arguments for ``kind`` from ``name=value`` pairs joined by colons.

    Raises
    ------
    BadInput
        If it has no such argument, or the value is not of its kind.
    """
    known = {f.name: f.default for f in fields(kind)}
    out: dict[str, Any] = {}
    for part in filter(None, text.split(":")):
        name, _, value = part.partition("=")
        if name not in known or not value:
            raise BadInput(f"{kind.name} takes {', '.join(known)}, each as NAME=VALUE; not {part!r}")  # type: ignore[attr-defined]
        try:
            out[name] = _converter(name, known[name])(value)
        except (ValueError, KeyError):
            raise BadInput(f"{name}={value} cannot be read; {_hint(name, known[name])}") from None
    lacking = [name for name, default in known.items() if default is MISSING and name not in out]
    if lacking:
        raise BadInput(f"{kind.name} needs {lacking[0]}, as in {kind.name}:{lacking[0]}=10")  # type: ignore[attr-defined]
    return out


def _converter(name: str, default: Any) -> Callable[[str], Any]:
    if isinstance(default, bool):
        return _truth
    if isinstance(default, int | float | str):
        return type(default)
    return numbers if name in _LISTS else int


def _hint(name: str, default: Any) -> str:
    if isinstance(default, bool):
        return "say yes or no"
    return "write numbers and ranges, as in 3,5-7" if default is None and name in _LISTS else "write a number"


def _truth(text: str) -> bool:
    return {"yes": True, "true": True, "no": False, "false": False}[text.lower()]


def numbers(text: str) -> tuple[int, ...]:
    """``3,5-7`` as 3, 5, 6, 7.

    Raises
    ------
    ValueError
        If it is anything else, a range that runs backwards among it.
    """
    out: list[int] = []
    for part in text.split(","):
        low, _, high = part.partition("-")
        some = range(int(low), int(high or low) + 1)
        if not some:
            raise ValueError(f"{part} runs backwards")
        out += some
    return tuple(out)

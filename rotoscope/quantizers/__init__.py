"""Quantized weights and activations, as interventions on the user's own model; one method a file, one line here."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

from rotoscope.errors import BadInput
from rotoscope.interventions.spec import arguments
from rotoscope.quantizers.awq import AWQ
from rotoscope.quantizers.base import Quantizer
from rotoscope.quantizers.calibration import Calibration
from rotoscope.quantizers.grid import grid_bits, low_bit_grid
from rotoscope.quantizers.nf4 import NF4
from rotoscope.quantizers.packed import PackedInt4
from rotoscope.quantizers.rtn import RTN
from rotoscope.quantizers.smoothquant import SmoothQuant
from rotoscope.quantizers.w8a8 import W8A8

_KINDS: tuple[type[Quantizer], ...] = (RTN, W8A8, SmoothQuant, AWQ, PackedInt4, NF4)

QUANTIZERS: dict[str, type[Quantizer]] = {kind.name: kind for kind in _KINDS}
"""Every quantizer by the name that users type."""

_GIVEN = ("keep", "calibration")


def parse(text: str, calibration: Calibration = ()) -> Quantizer:
    """A quantizer from text: ``rtn:bits=4:group=32``.

    Parameters
    ----------
    text : str
        Its name and arguments, joined by colons.
    calibration : sequence of sequences of int
        Texts, as token ids, for methods that need some.

    Raises
    ------
    BadInput
        If there is none of that name, or it takes no such argument.
    """
    name, _, rest = text.strip().partition(":")
    kind: Any = QUANTIZERS.get(name)
    if kind is None:
        raise BadInput(f"there is no quantizer {name!r}; there are {', '.join(QUANTIZERS)}")
    given = arguments(kind, rest)
    typed = next((argument for argument in _GIVEN if argument in given), None)
    if typed:
        raise BadInput(f"{typed} of {name} cannot be typed: give it in Python")
    built: Quantizer = kind(**given)
    if any(f.name == "calibration" for f in fields(kind)):
        built = replace(built, calibration=calibration)  # type: ignore[call-arg]
    return built


__all__ = [
    "AWQ", "NF4", "QUANTIZERS", "RTN", "W8A8", "PackedInt4", "Quantizer", "SmoothQuant", "grid_bits", "low_bit_grid",
    "parse",
]  # fmt: skip

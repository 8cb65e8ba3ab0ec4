"""How many layers are observed in one forward, so that capture keeps within the memory it is given.

Fewer layers at once cost more forwards and change no number.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from rotoscope.errors import BadInput
from rotoscope.model.anatomy import LayerAnatomy

_UNITS = {"": 1, "b": 1, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}
_SIZE = re.compile(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([kmgt]i?|)b?\s*", re.IGNORECASE | re.ASCII)

FLOAT64, COMPLEX128 = 8, 16


def parse_bytes(text: str) -> int:
    """Bytes that a size such as ``500MB``, ``2GB``, ``2GiB`` or ``1000000`` stands for.

    Raises
    ------
    BadInput
        If it is no size, or none above 0.
    """
    found = _SIZE.fullmatch(text)
    # Beyond 20 digits it is a slip of the hand, and soon no float.
    size = int(float(found[1]) * _UNITS[found[2].lower()]) if found and len(text) <= 20 else 0
    if size < 1:
        raise BadInput(f"max-memory {_short(text)} is no size: write it like 500MB, 2GB or 2GiB")
    return size


def in_words(size: float) -> str:
    """A number of bytes as a user reads it, in the units of `parse_bytes`."""
    for unit, name in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if size >= unit:
            return f"{size / unit:,.1f} {name}"
    return f"{size:,.0f} bytes"


def kept(layer: LayerAnatomy, tokens: int) -> int:
    """Bytes that the observers of `observe` keep of one layer until it is reduced to tables.

    Parameters
    ----------
    layer : LayerAnatomy
    tokens : int
        Length of the text.
    """
    moments = 3 * (layer.heads + layer.kv_heads) * layer.head_dim + 3 * layer.kv_heads * layer.v_head_dim
    causal = layer.calls * layer.heads * (3 * (tokens - 1) + 1)
    spread = 2 * layer.heads
    return FLOAT64 * (moments + causal + spread) + _grams(layer)


def used(layer: LayerAnatomy, tokens: int) -> int:
    """Upper bound of the bytes that reducing one layer takes for a moment, whatever else is kept.

    The largest of: a block of 128 rows of attention weights, in several copies; sums over the causal matrix of one
    key head; the draws of a Gaussian arm for all heads beside the moments that they are fitted with.
    """
    width = 2 * _pairs(layer)
    group = layer.heads // layer.kv_heads
    rows = min(tokens, 128)
    weights = 6 * 4 * layer.heads * rows * tokens
    causal = FLOAT64 * (group + 1) * (6 * tokens * layer.head_dim + 4 * layer.head_dim**2 + 2 * rows**2)
    fit = FLOAT64 * layer.heads * (16 * width**2 + (3 * tokens + 12) * width)
    solve = FLOAT64 * layer.heads * 3 * tokens * 12
    return max(weights, causal, fit if layer.position != "unknown" else 0, solve)


def capture(layers: Sequence[LayerAnatomy], tokens: int) -> int:
    """Bytes of observing these layers in one forward."""
    return sum(kept(layer, tokens) for layer in layers) + max((used(layer, tokens) for layer in layers), default=0)


def layers_at_once(layers: Sequence[LayerAnatomy], tokens: int, limit: int | None) -> int:
    """The most layers that any forward may observe so that capture keeps within `limit` bytes.

    Raises
    ------
    BadInput
        If not even one layer fits.
    """
    if limit is None:
        return max(1, len(layers))
    for count in range(len(layers), 0, -1):
        if all(capture(part, tokens) <= limit for part in split(layers, count)):
            return count
    if not layers:
        return 1
    least = max(capture([layer], tokens) for layer in layers)
    raise BadInput(
        f"max-memory {in_words(limit)} does not hold one layer of {tokens} tokens, which takes {in_words(least)}: "
        "give more, or use fewer --tokens"
    )


def split(layers: Sequence[LayerAnatomy], count: int) -> list[Sequence[LayerAnatomy]]:
    """The layers in order, at most `count` at a time."""
    return [layers[start : start + count] for start in range(0, len(layers), count)]


def _grams(layer: LayerAnatomy) -> int:
    """Second moments, sums, position 0 and unit phases of un-rotated queries and keys."""
    if layer.position == "unknown":
        return 0
    width = 2 * _pairs(layer)
    return FLOAT64 * (layer.heads + layer.kv_heads) * (width**2 + 2 * width) + COMPLEX128 * layer.kv_heads * width // 2


def _pairs(layer: LayerAnatomy) -> int:
    """Rotary pairs, with the dims that do not rotate as further ones."""
    still = layer.head_dim - layer.rotary_dims
    return layer.rotary_dims // 2 + (still + 1) // 2


def _short(text: str) -> str:
    return repr(text if len(text) <= 40 else f"{text[:37]}…")

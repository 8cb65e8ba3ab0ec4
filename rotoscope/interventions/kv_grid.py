"""Keys and values on a grid of few bits: what a quantized cache hands back, computed without storing anything."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rotoscope.errors import BadInput

KINDS = (*(f"int{bits}" for bits in range(2, 9)), "fp8")
AXES = ("token", "channel")
EXACT_BITS = 16  # what a value that stays as it is counts, and so does a scale or a zero point
_FP8 = torch.float8_e4m3fn
_FP8_MAX = torch.finfo(_FP8).max


class Rounded(NamedTuple):
    """Keys or values as a cache hands them back, and what was stored for those that were quantized.

    Attributes
    ----------
    x
        ``[batch, heads, tokens, dims]``; what was not quantized is what it was.
    bits
        Of quantized values, with the scales and zero points of their groups.
    """

    x: Tensor
    bits: int


def quantized(
    x: Tensor, kind: str = "int4", axis: str = "token", group: int = 64, keep: Tensor | None = None
) -> tuple[Tensor, int]:
    """Keys or values as a quantized cache hands them back.

    Parameters
    ----------
    x : torch.Tensor
        ``[batch, heads, tokens, dims]``, no padding.
    kind : str
        ``int2`` … ``int8``: asymmetric, from the least to the largest value of a group. ``fp8``: float8_e4m3fn with one
        scale a row of the batch, whatever ``axis`` and ``group`` are.
    axis : str
        ``token``: a group is ``group`` dims of one token and head, or all of them where there are fewer. ``channel``:
        it is one dim of a head in ``group`` tokens; tokens that fill no group stay exact (Liu et al. 2024, KIVI).
    group : int
        Values that share a scale.
    keep : torch.Tensor, optional
        Dims that stay exact and have no part in the scales, boolean ``[heads, dims]``.

    Returns
    -------
    torch.Tensor
        Of the shape and dtype of ``x``.
    int
        Bits stored: with a scale and a zero point of 16 bits for each group, and 16 for each value that stays exact.

    Raises
    ------
    BadInput
        If there is no such kind or axis, or the group size does not divide the dims.
    """
    known("kind", kind, KINDS)
    known("axis", axis, AXES)
    tokens = torch.ones(x.shape[0], x.shape[2], dtype=torch.bool, device=x.device)
    index = tokens.cumsum(-1) - 1
    if kind != "fp8" and axis == "channel":
        tokens = whole(index, tokens, group)
    places = at(tokens, keep, x)
    if kind == "fp8":
        scale = fp8_scale(x, places)
        done = Rounded(fp8(x, places, scale), 8 * int(places.sum()) + EXACT_BITS * len(x))
    else:
        done = rounded(x, places, int(kind[3:]), axis, group, index)
    return done.x, done.bits + EXACT_BITS * int((~places).sum())


def at(tokens: Tensor, keep: Tensor | None, x: Tensor) -> Tensor:
    """Values of ``x`` at some tokens ``[batch, tokens]`` and in no dim that is kept, boolean of its shape."""
    places = tokens[:, None, :, None].expand_as(x)
    return places if keep is None else places & ~keep.to(x.device)[:, None]


def whole(index: Tensor, tokens: Tensor, group: int) -> Tensor:
    """Those of some tokens whose group is there in full, boolean ``[batch, tokens]``.

    Parameters
    ----------
    index : torch.Tensor
        Place of each token in its row ``[batch, tokens]``; groups begin at multiples of ``group``.
    tokens : torch.Tensor
        Boolean ``[batch, tokens]``.
    group : int
        Tokens in a group.
    """
    of = _groups(index, group)
    count = torch.zeros(len(of), int(of.max()) + 1, dtype=torch.long, device=of.device)
    return tokens & (count.scatter_add(1, of, tokens.long()).gather(1, of) == group)


def rounded(x: Tensor, places: Tensor, bits: int, axis: str, group: int, index: Tensor) -> Rounded:
    """Integers of ``bits`` bits at some places ``[batch, heads, tokens, dims]``; ``index`` is as in `whole`."""
    exact = x if x.dtype == torch.float64 else x.float()
    if axis == "token":
        group = dividing(group, x.shape[-1])
        exact, among = (y.unflatten(-1, (-1, group)) for y in (exact, places))
        low = exact.masked_fill(~among, torch.inf).amin(-1, keepdim=True)
        high = exact.masked_fill(~among, -torch.inf).amax(-1, keepdim=True)
        groups = int((low <= high).sum())
        out = _affine(exact, low, high, bits).flatten(-2)
    else:
        of = _groups(index, group)
        to = of[:, None, :, None].expand_as(x)
        shape = (*x.shape[:2], int(of.max()) + 1, x.shape[-1])
        low = exact.new_full(shape, torch.inf).scatter_reduce(2, to, exact.masked_fill(~places, torch.inf), "amin")
        high = exact.new_full(shape, -torch.inf).scatter_reduce(2, to, exact.masked_fill(~places, -torch.inf), "amax")
        groups = int((low <= high).sum())
        out = _affine(exact, low.gather(2, to), high.gather(2, to), bits)
    stored = bits * int(places.sum()) + 2 * EXACT_BITS * groups
    return Rounded(torch.where(places, out.to(x.dtype), x), stored)


def fp8_scale(x: Tensor, places: Tensor) -> Tensor:
    """By what each row is divided before it becomes float8, float32 ``[batch, 1, 1, 1]``; 0 where it has no value."""
    largest = x.abs().masked_fill(~places, 0).amax((1, 2, 3), keepdim=True).float() / _FP8_MAX
    there = places.flatten(1).any(-1)[:, None, None, None]
    return torch.where(there, largest.clamp_min(torch.finfo(torch.float32).tiny), torch.zeros_like(largest))


def fp8(x: Tensor, places: Tensor, scale: Tensor) -> Tensor:
    """float8_e4m3fn at some places; what is too large for the scale becomes the largest number that there is."""
    narrow = (x.float() / scale).clamp(-_FP8_MAX, _FP8_MAX).to(_FP8)
    return torch.where(places, (narrow.float() * scale).to(x.dtype), x)


def known(what: str, value: str, allowed: tuple[str, ...]) -> None:
    """Raise `BadInput` where a value is none of those there are."""
    if value not in allowed:
        raise BadInput(f"{what} is one of {', '.join(allowed)}, not {value!r}")


def dividing(group: int, width: int) -> int:
    """The size of groups of dims: ``group``, or the width where it is less.

    Raises
    ------
    BadInput
        If it does not divide the width.
    """
    group = min(group, width)
    if group < 1 or width % group:
        fits = max((n for n in range(1, group) if width % n == 0), default=1)
        raise BadInput(f"heads of {width} dims cannot be cut into groups of {group}: the next size that fits is {fits}")
    return group


def _groups(index: Tensor, group: int) -> Tensor:
    """Which group each token belongs to, from 0 in each batch, ``[batch, tokens]``."""
    of = index.clamp_min(0) // group
    return of - of.min()


def _affine(x: Tensor, low: Tensor, high: Tensor, bits: int) -> Tensor:
    # The order of operations is that of the libraries, so that results are equal to the last bit.
    top = 2**bits - 1
    scale, shift = (high - low) / top, -low
    out = ((x + shift) / scale).round().clamp(0, top) * scale - shift
    return torch.where(scale > 0, out, low)

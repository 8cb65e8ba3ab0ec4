"""Rotary embeddings undone exactly, with the angle table that a layer really received.

A layer's rotation is measured, not read from its name: with the same hidden state at every position, a rotated
query is its un-rotated self turned by the table's angles. Of all ways to pair dims, lay out the table and order
its two halves, the one that explains the measured queries is taken; if none does, nothing is claimed.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True)
class AngleTable:
    """The two halves of a table as a layer received them, each ``[batch or 1, tokens, width]``, in their order."""

    one: torch.Tensor
    two: torch.Tensor
    _turns: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict, repr=False)

    def turns(self, columns: tuple[int, ...], cosine_first: bool, sign: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine per token and pair, float64 ``[batch or 1, 1, tokens, pairs]``; computed once a forward."""
        key = (columns, cosine_first, sign)
        if key not in self._turns:
            one, two = (half[..., list(columns)].double()[:, None] for half in (self.one, self.two))
            cos, sin = (one, two) if cosine_first else (two, one)
            self._turns[key] = cos, sin * sign
        return self._turns[key]

    def since(self, token: int) -> AngleTable:
        """The table from one token on."""
        return AngleTable(self.one[:, token:], self.two[:, token:])


@dataclass(frozen=True)
class Rotation:
    """How one layer rotates queries and keys.

    Attributes
    ----------
    pairs : int
        Rotation planes, ``rotary_dims / 2``; 0 where the layer does not rotate.
    head_dim : int
        Width of queries and keys.
    pairing : str
        ``half-split``, ``interleaved`` or ``""`` where nothing rotates.
    start : int
        First rotated dim.
    columns : tuple of int
        Column of the angle table that each pair reads.
    cosine_first : bool
        Whether the table came as (cos, sin).
    sign : int
        Direction of the turn.
    theta : numpy.ndarray
        Angle per token of each pair, ``[pairs]``, radians, as the table had it.
    scale : numpy.ndarray
        Modulus of the table per pair (1 unless the table is scaled, as with YaRN).
    error : float
        Largest difference between measured and re-rotated queries, relative to their largest value.
    """

    pairs: int
    head_dim: int
    pairing: str = ""
    start: int = 0
    columns: tuple[int, ...] = ()
    cosine_first: bool = True
    sign: int = 1
    theta: np.ndarray | None = None
    scale: np.ndarray | None = None
    error: float = 0.0

    @property
    def rotary_dims(self) -> int:
        return 2 * self.pairs

    def dims(self) -> tuple[list[int], list[int]]:
        """First and second dim of every rotated pair, fastest pair first."""
        m = range(self.pairs)
        if self.pairing == "interleaved":
            return [self.start + 2 * i for i in m], [self.start + 2 * i + 1 for i in m]
        return [self.start + i for i in m], [self.start + i + self.pairs for i in m]

    def still(self) -> list[int]:
        """The dims that do not rotate."""
        first, second = self.dims()
        return sorted(set(range(self.head_dim)) - set(first) - set(second))

    def pair_of_dim(self) -> np.ndarray:
        """Pair index of each dim ``[head_dim]``, -1 where it does not rotate."""
        out = np.full(self.head_dim, -1)
        for dims in self.dims():
            out[dims] = np.arange(self.pairs)
        return out

    def angles(self, distances: int) -> np.ndarray:
        """The turn at each distance, complex ``[distances, pairs + still pairs]``; still dims have angle 0."""
        still = np.ones((distances, (len(self.still()) + 1) // 2), dtype=complex)
        if not self.pairs or self.theta is None or self.scale is None:
            return still
        turn = self.scale**2 * np.exp(1j * np.arange(distances)[:, None] * self.theta)
        return np.concatenate([turn, still], axis=1)

    def turns(self, table: AngleTable) -> tuple[torch.Tensor, torch.Tensor]:
        """Cosine and sine per token and pair, float64 ``[batch or 1, 1, tokens, pairs]``."""
        return table.turns(self.columns, self.cosine_first, self.sign)

    def unrotate(self, x: torch.Tensor, table: AngleTable | None) -> torch.Tensor:
        """Queries or keys before rotation, float64 ``[batch, heads, tokens, 2 · (pairs + still pairs)]``.

        Real parts first, imaginary parts second. Dividing by the table's squared modulus undoes scaled tables too.
        """
        x = x.double()
        if table is None or not self.pairs:
            return torch.nn.functional.pad(x, (0, x.shape[-1] % 2))
        first, second = self.dims()
        still = x[..., self.still()]
        still = torch.nn.functional.pad(still, (0, still.shape[-1] % 2))
        half = still.shape[-1] // 2
        cos, sin = self.turns(table)
        norm = cos.square() + sin.square()
        a, b = self._pair(x, first, second)
        real, imaginary = (a * cos + b * sin) / norm, (b * cos - a * sin) / norm
        if not half:
            return torch.cat([real, imaginary], -1)
        return torch.cat([real, still[..., :half], imaginary, still[..., half:]], -1)

    def rotate(self, z: torch.Tensor, table: AngleTable) -> torch.Tensor:
        """The inverse of :meth:`unrotate`, in the layer's own layout, float64 ``[batch, heads, tokens, head_dim]``."""
        real, imaginary = z.chunk(2, -1)
        cos, sin = self.turns(table)
        a, b = real[..., : self.pairs], imaginary[..., : self.pairs]
        out = z.new_zeros(*z.shape[:-1], self.head_dim)
        first, second = self.dims()
        out[..., first], out[..., second] = a * cos - b * sin, b * cos + a * sin
        still = torch.cat([real[..., self.pairs :], imaginary[..., self.pairs :]], -1)
        out[..., self.still()] = still[..., : len(self.still())]
        return out

    def _pair(self, x: torch.Tensor, first: list[int], second: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
        if self.pairing == "half-split":
            block = x[..., self.start : self.start + 2 * self.pairs]
            return block[..., : self.pairs], block[..., self.pairs :]
        return x[..., first], x[..., second]


def find_table(given: Mapping[str, Any]) -> AngleTable | None:
    """The angle table among a module's arguments.

    It is a pair of real tensors, one complex tensor of unit numbers, or one real tensor whose halves are a pair, under
    one of the names that modeling files give to it.
    """
    for name in _NAMES & given.keys():
        value = given[name]
        if isinstance(value, torch.Tensor):
            value = _halves(value)
        if isinstance(value, tuple | list) and len(value) == 2 and all(isinstance(v, torch.Tensor) for v in value):
            one, two = (_flat(v) for v in value)
            if one.ndim == 3 and one.shape == two.shape:
                return AngleTable(one, two)
    return None


_NAMES = {"position_embeddings", "freqs_cis", "rotary_pos_emb", "rotary_embeds", "sinusoidal_pos"}


def _halves(value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
    if value.is_complex():
        return value.real, value.imag
    if value.shape[-1] % 2:
        return None
    one, two = value.chunk(2, -1)
    unit = one.square() + two.square() - 1
    return (one, two) if bool(unit.abs().max() < 1e-2) else None


def _flat(value: torch.Tensor) -> torch.Tensor:
    """``[batch or 1, tokens, width]`` out of what may lack the first or have one for heads."""
    if value.ndim == 4 and value.shape[1] == 1:
        value = value[:, 0]
    return value[None] if value.ndim == 2 else value


def measure(q: torch.Tensor, k: torch.Tensor, table: AngleTable | None, tolerance: float) -> Rotation | None:
    """The rotation that explains queries and keys of one and the same hidden state at every position.

    Parameters
    ----------
    q, k : torch.Tensor
        ``[1, heads, tokens, head_dim]`` of a forward in which every token had the same hidden state.
    table : AngleTable or None
        The table that the layer received.
    tolerance : float
        Largest relative difference allowed.

    Returns
    -------
    Rotation or None
        ``pairs = 0`` where nothing turns; None where something turns and no hypothesis explains it.
    """
    if k.shape[-1] != q.shape[-1]:
        return None
    found = _measure(q, k, table, tolerance)
    if found is None and q.shape[2] >= 2 * _SETTLED:
        found = _measure(q, k, table, tolerance, _SETTLED)
    if found is None or table is None or not found.pairs:
        return found
    cos, sin = (t[0, 0].cpu().numpy() for t in found.turns(table))
    return replace(found, theta=angle_per_token(cos + 1j * sin), scale=np.hypot(cos[0], sin[0]))


def why_not(q: torch.Tensor, table: AngleTable | None, tolerance: float) -> str:
    """In a sentence, what is known of queries that `measure` found no rotation for."""
    x = q[:, :, _SETTLED:].double()
    once = x[:, :, :1]
    if _spread(x, once * (x * once).sum((1, 3), True) / once.square().sum((1, 3), True)) <= tolerance:
        return "queries grow with position, by a factor that content has no part in"
    if table is None:
        return "queries change with position, and no table of angles is given to the layer or made in it"
    for rotation in _hypotheses(q.shape[-1], table):
        cos, sin = rotation.turns(table)
        first, second = rotation.dims()
        basis = torch.stack([cos[0, 0].T, sin[0, 0].T], -1)[None]
        told = True
        for dims in (first, second):
            x = q[:1, ..., dims].double().permute(1, 3, 2, 0)
            x = x.squeeze(-1)[..., None]
            fit = basis @ torch.linalg.lstsq(basis.expand(len(x), -1, -1, -1), x).solution
            told = told and _spread(x, fit) <= tolerance
        if told:
            return "dims are scaled one by one after they turn, so that logits depend on more than distance"
    return "queries change with position, but not by the table of angles that the layer receives"


_SETTLED = 8
"""Tokens after which a short convolution over neighbours no longer sees the padding in front of the text."""


def _measure(
    q: torch.Tensor, k: torch.Tensor, table: AngleTable | None, tolerance: float, start: int = 0
) -> Rotation | None:
    q, k = q[:, :, start:], k[:, :, start:]
    if max(_spread(x, x[:, :, :1].double().expand(x.shape)) for x in (q, k)) <= tolerance:
        return Rotation(0, q.shape[-1])
    if table is None:
        return None
    some = table.since(start)
    fitting = ((r, e) for r in _hypotheses(q.shape[-1], table) if (e := _misfit(r, some, q, k)) <= tolerance)
    # Cosine and sine swapped, with the sign turned, is the same rotation and a quarter turn more: token 0 tells.
    best = min(fitting, key=lambda fit: (not _starts_at_0(fit[0], table), fit[1]), default=None)
    return best and replace(best[0], error=best[1])


def _starts_at_0(rotation: Rotation, table: AngleTable) -> bool:
    cos, sin = (t[0, 0, 0] for t in rotation.turns(table))
    return bool(cos.sum() > sin.abs().sum())


def angle_per_token(turn: np.ndarray) -> np.ndarray:
    """Angle per token from the turns at consecutive positions ``[tokens, pairs]``, the span doubled step by step.

    A longer span divides the table's rounding by its length; the estimate so far says how many full circles to add.
    """
    theta: np.ndarray = np.angle(turn[1] * turn[0].conj())
    span = 2
    while span < len(turn):
        total = np.angle(turn[span] * turn[0].conj())
        theta = (total + 2 * np.pi * np.round((theta * span - total) / (2 * np.pi))) / span
        span *= 2
    return theta


def _hypotheses(width: int, table: AngleTable) -> Iterator[Rotation]:
    columns = table.one.shape[-1]
    for rotary, pairing, cosine_first, sign in itertools.product(
        sorted({columns, 2 * columns}), ("half-split", "interleaved"), (True, False), (1, -1)
    ):
        pairs = rotary // 2
        if rotary > width or rotary % 2:
            continue
        layouts = {tuple(range(pairs))} | ({tuple(range(0, 2 * pairs, 2))} if 2 * pairs <= columns else set())
        for layout, start in itertools.product(layouts, sorted({0, width - rotary})):
            yield Rotation(pairs, width, pairing, start, layout, cosine_first, sign)


def _misfit(rotation: Rotation, table: AngleTable, *tensors: torch.Tensor) -> float:
    worst = 0.0
    for x in tensors:
        once = rotation.unrotate(x, table)[:, :, :1].expand(-1, -1, x.shape[2], -1)
        worst = max(worst, _spread(x, rotation.rotate(once, table)))
    return worst if np.isfinite(worst) else np.inf


def _spread(x: torch.Tensor, other: torch.Tensor) -> float:
    return ((x.double() - other).abs().max() / x.abs().max().clamp_min(1e-30)).item()

"""Form 2 on the causal matrix: ``w_ij ≈ a_{i-j} + b_i + c_j`` over the real pairs ``j ≤ i`` only.

Real content and real distance stay tied together here. No logit matrix is built: row and column sums come from
cumulative sums, diagonal sums from an FFT, the sum of squares from chunked Gram matrices. The normal equations consist
of triangular sums, so conjugate gradients solve them for all heads at once in ``O(n)`` a step, without a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch

from rotoscope.stats.additive import correlation


@dataclass(frozen=True)
class CausalSums:
    """What the causal fit needs of logits ``w_ij``, ``j ≤ i < n``, per leading dimension (head).

    Attributes
    ----------
    squares : torch.Tensor
        ``Σ w²``, ``[...]``.
    rows, columns, diagonals : torch.Tensor
        Sums over keys, over queries, and over pairs of equal distance ``[..., n]``.
    """

    squares: torch.Tensor
    rows: torch.Tensor
    columns: torch.Tensor
    diagonals: torch.Tensor

    @classmethod
    def stack(cls, parts: Sequence[CausalSums]) -> CausalSums:
        """Sums of several groups of heads, one after the other."""
        return cls(*(torch.cat([getattr(p, f.name) for p in parts]) for f in fields(cls)))


@dataclass(frozen=True)
class CausalFit:
    """Sums of squares over the causal matrix: about the mean, about each query's mean, and left over by form 2."""

    raw: torch.Tensor
    within: torch.Tensor
    residual: torch.Tensor

    @property
    def form2(self) -> torch.Tensor:
        """Correlation of the real logits with form 2."""
        return correlation(self.residual, self.raw)

    @property
    def form2_within(self) -> torch.Tensor:
        """The same after removing each query's mean over its permitted keys."""
        return correlation(self.residual, self.within)


def causal_sums(q: torch.Tensor, k: torch.Tensor, chunk: int = 128) -> CausalSums:
    """Sums of ``q_i · k_j`` over ``j ≤ i`` for rotated queries and keys of one row of text.

    Parameters
    ----------
    q : torch.Tensor
        ``[heads, n, head_dim]``.
    k : torch.Tensor
        ``[kv_heads, n, head_dim]``; query head ``a`` reads kv head ``a // (heads / kv_heads)``.
    chunk : int
        Rows whose own triangle is built at a time.
    """
    heads, n, width = q.shape
    group = heads // k.shape[0]
    queries = q.double().view(-1, group, n, width)
    keys = k.double()[:, None]
    rows = (queries * keys.cumsum(-2)).sum(-1)
    columns = (queries.flip(-2).cumsum(-2).flip(-2) * keys).sum(-1)
    fq, fk = (torch.fft.rfft(x.transpose(-1, -2), 2 * n) for x in (queries, keys))
    diagonals = torch.fft.irfft((fq * fk.conj()).sum(-2), 2 * n)[..., :n]
    squares = torch.zeros(queries.shape[:2], dtype=torch.float64, device=q.device)
    before = keys.new_zeros(*keys.shape[:2], width, width)
    for start in range(0, n, chunk):
        a, b = queries[..., start : start + chunk, :], keys[..., start : start + chunk, :]
        squares += ((a @ before) * a).sum((-1, -2)) + (a @ b.transpose(-1, -2)).tril().square().sum((-1, -2))
        before = before + b.transpose(-1, -2) @ b
    return CausalSums(squares.flatten(), *(x.reshape(heads, n) for x in (rows, columns, diagonals)))


def fit_causal(sums: CausalSums, tolerance: float = 1e-12) -> CausalFit:
    """Least squares of ``a_{i-j} + b_i + c_j`` on the causal matrix."""
    n = sums.rows.shape[-1]
    right = _right(sums)
    explained = (right * _solve(right, tolerance)).sum((-1, -2))
    count = torch.arange(1, n + 1, dtype=torch.float64, device=right.device)
    mean = sums.rows.sum(-1).square() / count.sum()
    return CausalFit(sums.squares - mean, sums.squares - (sums.rows.square() / count).sum(-1), sums.squares - explained)


@dataclass(frozen=True)
class CausalTerms:
    """One solution of the least squares, each ``[..., n]``.

    The terms share a three-dimensional null space: their sum ``a_{i-j} + b_i + c_j`` over ``j ≤ i`` is determined,
    they themselves are not.
    """

    rows: torch.Tensor
    columns: torch.Tensor
    distances: torch.Tensor


def causal_terms(sums: CausalSums, tolerance: float = 1e-12) -> CausalTerms:
    """The terms ``b``, ``c`` and ``a`` that :func:`fit_causal` fits."""
    return CausalTerms(*_solve(_right(sums), tolerance).unbind(-2))


def _right(sums: CausalSums) -> torch.Tensor:
    """The right-hand side of the normal equations, ``[..., 3, n]``."""
    return torch.stack([sums.rows, sums.columns, sums.diagonals], -2)


def _normal(x: torch.Tensor) -> torch.Tensor:
    """The normal equations' matrix times ``x = (b, c, a)``, ``[..., 3, n]``, by cumulative sums."""
    b, c, a = x.unbind(-2)
    n = x.shape[-1]
    up = torch.arange(1, n + 1, dtype=x.dtype, device=x.device)
    down = up.flip(0)
    forward_a, forward_c = a.cumsum(-1), c.cumsum(-1)
    # Row i meets columns 0..i and distances 0..i; column j meets rows j..n-1 and distances 0..n-1-j.
    tail_b = b.flip(-1).cumsum(-1).flip(-1)
    rows = up * b + forward_c + forward_a
    columns = down * c + tail_b + forward_a.flip(-1)
    distances = down * a + tail_b + forward_c.flip(-1)
    return torch.stack([rows, columns, distances], -2)


def _solve(right: torch.Tensor, tolerance: float, limit: int = 2000) -> torch.Tensor:
    """Preconditioned conjugate gradients on a consistent, singular system, all leading dimensions at once."""
    n = right.shape[-1]
    up = torch.arange(1, n + 1, dtype=right.dtype, device=right.device)
    inverse = 1 / torch.stack([up, up.flip(0), up.flip(0)])
    x, residual = torch.zeros_like(right), right.clone()
    z = residual * inverse
    direction = z
    power = (residual * z).sum((-1, -2), keepdim=True)
    goal = tolerance**2 * power
    for _ in range(limit):
        if bool((power <= goal).all()):
            break
        image = _normal(direction)
        step = power / (direction * image).sum((-1, -2), keepdim=True).clamp_min(1e-300)
        x, residual = x + step * direction, residual - step * image
        z = residual * inverse
        power, previous = (residual * z).sum((-1, -2), keepdim=True), power
        direction = z + power / previous.clamp_min(1e-300) * direction
    return x

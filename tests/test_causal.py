"""The causal fit against dense least squares on a materialised matrix."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from rotoscope.stats.causal import causal_sums, fit_causal


def heads(n: int, seed: int, heads: int = 4, kv: int = 2, width: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    q, k = (torch.randn(h, n, width, generator=g, dtype=torch.float64) for h in (heads, kv))
    return q + 0.8, k - 0.5


def dense(w: np.ndarray) -> tuple[float, float, float]:
    """Sums of squares about the mean, about row means, and left over by ``a_{i-j} + b_i + c_j``."""
    n = len(w)
    i, j = np.tril_indices(n)
    y = w[i, j]
    design = np.zeros((len(y), 3 * n))
    at = np.arange(len(y))
    for column in (i, n + j, 2 * n + i - j):
        design[at, column] = 1
    rest = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    rows = np.bincount(i, y) / np.bincount(i)
    return ((y - y.mean()) ** 2).sum(), ((y - rows[i]) ** 2).sum(), (rest**2).sum()


@pytest.mark.parametrize(("n", "chunk"), [(5, 128), (40, 7), (90, 32)])
def test_fit_equals_dense_least_squares(n: int, chunk: int) -> None:
    q, k = heads(n, n)
    fit = fit_causal(causal_sums(q, k, chunk))
    for head in range(len(q)):
        w = (q[head] @ k[head // 2].T).numpy()
        raw, within, residual = dense(w)
        assert fit.raw[head].item() == pytest.approx(raw, rel=1e-10)
        assert fit.within[head].item() == pytest.approx(within, rel=1e-10)
        assert fit.residual[head].item() == pytest.approx(residual, rel=1e-8, abs=1e-9 * raw)
        assert fit.form2[head].item() == pytest.approx(np.sqrt(1 - residual / raw), abs=1e-8)


def test_sums_equal_those_of_the_matrix_at_real_length() -> None:
    q, k = heads(1500, 3, heads=2, kv=1)
    sums = causal_sums(q, k)
    w = np.tril((q[1] @ k[0].T).numpy())
    assert np.allclose(sums.rows[1], w.sum(1))
    assert np.allclose(sums.columns[1], w.sum(0))
    assert np.allclose(sums.diagonals[1], [np.trace(w, -d) for d in range(1500)])
    assert sums.squares[1].item() == pytest.approx((w**2).sum(), rel=1e-12)


def test_exactly_additive_logits_leave_no_residual() -> None:
    n = 64
    t = torch.arange(n).double()
    # i² - 2ij + j² = (i - j)²: a function of distance alone, plus a query and a key term.
    q = torch.stack([t**2 + t.sin(), -2 * t, torch.ones(n).double()], -1)[None]
    k = torch.stack([torch.ones(n).double(), t, t**2 + t.cos()], -1)[None]
    fit = fit_causal(causal_sums(q, k))
    assert (fit.residual / fit.raw).item() < 1e-12

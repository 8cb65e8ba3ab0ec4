"""How far attention logits are position + semantics: the closed-form fit on the full grid.

With un-rotated queries and keys as complex numbers per rotation plane, ``w(i, j, d) = Re Σ_m q_im k̄_jm e^{idθ_m}`` is
defined for every query, key and distance, without confounding position with content. On that full grid the least
squares fits are the analysis-of-variance main effects, and every sum of squares follows from first and second moments
of queries, keys and angles, at a cost that does not grow with the number of triples (Han & Ji 2025, arXiv 2503.13305).

- Form 1 (per query): ``w ≈ f(q_i, d) + g(q_i, k_j)``.
- Form 2 (three axes): ``w ≈ a_d + b_i + c_j``.

Each as ``r = √R²``, raw, and within-query (each query's mean removed, since softmax never sees it).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rotoscope.stats.moments import Moments


@dataclass(frozen=True)
class AdditiveFit:
    """Sums of squares over the full query × key × distance grid, one value per leading dimension (head).

    Attributes
    ----------
    total : torch.Tensor
        ``Σ w²``.
    raw : torch.Tensor
        About the grand mean.
    within : torch.Tensor
        About each query's mean.
    residual1, residual2 : torch.Tensor
        Left over by form 1 and by form 2.
    query, key, distance : torch.Tensor
        Main effects of form 2: ``pD Σ(b_i - m)²``, ``nD Σ(c_j - m)²``, ``np Σ(a_d - m)²``.
    """

    total: torch.Tensor
    raw: torch.Tensor
    within: torch.Tensor
    residual1: torch.Tensor
    residual2: torch.Tensor
    query: torch.Tensor
    key: torch.Tensor
    distance: torch.Tensor

    @property
    def form1(self) -> torch.Tensor:
        """Correlation of the logits with form 1."""
        return correlation(self.residual1, self.raw)

    @property
    def form1_within(self) -> torch.Tensor:
        """Correlation with form 1 after removing each query's mean."""
        return correlation(self.residual1, self.within)

    @property
    def form2(self) -> torch.Tensor:
        """Correlation of the logits with form 2."""
        return correlation(self.residual2, self.raw)

    @property
    def form2_within(self) -> torch.Tensor:
        """Correlation with form 2 after removing each query's mean."""
        return correlation(self.residual2, self.within)


def fit(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> AdditiveFit:
    """Fit forms 1 and 2 by least squares on the full grid.

    Parameters
    ----------
    q : torch.Tensor
        Un-rotated queries, complex ``[..., n, M]``.
    k : torch.Tensor
        Un-rotated keys, complex ``[..., p, M]``.
    angles : torch.Tensor
        Angle of each pair at each distance, radians, ``[D, M]``; or the turns themselves, complex.

    Returns
    -------
    AdditiveFit
        With one value per leading dimension.
    """
    turns = angles if angles.is_complex() else torch.polar(torch.ones_like(angles.double()), angles.double())
    return fit_moments(Moments.of(q), Moments.of(k), Moments.of(turns))


def fit_moments(q: Moments, k: Moments, e: Moments) -> AdditiveFit:
    """The same fit from moments alone: queries and keys ``[..., 2M]``, turns ``[2M]`` or ``[..., 2M]``."""
    total = grid_squares(q, k, e)
    qr, qi = q.mean.chunk(2, -1)
    kr, ki = k.mean.chunk(2, -1)
    er, ei = e.mean.chunk(2, -1)
    # Each main effect is Re(x · u), with u the product of the other two means: key̅·turn, query·turn, query·key̅.
    ur, ui = kr * er + ki * ei, kr * ei - ki * er
    vr, vi = qr * er - qi * ei, qr * ei + qi * er
    tr, ti = qr * kr + qi * ki, qi * kr - qr * ki
    mean = (qr * ur - qi * ui).sum(-1)
    n, p, d = q.n, k.n, e.n
    cells = n * p * d * mean.square()
    query = p * d * q.quadratic(ur, -ui) - cells
    key = n * d * k.quadratic(vr, vi) - cells
    distance = n * p * e.quadratic(tr, -ti) - cells
    # What is left of a total by rounding alone is no variation.
    raw, within = (torch.where(x > 1e-13 * total, x, 0) for x in (total - cells, total - cells - query))
    return AdditiveFit(
        total, raw, within, grid_squares(q, k.centred(), e.centred()), within - key - distance, query, key, distance
    )


def grid_squares(q: Moments, k: Moments, e: Moments) -> torch.Tensor:
    """``Σ_{ijd} (Re Σ_m q_im k̄_jm e_dm)²`` from second moments.

    ``½ Re Σ_{mm'} [QᴴQ ∘ K̄ᴴK̄ ∘ EᴴE + QᵀQ ∘ K̄ᵀK̄ ∘ EᵀE]``, in ``O(M²)`` for any number of triples.
    """
    (qh, qt), (kh, kt), (eh, et) = q.complex_grams(), k.complex_grams(), e.complex_grams()
    # Conjugating the keys conjugates both of their Gram matrices.
    return 0.5 * ((qh * kh.conj() * eh).real + (qt * kt.conj() * et).real).sum((-1, -2))


def correlation(residual: torch.Tensor, about: torch.Tensor) -> torch.Tensor:
    """``√(1 - residual / about)``, 0 where rounding would make it imaginary, NaN where nothing varies."""
    return torch.where(about > 0, (1 - residual / about).clamp_min(0).sqrt(), torch.nan)


def predicted_form1_within(q: Moments, k: Moments, e: Moments) -> torch.Tensor:
    """Form-1 within-query r expected from per-pair concentration and rotation alone.

    ``√(1 - Σ e v F / Σ e (v + |k̄|² F))`` with ``e = E|q_m|²``, ``v = E|k_m - k̄_m|²`` and the rotation spread
    ``F_m = 1 - |mean_d e^{idθ_m}|²``: logits are additive where keys are nearly constant or pairs turn slowly.
    """
    energy, centre = q.pair_energy, k.pair_mean_energy
    spread = k.pair_energy - centre
    turn = rotation_spread(e)
    return correlation((energy * spread * turn).sum(-1), (energy * (spread + centre * turn)).sum(-1))


def rotation_spread(e: Moments) -> torch.Tensor:
    """``F_m = E|e_m|² - |mean_d e_m|²`` per pair ``[M]``: 0 where a pair hardly turns, 1 where it circles."""
    return e.pair_energy - e.pair_mean_energy


def concentration(k: Moments) -> torch.Tensor:
    """``κ_m = |mean k_m|² / E|k_m - mean k_m|²`` per pair, ``[..., M]``."""
    return k.pair_mean_energy / (k.pair_energy - k.pair_mean_energy)

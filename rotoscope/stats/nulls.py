"""What explains the additivity of logits, found by taking moments away.

The full-grid r is a function of first and second moments alone, so a Gaussian with the same moments reproduces it:
that is a check of the implementation, not a null. An arm changes the moments of queries and keys, and the fit is
repeated on what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from rotoscope.stats.moments import Moments

Arm = Callable[[Moments, Moments, torch.Generator], tuple[Moments, Moments]]


def gaussian(x: Moments, generator: torch.Generator) -> Moments:
    """Moments of ``x.n`` draws from the Gaussian with the same mean and full real covariance."""
    mean = x.mean
    covariance = x.gram / x.n - mean[..., :, None] * mean[..., None, :]
    values, vectors = torch.linalg.eigh(covariance)
    root = vectors * values.clamp_min(0).sqrt()[..., None, :]
    drawn = _normal(x, generator) @ root.transpose(-1, -2)
    return Moments.of(drawn + mean[..., None, :])


def isotropic(x: Moments, generator: torch.Generator, keep_mean: bool) -> Moments:
    """Moments of ``x.n`` circular Gaussian draws of the same spread in every pair, about the mean or about 0."""
    spread = (x.pair_energy - x.pair_mean_energy).mean(-1)
    drawn = _normal(x, generator) * (spread / 2).clamp_min(0).sqrt()[..., None, None]
    return Moments.of(drawn + x.mean[..., None, :] if keep_mean else drawn)


def _normal(x: Moments, generator: torch.Generator) -> torch.Tensor:
    shape = (*x.sum.shape[:-1], x.n, x.sum.shape[-1])
    # Drawn in single precision, which is several times as fast and far finer than a null needs.
    return torch.randn(shape, generator=generator).double().to(x.sum.device)


ARMS: Mapping[str, Arm] = {
    "key_means_removed": lambda q, k, _: (q, k.centred()),
    "query_means_removed": lambda q, k, _: (q.centred(), k),
    "both_means_removed": lambda q, k, _: (q.centred(), k.centred()),
    "energies_equalised": lambda q, k, _: (q.equalised(), k.equalised()),
    "no_means_equal_energies": lambda q, k, _: (q.centred().equalised(), k.centred().equalised()),
    "isotropic_covariance": lambda q, k, g: (isotropic(q, g, True), isotropic(k, g, True)),
    "isotropic": lambda q, k, g: (isotropic(q, g, False), isotropic(k, g, False)),
    "matched_gaussian": lambda q, k, g: (gaussian(q, g), gaussian(k, g)),
}
"""Arms of the explanation table; ``matched_gaussian`` is the check."""

RANDOM_WEIGHTS_ARMS = (
    "key_means_removed",
    "both_means_removed",
    "energies_equalised",
    "no_means_equal_energies",
)
"""The arms that are repeated on random weights."""

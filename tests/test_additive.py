"""The closed-form fit against the materialised tensor, and arms of moments against the same done to vectors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rotoscope.stats import additive, nulls
from rotoscope.stats.moments import Moments


def draw(seed: int, *shapes: tuple[int, ...], offset: float = 0.7) -> list[torch.Tensor]:
    rng = np.random.default_rng(seed)
    return [torch.from_numpy(rng.normal(offset, 1, s) + 1j * rng.normal(-offset, 1, s)) for s in shapes]


def brute(q: torch.Tensor, k: torch.Tensor, e: torch.Tensor) -> dict[str, float]:
    """Every sum of squares from the full tensor, numpy only."""
    w = np.einsum("im,jm,dm->ijd", q.numpy(), k.numpy().conj(), e.numpy()).real
    n, p, d = w.shape
    mean, b, c, a = w.mean(), w.mean((1, 2)), w.mean((0, 2)), w.mean((0, 1))
    form1 = w.mean(1, keepdims=True) + w.mean(2, keepdims=True) - w.mean((1, 2), keepdims=True)
    form2 = a + b[:, None, None] + c[:, None] - 2 * mean
    return {
        "total": (w**2).sum(),
        "raw": ((w - mean) ** 2).sum(),
        "within": ((w - b[:, None, None]) ** 2).sum(),
        "residual1": ((w - form1) ** 2).sum(),
        "residual2": ((w - form2) ** 2).sum(),
        "query": p * d * ((b - mean) ** 2).sum(),
        "key": n * d * ((c - mean) ** 2).sum(),
        "distance": n * p * ((a - mean) ** 2).sum(),
    }


@pytest.mark.parametrize("shape", [(64, 96, 80, 32), (2, 3, 5, 1), (1, 40, 7, 3), (33, 1, 65, 8), (50, 20, 1, 4)])
def test_every_sum_of_squares_equals_brute_force(shape: tuple[int, int, int, int]) -> None:
    n, p, d, m = shape
    q, k = draw(sum(shape), (n, m), (p, m))
    angles = torch.from_numpy(np.random.default_rng(1).uniform(0, 3, (d, m)))
    e = torch.exp(1j * angles)
    fit, truth = additive.fit(q, k, angles), brute(q, k, e)
    for name, value in truth.items():
        assert getattr(fit, name).item() == pytest.approx(value, rel=1e-10, abs=1e-10 * truth["total"]), name


def test_correlations_are_what_regression_on_the_full_grid_gives() -> None:
    q, k = draw(5, (6, 4), (7, 4))
    e = torch.exp(1j * torch.arange(5.0).double()[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.01]))
    w = np.einsum("im,jm,dm->ijd", q.numpy(), k.numpy().conj(), e.numpy()).real
    i, j, d = (x.ravel() for x in np.indices(w.shape))
    y = w.ravel()

    def r(columns: list[np.ndarray], target: np.ndarray) -> float:
        design = np.concatenate([np.eye(c.max() + 1)[c] for c in columns], axis=1)
        fitted = design @ np.linalg.lstsq(design, target, rcond=None)[0]
        return float(np.corrcoef(fitted, target)[0, 1])

    fit = additive.fit(q, k, e)
    assert fit.form1.item() == pytest.approx(r([i * 5 + d, i * 7 + j], y), abs=1e-9)
    assert fit.form2.item() == pytest.approx(r([i, j, d], y), abs=1e-9)
    within = y - w.mean((1, 2))[i]
    assert fit.form1_within.item() == pytest.approx(r([i * 5 + d, i * 7 + j], within), abs=1e-9)
    assert fit.form2_within.item() == pytest.approx(r([j, d], within), abs=1e-9)


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 12), st.integers(1, 12), st.integers(1, 12), st.integers(1, 6))
def test_any_shape(seed: int, n: int, p: int, d: int, m: int) -> None:
    q, k, e = draw(seed, (n, m), (p, m), (d, m), offset=0.1)
    fit, truth = additive.fit_moments(Moments.of(q), Moments.of(k), Moments.of(e)), brute(q, k, e)
    for name, value in truth.items():
        assert getattr(fit, name).item() == pytest.approx(value, rel=1e-9, abs=1e-9 * truth["total"]), name


def test_heads_are_fitted_at_once_and_moments_add_up_over_batches() -> None:
    q, k, e = draw(2, (3, 20, 5), (3, 30, 5), (11, 5))
    whole = additive.fit(q, k, e)
    streamed = additive.fit_moments(
        Moments.of(q[:, :7]) + Moments.of(q[:, 7:]), Moments.of(k[:, :1]) + Moments.of(k[:, 1:]), Moments.of(e)
    )
    for head in range(3):
        alone = additive.fit(q[head], k[head], e)
        for kind in ("form1", "form1_within", "form2", "form2_within"):
            assert getattr(whole, kind)[head].item() == pytest.approx(getattr(alone, kind).item(), abs=1e-12)
            assert getattr(streamed, kind)[head].item() == pytest.approx(getattr(alone, kind).item(), abs=1e-12)


def test_without_rotation_logits_are_additive_and_without_variation_nothing_is_claimed() -> None:
    q, k = draw(3, (9, 4), (8, 4))
    still = additive.fit(q, k, torch.zeros(6, 4))
    assert still.form1.item() == pytest.approx(1, abs=1e-7)
    nothing = additive.fit(torch.zeros(3, 2, dtype=torch.complex128), k[:, :2], torch.zeros(6, 2))
    assert torch.isnan(nothing.form1)


def explicit(arm: str, x: np.ndarray) -> np.ndarray:
    """What an arm does, done to the vectors."""
    centred = x - x.mean(0)
    if arm in ("removed", "centred"):
        return centred
    if arm == "equalised":
        return x / np.sqrt((abs(x) ** 2).mean(0))
    return centred / np.sqrt((abs(centred) ** 2).mean(0))


@pytest.mark.parametrize(
    ("arm", "on_q", "on_k"),
    [
        ("key_means_removed", None, "removed"),
        ("query_means_removed", "removed", None),
        ("both_means_removed", "removed", "removed"),
        ("energies_equalised", "equalised", "equalised"),
        ("no_means_equal_energies", "both", "both"),
    ],
)
def test_arms_of_moments_equal_arms_of_vectors(arm: str, on_q: str | None, on_k: str | None) -> None:
    q, k = draw(8, (60, 6), (50, 6))
    angles = torch.arange(40.0)[:, None] * torch.logspace(0, -3, 6)
    moved = nulls.ARMS[arm](Moments.of(q), Moments.of(k), torch.Generator())
    turns = torch.polar(torch.ones_like(angles.double()), angles.double())
    found = additive.fit_moments(*moved, Moments.of(turns))
    x = torch.from_numpy(explicit(on_q, q.numpy())) if on_q else q
    y = torch.from_numpy(explicit(on_k, k.numpy())) if on_k else k
    truth = brute(x, y, turns)
    assert found.residual1.item() == pytest.approx(truth["residual1"], rel=1e-9)
    assert found.within.item() == pytest.approx(truth["within"], rel=1e-9)


def test_a_gaussian_with_the_same_moments_gives_the_same_r_and_isotropic_ones_do_not() -> None:
    rng = np.random.default_rng(0)
    mix = rng.normal(size=(16, 16)) * np.logspace(0, -1, 16)
    q, k = (Moments.of(torch.from_numpy(rng.normal(size=(2, 4000, 16)) @ mix + rng.normal(size=16))) for _ in range(2))
    e = Moments.of(torch.exp(1j * torch.arange(300.0).double()[:, None] * torch.logspace(0, -4, 8).double()))
    real = additive.fit_moments(q, k, e)
    matched = additive.fit_moments(*nulls.ARMS["matched_gaussian"](q, k, torch.Generator().manual_seed(0)), e)
    round_ = additive.fit_moments(*nulls.ARMS["isotropic"](q, k, torch.Generator().manual_seed(0)), e)
    assert (real.form1 - matched.form1).abs().max() < 0.01
    assert (real.form2_within - matched.form2_within).abs().max() < 0.01
    assert (real.form1 - round_.form1).abs().min() > 0.05


def test_sampled_arms_have_the_moments_they_promise_and_leave_the_global_generator_alone() -> None:
    x = Moments.of(torch.randn(1, 20000, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64) + 2)
    before = torch.get_rng_state()
    kept = nulls.isotropic(x, torch.Generator().manual_seed(3), keep_mean=True)
    same = nulls.gaussian(x, torch.Generator().manual_seed(3))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.allclose(kept.mean, x.mean, atol=0.05)
    assert torch.allclose(same.gram / same.n, x.gram / x.n, atol=0.2)
    spread = kept.pair_energy - kept.pair_mean_energy
    assert torch.allclose(spread, (x.pair_energy - x.pair_mean_energy).mean().expand_as(spread), rtol=0.05)


def test_prediction_and_concentration_follow_their_formulas() -> None:
    q, k = (x.numpy() for x in draw(11, (200, 5), (300, 5)))
    theta = np.logspace(0, -4, 5)
    turns = np.exp(1j * np.arange(100)[:, None] * theta)
    e, v = (abs(q) ** 2).mean(0), (abs(k - k.mean(0)) ** 2).mean(0)
    centre, spread = abs(k.mean(0)) ** 2, 1 - abs(turns.mean(0)) ** 2
    truth = np.sqrt(1 - (e * v * spread).sum() / (e * (v + centre * spread)).sum())
    mq, mk, me = (Moments.of(torch.from_numpy(x)) for x in (q, k, turns))
    assert additive.predicted_form1_within(mq, mk, me).item() == pytest.approx(truth, abs=1e-12)
    assert np.allclose(additive.concentration(mk).numpy(), centre / v)

"""The demo model's numbers against published ones and against slow, independent routes."""

from __future__ import annotations

from pydoc_data.topics import topics
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch

import rotoscope as rs
from rotoscope.model.tap import tap
from rotoscope.stats.additive import fit_moments
from rotoscope.studies import observe

# Mean per-head r of form 1, within, form 2, within; d < 1,024, position 0 dropped, computed with plain code on the text
# below: characters 1,000 to 40,000 of the joined topics, first 1,024 tokens.
KNOWN = {
    "as_it_is": (0.970, 0.965, 0.874, 0.849),
    "key_means_removed": (0.902, 0.902, 0.763, 0.763),
    "query_means_removed": (0.961, 0.930, 0.644, 0),
    "both_means_removed": (0.834, 0.834, 0, 0),
    "energies_equalised": (0.884, 0.869, 0.623, 0.563),
    "no_means_equal_energies": (0.712, 0.712, 0, 0),
    "isotropic_covariance": (0.949, 0.935, 0.888, 0.852),
    "isotropic": (0.680, 0.680, 0.03, 0.02),
    "random": (0.920, 0.912, 0.826, 0.807),
    "random_key_means_removed": (0.652, 0.652, 0.564, 0.564),
    "random_both_means_removed": (0.656, 0.656, 0, 0),
    "random_energies_equalised": (0.886, 0.870, 0.755, 0.718),
    "random_no_means_equal_energies": (0.667, 0.667, 0, 0),
}


@pytest.fixture(scope="module")
def ids(demo: rs.LM) -> list[int]:
    return demo.encode("\n".join(topics.values())[1000:40000])[:1024].tolist()


@pytest.fixture(scope="module")
def seen(demo: rs.LM, ids: list[int]) -> dict[str, pd.DataFrame]:
    return observe.observe(demo, ids, seed=0)


@pytest.fixture(scope="module")
def twin(demo: rs.LM, ids: list[int]) -> dict[str, pd.DataFrame]:
    return observe.observe_twin(demo, ids, seed=0)


@pytest.mark.parametrize("arm", KNOWN)
def test_the_explanation_table(arm: str, seen: dict[str, pd.DataFrame], request: pytest.FixtureRequest) -> None:
    heads = seen["heads"]
    name = arm.removeprefix("random").removeprefix("_")
    if arm.startswith("random"):
        heads = request.getfixturevalue("twin")["heads"]
    found = [heads[kind if name in ("", "as_it_is") else f"{kind}__{name}"].mean() for kind in observe.KINDS]
    assert found == pytest.approx(KNOWN[arm], abs=0.02)


def test_the_matched_gaussian_gives_the_same_r(seen: dict[str, pd.DataFrame]) -> None:
    heads = seen["heads"]
    for kind in observe.KINDS:
        assert heads[f"{kind}__matched_gaussian"].mean() == pytest.approx(heads[kind].mean(), abs=0.005)


def test_prediction_and_causal_fit(seen: dict[str, pd.DataFrame], twin: dict[str, pd.DataFrame]) -> None:
    heads = seen["heads"]
    assert heads.form1_within.corr(heads.predicted, method="spearman") == pytest.approx(0.92, abs=0.02)
    assert (heads.form1_within - heads.predicted).abs().mean() == pytest.approx(0.007, abs=0.001)
    assert (heads.causal.mean(), heads.causal_within.mean()) == pytest.approx((0.87, 0.82), abs=0.02)
    assert (twin["heads"].causal.mean(), twin["heads"].causal_within.mean()) == pytest.approx((0.83, 0.82), abs=0.07)


def slow_r(q: np.ndarray, k: np.ndarray, e: np.ndarray) -> list[float]:
    """r of the four kinds from the materialised tensor, numpy only."""
    left = (q[:, None] * e).reshape(-1, q.shape[1])
    w = left.real @ k.real.T + left.imag @ k.imag.T
    w = w.reshape(len(q), len(e), len(k)).transpose(0, 2, 1)
    b = w.mean((1, 2), keepdims=True)
    form1 = w - w.mean(1, keepdims=True) - w.mean(2, keepdims=True) + b
    form2 = w - w.mean((0, 1)) - b - w.mean((0, 2))[:, None] + 2 * w.mean()
    raw, within = ((w - w.mean()) ** 2).sum(), ((w - b) ** 2).sum()
    one, two = (form1**2).sum(), (form2**2).sum()
    return [float(np.sqrt(1 - rest / about)) for rest, about in ((one, raw), (one, within), (two, raw), (two, within))]


def test_ten_random_heads_against_the_materialised_tensor(demo: rs.LM, ids: list[int]) -> None:
    """Rotated vectors from the tap, un-rotated here with the rotary module's own table."""
    tokens, reach = 220, 256
    capture, grams = rs.observers.Capture(), rs.observers.Grams()
    with torch.no_grad(), tap(demo, capture, grams):
        demo.model(torch.tensor([ids[:tokens]]))
        cos, sin = demo.model.model.rotary_emb(torch.zeros(1, 1), torch.arange(tokens)[None])
    turn = (cos.double() + 1j * sin.double())[0, 1:, :32].numpy()
    back = turn.conj() / abs(turn) ** 2
    rng = np.random.default_rng(0)
    for head in rng.choice(270, 10, replace=False):
        layer, a = divmod(int(head), 9)
        call = capture.layers[layer][0]
        q, k = (
            (x[..., :32] + 1j * x[..., 32:]) * back
            for x in (call.q[0, a, 1:].double().numpy(), call.k[0, a // 3, 1:].double().numpy())
        )
        e = np.exp(1j * np.arange(reach)[:, None] * demo.anatomy.theta(layer).numpy())
        of = grams.layers[layer]
        fit = fit_moments(of.q, of.keys(), of.turns(reach))
        mine = [getattr(fit, kind)[a].item() for kind in observe.KINDS]
        assert mine == pytest.approx(slow_r(q, k, e), abs=1e-9)


def test_massive_counts_equal_those_of_plain_hooks(demo: rs.LM, ids: list[int], seen: dict[str, pd.DataFrame]) -> None:
    """Projection outputs caught by plain hooks, rotated here."""
    kept: dict[tuple[int, str], torch.Tensor] = {}

    def keep(layer: int, name: str) -> Any:
        return lambda module, args, out: kept.__setitem__((layer, name), out[0])

    handles = [
        getattr(layer.self_attn, f"{name}_proj").register_forward_hook(keep(i, name))
        for i, layer in enumerate(demo.model.model.layers)
        for name in "qkv"
    ]
    with torch.no_grad():
        demo.model(torch.tensor([ids]))
    for handle in handles:
        handle.remove()
    angle = np.arange(1024)[:, None] * 1e5 ** (-np.arange(32) / 32)
    turn = np.exp(1j * angle)[:, None]
    counts = {}
    for (_, name), out in kept.items():
        x = out.double().numpy().reshape(1024, -1, 64)
        if name != "v":
            z = (x[..., :32] + 1j * x[..., 32:]) * turn
            x = np.concatenate([z.real, z.imag], -1)
        rms = np.sqrt((x**2).mean(0))
        ratio = rms / rms.mean(-1, keepdims=True)
        counts.setdefault(name.upper(), []).extend((ratio > 5).sum(-1))
    of = seen["dims"]
    ratio = of.rms / of.groupby(["layer", "tensor", "head"]).rms.transform("mean")
    mine = (ratio > 5).groupby([of.tensor, of.layer, of["head"]]).sum()
    for tensor, truth in counts.items():
        assert mine[tensor].tolist() == truth
    shares = {t: np.mean(np.array(c) > 0) for t, c in counts.items()}
    assert (shares["Q"], shares["K"], shares["V"]) == pytest.approx((0.77, 0.73, 0.02), abs=0.01)


def test_depth_and_ratio_grow_together_as_published(seen: dict[str, pd.DataFrame]) -> None:
    of = seen["dims"]
    ratio = (of.rms / of.groupby(["layer", "tensor", "head"]).rms.transform("mean")).groupby(
        [of.tensor, of.layer, of["head"]]
    )
    top = ratio.max().groupby(["tensor", "layer"]).mean()
    for tensor, truth in (("Q", 0.70), ("K", 0.48)):
        assert top[tensor].reset_index().corr(method="spearman").iloc[0, 1] == pytest.approx(truth, abs=0.02)

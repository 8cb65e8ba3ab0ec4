"""Observers against plain hooks, padding against single rows, streams against wholes."""

from __future__ import annotations

import pytest
import torch
from tiny import tiny

import rotoscope as rs
from rotoscope.model.tap import tap
from rotoscope.stats.additive import fit_moments
from rotoscope.stats.causal import causal_sums


@pytest.fixture(scope="module")
def lm() -> rs.LM:
    return rs.wrap(tiny("llama"))


def rows() -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(4)
    return [torch.randint(3, 97, (n,), generator=g) for n in (23, 14, 9)]


def padded(side: str) -> dict[str, torch.Tensor]:
    some = rows()
    ids, mask = torch.zeros(3, 23, dtype=torch.long), torch.zeros(3, 23, dtype=torch.long)
    for i, row in enumerate(some):
        at = slice(23 - len(row), None) if side == "left" else slice(len(row))
        ids[i, at], mask[i, at] = row, 1
    # Left to itself a forward counts positions from the padding on.
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}


def watch(lm: rs.LM, *batches: dict[str, torch.Tensor]) -> list:  # type: ignore[type-arg]
    parts = rs.observers.Moments(), rs.observers.Grams(), rs.observers.Causal(), rs.observers.Entropy(rows=5)
    with torch.no_grad(), tap(lm, *parts):
        for batch in batches:
            lm.model(**batch, use_cache=False)
    return list(parts)


@pytest.mark.parametrize("side", ["left", "right"])
def test_a_padded_batch_equals_its_rows_one_by_one(lm: rs.LM, side: str) -> None:
    moments, grams, causal, entropy = watch(lm, padded(side))
    alone = watch(lm, *({"input_ids": row[None]} for row in rows()))
    for layer in range(3):
        for name in "qkv":
            mine, truth = moments.layers[layer][name], alone[0].layers[layer][name]
            assert mine.n == truth.n == 46
            for what in ("rms", "mean", "offset", "first"):
                assert torch.allclose(getattr(mine, what), getattr(truth, what), rtol=1e-4, atol=1e-4), what
        for which in ("q", "k"):
            mine, truth = getattr(grams.layers[layer], which), getattr(alone[1].layers[layer], which)
            assert mine.n == truth.n == 43
            assert torch.allclose(mine.gram, truth.gram, rtol=1e-4, atol=1e-4)
        for which in ("q0", "k0"):
            mine, truth = getattr(grams.layers[layer], which), getattr(alone[1].layers[layer], which)
            assert mine.shape[1] == truth.shape[1] == 3
            assert torch.allclose(mine, truth, atol=1e-4)
        assert torch.allclose(grams.layers[layer].phase, alone[1].layers[layer].phase, atol=1e-3)
        for mine, truth in zip(causal.layers[layer], alone[2].layers[layer], strict=True):
            assert torch.allclose(mine.rows, truth.rows, rtol=1e-3, atol=1e-3)
            assert torch.allclose(mine.squares, truth.squares, rtol=1e-4)
        assert torch.allclose(entropy.layers[layer].entropy, alone[3].layers[layer].entropy, atol=1e-4)
        assert torch.allclose(entropy.layers[layer].sink_mass, alone[3].layers[layer].sink_mass, atol=1e-4)


def test_moments_equal_those_of_plain_hooks(lm: rs.LM) -> None:
    batch = {"input_ids": rows()[0][None]}
    kept = {}
    handle = lm.model.model.layers[1].self_attn.v_proj.register_forward_hook(lambda m, a, out: kept.update(v=out))
    moments = watch(lm, batch)[0]
    handle.remove()
    v = kept["v"].view(23, 2, 16).double()
    sums = moments.layers[1]["v"]
    assert torch.allclose(moments.rms[1]["v"], v.square().mean(0).sqrt(), rtol=1e-6)
    assert torch.allclose(moments.mean[1]["v"], v.mean(0), atol=1e-6)
    assert torch.allclose(sums.offset, v.mean(0).abs() / v.std(0, correction=0), rtol=1e-4)
    assert torch.allclose(sums.first, v[0], atol=1e-6)
    assert torch.equal(sums.sign0, v[0].sign() * v[1:].mean(0).sign())


def test_grams_give_the_fit_of_the_vectors_themselves(lm: rs.LM) -> None:
    batch = {"input_ids": rows()[0][None]}
    capture, grams = rs.observers.Capture(), rs.observers.Grams()
    with torch.no_grad(), tap(lm, capture, grams):
        lm.model(**batch)
    call, of = capture.layers[2][0], grams.layers[2]
    q, k = (torch.complex(*call.unrotate(x).chunk(2, -1))[0, :, 1:] for x in (call.q, call.k))
    assert of.rotation is not None
    truth = rs.stats.additive.fit(q, k.repeat_interleave(2, 0), torch.from_numpy(of.rotation.angles(30)))
    mine = fit_moments(of.q, of.keys(), of.turns(30))
    assert torch.allclose(mine.form1, truth.form1, atol=1e-10)
    assert torch.allclose(mine.form2_within, truth.form2_within, atol=1e-10)
    assert torch.allclose(of.phase, (k / k.abs()).sum(1), atol=1e-9)


def test_causal_sums_are_those_of_the_scaled_logits(lm: rs.LM) -> None:
    batch = {"input_ids": rows()[0][None]}
    capture, causal = rs.observers.Capture(), rs.observers.Causal()
    with torch.no_grad(), tap(lm, capture, causal):
        lm.model(**batch)
    call = capture.layers[0][0]
    w = (call.logits()[0] / call.scaling)[:, 1:, 1:].double().tril()
    assert torch.allclose(causal.layers[0][0].rows, w.sum(-1), atol=1e-4)
    assert torch.allclose(causal.layers[0][0].squares, w.square().sum((-1, -2)), rtol=1e-5)
    assert torch.allclose(causal_sums(call.q[0, :, 1:], call.k[0, :, 1:]).columns, w.sum(-2), atol=1e-4)


def test_generation_with_a_cache_counts_each_token_once(lm: rs.LM) -> None:
    moments, grams = rs.observers.Moments(), rs.observers.Grams()
    batch = {"input_ids": rows()[2][None], "attention_mask": torch.ones(1, 9, dtype=torch.long)}
    with torch.no_grad(), tap(lm, moments, grams):
        out = lm.model.generate(**batch, max_new_tokens=6, min_new_tokens=6, do_sample=False, pad_token_id=0)
    whole = watch(lm, {"input_ids": out[:, :-1]})
    for layer in range(3):
        for name in "qkv":
            assert moments.layers[layer][name].n == 14
            assert torch.allclose(moments.rms[layer][name], whole[0].rms[layer][name], rtol=1e-4)
        assert torch.allclose(grams.layers[layer].k.gram, whole[1].layers[layer].k.gram, rtol=1e-3, atol=1e-3)
        assert grams.layers[layer].q0.shape[1] == 1


def test_half_precision_is_summed_in_single(lm: rs.LM) -> None:
    half = rs.wrap(tiny("llama", dtype=torch.bfloat16))
    batch = {"input_ids": rows()[0][None]}
    rms, truth = (watch(x, batch)[0].rms[0]["q"] for x in (half, lm))
    assert torch.allclose(rms, truth, rtol=0.05)
    assert rms.dtype == torch.float64


def test_reading_what_never_fired_raises(lm: rs.LM) -> None:
    with tap(lm, rs.observers.Moments()) as (moments,):
        pass
    with pytest.raises(rs.errors.NeverFired, match="no attention call"):
        _ = moments.rms


def test_a_mask_that_hides_its_padding_is_bad_input(lm: rs.LM) -> None:
    mask = torch.ones(1, 1, 9, 9).tril().bool()
    with pytest.raises(rs.errors.BadInput, match="two-dimensional"), tap(lm, rs.observers.Moments()):
        lm.model(input_ids=rows()[2][None], attention_mask=mask)

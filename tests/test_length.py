"""Λ-shaped mask and distance cap: identities, a slow reference, padding, caches, memory."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from slow_attention import Head, Slow, product, turns
from tiny import tiny

import rotoscope as rs
from rotoscope.errors import BadInput, NeverFired, Refused
from rotoscope.interventions import DistanceCap, Intervention, LambdaMask, Together, parse
from rotoscope.interventions import logits as blockwise
from rotoscope.model.call import AttentionCall
from rotoscope.model.tap import tap
from rotoscope.observers.entropy import probabilities

EQUAL = 1e-5  # in float64, end to end: norms and what `generate` returns round to float32
FAMILIES = ("llama", "mistral", "glm", "gemma2", "gpt_oss", "stablelm")


def ids(batch: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def padding(tokens: int) -> torch.Tensor:
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, :5] = 0
    return mask


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def logits(lm: rs.LM, **batch: Any) -> torch.Tensor:
    return lm.model(**batch).logits  # type: ignore[no-any-return]


def model(family: str = "llama", dtype: torch.dtype = torch.float64) -> rs.LM:
    return rs.wrap(tiny(family, layers=2, dtype=dtype))


# ---- identities ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", [LambdaMask(24), LambdaMask(3, first=24), DistanceCap(23)])
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_what_reaches_the_whole_text_changes_nothing(how: Intervention, family: str) -> None:
    lm = model(family, torch.float32)
    plain = logits(lm, input_ids=ids(2, 24), attention_mask=padding(24))
    with how.on(lm) as run:
        got = logits(lm, input_ids=ids(2, 24), attention_mask=padding(24))
    assert torch.equal(got, plain)
    assert run.fired == 2


@pytest.mark.parametrize("how", [LambdaMask(14, first=10), DistanceCap(23)])
def test_so_it_does_where_it_is_computed_in_blocks(how: Intervention) -> None:
    lm = model(dtype=torch.float32)
    mask = padding(24 if isinstance(how, LambdaMask) else 29)
    if isinstance(how, DistanceCap):
        mask[:, :5] = 0  # 29 columns, 24 tokens
    batch = {"input_ids": ids(2, mask.shape[1]), "attention_mask": mask}
    plain = logits(lm, **batch)
    with how.on(lm):
        got = logits(lm, **batch)
    assert 0 < (got - plain)[mask.bool()].abs().max() < 1e-5
    # one token fewer, and it is felt
    less = LambdaMask(13, first=10) if isinstance(how, LambdaMask) else DistanceCap(22)
    with less.on(lm):
        assert (logits(lm, **batch) - plain)[mask.bool()].abs().max() > 1e-4


# ---- slow references -------------------------------------------------------------------------------------------------


def capped(cap: int) -> Any:
    def form(head: Head) -> np.ndarray:
        i, j = np.indices(head.w.shape)
        at_cap = np.broadcast_to(head.u[head.zero + cap] * head.u[head.zero].conj(), (*i.shape, head.u.shape[1]))
        return product(head.q, head.k, np.where((i - j > cap)[..., None], at_cap, turns(head)))

    return form


def around(first: int, window: int) -> Any:
    return lambda i, j, zero: (i - j < window) | (j - zero < first)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_together_equal_attention_with_all_logits_laid_out(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = model(family)
    batch = {"input_ids": ids(2, 22), "attention_mask": padding(22)}
    parts = (LambdaMask(4, first=2), DistanceCap(7))
    for rows in (3, 128):
        monkeypatch.setattr(blockwise, "_ROWS", rows)
        for order in (parts, parts[::-1]):
            slow = Slow(family, capped(7), around(2, 4))
            with Together(order).on(lm) as run, tap(lm, slow):
                logits(lm, **batch)
            assert len(slow.apart) == 2
            assert max(slow.apart) < 1e-9
            assert run.fired == 4
    slow = Slow(family, capped(3))
    with DistanceCap(3).on(lm), tap(lm, slow):
        logits(lm, **batch)
    assert max(slow.apart) < 1e-9


def test_the_mask_alone_equals_the_same_mask_given_to_the_model() -> None:
    lm = model()
    i, j = torch.meshgrid(torch.arange(30), torch.arange(30), indexing="ij")
    shape = (j <= i) & ((i - j < 6) | (j < 3))
    expected = logits(lm, input_ids=ids(2, 30), attention_mask=shape[None, None].expand(2, 1, -1, -1))
    with LambdaMask(6, first=3).on(lm):
        got = logits(lm, input_ids=ids(2, 30))
    assert (got - expected).abs().max() < EQUAL


# ---- batches, caches, memory -----------------------------------------------------------------------------------------


BOTH = Together((LambdaMask(4, first=2), DistanceCap(7)))


@pytest.mark.parametrize("family", FAMILIES)
def test_padded_rows_equal_single_ones(family: str) -> None:
    lm, mask = model(family), padding(22)
    with BOTH.on(lm):
        got = logits(lm, input_ids=ids(2, 22), attention_mask=mask, position_ids=positions(mask))
        for row in range(2):
            there = mask[row].bool()
            alone = logits(lm, input_ids=ids(2, 22)[row : row + 1, there])[0]
            assert (got[row, there] - alone).abs().max() < EQUAL


@pytest.mark.parametrize("family", ["llama", "mistral", "glm"])
@pytest.mark.parametrize("how", [BOTH, DistanceCap(9), LambdaMask(12, first=1)])
def test_cached_generation_equals_full_recomputation(family: str, how: Intervention) -> None:
    lm, text, mask = model(family), ids(2, 8), padding(8)
    with how.on(lm):
        out = lm.model.generate(
            input_ids=text, attention_mask=mask, max_new_tokens=12, min_new_tokens=12, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        for step in out.logits:
            full = logits(lm, input_ids=text, attention_mask=mask, position_ids=positions(mask), use_cache=False)
            assert (full[:, -1] - step).abs().max() < EQUAL
            text = torch.cat([text, full[:, -1:].index_fill(-1, torch.tensor([2]), -torch.inf).argmax(-1)], 1)
            mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
    assert torch.equal(out.sequences, text)


def test_a_block_of_rows_meets_no_more_keys_than_it_can_reach(monkeypatch: pytest.MonkeyPatch) -> None:
    lm, seen = model(dtype=torch.float32), []
    own = blockwise.softmax
    monkeypatch.setattr(blockwise, "_ROWS", 8)
    monkeypatch.setattr(blockwise, "softmax", lambda call, w, *a: (seen.append(w.shape[-2:]), own(call, w, *a))[1])
    with BOTH.on(lm):
        logits(lm, input_ids=ids(1, 120))
    assert max(rows for rows, _ in seen) == 8
    assert max(keys for _, keys in seen) == 8 + 3 + 2  # the rows' own, those of the window before them, the first
    assert len(seen) == 2 * 15


# ---- what observers see, what is left behind, what is refused --------------------------------------------------------


def test_an_observer_behind_them_sees_the_attention_that_counts() -> None:
    lm = model("gpt_oss")

    class Same:
        def observe(self, call: AttentionCall) -> None:
            weights = probabilities(call)
            values = call.v.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
            assert ((weights @ values).transpose(1, 2) - call.run(call)[0]).abs().max() < 1e-12
            assert (weights[:, :, 20, 2:17] == 0).all()
            assert (weights[:, :, 20, 17:] > 0).all()

    with BOTH.on(lm), tap(lm, Same()):
        logits(lm, input_ids=ids(2, 21))


def test_the_model_and_the_random_state_are_left_as_found() -> None:
    lm = model()
    plain, before = logits(lm, input_ids=ids(1, 20)), torch.get_rng_state()
    with pytest.raises(RuntimeError, match="mine"), BOTH.on(lm):  # noqa: PT012
        logits(lm, input_ids=ids(1, 20))
        raise RuntimeError("mine")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits(lm, input_ids=ids(1, 20)), plain)
    with pytest.raises(NeverFired), LambdaMask(4).on(lm):
        pass


def test_they_are_made_from_text_and_bad_input_is_named() -> None:
    assert parse("lambda-mask:window=4:first=2+distance-cap:cap=7") == BOTH
    with pytest.raises(BadInput, match="window"):
        parse("lambda-mask:first=2")
    with pytest.raises(BadInput, match="window ≥ 1"):
        LambdaMask(0)
    with pytest.raises(BadInput, match="1 or more"):
        DistanceCap(0)
    with pytest.raises(Refused, match="no distance to cap"), DistanceCap(4).on(rs.wrap(tiny("gpt2"))):
        pass
    lm = model()
    with pytest.raises(BadInput, match="one at a time"), Together((LambdaMask(4), LambdaMask(5))).on(lm):
        logits(lm, input_ids=ids(1, 12))


def test_a_learned_position_model_takes_the_mask_and_a_hybrid_takes_both() -> None:
    for family, how, fired in (("gpt2", LambdaMask(4), 2), ("smollm3", DistanceCap(4), 1)):
        lm = model(family)
        with how.on(lm) as run:
            logits(lm, input_ids=ids(1, 20))
        assert run.fired == fired

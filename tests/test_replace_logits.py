"""ReplaceLogits: every arm against attention with all logits laid out; padding, windows, caches; what is left."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from slow_attention import PAIRS, Head, Slow, product, turns
from tiny import tiny
from transformers import DynamicCache

import rotoscope as rs
from rotoscope.errors import BadInput, Refused
from rotoscope.interventions import Disrupt, DistanceCap, LogitMeans, ReplaceLogits, Together
from rotoscope.interventions.base import seed_of
from rotoscope.interventions.fitted import draws
from rotoscope.interventions.replace_logits import ARMS
from rotoscope.model.call import AttentionCall
from rotoscope.model.tap import tap
from rotoscope.observers.entropy import probabilities

DISTANCES = 24
EQUAL = 1e-5  # in float64, end to end: norms and what `generate` returns round to float32
CACHED = tuple(arm for arm in ARMS if arm != "form2-causal")


def ids(batch: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def padded() -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[1, :5] = 0
    return {"input_ids": ids(2, 18), "attention_mask": mask}


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


@torch.no_grad()
def logits(lm: rs.LM, **batch: Any) -> torch.Tensor:
    return lm.model(**batch).logits  # type: ignore[no-any-return]


def double(family: str, **extra: Any) -> tuple[rs.LM, LogitMeans]:
    lm = rs.wrap(tiny(family, layers=2, dtype=torch.float64, **extra))
    return lm, LogitMeans.measure(lm, [ids(1, 30, 8)[0].tolist(), ids(1, 21, 9)[0].tolist()], DISTANCES)


# ---- the arms, with everything laid out ------------------------------------------------------------------------------


def form(arm: str, means: LogitMeans) -> Callable[[Head], np.ndarray]:
    """The logits of one arm before scaling."""

    def of(head: Head) -> np.ndarray:
        out = fitted(arm, means, head)
        out[:, head.zero] = head.w[:, head.zero]
        return out

    return of


def fitted(arm: str, means: LogitMeans, head: Head) -> np.ndarray:
    layer, group = head.call.layer, head.call.q.shape[1] // head.call.k.shape[1]
    halves = (means.query[layer][head.head], means.key[layer][head.head // group], means.turn[layer])
    q_mean, k_mean, e_mean = (torch.complex(*x.chunk(2)).numpy() for x in halves)
    every, q, k = turns(head), head.q, head.k
    still = np.broadcast_to(e_mean, every.shape)
    if arm == "full":
        return head.w.copy()
    if arm == "form2-causal":
        return least_squares(head)
    if arm == "form2":
        a, mean = (product(q_mean[None], k_mean[None], turn) for turn in (every, still))
        return a + product(q, k_mean[None], still) + product(q_mean[None], k, still) - 2 * mean
    f, g = product(q, k_mean[None], every), product(q, k - k_mean, still)
    if arm == "form1-centred":
        return centred(head, f + g)
    return permuted(head, f + g) if arm == "permuted" else {"f": f, "g": g, "form1": f + g}[arm]


def centred(head: Head, form1: np.ndarray) -> np.ndarray:
    """Form 1 moved, query by query, until its mean over the permitted keys but position 0 is the real one's."""
    out = head.w.copy()
    for i in np.flatnonzero(head.real):
        some = [j for j in np.flatnonzero(head.permitted[i]) if j != head.zero]
        if some:
            out[i, some] = form1[i, some] + (head.w[i, some].mean() - form1[i, some].mean())
    return out


def least_squares(head: Head) -> np.ndarray:
    there = [t for t in np.flatnonzero(head.real) if t != head.zero]
    pairs = [(i, j) for i in there for j in there if j <= i]
    n = len(head.real)
    design = np.zeros((len(pairs), 3 * n))
    for row, (i, j) in enumerate(pairs):
        design[row, [i - j, n + i, 2 * n + j]] = 1
    a, b, c = np.split(np.linalg.lstsq(design, np.array([head.w[p] for p in pairs]), rcond=None)[0], 3)
    i, j = np.indices((n, n))
    return a[np.maximum(i - j, 0)] + b[i] + c[j]


def permuted(head: Head, form1: np.ndarray) -> np.ndarray:
    out = head.w.copy()
    seed = seed_of(0, head.call.layer, 0)
    for i in np.flatnonzero(head.real):
        there = [j for j in np.flatnonzero(head.permitted[i]) if j != head.zero]
        if not there:
            continue
        token, keys = torch.tensor([[i - head.zero]]), torch.tensor([there]) - head.zero
        draw = draws(token, keys, head.call.q.shape[1], seed)[0, head.head, 0].tolist()
        residual = [head.w[i, j] - form1[i, j] for j in there]
        for j, source in zip(there, sorted(range(len(there)), key=lambda n: draw[n]), strict=True):
            out[i, j] -= residual[source] - sum(residual) / len(residual)
    return out


@pytest.mark.parametrize("family", PAIRS)
def test_each_arm_equals_attention_with_all_logits_laid_out(family: str) -> None:
    lm, means = double(family)
    batch = padded()
    plain, changed = logits(lm, **batch)[0], {}
    for arm in ARMS:
        slow = Slow(family, form(arm, means))
        with ReplaceLogits(means, arm).on(lm) as run, tap(lm, slow):
            changed[arm] = (logits(lm, **batch)[0] - plain).abs().max().item()
        assert run.fired == len(slow.apart) == 2
        assert max(slow.apart) < 1e-9, arm
    assert changed.pop("full") < 1e-5  # the model's own softmax is float32 where it is written out
    assert min(changed.values()) > 1e-3, "an arm changed nothing"


def test_the_means_are_those_of_the_projections() -> None:
    lm = rs.wrap(tiny("llama", layers=2, dtype=torch.float64))
    texts = [ids(1, 30, 8)[0].tolist(), ids(1, 21, 9)[0].tolist(), [5]]
    means = LogitMeans.measure(lm, texts)
    kept: dict[str, list[torch.Tensor]] = {"q_proj": [], "k_proj": []}
    attention = lm.model.model.layers[1].self_attn
    hooks = [
        getattr(attention, name).register_forward_hook(lambda m, a, out, into=into: into.append(out[0, 1:]))
        for name, into in kept.items()
    ]
    for text in texts[:2]:
        logits(lm, input_ids=torch.tensor([text]))
    for hook in hooks:
        hook.remove()
    for name, heads, got in (("q_proj", 4, means.query[1]), ("k_proj", 2, means.key[1])):
        # half-split pairs: the first half of a head's dims are the real parts
        assert torch.allclose(got, torch.cat(kept[name]).mean(0).view(heads, 16), atol=1e-12)
    theta = 10000.0 ** (-np.arange(8) / 8)
    turn = np.exp(1j * np.arange(lm.trained_length)[:, None] * theta).mean(0)  # 128, less than 1,024
    np.testing.assert_allclose(means.turn[1], np.concatenate([turn.real, turn.imag]), atol=1e-6)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "gptj", "falcon_h1"])
def test_all_terms_kept_change_nothing_in_single_precision(family: str) -> None:
    lm = rs.wrap(tiny(family, attn_implementation="eager"))
    plain = logits(lm, input_ids=ids(2, 40))
    with ReplaceLogits(None, "full").on(lm):
        assert (logits(lm, input_ids=ids(2, 40)) - plain).abs().max() < 1e-5


def test_one_layer_is_replaced_and_the_others_are_not() -> None:
    lm, means = double("llama")
    there = Slow("llama", form("form1", means))
    with ReplaceLogits(means, "form1", layers=1).on(lm) as run, tap(lm, there):
        logits(lm, input_ids=ids(2, 12))
    assert run.fired == 1
    assert there.apart[1] < 1e-9 < 1e-3 < there.apart[0]
    own = Slow("llama", form("full", means))
    with ReplaceLogits(means, "form1", layers=1).on(lm), tap(lm, own):
        logits(lm, input_ids=ids(2, 12))
    assert own.apart[0] < 1e-9


# ---- batches and caches ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padded_rows_equal_single_ones(family: str, side: str) -> None:
    lm, means = double(family)
    mask = torch.ones(2, 18, dtype=torch.long)
    mask[1, :5] = 0
    mask = mask if side == "left" else mask.flip(-1)
    for arm in ARMS:
        with ReplaceLogits(means, arm).on(lm):
            got = logits(lm, input_ids=ids(2, 18), attention_mask=mask, position_ids=positions(mask))
            for row in range(2):
                there = mask[row].bool()
                alone = logits(lm, input_ids=ids(2, 18)[row : row + 1, there])[0]
                assert (got[row, there] - alone).abs().max() < EQUAL, arm


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma2", "deepseek_v3"])
def test_cached_generation_equals_full_recomputation(family: str) -> None:
    lm, means = double(family)
    batch = padded()
    for arm in CACHED:
        with ReplaceLogits(means, arm, seed=3).on(lm):
            out = lm.model.generate(
                **batch,
                max_new_tokens=6,
                min_new_tokens=6,
                do_sample=False,
                output_logits=True,
                return_dict_in_generate=True,
            )
            text, mask = batch["input_ids"], batch["attention_mask"]
            for step in out.logits:
                full = logits(lm, input_ids=text, attention_mask=mask, position_ids=positions(mask), use_cache=False)
                assert (full[:, -1] - step).abs().max() < EQUAL, arm
                text = torch.cat([text, full[:, -1:].index_fill(-1, torch.tensor([2]), -torch.inf).argmax(-1)], 1)
                mask = torch.cat([mask, mask.new_ones(2, 1)], 1)
        assert torch.equal(out.sequences, text)


def test_a_cache_from_outside_the_block_is_bad_input() -> None:
    lm, means = double("llama")
    cache = DynamicCache()
    logits(lm, input_ids=ids(1, 9), past_key_values=cache)
    with pytest.raises(BadInput, match="inside the same open block"), ReplaceLogits(means).on(lm):
        logits(lm, input_ids=ids(1, 1), past_key_values=cache)
    cache = DynamicCache()
    with pytest.raises(BadInput, match="without a cache"), ReplaceLogits(None, "form2-causal").on(lm):  # noqa: PT012
        logits(lm, input_ids=ids(1, 9), past_key_values=cache)
        logits(lm, input_ids=ids(1, 1), past_key_values=cache)


# ---- the permutation -------------------------------------------------------------------------------------------------


def test_every_order_is_as_likely_and_each_head_and_query_has_its_own() -> None:
    token, keys = torch.arange(3000)[None], torch.tensor([[1, 2, 3]])
    orders = draws(token, keys, 2, seed_of(0, 4, 0))[0].argsort(-1)
    for head in range(2):
        count = Counter(map(tuple, orders[head].tolist()))
        chi = sum((count[order] - 500) ** 2 / 500 for order in itertools.permutations(range(3)))
        assert chi < 20.5  # the 99.9th percentile at 5 degrees of freedom
    same = [(a == b).all(-1).double().mean() for a, b in ((orders[0], orders[1]), (orders[0, 1:], orders[0, :-1]))]
    assert all(abs(share - 1 / 6) < 0.04 for share in same)
    other = draws(token, keys, 2, seed_of(1, 4, 0))[0].argsort(-1)
    assert abs((orders == other).all(-1).double().mean() - 1 / 6) < 0.04


# ---- what observers see, what is left behind, what is refused --------------------------------------------------------


def test_an_observer_behind_it_sees_the_logits_that_count() -> None:
    lm, means = double("gpt_oss")

    class Same:
        def observe(self, call: AttentionCall) -> None:
            values = call.v.repeat_interleave(call.q.shape[1] // call.k.shape[1], 1)
            mine = (probabilities(call) @ values).transpose(1, 2)
            assert (mine - call.run(call)[0]).abs().max() < 1e-12

    with ReplaceLogits(means, "permuted").on(lm), tap(lm, Same()):
        logits(lm, **padded())


def test_the_model_and_the_random_state_are_left_as_found() -> None:
    lm, means = double("llama")
    plain, before = logits(lm, input_ids=ids(1, 12)), torch.get_rng_state()
    hooks = [dict(m._forward_pre_hooks) for m in lm.model.modules()]
    with pytest.raises(RuntimeError, match="mine"), ReplaceLogits(means, "permuted").on(lm):  # noqa: PT012
        logits(lm, input_ids=ids(1, 12))
        raise RuntimeError("mine")
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(logits(lm, input_ids=ids(1, 12)), plain)
    assert [dict(m._forward_pre_hooks) for m in lm.model.modules()] == hooks


def test_layers_without_rotation_are_left_alone_or_refused() -> None:
    lm, means = double("smollm3")  # layer 1 does not rotate
    with ReplaceLogits(means).on(lm) as run:
        logits(lm, input_ids=ids(1, 8))
    assert run.fired == 1
    with pytest.raises(Refused, match="layer 1 has no rotary"), ReplaceLogits(means, layers=range(2)).on(lm):
        pass
    bare = rs.wrap(tiny("gpt2"))
    with pytest.raises(Refused, match="no layer"), ReplaceLogits(means).on(bare):
        pass
    with pytest.raises(Refused, match="no layer"):
        LogitMeans.measure(bare, [[3, 4, 5]])


def test_bad_input_is_named() -> None:
    lm, means = double("llama")
    with pytest.raises(BadInput, match="arm is one of"):
        ReplaceLogits(means, "form3")
    with pytest.raises(BadInput, match="needs means"):
        ReplaceLogits(None)
    with pytest.raises(BadInput, match="measure them on this model"), ReplaceLogits(means).on(rs.wrap(tiny("llama"))):
        pass  # it has a third layer
    with pytest.raises(BadInput, match="two tokens"):
        LogitMeans.measure(lm, [[3]])
    both = Together((ReplaceLogits(means), DistanceCap(4)))
    with pytest.raises(BadInput, match="one at a time"), both.on(lm):
        logits(lm, input_ids=ids(1, 12))


def test_edits_of_queries_and_keys_that_come_first_or_last_are_read() -> None:
    lm, _ = double("llama")
    with Disrupt("QK").on(lm):
        expected = logits(lm, input_ids=ids(1, 12), use_cache=False)
    for parts in ((Disrupt("QK"), ReplaceLogits(None, "full")), (ReplaceLogits(None, "full"), Disrupt("QK"))):
        with Together(parts).on(lm):
            got = logits(lm, input_ids=ids(1, 12), use_cache=False)
        assert (got - expected).abs().max() < EQUAL

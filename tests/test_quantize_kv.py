"""QuantizeKV: its grids, real quantized caches, a cache rounded by hand between forwards, passes, batches, refusals."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny import tiny
from transformers import DynamicCache, QuantizedCache

import rotoscope as rs
from rotoscope.errors import BadInput, NeverFired, Refused
from rotoscope.interventions import Disrupt, LambdaMask, QuantizeKV, ShiftPositions, Together, parse
from rotoscope.interventions.quantize_kv import quantized
from rotoscope.model.call import AttentionCall
from rotoscope.model.tap import tap
from rotoscope.tasks.forward import Row, generate, score

EQUAL = 1e-5  # in float64, end to end: some families' norms round to float32
FAMILIES = ("llama", "mistral", "gemma2", "gpt_oss", "glm", "gpt2", "mpt", "gemma3n_text")
HOWS = (
    QuantizeKV("int2"),
    QuantizeKV("int3", group=8, first=2, targets="V"),
    QuantizeKV("int2", keys="channel", group=4, first=1),
    QuantizeKV("fp8"),
)


def ids(batch: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padding(tokens: int) -> torch.Tensor:
    mask = torch.ones(2, tokens, dtype=torch.long)
    mask[1, :5] = 0
    return mask


def positions(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp_min(0)


@functools.cache
def model(family: str = "llama", dtype: torch.dtype = torch.float64, **overrides: Any) -> rs.LM:
    return rs.wrap(tiny(family, layers=overrides.pop("layers", 3), dtype=dtype, **overrides))


@torch.no_grad()
def logits(lm: rs.LM, **batch: Any) -> torch.Tensor:
    return lm.model(**batch).logits  # type: ignore[no-any-return]


def pair(held: Any, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values in a cache."""
    return held.layers[layer].keys, held.layers[layer].values


def in_two(lm: rs.LM, text: torch.Tensor, first: int, cache: Any = None) -> torch.Tensor:
    """Logits of a prefill of some columns and a second forward over the others."""
    cache = DynamicCache(config=lm.model.config) if cache is None else cache
    return torch.cat([logits(lm, input_ids=part, cache=cache) for part in (text[:, :first], text[:, first:])], 1)


# ---- grids -----------------------------------------------------------------------------------------------------------


def slow_group(values: list[float], bits: int) -> list[float]:
    """A group on its grid: the nearest of 2^bits evenly spaced numbers from its least value to its largest."""
    low, step = min(values), (max(values) - min(values)) / (2**bits - 1)
    return [low + step * math.floor((x - low) / step + 0.5) if step else x for x in values]


def slow(x: torch.Tensor, bits: int, axis: str, group: int, keep: torch.Tensor | None) -> tuple[torch.Tensor, int]:
    """Keys [heads, tokens, dims] in loops over groups, and bits stored."""
    out, stored = x.clone(), 0
    heads, tokens, dims = x.shape
    for h in range(heads):
        if axis == "token":
            groups = [[(t, g + d) for d in range(group)] for t in range(tokens) for g in range(0, dims, group)]
        else:
            groups = [
                [(g + t, d) for t in range(group)] for d in range(dims) for g in range(0, tokens - group + 1, group)
            ]
        for places in groups:
            free = [(t, d) for t, d in places if keep is None or not keep[h, d]]
            if not free:
                continue
            for (t, d), value in zip(free, slow_group([float(x[h, t, d]) for t, d in free], bits), strict=True):
                out[h, t, d] = value
            stored += bits * len(free) + 32
            stored -= 16 * len(free)
    return out, stored + 16 * x.numel()  # what is in no group counts 16 bits a value


@pytest.mark.parametrize("bits", [2, 3, 5, 8])
@pytest.mark.parametrize(("axis", "group"), [("token", 4), ("token", 12), ("channel", 4), ("channel", 3)])
@pytest.mark.parametrize("kept", [False, True])
def test_integers_equal_a_slow_reference(bits: int, axis: str, group: int, kept: bool) -> None:
    x = normal(2, 3, 10, 12).double()
    x[0, 0, :, 5] = 2.0  # a channel in which nothing varies
    keep = normal(3, 12, seed=2) > 0.5 if kept else None
    got, stored = quantized(x, f"int{bits}", axis, group, keep)
    rows = [slow(row, bits, axis, group, keep) for row in x]
    assert (got - torch.stack([row for row, _ in rows])).abs().max() < 1e-12
    assert stored == sum(count for _, count in rows)
    if keep is not None:
        assert torch.equal(got[:, keep[:, None].expand(-1, 10, -1)], x[:, keep[:, None].expand(-1, 10, -1)])


def test_a_protected_dim_leaves_the_scale_of_the_others() -> None:
    x = normal(1, 1, 6, 8)
    x[..., 3] = 1000
    keep = torch.arange(8)[None] == 3
    assert (quantized(x, "int4")[0] - x)[..., :3].abs().max() > 0.5
    got, _ = quantized(x, "int4", keep=keep)
    others = x[..., [0, 1, 2, 4, 5, 6, 7]]
    assert (got - x).abs().max() <= (others.amax() - others.amin()) / 15 / 2
    assert torch.equal(got[..., [0, 1, 2, 4, 5, 6, 7]], quantized(others, "int4")[0])


def test_what_is_no_grid_is_named() -> None:
    x = normal(1, 1, 4, 12)
    with pytest.raises(BadInput, match="12 dims cannot be cut into groups of 8: the next size that fits is 6"):
        quantized(x, group=8)
    with pytest.raises(BadInput, match=r"kind is one of int2, .*fp8, not 'int9'"):
        quantized(x, "int9")
    with pytest.raises(BadInput, match="axis is one of token, channel"):
        quantized(x, axis="head")


# ---- the caches of transformers --------------------------------------------------------------------------------------


@pytest.fixture
def plain_unpack(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unpacking written down here, so that quanto compiles nothing."""
    quanto = pytest.importorskip("optimum.quanto")

    def unpack(packed: Any) -> torch.Tensor:
        bits = packed._bits
        parts = [(packed._data >> shift) & (2**bits - 1) for shift in range(0, 8, bits)]
        return torch.cat(parts)[: packed.shape[0]]

    monkeypatch.setattr(quanto.tensor.packed.PackedTensor, "unpack", unpack)


def against_quanto(bits: int, axis: int) -> None:
    lm = model(dtype=torch.float32, head_dim=64)
    text = ids(1, 70)
    cache = QuantizedCache(
        "quanto", lm.model.config, nbits=bits, axis_key=axis, axis_value=axis, q_group_size=64, residual_length=128
    )
    how = {0: "token", -1: "channel"}[axis]
    theirs = in_two(lm, text, 64, cache)
    exact = DynamicCache()
    logits(lm, input_ids=text[:, :64], cache=exact)
    layer: Any = cache.layers[0]
    for x, q in zip(pair(exact), (layer._quantized_keys, layer._quantized_values), strict=True):
        assert torch.equal(quantized(x, f"int{bits}", how)[0], q.dequantize())
    with QuantizeKV(f"int{bits}", how, how).on(lm, prompt=65) as run:
        ours = logits(lm, input_ids=text)
    assert (ours - theirs).abs().max() < 1e-4
    assert (in_two(lm, text, 64) - theirs)[:, 64:].abs().max() > 0.05
    assert run.measured["bits"] / run.measured["values"] == (
        bits + 0.5 if axis == 0 else ((bits + 0.5) * 64 + 16 * 6) / 70
    )


@pytest.mark.usefixtures("plain_unpack")
@pytest.mark.parametrize("axis", [0, -1])
@pytest.mark.parametrize("bits", [4, 2])
def test_it_equals_the_quanto_cache(bits: int, axis: int) -> None:
    against_quanto(bits, axis)


@pytest.mark.slow
def test_it_equals_the_quanto_cache_with_its_compiled_kernel() -> None:
    pytest.importorskip("optimum.quanto")
    against_quanto(4, 0)


def test_it_holds_what_the_fp8_cache_holds_to_the_last_bit() -> None:
    lm = model(dtype=torch.float32, layers=1)  # in which no key depends on what was read
    text, theirs, own = ids(1, 16), QuantizedCache("fp8", lm.model.config), DynamicCache()
    steps = (text[:, :10], text[:, 10:13], *text[:, 13:].split(1, 1))
    expected = [logits(lm, input_ids=part, cache=theirs) for part in steps]
    with QuantizeKV("fp8").on(lm) as run:
        got = [logits(lm, input_ids=part, cache=own) for part in steps]
    # theirs rounds new tokens from the second pass on before they are read the first time
    assert [torch.equal(a, b) for a, b in zip(got, expected, strict=True)] == [True, *[False] * 4]
    layer: Any = theirs.layers[0]
    for held, (narrow, scale) in zip(pair(own), (layer._quantized_keys, layer._quantized_values), strict=True):
        assert torch.equal(held, narrow.float() * scale)
    assert run.fired == 4
    # eight bits a value, and a scale for the keys and one for the values
    assert run.measured["values"] == 2 * 2 * 16 * 16
    assert run.measured["bits"] == 8 * 2 * 2 * 16 * 16 + 16 * 2


def test_numbers_beyond_the_frozen_scale_stay_numbers() -> None:
    lm = rs.wrap(tiny("llama", layers=1))
    cache = DynamicCache()
    with QuantizeKV("fp8").on(lm):
        logits(lm, input_ids=ids(1, 1), cache=cache)
        lm.model.model.layers[0].self_attn.k_proj.weight.data *= 100
        logits(lm, input_ids=ids(1, 5, seed=2), cache=cache)
    keys, _ = pair(cache)
    keys = keys[0]
    assert keys.isfinite().all()
    assert keys[:, 1:].abs().max() == keys[:, :1].abs().max()


# ---- passes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", FAMILIES)
def test_one_forward_equals_a_prefill_and_a_second_forward(family: str, how: QuantizeKV) -> None:
    lm, text = model(family), ids(2, 20)
    plain = logits(lm, input_ids=text, use_cache=False)
    with how.on(lm, prompt=14) as run:
        one = logits(lm, input_ids=text, use_cache=False)
        again = logits(lm, input_ids=text)  # the same where a cache is filled on the way
    with how.on(lm) as apart:
        two = in_two(lm, text, 13)
    assert torch.equal(one, again)
    assert (one - two).abs().max() < EQUAL
    assert (one - plain)[:, :13].abs().max() < EQUAL
    assert (one - plain)[:, 13].abs().max() > 1e-3
    assert run.fired == 2 * 3
    assert apart.fired == 3


@pytest.mark.parametrize("how", [*HOWS, QuantizeKV("int2", "channel", "channel", 4)])
@pytest.mark.parametrize("family", ["llama", "gemma2", "mpt"])
def test_it_equals_a_cache_that_is_rounded_by_hand_between_forwards(family: str, how: QuantizeKV) -> None:
    lm = model(family, layers=2)
    steps = (13, 1, 1, 5, 1)
    text, cache, expected, done = ids(1, sum(steps)), DynamicCache(), [], 0
    scale: dict[Any, float] = {}
    for step in steps:
        expected.append(logits(lm, input_ids=text[:, done : done + step], cache=cache))
        for layer, held in enumerate(cache.layers):
            for name in how.targets:
                x = held.keys if name == "K" else held.values
                assert x.shape[2] == done + step
                round_by_hand(x, done, how, how.axis(name), scale, (layer, name))
        done += step
    with how.on(lm) as run:
        cache = DynamicCache()
        got = [logits(lm, input_ids=part, cache=cache) for part in text.split(steps, 1)]
    assert (torch.cat(got, 1) - torch.cat(expected, 1)).abs().max() < EQUAL
    assert run.fired == 2 * (len(steps) - 1)


def round_by_hand(x: torch.Tensor, start: int, how: QuantizeKV, axis: str, scale: Any, key: Any) -> None:
    """Columns of a cache from ``start`` on, in place."""
    if how.kind == "fp8":
        new = x[:, :, start:].float()
        scale.setdefault(key, float(x.abs().max().float() / 448))
        x[:, :, start:] = ((new / scale[key]).to(torch.float8_e4m3fn).float() * scale[key]).to(x.dtype)
        return
    size = min(how.group, x.shape[3]) if axis == "token" else how.group
    for h, head in enumerate(x[0]):
        if axis == "token":
            for t in range(max(start, how.first), len(head)):
                for d in range(0, head.shape[1], size):
                    some = slow_group(head[t, d : d + size].tolist(), int(how.kind[3:]))
                    x[0, h, t, d : d + size] = torch.tensor(some, dtype=x.dtype)
            continue
        for g in range(math.ceil(start / size) * size, len(head) - size + 1, size):
            rows = range(max(g, how.first), g + size)
            for d in range(head.shape[1]):
                some = slow_group([float(head[t, d]) for t in rows], int(how.kind[3:]))
                x[0, h, rows.start : rows.stop, d] = torch.tensor(some, dtype=x.dtype)


def test_layers_that_share_keys_read_those_of_their_own_source() -> None:
    lm, text = model("gemma3n_text", layers=4), ids(1, 20)  # layers 2 and 3 read what 0 and 1 wrote
    with QuantizeKV("int2").on(lm, prompt=14) as run:
        one = logits(lm, input_ids=text, use_cache=False)
    with QuantizeKV("int2").on(lm) as apart:
        assert (in_two(lm, text, 13) - one).abs().max() < EQUAL
    assert run.fired == apart.fired == 4


def test_one_pass_reads_nothing_back_and_says_so() -> None:
    lm, text = model(), ids(2, 20)
    plain = logits(lm, input_ids=text)
    for how in HOWS:
        with pytest.raises(NeverFired, match="QuantizeKV changed nothing"), how.on(lm) as run:  # noqa: PT012
            assert torch.equal(logits(lm, input_ids=text), plain)
            assert torch.equal(logits(lm, input_ids=text, use_cache=False), plain)
        assert run.fired == 0
    for how, prompt in ((QuantizeKV(fresh=14), 14), (QuantizeKV(), 1), (QuantizeKV(first=13), 14)):
        with pytest.raises(NeverFired), how.on(lm, prompt=prompt):
            assert torch.equal(logits(lm, input_ids=text), plain)
    with pytest.raises(NeverFired), QuantizeKV(keys="channel", targets="K", group=16).on(lm, prompt=16):
        assert torch.equal(logits(lm, input_ids=text), plain)


def test_fresh_columns_are_the_next_pass() -> None:
    lm, text = model(), ids(1, 20)
    for fresh in (0, 1, 6):
        with QuantizeKV("int2", fresh=fresh).on(lm, prompt=14):
            one = logits(lm, input_ids=text)
        with QuantizeKV("int2").on(lm):
            two = in_two(lm, text, 14 - fresh)
        assert (one - two).abs().max() < EQUAL


def test_a_cache_filled_before_the_block_is_read_as_it_is() -> None:
    lm, text, cache = model(), ids(1, 12), DynamicCache()
    logits(lm, input_ids=text[:, :10], cache=cache)
    plain = in_two(lm, text[:, :11], 10)
    with QuantizeKV("int2").on(lm) as run:
        assert torch.equal(logits(lm, input_ids=text[:, 10:11], cache=cache), plain[:, 10:])
        assert run.fired == 0
        logits(lm, input_ids=text[:, 11:], cache=cache)  # reads the one before
        assert run.fired == 3


# ---- what the cache holds --------------------------------------------------------------------------------------------


def test_groups_of_tokens_begin_at_the_rows_own_start_and_the_rest_is_exact() -> None:
    lm, mask, text = model(layers=1), padding(16), ids(2, 16)
    given = {"input_ids": text, "attention_mask": mask, "position_ids": positions(mask)}
    plain, got = DynamicCache(), DynamicCache()
    logits(lm, **given, cache=plain)
    how = QuantizeKV("int2", keys="channel", group=4, first=2, targets="K")
    with pytest.raises(NeverFired), how.on(lm, prompt=15):
        logits(lm, **{name: x[:, :14] for name, x in given.items()}, cache=got)
    changed = (pair(got)[0] != pair(plain)[0][:, :, :14]).any(-1).any(1)
    # row 0: 14 tokens, whole groups 0-3, 4-7, 8-11; row 1 begins in column 5: 9 tokens, whole groups 5-8 and 9-12
    assert changed[0].nonzero()[:, 0].tolist() == [*range(2, 12)]
    assert changed[1].nonzero()[:, 0].tolist() == [*range(7, 13)]
    assert torch.equal(pair(got)[1], pair(plain)[1][:, :, :14])
    for row, (start, stop) in enumerate(((4, 8), (9, 13))):
        some = pair(plain)[0][row : row + 1, :, start:stop]
        assert torch.equal(pair(got)[0][row : row + 1, :, start:stop], quantized(some, "int2", "channel", 4)[0])


def test_groups_of_a_later_pass_are_counted_from_the_rows_own_start() -> None:
    lm, mask, text = model(layers=1), padding(16), ids(2, 16)
    exact, got = DynamicCache(), DynamicCache()
    with QuantizeKV("int2", keys="channel", group=4, targets="K").on(lm):
        for part in (slice(0, 10), slice(10, 16)):
            given = {"attention_mask": mask[:, : part.stop], "position_ids": positions(mask)[:, part]}
            logits(lm, input_ids=text[:, part], cache=got, **given)
    logits(lm, input_ids=text, attention_mask=mask, position_ids=positions(mask), cache=exact)
    changed = (pair(got)[0] - pair(exact)[0]).abs().amax((1, 3)) > EQUAL
    # row 0: 0-3 and 4-7, then 12-15, as 8-11 came in two; row 1 begins in column 5: 5-8, then nothing until 13-16
    assert changed[0].nonzero()[:, 0].tolist() == [*range(8), *range(12, 16)]
    assert changed[1].nonzero()[:, 0].tolist() == [*range(5, 9)]


def test_layers_and_protected_dims_that_were_not_asked_for_stay() -> None:
    lm, text = model(), ids(1, 12)
    keep = {1: normal(2, 16) > 0, 2: torch.ones(2, 16, dtype=torch.bool)}
    plain, got = DynamicCache(), DynamicCache()
    in_two(lm, text, 11, plain)
    with QuantizeKV("int3", layers=(1, 2), keep=keep, targets="K").on(lm) as run:
        in_two(lm, text, 11, got)
    assert torch.equal(pair(got)[0], pair(plain)[0])
    assert torch.equal(pair(got, 1)[1][:, :, :11], pair(plain, 1)[1][:, :, :11])
    apart = (pair(got, 1)[0] - pair(plain, 1)[0])[0, :, :11]
    kept = keep[1][:, None].expand(-1, 11, -1)
    assert (apart[kept] == 0).all()
    assert (apart != 0).any(1)[~keep[1]].all()
    groups, free = 2 * 12, int((~keep[1]).sum()) * 12
    values = 2 * 2 * 2 * 16 * 12  # two layers, keys and values, two heads
    assert run.measured["values"] == values
    assert run.measured["bits"] == 16 * values - 13 * free + 32 * groups


def test_error_and_energy_are_of_what_was_quantized() -> None:
    lm, text = model(layers=1), ids(1, 12)
    plain = DynamicCache()
    logits(lm, input_ids=text, cache=plain)
    x = torch.stack([pair(plain)[0], pair(plain)[1]])[:, :, :, 3:]
    expected = quantized(x.flatten(0, 1), "int4")[0].view_as(x) - x
    with QuantizeKV(first=3).on(lm, prompt=12) as run:
        logits(lm, input_ids=text)
    assert run.measured["error"] == pytest.approx(expected.square().sum().item())
    assert run.measured["energy"] == pytest.approx(x.square().sum().item())
    assert run.measured["bits"] / run.measured["values"] == pytest.approx((3 * 16 + 9 * (4 + 32 / 16)) / 12)


# ---- batches, generation ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", ["llama", "mistral", "gpt_oss"])
def test_padded_rows_equal_single_ones(family: str, how: QuantizeKV) -> None:
    lm, mask, text = model(family), padding(22), ids(2, 22)
    with how.on(lm, prompt=16) as run:
        got = logits(lm, input_ids=text, attention_mask=mask, position_ids=positions(mask))
    one_by_one: dict[str, float] = {}
    for row in range(2):
        there = mask[row].bool()
        with how.on(lm, prompt=int(there[:16].sum())) as single:
            alone = logits(lm, input_ids=text[row : row + 1, there])[0]
        assert (got[row, there] - alone).abs().max() < EQUAL
        one_by_one = {name: one_by_one.get(name, 0) + value for name, value in single.measured.items()}
    assert run.measured == pytest.approx(one_by_one)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
def test_generation_equals_steps_by_hand(family: str, how: QuantizeKV) -> None:
    lm, text, mask = model(family), ids(2, 14), padding(14)
    with how.on(lm, prompt=14):
        out = lm.model.generate(
            input_ids=text, attention_mask=mask, max_new_tokens=8, min_new_tokens=8, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
    parts = (slice(0, 13), *(slice(at, at + 1) for at in range(13, 21)))
    whole, cache = torch.cat([mask, mask.new_ones(2, 8)], 1), DynamicCache(config=lm.model.config)
    with how.on(lm):
        for i, part in enumerate(parts):
            places = positions(whole)[:, part]
            step = logits(
                lm, input_ids=out.sequences[:, part], attention_mask=whole[:, : part.stop], position_ids=places,
                cache=cache,
            )  # fmt: skip
            if i:
                assert (step[:, -1] - out.logits[i - 1]).abs().max() < EQUAL


def test_a_scored_answers_first_token_is_the_one_that_is_generated(demo: rs.LM) -> None:
    how = QuantizeKV("int3")
    prompts = [tuple(demo.encode(text).tolist()) for text in ("The capital of France is", "One, two, three,")]
    made = generate(demo, prompts, 1, how)
    told = score(demo, [Row(prompt, new) for prompt, new in zip(prompts, made, strict=True)], how)
    assert [scored.exact for scored in told] == [True, True]


# ---- with others, what observers see, what is refused ----------------------------------------------------------------


@dataclass
class See:
    calls: list[AttentionCall]

    def observe(self, call: AttentionCall) -> None:
        self.calls.append(call)


def test_observers_see_the_keys_that_the_last_columns_read() -> None:
    lm, text = model(layers=1), ids(1, 12)
    seen: list[AttentionCall] = []
    with tap(lm, See(seen)):
        logits(lm, input_ids=text)
    with QuantizeKV("int2").on(lm, prompt=9), tap(lm, See(seen)):
        logits(lm, input_ids=text)
    plain, got = seen
    assert torch.equal(got.k[:, :, :8], quantized(plain.k[:, :, :8], "int2")[0])
    assert torch.equal(got.k[:, :, 8:], plain.k[:, :, 8:])
    first = got.run(got)[0][:, :8]
    assert torch.equal(first, plain.run(plain)[0][:, :8])


def test_two_of_them_share_the_layers_and_others_come_before() -> None:
    lm, text = model(), ids(1, 20)
    low, high = QuantizeKV("int2", layers=0), QuantizeKV("int8", layers=(1, 2))
    with Together((low, high)).on(lm, prompt=14) as run:
        both = logits(lm, input_ids=text)
    assert run.fired == 3
    assert run.measured["bits"] / run.measured["values"] == pytest.approx((4 + 10 + 10) / 3)
    with low.on(lm, prompt=14):
        assert 0 < (logits(lm, input_ids=text) - both).abs().max() < 0.1 * both.std()
    with tap(lm, See([])), Together((low, high)).on(lm, prompt=14):
        assert torch.equal(logits(lm, input_ids=text), both)
    how = QuantizeKV("int2")
    for other in (Disrupt(targets="K"), Disrupt(), LambdaMask(5, first=1)):
        with other.on(lm, prompt=13), how.on(lm, prompt=14):
            one = logits(lm, input_ids=text)
        with other.on(lm, prompt=13), how.on(lm):
            assert (in_two(lm, text, 13) - one).abs().max() < EQUAL
        with pytest.raises(BadInput, match="open quantize-kv last"), Together((how, other)).on(lm, prompt=14):
            logits(lm, input_ids=text)
        with pytest.raises(BadInput, match="open quantize-kv last"), Together((how, other)).on(lm):
            in_two(lm, text, 13)
    turned = ShiftPositions("rotate", mean=3)
    with Together((turned, how)).on(lm, prompt=14) as run:
        logits(lm, input_ids=text, use_cache=False)
    with pytest.raises(BadInput, match="not in the cache"), Together((turned, how)).on(lm, prompt=14):
        logits(lm, input_ids=text)


def test_the_model_is_left_as_found() -> None:
    lm, text = model(), ids(1, 20)
    plain = logits(lm, input_ids=text)
    with pytest.raises(RuntimeError, match="mine"), QuantizeKV().on(lm, prompt=9):  # noqa: PT012
        logits(lm, input_ids=text)
        raise RuntimeError("mine")
    assert torch.equal(logits(lm, input_ids=text), plain)


def test_they_are_made_from_text_and_bad_input_is_named() -> None:
    how = parse("quantize-kv:kind=int2:keys=channel:group=32:layers=1-2:first=4:fresh=2")
    assert how == QuantizeKV("int2", "channel", group=32, layers=(1, 2), first=4, fresh=2)
    for text, said in (
        ("kind=int1", "kind is one of int2"),
        ("keys=head", "keys is one of token, channel"),
        ("targets=Q", "targets are K, V or KV"),
        ("group=0", "group is 1 or more"),
        ("kind=fp8:keys=channel", "fp8 has one scale"),
        ("keep=3", "keep maps layers"),
    ):
        with pytest.raises(BadInput, match=said):
            parse(f"quantize-kv:{text}")
    lm = model()
    keep = torch.ones(2, 16, dtype=torch.bool)
    for wrong, said in (
        (QuantizeKV(layers=7), "layer 7 is none"),
        (QuantizeKV(group=6), "16 dims cannot be cut into groups of 6: the next size that fits is 4"),
        (QuantizeKV(keep={3: keep}), "layer 3 is none"),
        (QuantizeKV(keep={1: keep[0]}), r"keep of layer 1 must be boolean \[2, 16\]"),
        (QuantizeKV(keep={1: keep.float()}), r"keep of layer 1 must be boolean \[2, 16\], not torch.float32"),
    ):
        with pytest.raises(BadInput, match=said), wrong.on(lm):
            pass


def test_what_cannot_be_exact_is_refused() -> None:
    text = ids(1, 14)
    compressed = model("deepseek_v3")
    with QuantizeKV().on(compressed, prompt=10) as run:
        logits(compressed, input_ids=text, use_cache=False)
    assert run.fired == 3
    with pytest.raises(Refused, match="something else than keys and values"), QuantizeKV().on(compressed):
        in_two(compressed, text, 10)
    shared = model("gemma3n_text")
    with pytest.raises(Refused, match="layer 2 reads the keys"), QuantizeKV(layers=2).on(shared):
        in_two(shared, text, 10)
    lm = model()
    with pytest.raises(BadInput, match="dynamic cache"), QuantizeKV().on(lm):
        lm.model.generate(text, max_new_tokens=3, cache_implementation="static")
    with pytest.raises(BadInput, match="prefill inside the same block"), QuantizeKV("fp8").on(lm):  # noqa: PT012
        in_two(lm, text, 10)
        cache = DynamicCache()
        logits(lm, input_ids=ids(1, 9), cache=cache)
        cache.batch_repeat_interleave(2)
        logits(lm, input_ids=ids(2, 1), cache=cache)

"""ShiftPositions: against the model's own position ids, and against logits and attention written out in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from tiny import VOCABULARY, tiny

import rotoscope as rs
from rotoscope.interventions.shift import ShiftPositions, no_jitter, signed
from rotoscope.model.call import AttentionCall

TOKENS = 14
IDS = torch.randint(3, VOCABULARY, (2, TOKENS), generator=torch.Generator().manual_seed(7))
SHIFTS = [0, 3, 0, -2, 5, 0, -6, 0, 4, 0, 0, 2, -11, -1]
# two tables (gemma3_text), YaRN with sinks (gpt_oss), interleaved and partial (glm, gptj), keys wider than values
# (deepseek_v3), layers that do not rotate (cohere2, smollm3), layers without attention (lfm2)
ROTARY = (
    "llama", "gemma2", "gemma3_text", "gpt_oss", "glm", "gptj", "phi", "deepseek_v3", "cohere2", "smollm3", "lfm2",
)  # fmt: skip
LEARNED = ("gpt2", "opt", "gpt_neo", "gpt_bigcode")


def wrapped(family: str, **more: Any) -> rs.LM:
    return rs.wrap(tiny(family, dtype=torch.float64, **more))


def run(lm: rs.LM, ids: torch.Tensor = IDS, mask: torch.Tensor | None = None, **more: Any) -> torch.Tensor:
    if mask is None:
        mask = torch.ones_like(ids)
    else:
        more["position_ids"] = (mask.cumsum(-1) - 1).clamp_min(0)
    with torch.no_grad():
        out = lm.model(input_ids=ids, attention_mask=mask, use_cache=False, **more).logits
    return out  # type: ignore[no-any-return]


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    return (a - b).abs().max().item()


# ---- jitter: the model's own position ids ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", [*ROTARY, *LEARNED])
def test_jitter_is_other_position_ids(family: str) -> None:
    lm = wrapped(family)
    expected = run(lm, position_ids=(torch.arange(TOKENS) + torch.tensor(SHIFTS))[None].expand(2, -1))
    plain = run(lm)
    with ShiftPositions(shifts=SHIFTS).on(lm) as block:
        assert far(run(lm), expected) < 1e-9
        with torch.no_grad():
            unmasked = lm.model(input_ids=IDS, use_cache=False).logits
        assert far(unmasked, expected) < 1e-9, "shifted position ids pass for packed texts"
    assert far(plain, expected) > 1e-3
    assert torch.equal(run(lm), plain)
    assert block.fired == 2
    assert block.measured["shift"] / block.measured["shifted"] == np.abs(SHIFTS).sum() / np.count_nonzero(SHIFTS)


@pytest.mark.parametrize(
    ("family", "reason"), [("bloom", "no positions from position ids"), ("jamba", "no positions"), ("falcon", "no pos")]
)
def test_jitter_needs_positions_from_position_ids(family: str, reason: str) -> None:
    lm = wrapped(family)
    with pytest.raises(rs.errors.Refused, match=reason), ShiftPositions(shifts=SHIFTS).on(lm):
        run(lm)
    assert reason in no_jitter(lm)
    assert not no_jitter(wrapped("llama"))


# ---- rotate: features turned in the call ----------------------------------------------------------------------------


@pytest.mark.parametrize("family", ROTARY)
def test_features_turned_alike_in_all_layers_are_other_position_ids(family: str) -> None:
    lm = wrapped(family)
    with ShiftPositions(shifts=SHIFTS).on(lm):
        expected = run(lm)
    with ShiftPositions("rotate", shifts=SHIFTS).on(lm) as block:
        assert far(run(lm), expected) < 1e-9
    assert block.fired == len(lm.anatomy.rotary)


def test_each_layer_has_shifts_of_its_own() -> None:
    """Two layers' shifts together are those of one layer on top of those of the other."""
    lm = wrapped("llama")
    other = signed(np.arange(TOKENS) % 5, 0).tolist()
    with ShiftPositions("rotate", shifts={0: SHIFTS, 2: other}, layers=(0, 2)).on(lm):
        both = run(lm)
    with (
        ShiftPositions("rotate", shifts=SHIFTS, layers=0).on(lm),
        ShiftPositions("rotate", shifts=other, layers=2).on(lm),
    ):
        assert torch.equal(run(lm), both)
    with ShiftPositions("rotate", shifts=SHIFTS).on(lm):
        assert far(run(lm), both) > 1e-3


# ---- dummy: logits written out --------------------------------------------------------------------------------------


class Calls:
    def __init__(self) -> None:
        self.of: dict[int, AttentionCall] = {}

    def observe(self, call: AttentionCall) -> None:
        self.of[call.layer] = call


def at_distance(call: AttentionCall, distance: int) -> np.ndarray:
    """``scaling · Re Σ q conj(k) e^{idθ}`` of every query and key, by loops over heads and pairs."""
    rotation: Any = call.rotation
    q, k = (call.unrotate(x).numpy() for x in (call.q, call.k))
    pairs = q.shape[-1] // 2
    group = q.shape[1] // k.shape[1]
    out = np.zeros((*q.shape[:3], k.shape[2]))
    for head in range(q.shape[1]):
        for m in range(pairs):
            turns = m < rotation.pairs
            theta, scale = (rotation.theta[m], rotation.scale[m]) if turns else (0.0, 1.0)
            a = q[:, head, :, m] + 1j * q[:, head, :, m + pairs]
            b = k[:, head // group, :, m] + 1j * k[:, head // group, :, m + pairs]
            turn = scale**2 * np.exp(1j * distance * theta)
            out[:, head] += (a[:, :, None] * b[:, None].conj() * turn).real * call.scaling
    return out


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "glm", "gemma2", "deepseek_v3", "smollm3"])
@pytest.mark.parametrize("distance", [0, 5, 300])
def test_all_pairs_at_one_distance(family: str, distance: int) -> None:
    lm = wrapped(family)
    clean, seen = Calls(), Calls()
    with rs.tap(lm, clean):
        run(lm)
    first = lm.anatomy.rotary[0].layer  # layers above it get other states
    with ShiftPositions("dummy", distance=distance).on(lm), rs.tap(lm, seen):
        run(lm)
    expected = at_distance(clean.of[first], distance)
    assert np.abs(seen.of[first].logits().numpy() - expected).max() < 1e-9
    assert np.abs(clean.of[first].logits().numpy() - expected).max() > 0.1


def test_without_turns_tokens_are_a_bag() -> None:
    """At one distance for all, a one-layer model's last token does not tell how those before it are ordered."""
    lm = wrapped("llama", layers=1)
    swapped = IDS[:, [3, 1, 2, 0, *range(4, TOKENS)]]
    with ShiftPositions("dummy", distance=3).on(lm):
        assert far(run(lm)[:, -1], run(lm, swapped)[:, -1]) < 1e-9
    assert far(run(lm)[:, -1], run(lm, swapped)[:, -1]) > 1e-3


# ---- what is drawn, padding, caches ---------------------------------------------------------------------------------

KINDS = (
    ShiftPositions(mean=2.5, share=0.5, seed=3),
    ShiftPositions("rotate", mean=2.5, share=0.5, seed=3),
    ShiftPositions("dummy", distance=4),
)


@pytest.mark.parametrize("how", KINDS[:2], ids=lambda how: how.kind)
def test_share_and_mean_are_those_asked_for(how: ShiftPositions) -> None:
    lm = wrapped("llama")
    with how.on(lm) as block:
        run(lm)
    layers = 1 if how.kind == "jitter" else 3
    told = block.measured
    assert told == {"tokens": 2 * TOKENS * layers, "shifted": 2 * 7 * layers, "shift": 2 * round(2.5 * 7) * layers}


@pytest.mark.parametrize("kind", ["jitter", "rotate"])
def test_no_share_or_no_distance_changes_no_bit(kind: str) -> None:
    lm = wrapped("gpt_oss")
    plain = run(lm)
    for nothing in ({"share": 0.0}, {"mean": 0.0}, {"shifts": [0] * TOKENS}):
        with ShiftPositions(kind, **nothing).on(lm) as block:  # type: ignore[arg-type]
            assert torch.equal(run(lm), plain)
        assert block.fired


def test_draws_differ_between_seeds_prompts_and_layers() -> None:
    lm = wrapped("llama")

    def columns(seed: int, ids: torch.Tensor, layer: int | None = None) -> list[list[int]]:
        how = ShiftPositions("rotate", mean=3, share=0.5, seed=seed)
        with how.on(lm) as block:
            run(lm, ids)
            return how.drawn(block, block.forward, layer).tolist()  # type: ignore[arg-type]

    one, other = columns(0, IDS)
    assert one != other
    assert columns(0, IDS.flip(0)) == [other, one]
    assert columns(1, IDS)[0] != one
    assert columns(0, IDS, 0)[0] != columns(0, IDS, 1)[0]
    assert one[0] == other[0] == 0


@pytest.mark.parametrize(
    ("family", "how"), [(family, how) for family in ("llama", "gemma3_text") for how in KINDS] + [("gpt2", KINDS[0])]
)
def test_rows_in_a_left_padded_batch_equal_single_runs(how: ShiftPositions, family: str) -> None:
    lm = wrapped(family)
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    mask[1, :5] = ids[1, :5] = 0
    both = {"shifts": SHIFTS[:9]} if how.kind == "jitter" else {}
    for some in (how, ShiftPositions(how.kind, distance=how.distance, **both)):  # type: ignore[arg-type]
        with some.on(lm):
            batch = run(lm, ids, mask)
            assert far(batch[0], run(lm, ids[:1])[0]) < 1e-9
            assert far(batch[1, 5:], run(lm, ids[1:, 5:])[0]) < 1e-9


def test_positions_follow_the_mask_where_none_are_given() -> None:
    lm = wrapped("gpt2")
    mask = torch.ones_like(IDS[:1])
    mask[0, :5] = 0
    with ShiftPositions(shifts=SHIFTS[:9]).on(lm), torch.no_grad():
        padded = lm.model(input_ids=IDS[:1], attention_mask=mask, use_cache=False).logits
        assert far(padded[0, 5:], run(lm, IDS[:1, 5:])[0]) < 1e-9


@pytest.mark.parametrize("how", KINDS, ids=lambda how: how.kind)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "deepseek_v3"])
def test_generation_with_a_cache_equals_full_forwards(how: ShiftPositions, family: str) -> None:
    """Windows of 5 tokens among them: a cache then hands over fewer keys than there are columns."""
    lm = wrapped(family)
    ids, mask = IDS.clone(), torch.ones_like(IDS)
    mask[1, :4] = ids[1, :4] = 0
    kept: dict[str, Any] = {"attention_mask": mask, "do_sample": False, "max_new_tokens": 6, "pad_token_id": 0}
    kept |= {"eos_token_id": None, "output_logits": True, "return_dict_in_generate": True}
    with how.on(lm):
        cached = lm.model.generate(ids, **kept)
    with how.on(lm, prompt=TOKENS):
        whole = lm.model.generate(ids, use_cache=False, **kept)
    assert torch.equal(cached.sequences, whole.sequences)
    # a router that computes in float32 whatever the model's dtype
    assert far(torch.stack(cached.logits), torch.stack(whole.logits)) < (1e-6 if family == "deepseek_v3" else 1e-9)
    plain = lm.model.generate(ids, **kept)
    assert far(torch.stack(cached.logits), torch.stack(plain.logits)) > 1e-3


def test_a_step_needs_its_prompt() -> None:
    lm = wrapped("llama")
    with torch.no_grad():
        cache = lm.model(input_ids=IDS, use_cache=True).past_key_values
    with (
        pytest.raises(rs.errors.BadInput, match="prefill inside the same block"),
        ShiftPositions("dummy").on(lm),
        torch.no_grad(),
    ):
        lm.model(input_ids=IDS[:, :1], cache=cache)


# ---- signs, refusals ------------------------------------------------------------------------------------------------


def test_signs_keep_within_the_text() -> None:
    sizes = np.array([0, 1, 5, 3, 0, 2, 6, 1])
    drawn = np.array([signed(sizes, seed) for seed in range(400)])
    there = np.arange(8) + drawn
    assert ((there >= 0) & (there < 8)).all()
    assert (np.abs(drawn) == sizes).all()
    share = (drawn > 0).mean(0)
    assert share[[2, 6, 7]].tolist() == [1, 0, 0]  # 2 - 5, 6 + 6 and 7 + 1 lie outside
    assert np.abs(share[[1, 3, 5]] - 0.5).max() < 0.1
    with pytest.raises(rs.errors.BadInput, match="a shift by 5 leads out of a text of 8 tokens"):
        signed([0, 0, 0, 0, 5, 0, 0, 0], 0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"kind": "swap"}, "jitter, rotate, dummy"),
        ({"share": 1.5}, "share is from 0 to 1"),
        ({"mean": -1}, "mean and distance are 0 or more"),
        ({"layers": 1}, "leave layers out"),
        ({"kind": "dummy", "shifts": [1]}, "dummy takes no such shifts"),
        ({"shifts": {0: [1]}}, "jitter takes no such shifts"),
    ],
)
def test_bad_arguments(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(rs.errors.BadInput, match=message):
        ShiftPositions(**arguments)


def test_rotate_on_what_it_cannot_turn() -> None:
    with pytest.raises(rs.errors.Refused, match="no layer"), ShiftPositions("rotate").on(wrapped("gpt2")):
        pass
    lm = wrapped("smollm3")
    with pytest.raises(rs.errors.BadInput, match="layers that rotate"), ShiftPositions("dummy", layers=1).on(lm):
        pass
    for shifts, message in (([0, -2], "within it"), ({0: SHIFTS}, "no shifts for layer 2")):
        with pytest.raises(rs.errors.BadInput, match=message), ShiftPositions("rotate", shifts=shifts).on(lm):
            run(lm)

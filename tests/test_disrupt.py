"""Disrupt: every combination of axes against slow loops; batches, caches and generation; the size of the change."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny
from transformers import DynamicCache
from transformers.cache_utils import DynamicLayer

import rotoscope as rs
from rotoscope.interventions import Disrupt, Run, Together, parse
from rotoscope.interventions.base import uniform
from rotoscope.interventions.disrupt import PHASES, POSITIONS, REPLACEMENTS
from rotoscope.model.call import AttentionCall, NewKeys

SELECTIONS = (
    "top-1", "top-2", "top-0", "lambda-1.5", "lambda-99", "second", "smallest", "smallest-3", "random-2",
    "change-matched", "change-matched-top-2", "energy-matched", "change-matched-lambda-1.5",
)  # fmt: skip
PROMPT, LATER = 7, 2


# ---- a slow reference: Python loops over rows, heads, tokens and dims, in float64 ----------------------------------


def slow(x: np.ndarray, real: np.ndarray, how: Disrupt, draw: np.ndarray) -> np.ndarray:
    """``x`` [batch, heads, tokens, dims], the first `PROMPT` columns being the prompt."""
    batch, heads, tokens, dims = x.shape
    out = x.copy()
    for b in range(batch):
        prompt = [t for t in range(PROMPT) if real[b, t]]
        first = prompt[0]
        everywhere = prompt if how.phase == "prefill" else [t for t in range(tokens) if real[b, t]]
        changed = {
            "all": everywhere,
            "all-but-0": [t for t in everywhere if t != first],
            "only-0": [t for t in everywhere if t == first],
        }[how.positions]
        measured = [t for t in changed if t in prompt]
        base, matched = how.selection, ""
        for kind in ("change-matched", "energy-matched"):
            if base.startswith(kind):
                base, matched = base.removeprefix(kind).removeprefix("-") or "top-1", kind
        size = [
            [math.sqrt(sum(x[b, h, t, d] ** 2 for t in prompt) / len(prompt)) for d in range(dims)]
            for h in range(heads)
        ]
        taken = [chosen(size[h], base, draw[b, h]) for h in range(heads)]
        pool = [x[b, h, t, d] for h in range(heads) for d in taken[h] for t in prompt]
        for h in range(heads):
            value = []
            for d in range(dims):
                column = [x[b, h, t, d] for t in prompt]
                value.append(
                    {
                        "token-mean": sum(column) / len(column),
                        "zero": 0.0,
                        "max": max(column),
                        "pooled": sum(pool) / len(pool) if pool else 0.0,
                    }[how.replacement]
                )
            weight = dict.fromkeys(taken[h], 1.0)
            if matched:
                amount = [
                    sum(
                        (value[d] - x[b, h, t, d]) ** 2 if matched == "change-matched" else x[b, h, t, d] ** 2
                        for t in measured
                    )
                    for d in range(dims)
                ]
                weight = fill(amount, taken[h], draw[b, h], matched)
            for d, w in weight.items():
                for t in changed:
                    out[b, h, t, d] = x[b, h, t, d] + w * (value[d] - x[b, h, t, d])
    return out


def chosen(size: list[float], name: str, draw: np.ndarray) -> list[int]:
    ranked = sorted(range(len(size)), key=lambda d: -size[d])
    kind, _, number = name.partition("-")
    n = int(float(number or 1))
    if kind == "lambda":
        return [d for d in ranked if size[d] > float(number) * sum(size) / len(size)]
    if kind == "random":
        return sorted(ranked[2:], key=lambda d: draw[d])[:n]
    return {"top": ranked[:n], "second": ranked[1:2], "smallest": ranked[len(ranked) - n :]}[kind]


def fill(amount: list[float], taken: list[int], draw: np.ndarray, kind: str) -> dict[int, float]:
    left = sum(amount[d] for d in taken)
    others = sorted((d for d in range(len(amount)) if d not in taken), key=lambda d: draw[d])
    total = sum(amount[d] for d in others)
    part = math.sqrt if kind == "change-matched" else float
    if left > total > 0:
        return {d: part(left / total) for d in others}
    weight = {}
    for d in others:
        if left <= 0:
            break
        weight[d] = part(min(1.0, left / amount[d])) if amount[d] > 0 else 1.0
        left -= amount[d]
    return weight


@pytest.mark.parametrize("selection", SELECTIONS)
def test_every_combination_of_axes_equals_slow_loops(selection: str) -> None:
    generator = torch.Generator().manual_seed(3)

    def random(heads: int) -> torch.Tensor:
        x = torch.randn(2, heads, PROMPT + LATER, 6, generator=generator, dtype=torch.float64)
        x[..., 1] = 3 * x[..., 1] + 4  # one dim stands out, and position 0 in another
        x[:, :, 3, 4] *= 5
        return x

    q, k, v = random(4), random(2), random(2)
    padding = torch.ones(2, PROMPT + LATER, dtype=torch.long)
    padding[1, :2] = 0
    real = padding.bool().numpy()
    for replacement, positions, phase in itertools.product(REPLACEMENTS, POSITIONS, PHASES):
        how = Disrupt("QKV", selection, replacement, positions, None, phase, seed=5)
        part: Any = how.part(Run(prompt=PROMPT), frozenset({0}))
        got_k = part.write(NewKeys(0, k, v, padding))
        call = AttentionCall(0, q, k, v, None, 1.0, torch.nn.Identity(), run=lambda c: (c.q, None), padding=padding)
        got_q = part.edit(call).q
        for name, x, got in (("Q", q, got_q), ("K", k, got_k.k), ("V", v, got_k.v)):
            seeds = Run(prompt=PROMPT).seeds(2, 5, 0, 0, name)
            draw = uniform(seeds, (x.shape[1], 6), x.device).numpy()
            expected = slow(x.numpy(), real, how, draw)
            np.testing.assert_allclose(
                got.numpy()[real.nonzero()[0], :, real.nonzero()[1]],
                expected[real.nonzero()[0], :, real.nonzero()[1]],
                atol=1e-12, err_msg=f"{name} {how}",
            )  # fmt: skip
            assert np.array_equal(got.numpy()[1, :, :2], x.numpy()[1, :, :2]), "padding was changed"


# ---- identities ------------------------------------------------------------------------------------------------------


def ids(batch: int, tokens: int, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 90, (batch, tokens), generator=torch.Generator().manual_seed(seed))


def logits(lm: rs.LM, **batch: Any) -> torch.Tensor:
    with torch.no_grad():
        return lm.model(**batch).logits


def test_an_empty_selection_changes_nothing_at_all(demo: rs.LM) -> None:
    batch = {"input_ids": torch.tensor([demo.encode("A claim that fails is a finding.").tolist()])}
    plain = logits(demo, **batch)
    for how in (Disrupt(selection="top-0"), Disrupt(selection="lambda-999"), Disrupt(selection="change-matched-top-0")):
        with how.on(demo) as run:
            assert (logits(demo, **batch) - plain).abs().max() == 0
        assert run.fired == 60  # 30 layers, queries and keys


def test_a_replacement_equal_to_the_value_changes_nothing_at_all(demo: rs.LM) -> None:
    """The mean over one token is that token's value."""
    batch = {"input_ids": demo.encode("Hello")[:1][None]}
    plain = logits(demo, **batch)
    for selection in ("top-3", "energy-matched", "random-2"):
        with Disrupt("QKV", selection, positions="all").on(demo):
            assert (logits(demo, **batch) - plain).abs().max() == 0
    with Disrupt("QKV", "top-3", "zero", positions="all").on(demo):
        assert (logits(demo, **batch) - plain).abs().max() > 0


# ---- batches, caches, generation -------------------------------------------------------------------------------------

CACHED = ("llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "mixtral", "bloom", "deepseek_v3", "falcon_h1", "gpt_oss")
HOWS = (
    Disrupt("QK", "top-1", phase="prefill"),
    Disrupt("QKV", "top-2", "pooled", "all"),
    Disrupt("QK", "change-matched-top-2", "zero", layers=(1, 2)),
)


def left_padded(rows: list[torch.Tensor]) -> dict[str, torch.Tensor]:
    width = max(map(len, rows))
    padded = torch.stack([torch.cat([row.new_zeros(width - len(row)), row]) for row in rows])
    mask = torch.stack([torch.cat([row.new_zeros(width - len(row)), torch.ones_like(row)]) for row in rows])
    return {"input_ids": padded, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neox", "gpt2"])
def test_rows_of_a_left_padded_batch_equal_single_runs(family: str, how: Disrupt) -> None:
    # In double precision eager attention with a softcap gives NaN to padding, with or without an intervention.
    dtype, atol = (torch.float32, 2e-5) if family == "gemma2" else (torch.float64, 1e-9)
    lm = rs.wrap(tiny(family, dtype=dtype))
    rows = [ids(1, n, n)[0] for n in (8, 11, 9)]  # fewer padded columns than the narrowest window
    with how.on(lm):
        together = logits(lm, **left_padded(rows))
        for row, got in zip(rows, together, strict=True):
            alone = logits(lm, input_ids=row[None])[0]
            torch.testing.assert_close(got[-len(row) :], alone, rtol=0, atol=atol)


def recomputed(lm: rs.LM, how: Disrupt, row: torch.Tensor, steps: int, least: int = 0) -> list[int]:
    """Greedy tokens, each from a whole forward without a cache."""
    prompt = len(row)
    for _ in range(steps):
        with how.on(lm, prompt=prompt):
            last = logits(lm, input_ids=row[None], use_cache=False)[0, -1]
        if len(row) < prompt + least:
            last[2] = -torch.inf
        row = torch.cat([row, last.argmax()[None]])
    return row[prompt:].tolist()


@pytest.mark.parametrize("how", HOWS, ids=str)
@pytest.mark.parametrize("family", CACHED)
def test_generation_with_a_cache_equals_full_recomputation(family: str, how: Disrupt) -> None:
    lm = rs.wrap(
        tiny(family, dtype=torch.float64, **({"experts_implementation": "eager"} if family in EXPERTS else {}))
    )
    row = ids(1, 9)[0]
    greedy = {"do_sample": False, "max_new_tokens": 6, "min_new_tokens": 6, "pad_token_id": 0}
    with how.on(lm) as run:
        cached = lm.model.generate(row[None], attention_mask=torch.ones(1, 9, dtype=torch.long), **greedy)
    expected = recomputed(lm, how, row, 6, least=6)
    assert cached[0, 9:].tolist() == expected
    assert run.fired > 0
    plain = lm.model.generate(row[None], attention_mask=torch.ones(1, 9, dtype=torch.long), **greedy)
    assert plain[0, :9].tolist() == row.tolist()


EXPERTS = ("mixtral", "gpt_oss", "deepseek_v3")


@pytest.mark.parametrize("phase", PHASES)
def test_generation_on_the_demo_model_equals_full_recomputation(demo: rs.LM, phase: str) -> None:
    row = demo.encode("Question: What is the capital of France?\nAnswer:")
    how = Disrupt(selection="top-2", phase=phase)
    with how.on(demo):
        cached = demo.model.generate(
            row[None], attention_mask=torch.ones_like(row)[None], do_sample=False, max_new_tokens=12, pad_token_id=0
        )
    assert cached[0, len(row) :].tolist() == recomputed(demo, how, row, cached.shape[1] - len(row))


def test_the_cache_holds_what_was_written_and_serves_after_the_block() -> None:
    lm = rs.wrap(tiny("llama", dtype=torch.float64))
    row = ids(1, 9)
    how = Disrupt("K", "top-2", "zero", "all")
    seen = Keys()
    cache = DynamicCache()
    with how.on(lm), rs.tap(lm, seen):
        logits(lm, input_ids=row, past_key_values=cache)
    for layer, k in seen.k.items():
        assert torch.equal(cache.layers[layer].keys, k)
        assert (k == 0).all(2).sum(-1).tolist() == [[2, 2]]
    assert "update" not in vars(cache)


class Keys:
    """Keeps the keys of every layer."""

    def __init__(self) -> None:
        self.k: dict[int, torch.Tensor] = {}

    def observe(self, call: AttentionCall) -> None:
        self.k[call.layer] = call.k.clone()


def test_an_observer_in_front_sees_the_keys_unchanged() -> None:
    lm = rs.wrap(tiny("llama", dtype=torch.float64))
    row, how = ids(1, 9), Disrupt("K", "top-2", "zero", "all", layers=0)
    plain, before, between, after = Keys(), Keys(), Keys(), Keys()
    with rs.tap(lm, plain):
        logits(lm, input_ids=row)
    second = Disrupt("K", "top-3", "zero", "all", layers=0)
    with rs.tap(lm, before), how.on(lm), rs.tap(lm, between), second.on(lm), rs.tap(lm, after):
        logits(lm, input_ids=row, use_cache=True)
    assert torch.equal(before.k[0], plain.k[0])
    assert [int((x.k[0] == 0).all(2).sum()) for x in (before, between, after)] == [0, 4, 10]
    assert not torch.equal(after.k[2], plain.k[2])


class RoundedLayer(DynamicLayer):
    """Keeps keys and values on a coarse grid, as quantized caches do, and hands the first ones over as they came."""

    def update(self, k: torch.Tensor, v: torch.Tensor, *args: Any, **kw: Any) -> tuple[torch.Tensor, torch.Tensor]:
        first = self.get_seq_length() == 0
        grid = super().update((k * 4).round() / 4, (v * 4).round() / 4, *args, **kw)
        return (k, v) if first else grid


def test_a_cache_that_quantizes_stores_the_changed_keys() -> None:
    lm = rs.wrap(tiny("llama", dtype=torch.float64))
    cache = DynamicCache()
    cache.layers = [RoundedLayer() for _ in lm.anatomy.layers]
    seen = Keys()
    with Disrupt("K", "top-2", "zero", "all", phase="prefill").on(lm), rs.tap(lm, seen):
        logits(lm, input_ids=ids(1, 9), past_key_values=cache)
    for layer, k in seen.k.items():
        assert torch.equal(cache.layers[layer].keys, (k * 4).round() / 4)


def test_prefill_alone_leaves_later_tokens_as_they_are() -> None:
    lm = rs.wrap(tiny("llama", dtype=torch.float64))
    row = ids(1, 12)
    seen, plain = Keys(), Keys()
    with rs.tap(lm, plain):
        logits(lm, input_ids=row)
    with Disrupt("K", "top-1", "zero", "all", layers=0, phase="prefill").on(lm, prompt=8), rs.tap(lm, seen):
        logits(lm, input_ids=row)
    assert torch.equal(seen.k[0][:, :, 8:], plain.k[0][:, :, 8:])
    assert (seen.k[0][:, :, :8] == 0).all(2).sum() == 2


# ---- the size of the change ------------------------------------------------------------------------------------------


class QK:
    """Keeps queries and keys."""

    def __init__(self) -> None:
        self.of: dict[tuple[int, str], torch.Tensor] = {}

    def observe(self, call: AttentionCall) -> None:
        self.of |= {(call.layer, "q"): call.q.double(), (call.layer, "k"): call.k.double()}


@pytest.mark.parametrize("positions", POSITIONS)
def test_the_change_matched_arm_changes_as_much_as_the_massive_one(demo: rs.LM, positions: str) -> None:
    """Per head and prompt, on the same queries and keys: each arm alone in one layer, so that both start from them."""
    rows = [demo.encode(text) for text in ("The grass is green. " * 9, "Question: What is the capital of Peru?")]
    batch = left_padded(rows)
    worst, moved = 0.0, 0
    for layer in (0, 7, 15, 29):
        before = QK()
        change = {}
        for selection in ("top-1", "change-matched"):
            after = QK()
            how = Disrupt(selection=selection, positions=positions, layers=layer)
            with rs.tap(demo, before), how.on(demo), rs.tap(demo, after):
                logits(demo, **batch)
            for name in "qk":
                difference = after.of[layer, name] - before.of[layer, name]
                change[selection, name] = difference.square().sum((2, 3))
                dims = (difference != 0).any(2)
                if selection == "top-1":
                    taken = dims
                    change["dims", name] = taken
                else:
                    assert not (dims & change["dims", name]).any()
        for name in "qk":
            a, b = change["top-1", name], change["change-matched", name]
            moved += int((a > 0).sum())
            worst = max(worst, float(((b - a).abs() / a)[a > 0].max()))
    assert worst < 0.05
    assert moved == 4 * 2 * (9 + 3)


def test_the_measured_change_is_the_real_one(demo: rs.LM) -> None:
    before, after = QK(), QK()
    batch = {"input_ids": demo.encode("The sky is blue. The sun is yellow. Here we go.")[None]}
    with rs.tap(demo, before), Disrupt(layers=11, selection="top-3").on(demo) as run, rs.tap(demo, after):
        logits(demo, **batch)
    change = sum(float((after.of[11, n] - before.of[11, n]).square().sum()) for n in "qk")
    energy = sum(float(before.of[11, n][:, :, 1:].square().sum()) for n in "qk")
    assert run.measured["change"] == pytest.approx(change, rel=1e-4)
    assert run.measured["energy"] == pytest.approx(energy, rel=1e-5)
    assert (run.measured["dims"], run.measured["heads"]) == (36, 12)


def test_random_dims_differ_between_prompts_and_seeds_and_not_between_batches() -> None:
    lm = rs.wrap(tiny("llama", dtype=torch.float64))
    rows = [ids(1, 8, seed)[0] for seed in (1, 2)]

    def dims(seed: int, *some: torch.Tensor) -> list[list[int]]:
        seen = Keys()
        with Disrupt("K", "random-3", "zero", "all", layers=0, seed=seed).on(lm), rs.tap(lm, seen):
            logits(lm, **left_padded(list(some)))
        return [(row == 0).all(1).nonzero().flatten().tolist() for row in seen.k[0]]

    one, two = dims(0, *rows)
    assert [one] == dims(0, rows[0])
    assert [two] == dims(0, rows[1])
    assert one != two
    assert [one] != dims(1, rows[0])


# ---- faults ----------------------------------------------------------------------------------------------------------


def test_what_cannot_be_done_is_said_in_one_line() -> None:
    lm = rs.wrap(tiny("llama"))
    for wrong, said in (
        ({"targets": "X"}, "some of Q, K and V"),
        ({"selection": "biggest"}, "no selection 'biggest'"),
        ({"selection": "top"}, "no selection"),
        ({"selection": "change-matched-random-2"}, "no selection"),
        ({"replacement": "median"}, "replacement is one of token-mean"),
        ({"positions": "some"}, "positions is one of all"),
        ({"phase": "decode"}, "phase is one of prefill"),
    ):
        with pytest.raises(rs.BadInput, match=said) as raised:
            Disrupt(**wrong)
        assert "\n" not in str(raised.value)
    for layers in (3, (0, 7), range(2, 5), ()):
        with pytest.raises(rs.BadInput, match="layers of attention are 0-2"), Disrupt(layers=layers).on(lm):
            pass
    with pytest.raises(rs.NeverFired, match="Disrupt changed nothing"), Disrupt().on(lm):
        pass
    with pytest.raises(KeyError), Disrupt().on(lm):
        raise KeyError
    cache = DynamicCache()
    logits(lm, input_ids=ids(1, 4), past_key_values=cache)
    with pytest.raises(rs.BadInput, match="own prompt's prefill"), Disrupt().on(lm):
        logits(lm, input_ids=ids(1, 1), past_key_values=cache)
    assert vars(lm.model).get("forward") is None


def test_interventions_from_text() -> None:
    assert parse("disrupt") == Disrupt()
    both = parse("disrupt:targets=K:selection=lambda-4.5:layers=0,2-3:seed=9+disrupt:targets=V:positions=only-0")
    assert both == Together((Disrupt("K", "lambda-4.5", layers=(0, 2, 3), seed=9), Disrupt("V", positions="only-0")))
    for text, said in (
        ("break", "no intervention 'break'"),
        ("disrupt:colour=red", "takes targets, selection"),
        ("disrupt:seed=x", "seed=x cannot be read"),
        ("disrupt:layers=4-x", "numbers and ranges"),
    ):
        with pytest.raises(rs.BadInput, match=said):
            parse(text)


def test_together_needs_every_part_to_fire() -> None:
    lm = rs.wrap(tiny("llama"))
    plain = logits(lm, input_ids=ids(1, 6))
    both = Together((Disrupt("Q", layers=0), Disrupt("K", layers=2)))
    with both.on(lm) as run:
        changed = logits(lm, input_ids=ids(1, 6))
    assert run.fired == 2
    with Disrupt("Q", layers=0).on(lm), Disrupt("K", layers=2).on(lm):
        assert torch.equal(logits(lm, input_ids=ids(1, 6)), changed)
    assert not torch.equal(changed, plain)
    assert torch.equal(logits(lm, input_ids=ids(1, 6)), plain)

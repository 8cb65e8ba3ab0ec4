"""The tap changes nothing, sees everything, and leaves the model as found."""

from __future__ import annotations

import copy
from dataclasses import replace

import pytest
import torch
from tiny import FAMILIES, tiny

import rotoscope as rs
from rotoscope.model.anatomy import probe_ids
from rotoscope.model.call import AttentionCall
from rotoscope.model.tap import tap, tap_model

REACHED = [f for f in FAMILIES if f not in ("bert", "t5")]


class Calls:
    """Remembers every call."""

    def __init__(self) -> None:
        self.seen: list[AttentionCall] = []

    def observe(self, call: AttentionCall) -> None:
        self.seen.append(call)


class Scale:
    """Multiplies queries."""

    def __init__(self, by: float):
        self.by = by

    def edit(self, call: AttentionCall) -> AttentionCall:
        return replace(call, q=call.q * self.by)


@pytest.fixture(scope="module")
def llama() -> rs.LM:
    return rs.wrap(tiny("llama"))


@pytest.fixture
def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(3, 97, (2, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("family", REACHED)
def test_logits_are_exactly_those_of_the_untouched_model(family: str, batch: dict[str, torch.Tensor]) -> None:
    model = tiny(family)
    with torch.no_grad():
        plain = model(**batch, use_cache=False).logits
        with tap_model(model, (calls := Calls(),)):
            tapped = model(**batch, use_cache=False).logits
    assert torch.equal(plain[0], tapped[0])
    assert torch.equal(plain[batch["attention_mask"] == 1], tapped[batch["attention_mask"] == 1])
    assert calls.seen


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_exact_on_the_demo_model(demo: rs.LM, implementation: str) -> None:
    ids = probe_ids(demo.model, demo.anatomy.vocabulary, 200)
    before = demo.model.config._attn_implementation
    demo.model.set_attn_implementation(implementation)
    try:
        with torch.no_grad():
            plain = demo.model(ids).logits
            with tap(demo, rs.observers.Moments(), rs.observers.Grams(), rs.observers.Causal()):
                tapped = demo.model(ids).logits
        assert (plain - tapped).abs().max().item() == 0.0
        assert demo.model.config._attn_implementation == implementation
    finally:
        demo.model.set_attn_implementation(before)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_model_is_put_back_after_an_error_inside_and_outside_a_forward(
    llama: rs.LM, batch: dict[str, torch.Tensor], error: type[BaseException]
) -> None:
    class Stop:
        def observe(self, call: AttentionCall) -> None:
            raise error

    def hooks() -> int:
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in llama.model.modules())

    configs = [m.config for m in llama.model.modules() if hasattr(m, "config")]
    before, count = [c._attn_implementation for c in configs], hooks()
    with pytest.raises(error), tap(llama, Stop()):
        llama.model(**batch)
    with pytest.raises(error), tap(llama, Calls()):
        raise error
    after = [c._attn_implementation for c in configs]
    assert after == before
    assert all(type(name) is str for name in after)
    assert hooks() == count


def test_editors_act_and_later_parts_see_the_edited_call(llama: rs.LM, batch: dict[str, torch.Tensor]) -> None:
    early, late, inner = Calls(), Calls(), Calls()
    with torch.no_grad():
        plain = llama.model(**batch).logits
        with tap(llama, early, Scale(2.0), late), tap(llama, inner):
            changed = llama.model(**batch).logits
    assert not torch.allclose(plain, changed)
    assert torch.equal(early.seen[0].q * 2, late.seen[0].q)
    assert torch.equal(late.seen[0].q, inner.seen[0].q)
    assert [c.layer for c in early.seen] == [0, 1, 2]


def test_an_editor_may_replace_attention_itself(llama: rs.LM, batch: dict[str, torch.Tensor]) -> None:
    class Nothing:
        def edit(self, call: AttentionCall) -> AttentionCall:
            shape = (call.q.shape[0], call.q.shape[2], call.q.shape[1], call.v.shape[-1])
            return replace(call, run=lambda c: (torch.zeros(shape), None))

    calls = Calls()
    with torch.no_grad(), tap(llama, Nothing(), calls):
        first = llama.model(**batch).logits
        other = llama.model(input_ids=batch["input_ids"].flip(0)).logits
    assert len(calls.seen) == 6
    assert torch.allclose(first[0], other[1], atol=1e-5)  # without attention no token sees its row


def test_taps_on_two_models_keep_apart(llama: rs.LM, batch: dict[str, torch.Tensor]) -> None:
    other = rs.wrap(tiny("llama", seed=5))
    mine, theirs = Calls(), Calls()
    with torch.no_grad(), tap(llama, mine), tap(other, theirs):
        llama.model(**batch)
        assert (len(mine.seen), len(theirs.seen)) == (3, 0)
        other.model(**batch)
    assert (len(mine.seen), len(theirs.seen)) == (3, 3)
    assert not torch.equal(mine.seen[0].q, theirs.seen[0].q)


def test_modeling_files_that_ask_for_the_implementations_name_get_the_old_answer(llama: rs.LM) -> None:
    with tap(llama, Calls()):
        name = llama.model.config._attn_implementation
        assert name == "sdpa"
        assert name in ("eager", "sdpa")
        assert name != "eager"
        assert str.__str__(name) != "sdpa"
        assert copy.deepcopy(name) == "sdpa"
        assert str.__str__(copy.deepcopy(name)) == str.__str__(name)


def test_attention_that_bypasses_the_interface_under_one_name_is_refused_not_rerouted() -> None:
    """GPT-2's upcast path, which only eager attention takes, never calls the interface."""
    model = tiny("gpt2", reorder_and_upcast_attn=True)
    rs.wrap(model)
    model.set_attn_implementation("eager")
    with pytest.raises(rs.Refused, match="attention interface"):
        rs.wrap(model)


def test_hybrids_are_keyed_by_layer_not_by_order() -> None:
    lm = rs.wrap(tiny("jamba", layers=4))
    kinds = [layer.kind for layer in lm.anatomy.layers]
    calls = Calls()
    with torch.no_grad(), tap(lm, calls):
        lm.model(probe_ids(lm.model, 97))
    assert {"attention", "none"} == set(kinds)
    assert [c.layer for c in calls.seen] == [i for i, kind in enumerate(kinds) if kind == "attention"]


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_oss", "mistral", "gpt2"])
def test_logits_and_masks_reproduce_eager_attention_weights(family: str, batch: dict[str, torch.Tensor]) -> None:
    """Softcap, sinks, windows, grouped heads, left padding: against the weights the modeling file returns."""
    from rotoscope.observers.entropy import probabilities

    model = tiny(family)
    model.set_attn_implementation("eager")
    with torch.no_grad(), tap_model(model, (calls := Calls(),)):
        truth = model(**batch, output_attentions=True).attentions
    real = batch["attention_mask"].bool()
    for call, weights in zip(calls.seen, truth, strict=True):
        for rows in (slice(None), slice(3, 9)):
            mine = probabilities(call, rows)
            kept = real[:, None, rows, None].expand_as(mine)
            assert torch.allclose(mine[kept], weights[:, :, rows][kept].float(), atol=1e-6)


def test_causal_mask_is_rebuilt_where_none_is_given(llama: rs.LM) -> None:
    calls = Calls()
    with torch.no_grad(), tap(llama, calls):
        out = llama.model(probe_ids(llama.model, 97), use_cache=True)
        llama.model(torch.tensor([[5]]), cache=out.past_key_values if hasattr(out, "past_key_values") else out.cache)
    first, step = calls.seen[0], calls.seen[3]
    assert first.mask is None
    assert torch.equal(first.allowed()[0, 0], torch.ones(32, 32).tril().bool())
    assert step.allowed().shape[-2:] == (1, 33)
    assert bool(step.allowed().all())


def test_padding_is_told_from_text_and_position_0_found(llama: rs.LM, batch: dict[str, torch.Tensor]) -> None:
    calls = Calls()
    with torch.no_grad(), tap(llama, calls):
        llama.model(**batch)
        llama.model(batch["input_ids"])
    padded, bare = calls.seen[0], calls.seen[3]
    assert torch.equal(padded.tokens, batch["attention_mask"].bool())
    assert padded.first.nonzero().tolist() == [[0, 0], [1, 4]]
    assert bool(bare.tokens.all())
    assert bare.first.nonzero().tolist() == [[0, 0], [1, 0]]


def test_encoders_and_encoder_decoders_are_refused() -> None:
    with pytest.raises(rs.Refused, match="later token"):
        rs.wrap(tiny("bert"))
    with pytest.raises(rs.Refused, match="encoder-decoder"):
        rs.wrap(tiny("t5"))


def test_parts_that_neither_read_nor_edit_are_bad_input(llama: rs.LM) -> None:
    with pytest.raises(rs.errors.BadInput, match="neither an observer"), tap(llama, object()):
        pass


def test_wrapping_leaves_training_mode_and_generator_alone() -> None:
    model = tiny("llama").train()
    before = torch.get_rng_state()
    rs.wrap(model)
    assert model.training
    assert torch.equal(before, torch.get_rng_state())


def test_padding_of_one_forward_does_not_reach_the_next(llama: rs.LM, batch: dict[str, torch.Tensor]) -> None:
    """Not even when only the inner model is called, or a forward was broken off."""
    calls = Calls()
    with torch.no_grad(), tap(llama, calls):
        llama.model(**batch)
        llama.model.model(batch["input_ids"][:1])
        with pytest.raises(IndexError):
            llama.model(torch.full_like(batch["input_ids"], 10**6), attention_mask=batch["attention_mask"])
        llama.model.model(batch["input_ids"][:1])
    assert not bool(calls.seen[0].tokens.all())
    for later in (calls.seen[3], calls.seen[-1]):
        assert later.tokens.shape[0] == 1
        assert bool(later.tokens.all())


def test_recomputation_under_gradient_checkpointing_is_not_seen_twice(batch: dict[str, torch.Tensor]) -> None:
    model = tiny("llama")
    lm = rs.wrap(model)
    model.train()
    model.gradient_checkpointing_enable()
    moments = rs.observers.Moments()
    with tap(lm, moments):
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()
    assert {sums["q"].n for sums in moments.layers.values()} == {int(batch["attention_mask"].sum())}
    with pytest.raises(rs.Refused, match="gradient checkpointing"), tap(lm, Scale(2.0)):
        model(**batch, labels=batch["input_ids"], use_cache=False).loss.backward()


def test_static_caches_are_edited_but_not_observed(llama: rs.LM, batch: dict[str, torch.Tensor]) -> None:
    """Their empty slots would count as keys."""
    from transformers import StaticCache

    ids = batch["input_ids"][:1]
    plain = llama.model(ids, cache=StaticCache(config=llama.model.config, max_cache_len=32)).logits
    with tap(llama, Scale(1.0)):
        same = llama.model(ids, cache=StaticCache(config=llama.model.config, max_cache_len=32)).logits
    assert torch.equal(plain, same)
    for observer in (rs.observers.Moments(), rs.observers.Grams(), rs.observers.Entropy(), rs.observers.Causal()):
        with pytest.raises(rs.errors.BadInput, match=r"static cache|without a cache"), tap(llama, observer):
            llama.model(ids, cache=StaticCache(config=llama.model.config, max_cache_len=32))


def test_editors_that_return_nothing_and_classes_in_place_of_objects_are_bad_input(llama: rs.LM) -> None:
    class Forgetful:
        def edit(self, call: AttentionCall) -> None:
            pass

    with pytest.raises(rs.errors.BadInput, match="must return the call"), tap(llama, Forgetful()):
        llama.model(probe_ids(llama.model, 97))
    with pytest.raises(rs.errors.BadInput, match="neither an observer"), tap(llama, rs.observers.Moments):
        pass

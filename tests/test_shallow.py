"""Prefill that stops at a depth: the same tokens as under Freeze, whatever the model, the batch and the cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny
from torch import Tensor

import rotoscope as rs
from rotoscope.checks.edits import traces
from rotoscope.interventions import Disrupt, Freeze
from rotoscope.model.layers import decoder_layers

L = 4
FAMILIES = ["llama", "gpt2", "gpt_neox", "mixtral", "gemma3_text", "deepseek_v3", "cohere2", "falcon", "gemma3n_text"]
HYBRIDS = ["jamba", "falcon_h1", "lfm2"]
NAN_IN_DOUBLE = ["gemma2", "bloom"]  # by themselves, in padded rows


@pytest.fixture(scope="module")
def models() -> Callable[[str], rs.LM]:
    known: dict[str, rs.LM] = {}

    def get(family: str) -> rs.LM:
        if family not in known:
            dtype = torch.float32 if family in NAN_IN_DOUBLE else torch.float64
            known[family] = rs.wrap(tiny(family, layers=L, dtype=dtype))
        return known[family]

    return get


@pytest.fixture
def batch() -> dict[str, Tensor]:
    """Rows of 11, 7 and 2 tokens, padded on the left."""
    ids = torch.randint(3, 97, (3, 11), generator=torch.Generator().manual_seed(3))
    mask = torch.ones_like(ids)
    mask[1, :4] = mask[2, :9] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


@torch.no_grad()
def generated(lm: rs.LM, batch: dict[str, Tensor], **extra: Any) -> tuple[Tensor, Tensor]:
    """Tokens ``[batch, new]`` and the logits ``[batch, new, vocabulary]`` that they were taken from."""
    asked = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0, "eos_token_id": None, "use_cache": True}
    kept = {"return_dict_in_generate": True, "output_logits": True}
    out = lm.model.generate(**batch, **{**asked, **kept, **extra})
    return out.sequences[:, batch["input_ids"].shape[1] :], torch.stack(out.logits, 1)


def same(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> bool:
    # generate hands logits over in float32, and some files compute parts of a layer in it
    return torch.equal(a[0], b[0]) and torch.allclose(a[1], b[1], atol=3e-5, rtol=0)


@pytest.mark.parametrize("depth", [0, 1, 3])
@pytest.mark.parametrize("exempt", [False, True])
@pytest.mark.parametrize("family", FAMILIES + NAN_IN_DOUBLE)
def test_the_same_tokens_as_under_freeze(
    models: Callable[[str], rs.LM], batch: dict[str, Tensor], family: str, exempt: bool, depth: int
) -> None:
    lm = models(family)
    with Freeze(depth, exempt_first=exempt).on(lm):
        frozen = generated(lm, batch)
    with rs.shallow_prefill(lm, depth, exempt_first=exempt) as run:
        shallow = generated(lm, batch)
    assert same(shallow, frozen)
    assert run.fired == 1
    if depth == 0:
        assert not same(shallow, generated(lm, batch))


@pytest.mark.parametrize("family", HYBRIDS)
def test_recurrent_layers_take_up_the_whole_prompt(
    models: Callable[[str], rs.LM], batch: dict[str, Tensor], family: str
) -> None:
    lm = models(family)
    for depth in (0, 1, 2):
        with Freeze(depth).on(lm):
            frozen = generated(lm, batch)
        with rs.shallow_prefill(lm, depth):
            assert same(generated(lm, batch), frozen)
    with pytest.raises(rs.Refused, match="recurrent layers"), rs.shallow_prefill(lm, 1, exempt_first=True):
        generated(lm, batch)


def test_demo(demo: rs.LM) -> None:
    tokens = [demo.encode(f"Question: What is the capital of {x}?\nAnswer:") for x in ("Chile", "the Czech Republic")]
    width = max(map(len, tokens))
    rows = [torch.nn.functional.pad(t, (width - len(t), 0)) for t in tokens]
    mask = [torch.nn.functional.pad(torch.ones_like(t), (width - len(t), 0)) for t in tokens]
    batch = {"input_ids": torch.stack(rows), "attention_mask": torch.stack(mask)}
    with Freeze(15).on(demo):
        frozen = generated(demo, batch, max_new_tokens=6)
    with rs.shallow_prefill(demo, depth=15):
        shallow = generated(demo, batch, max_new_tokens=6)
    assert torch.equal(shallow[0], frozen[0])
    assert torch.allclose(shallow[1], frozen[1], atol=1e-3)


def test_upper_layers_make_keys_and_values_of_prompt_tokens_and_nothing_else(models: Callable[[str], rs.LM]) -> None:
    lm = models("llama")
    seen: dict[str, list[int]] = {}
    hooks = [
        module.register_forward_hook(
            lambda m, args, out, name=name: seen.setdefault(name, []).append(out.shape[1])  # type: ignore[misc]
        )
        for name, module in lm.model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with torch.no_grad(), rs.shallow_prefill(lm, 2):
        logits = lm.model(torch.arange(3, 12)[None]).logits
    for hook in hooks:
        hook.remove()
    assert logits.shape == (1, 1, 97)
    assert seen.pop("lm_head") == [1]
    for name, tokens in seen.items():
        layer = int(name.split(".")[2])
        filled = name.endswith(("q_proj", "k_proj", "v_proj"))
        assert tokens == ([8, 1] if layer < 2 or filled else [1]), name


def test_the_full_depth_and_a_prompt_of_one_token_are_the_models_own(
    models: Callable[[str], rs.LM], batch: dict[str, Tensor]
) -> None:
    lm = models("llama")
    with rs.shallow_prefill(lm, L) as run:
        shallow = generated(lm, batch)
        assert torch.equal(shallow[1], generated(lm, batch)[1])
    assert run.fired == 2
    assert torch.equal(shallow[1], generated(lm, batch)[1])
    one = {"input_ids": torch.tensor([[5]])}
    with rs.shallow_prefill(lm, 0):
        assert torch.equal(generated(lm, one)[1], generated(lm, one)[1])


def test_what_cannot_be_is_one_line(models: Callable[[str], rs.LM], batch: dict[str, Tensor]) -> None:
    lm = models("llama")
    for depth in (-1, L + 1):
        with pytest.raises(rs.BadInput, match=f"no layer {depth}: choose 0 to {L}"), rs.shallow_prefill(lm, depth):
            pass
    with pytest.raises(rs.BadInput, match="use_cache=True"), rs.shallow_prefill(lm, 1):
        generated(lm, batch, use_cache=False)
    right = {name: x.flip(1) for name, x in batch.items()}
    with pytest.raises(rs.BadInput, match="pad on the left"), rs.shallow_prefill(lm, 1):
        generated(lm, right)
    with pytest.raises(rs.NeverFired, match="no prompt"), rs.shallow_prefill(lm, 1):
        pass


def test_layers_that_need_more_of_those_below_are_refused(models: Callable[[str], rs.LM]) -> None:
    """Where a layer hands on what it makes after it has attended."""
    lm = models("llama")
    layers, handed = decoder_layers(lm.model), {}
    hooks = [
        layers[2].self_attn.register_forward_hook(lambda *_: handed.update(made=1)),
        layers[3].self_attn.register_forward_pre_hook(lambda *_: handed.pop("made")),
    ]
    try:
        with pytest.raises(rs.Refused, match="need more of those below"), rs.shallow_prefill(lm, 1):
            lm.model(torch.arange(3, 12)[None])
    finally:
        for hook in hooks:
            hook.remove()


def test_it_composes_with_disrupt(models: Callable[[str], rs.LM], batch: dict[str, Tensor]) -> None:
    """All dims, since what is chosen may change: the last token of a prompt comes as a step of its own."""
    lm = models("llama")
    prompt = {name: x[:1] for name, x in batch.items()}
    for targets in ("K", "QK", "V"):
        how = Disrupt(targets=targets, selection="lambda-0", replacement="zero", positions="all")
        with Freeze(2).on(lm), how.on(lm):
            frozen = generated(lm, prompt)
        with how.on(lm), rs.shallow_prefill(lm, 2):
            assert same(generated(lm, prompt), frozen)
        with rs.shallow_prefill(lm, 2):
            assert not same(generated(lm, prompt), frozen)


def test_the_model_and_the_cache_are_put_back(models: Callable[[str], rs.LM], batch: dict[str, Tensor]) -> None:
    lm = models("gpt2")
    before, plain = traces(lm.model), generated(lm, batch)
    with torch.no_grad(), rs.shallow_prefill(lm, 1):
        cache = lm.model(**batch).past_key_values
    assert "update" not in vars(cache)
    assert [cache.get_seq_length(layer) for layer in range(L)] == [11] * L
    broken = lm.model.transformer.h[2].register_forward_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), rs.shallow_prefill(lm, 1):
        generated(lm, batch)
    broken.remove()
    assert traces(lm.model) == before
    assert torch.equal(generated(lm, batch)[1], plain[1])

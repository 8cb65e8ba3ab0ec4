"""Layers without their attention sublayer, against the same weights put to zero or a layer computed by hand."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import tiny
from torch import Tensor, nn

from rotoscope.model.sublayer import sublayers, without_attention

IDS = torch.tensor([[5, 17, 3, 44, 9, 61, 23, 12, 80]])


def logits(model: Any, **more: Any) -> Tensor:
    with torch.no_grad():
        return model(IDS, use_cache=False, **more).logits


@pytest.mark.parametrize(("family", "last"), [
    ("llama", "model.layers.{}.self_attn.o_proj"),
    ("qwen3_moe", "model.layers.{}.self_attn.o_proj"),
    ("gpt2", "transformer.h.{}.attn.c_proj"),
    ("gpt_bigcode", "transformer.h.{}.attn.c_proj"),
    ("gptj", "transformer.h.{}.attn.out_proj"),
    ("phi", "model.layers.{}.self_attn.dense"),
    ("gpt_neox", "gpt_neox.layers.{}.attention.dense"),
    ("bloom", "transformer.h.{}.self_attention.dense"),
    ("falcon", "transformer.h.{}.self_attention.dense"),
    ("mpt", "transformer.blocks.{}.attn.out_proj"),
    ("gpt_neo", "transformer.h.{}.attn.attention.out_proj"),
    ("opt", "model.decoder.layers.{}.self_attn.out_proj"),
    ("gemma2", "model.layers.{}.post_attention_layernorm"),
    ("glm4", "model.layers.{}.post_self_attn_layernorm"),
    ("falcon_h1", "model.layers.{}.self_attn.o_proj"),
])  # fmt: skip
def test_it_is_the_layer_with_its_output_projection_at_zero(family: str, last: str) -> None:
    model = tiny(family, dtype=torch.float64)
    told: list[int] = []
    with without_attention(model, [1, 2], told.append):
        without = logits(model)
    assert told == [1, 2]
    clean = logits(model)
    for layer in (1, 2):
        for name, parameter in model.get_submodule(last.format(layer)).named_parameters():
            # Gemma's norms multiply by one more than their weight
            parameter.data.fill_(-1 if (family, name) == ("gemma2", "weight") else 0)
    assert (logits(model) - without).abs().max() <= 1e-12
    assert (clean - without).abs().max() > 1e-2


def test_a_bias_that_the_layer_adds_goes_with_it() -> None:
    model = tiny("gpt_neox_japanese", dtype=torch.float64)
    with without_attention(model, range(3)):
        without = logits(model)
        with torch.no_grad():
            cached = model(IDS, use_cache=True).logits
    for layer in model.gpt_neox_japanese.layers:
        layer.attention.dense.weight.data.zero_()
        if layer.attention.dense_bias is not None:
            layer.attention.dense_bias.data.zero_()
    assert (logits(model) - without).abs().max() <= 1e-12
    assert (cached - without).abs().max() <= 1e-12


def test_a_norm_of_the_output_goes_with_its_bias() -> None:
    model = tiny("gemma2", dtype=torch.float64)
    for layer in model.model.layers:
        layer.post_attention_layernorm = nn.LayerNorm(64, dtype=torch.float64)  # of zeros, it would give its bias
        layer.post_attention_layernorm.bias.data.fill_(0.7)
    with without_attention(model, range(3)):
        without = logits(model)
    for layer in model.model.layers:
        for parameter in layer.post_attention_layernorm.parameters():
            parameter.data.zero_()
    assert (logits(model) - without).abs().max() <= 1e-12


@pytest.mark.parametrize("family", ["llama", "gpt2", "bloom", "gpt_neox", "jamba"])
def test_generation_with_a_cache_equals_recomputation(family: str) -> None:
    model = tiny(family)

    def generate(use_cache: bool) -> Tensor:
        made = model.generate(IDS, do_sample=False, max_new_tokens=6, eos_token_id=None, use_cache=use_cache)
        return made[:, IDS.shape[1] :]

    plain = generate(True)
    with without_attention(model, range(3)):
        assert torch.equal(generate(True), generate(False))
        assert not torch.equal(generate(True), plain)


def test_layers_without_attention_stay_as_they_are() -> None:
    model = tiny("jamba")
    assert set(sublayers(model)) == {1}
    clean = logits(model)
    with without_attention(model, [0, 2]):
        assert torch.equal(logits(model), clean)


def test_dropout_in_training_does_not_hide_it() -> None:
    model = tiny("gpt2").train()
    assert [s.module for (s,) in sublayers(model).values()] == [layer.attn for layer in model.transformer.h]
    assert model.training

"""Tiny random models of many families, built in process.

Default initialisation (std 0.02) leaves attention nearly uniform, so that a wrong position or mask would hardly show.
Here every matrix has std 0.2, which at width 64 gives logits of order 1, and every vector (norms, biases, sinks) is
moved off its constant start.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSeq2SeqLM, PreTrainedModel

VOCABULARY = 97
LENGTH = 128


def _like_llama(n: int, **extra: Any) -> dict[str, Any]:
    shape = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    return {**shape, "num_hidden_layers": n, "max_position_embeddings": LENGTH, **extra}


def _like_gpt2(n: int, **extra: Any) -> dict[str, Any]:
    return {"n_embd": 64, "n_head": 4, "n_layer": n, "n_positions": LENGTH, **extra}


def _rotary(share: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}}


def _alternate(n: int, *kinds: str) -> list[str]:
    return [kinds[layer % len(kinds)] for layer in range(n)]


def _gpt_oss(n: int) -> dict[str, Any]:
    yarn = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": LENGTH // 4}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    return _like_llama(n, head_dim=16, sliding_window=5, rope_parameters=yarn, **experts)


def _deepseek(n: int) -> dict[str, Any]:
    widths = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 12}
    experts = {"n_routed_experts": 4, "n_group": 2, "topk_group": 1, "num_experts_per_tok": 2}
    extra = {"num_key_value_heads": 4, "first_k_dense_replace": 1, "moe_intermediate_size": 32}
    return _like_llama(n, **widths, **experts, **extra)


def _jamba(n: int) -> dict[str, Any]:
    layers = {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}
    return _like_llama(n, num_experts=2, num_experts_per_tok=2, mamba_d_state=8, mamba_dt_rank=4, **layers)


def _falcon_h1(n: int) -> dict[str, Any]:
    mamba = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}
    return _like_llama(n, **mamba)


def _gemma3n(n: int) -> dict[str, Any]:
    layers = {"layer_types": _alternate(n, "sliding_attention", "full_attention"), "sliding_window": 5}
    streams = {"hidden_size_per_layer_input": 8, "laurel_rank": 4, "vocab_size_per_layer_input": VOCABULARY}
    shared = {"num_kv_shared_layers": max(0, n - 2), "activation_sparsity_pattern": [0.0] * n}
    return _like_llama(n, head_dim=16, **layers, **streams, **shared)


_WINDOWS = {"head_dim": 16, "sliding_window": 5, "query_pre_attn_scalar": 16}

FAMILIES: dict[str, Callable[[int], dict[str, Any]]] = {
    # full rotary, half-split pairs
    "llama": lambda n: _like_llama(n),
    "mistral": lambda n: _like_llama(n, sliding_window=5),
    "mixtral": lambda n: _like_llama(n, num_local_experts=4, num_experts_per_tok=2),
    "qwen2": lambda n: _like_llama(n),
    "qwen3": lambda n: _like_llama(n, head_dim=24),  # 4 heads of 24 in a model of width 64
    "qwen3_moe": lambda n: _like_llama(n, head_dim=24, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32),
    "gemma": lambda n: _like_llama(n, head_dim=16),
    "gemma2": lambda n: _like_llama(n, **_WINDOWS, attn_logit_softcapping=5.0),
    "gemma3_text": lambda n: _like_llama(
        n, **_WINDOWS, layer_types=_alternate(n, "sliding_attention", "full_attention")
    ),
    "olmo2": lambda n: _like_llama(n),
    "granite": lambda n: _like_llama(n, attention_multiplier=0.3, residual_multiplier=0.5),
    "starcoder2": lambda n: _like_llama(n),
    "smollm3": lambda n: _like_llama(n, no_rope_layers=[(layer + 1) % 2 for layer in range(n)]),  # 1, 3, …: NoPE
    "gpt_oss": _gpt_oss,  # sinks, a YaRN table
    # partial rotary
    "phi": lambda n: _like_llama(n, **_rotary(0.5)),
    "phi3": lambda n: _like_llama(n),
    "stablelm": lambda n: _like_llama(n, **_rotary(0.25)),
    "gpt_neox": lambda n: _like_llama(n, **_rotary(0.25)),
    "gpt_neox_japanese": lambda n: _like_llama(n, **_rotary(0.5)),
    # interleaved pairs
    "glm": lambda n: _like_llama(n, head_dim=16, **_rotary(0.5)),
    "glm4": lambda n: _like_llama(n, head_dim=16, **_rotary(0.5)),
    "cohere": lambda n: _like_llama(n, logit_scale=1.0),
    "cohere2": lambda n: _like_llama(n, logit_scale=1.0, sliding_window=5, sliding_window_pattern=3),  # 2, 5, …: NoPE
    "gptj": lambda n: _like_gpt2(n, rotary_dim=8),
    "codegen": lambda n: _like_gpt2(n, rotary_dim=8),
    "deepseek_v3": _deepseek,  # q and k are 16 wide, v 12
    # learned positions
    "gpt2": lambda n: _like_gpt2(n),
    "gpt_bigcode": lambda n: _like_gpt2(n),
    "opt": lambda n: _like_llama(n, ffn_dim=96, word_embed_proj_dim=64),
    "gpt_neo": lambda n: {
        "hidden_size": 64,
        "num_heads": 4,
        "num_layers": n,
        "max_position_embeddings": LENGTH,
        "window_size": 5,
        "attention_types": [[_alternate(n, "global", "local"), 1]],
    },
    "xglm": lambda n: {
        "d_model": 64,
        "ffn_dim": 96,
        "attention_heads": 4,
        "num_layers": n,
        "max_position_embeddings": LENGTH,
    },
    # ALiBi
    "bloom": lambda n: {"hidden_size": 64, "n_head": 4, "n_layer": n},
    "mpt": lambda n: {"d_model": 64, "n_heads": 4, "n_layers": n, "max_seq_len": LENGTH},
    "falcon": lambda n: {"hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": n, "alibi": True},
    # hybrids: layers, or parts of them, without attention
    "jamba": _jamba,
    "falcon_h1": _falcon_h1,
    "lfm2": lambda n: _like_llama(n, layer_types=_alternate(n, "conv", "full_attention")),
    # several residual streams; upper layers reuse the keys and values of lower ones
    "gemma3n_text": _gemma3n,
    # no decoders
    "bert": lambda n: _like_llama(n),
    "t5": lambda n: {"d_model": 64, "d_kv": 16, "d_ff": 96, "num_heads": 4, "num_layers": n, "num_decoder_layers": n},
}


def tiny(
    family: str, *, layers: int = 3, dtype: torch.dtype = torch.float32, seed: int = 0, **overrides: Any
) -> PreTrainedModel:
    """A random model of one family: 97 ids (0 pad, 1 bos, 2 eos), width 64, 4 heads, 2 kv heads where it allows.

    The global random state is left as found. `overrides` go to the config.
    """
    ids = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    config = CONFIG_MAPPING[family](**{**ids, **FAMILIES[family](layers), **overrides})
    build = AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        # the grouped matrix product that is the default for experts refuses float64
        model = build.from_config(config, dtype=dtype, experts_implementation="eager")
        torch.manual_seed(seed)
        # what a family draws at its initialisation depends on the dtype: the start is float32's, whatever the dtype
        start = dict(build.from_config(config, dtype=torch.float32).named_parameters())
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else start[name] + 0.1 * noise)
    return model.eval()

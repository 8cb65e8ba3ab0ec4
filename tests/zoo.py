"""A zoo of tiny random models, one for every name in transformers' own registry of causal models.

Nothing is listed but what the rule does not fit. A config's defaults say which sizes a family has and how its layers
differ; the rule keeps two layers of every kind and gives every size a tiny value by what its key says. The result is
built on the meta device first, so that what stayed large is turned away before it costs memory.

Weights are random and large (standard deviation 0.2 at width 64, vectors moved off their constant start), so that a
wrong position, mask or head shows in the logits.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCABULARY = 97
LENGTH = 128
WIDTH = 64
HEADS = 4
LAYERS = 4
LARGEST = 2_000_000  # parameters

CLASSES: dict[str, str] = dict(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
NAMES = tuple(CLASSES)


class NotBuilt(Exception):
    """Why a name has no tiny model."""


# What a key says about its value; the first pattern that fits decides. An integer that nothing fits and that is small
# stays as it is; a large one becomes 16.
_DEPTH = r"layers?$|^(num_blocks|depth)$"
_AT_MOST: tuple[tuple[str, int], ...] = (
    (_DEPTH, LAYERS),
    (r"type_vocab_size|segment_types|prompt_types", 8),
    (r"vocab", VOCABULARY),
    (r"(kv|key_value)_heads|kv_n_heads|query_groups", 2),
    (r"max_distance", LENGTH),
    (r"index_topk$", 8),
    (r"per_tok|top_?k(?!_group)|_top_k|moe_k", 2),
    (r"topk_group", 1),
    (r"n_group$|expert_group", 2),
    (r"shared_experts?$|experts_shared", 1),
    (r"experts?(_num)?$|^n_routed_experts$|zero_expert_num", 4),
    (r"max_(position|source|target|seq)|n_positions|n_ctx|context_length|model_max_length|max_inference", LENGTH),
    (r"window|local_attention$|attention_chunk_size|attn_chunk_length", 6),
    (r"nope_head_dim", 8),
    (r"v_head_dim", 12),
    (r"rotary_dim", 8),
    (r"mamba_n_heads|mamba_num_heads|n_mamba_heads", HEADS),
    (r"head_dim|d_head|headdim|d_kv|dim_head|head_size|kv_channels|query_pre_attn_scalar|index_head", 16),
    (r"intermediate|ffn|_ff$|dff|mlp_dim|feed_forward|inner", 96),
    (r"linear_num_(key|value)_heads|n_groups|ngroups|o_groups", 2),
    (r"heads?$|num_heads", HEADS),
    (r"lora_rank|_rank$|lowrank|rank_|time_step_rank", 8),
    (r"state(_size)?$", 8),
    (r"chunk_size|block_size|block_multiple", 8),
    (r"hidden_size_per_layer|embed_dim_per|altup", 8),
    (
        r"hidden|d_model|adapter_(in|out|input)_(dim|size)|n_embd|embed|^dim$|lru_width|mamba_d_ssm|width|attention_head_dim|d_inner",
        WIDTH,
    ),
    (r"period|interval|every_n|pattern$|group_size", 2),
    (r"offset$", 1),
)


def shrink(config: PreTrainedConfig) -> dict[str, Any]:
    """The arguments that make a config tiny: what its class is given instead of its defaults."""
    values = {k: v for k, v in vars(config).items() if not k.startswith("_") and not isinstance(v, bool)}
    depth = getattr(config, "num_hidden_layers", None)
    lists = {k: list(v) for k, v in values.items() if isinstance(v, list | tuple)}
    kept = _layers(lists, depth) if isinstance(depth, int) else []
    declared = {field.name: field.default for field in fields(config)}
    out: dict[str, Any] = {"head_dim": 16} if values.get("head_dim", 0) is None else {}
    for key, value in values.items():
        if isinstance(value, PreTrainedConfig):
            out[key] = type(value)(**{**shrink(value), **OVERRIDES.get(value.model_type, {})})
        elif key in lists and kept and len(value) == depth and not _indices(value, depth):
            out[key] = [_integer(key, v) if isinstance(v, int) else v for v in (value[i] for i in kept)]
        elif key in lists and kept and _indices(value, depth):
            out[key] = [new for new, old in enumerate(kept) if old in value]
        elif declared.get(key) is None and not (isinstance(value, int) and "expert" in key):
            continue  # the class derives it from others, which are tiny by then
        elif isinstance(value, int):
            small = _integer(key, value)
            if kept and value == depth and re.search(_DEPTH, key):
                small = len(kept)
            if key == "num_key_value_heads" and "kv_lora_rank" in values:
                small = HEADS  # latent attention has one key a head
            if small != value:
                out[key] = small
        elif key.startswith("rope_parameters") and isinstance(value, dict):
            out[key] = _rope(value)
    return out | _ids(values)


def _indices(values: Sequence[Any], depth: int) -> bool:
    """Whether a list names layers by their index rather than holding one entry a layer."""
    ints = all(type(v) is int for v in values)
    return bool(values) and ints and sorted(set(values)) == list(values) and values[-1] < depth


def _layers(lists: Mapping[str, list[Any]], depth: int) -> list[int]:
    """Two layers of every kind that the lists tell apart, in their order; at least four. Empty without lists."""
    kinds = []
    for values in lists.values():
        if _indices(values, depth):
            kinds.append([str(i in values) for i in range(depth)])
        elif len(values) == depth > 1:
            kinds.append([str(v) for v in values])
    seen: Counter[tuple[str, ...]] = Counter()
    kept = []
    for i, kind in enumerate(zip(*kinds, strict=True)):
        seen[kind] += 1
        if seen[kind] <= 2:
            kept.append(i)
    more = (i for i in range(depth) if i not in kept)
    while kinds and len(kept) < min(LAYERS, depth):
        kept.append(next(more))
    return sorted(kept)


def _integer(key: str, value: int) -> int:
    if re.search(r"(token_id|token_index|token)$", key) or value <= 1:
        return value
    for pattern, most in _AT_MOST:
        if re.search(pattern, key):
            return min(value, most)
    return value if value <= 32 else 16


def _rope(value: Mapping[str, Any]) -> dict[str, Any]:
    """Long contexts are scaled down with the trained length; one table or one for every kind of layer."""
    if any(isinstance(v, dict) for v in value.values()):
        return {k: _rope(v) if isinstance(v, dict) else v for k, v in value.items()}
    small = dict(value)
    if "original_max_position_embeddings" in small:
        small["original_max_position_embeddings"] = LENGTH // 4
    return small


def _ids(values: Mapping[str, Any]) -> dict[str, Any]:
    """Special ids at both ends of the tiny vocabulary, away from the middle that probes take their ids from."""
    out: dict[str, Any] = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    large = VOCABULARY - 1
    for key, value in values.items():
        if re.search(r"token_(id|index)$", key) and key not in out and isinstance(value, int) and value >= VOCABULARY:
            out[key], large = large, large - 1
    return out


# What the rule does not fit: the name, and what its config is given besides.
_MAMBA = {"mamba_n_heads": 8, "mamba_d_head": 16}
OVERRIDES: dict[str, dict[str, Any]] = {
    "bamba": {**_MAMBA, "attn_layer_indices": [1, 3]},
    "granitemoehybrid": {**_MAMBA, "layer_types": ["mamba", "attention"] * 2},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "dbrx": {"attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 10000.0}},
    "deepseek_v2": {"n_group": 2, "topk_group": 1, "num_experts_per_tok": 2},
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
            "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        },
    },
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "nemotron": {"num_key_value_heads": 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "dory": {"n_input_layers": 1, "n_output_layers": 1},
    "bailing_hybrid": {"num_expert_group": 2, "topk_group": 1, "num_experts_per_token": 2},
    "kimi_linear": {"num_experts_per_token": 2},
    "dots3_note_text": {
        "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": HEADS, "swa_q_lora_rank": 8, "swa_kv_lora_rank": 8,
        "sliding_window": 6, "swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 12,
    },
    "reformer": {"axial_pos_shape": [8, 16], "axial_pos_embds_dim": [32, 32], "num_buckets": 4},
    "xmod": {"default_language": "en_XX"},
    "qwen4_exp_text": {
        "indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
}  # fmt: skip


def config_of(name: str) -> PreTrainedConfig:
    """A tiny config of one name of the registry."""
    kind = CONFIG_MAPPING[name]
    special = OVERRIDES.get(name, {})
    try:
        default = kind(**special.get("default", {}))
        extra = {k: v for k, v in special.items() if k != "default"}
        decoder = {"is_decoder": True} if hasattr(default, "is_decoder") else {}
        return kind(**{**shrink(default), **decoder, **extra})
    except Exception as error:
        raise NotBuilt(f"config: {_short(error)}") from error


def build(name: str, *, seed: int = 0, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A tiny random model of one name of the registry; the global random state is left as found.

    Raises
    ------
    NotBuilt
        If the rule does not fit the name.
    """
    config = config_of(name)
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(seed)
        try:
            with torch.device("meta"):
                size = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
        except Exception as error:
            raise NotBuilt(_short(error)) from error
        if size > LARGEST:
            raise NotBuilt(f"stays large: {size:,} parameters")
        try:
            # the grouped matrix product that is the default for experts refuses float64
            model = AutoModelForCausalLM.from_config(config_of(name), dtype=dtype, experts_implementation="eager")
        except Exception as error:
            raise NotBuilt(_short(error)) from error
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue  # a table of sines
            noise = torch.randn(parameter.shape)
            parameter.copy_(0.2 * noise if parameter.ndim > 1 else parameter + 0.1 * noise)
    return model.eval()


def _short(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"

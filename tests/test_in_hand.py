"""Models that a user already holds: sharded, offloaded, quantized, with adapters, inside a multimodal one."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from small import characters
from tiny import tiny

import rotoscope as rs
from rotoscope.studies import STUDIES, Options, conduct
from rotoscope.studies.observe import observe

IDS = list(range(3, 60))


def offloaded(folder: Path) -> Any:
    """Every weight is fetched when its module runs."""
    from accelerate import cpu_offload

    model = tiny("llama")
    cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def sharded(folder: Path) -> Any:
    """Spread by a device map, one layer on the disk."""
    from transformers import AutoModelForCausalLM

    tiny("llama").save_pretrained(folder)
    names = ["model.embed_tokens", "model.rotary_emb", "model.layers.0", "model.layers.2", "model.norm", "lm_head"]
    places = dict.fromkeys(names, "cpu") | {"model.layers.1": "disk"}
    return AutoModelForCausalLM.from_pretrained(folder, device_map=places, offload_folder=folder / "off").eval()


def adapted(folder: Path) -> Any:
    """Adapters that change what the model computes."""
    from peft import LoraConfig, get_peft_model

    return get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"], init_lora_weights=False)).eval()


def eight_bit(folder: Path) -> Any:
    """Weight-only int8."""
    quantization = pytest.importorskip("torchao.quantization")
    model = tiny("llama")
    quantization.quantize_(model, quantization.Int8WeightOnlyConfig(), filter_fn=_linear)
    return model


def _linear(module: torch.nn.Module, name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and "lm_head" not in name


def bitsandbytes(folder: Path, **bits: Any) -> Any:
    """LLM.int8() or nf4."""
    pytest.importorskip("bitsandbytes")
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    tiny("llama", intermediate_size=128).save_pretrained(folder)
    config = BitsAndBytesConfig(**bits)
    return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, device_map="cpu").eval()


def multimodal(folder: Path) -> Any:
    """A decoder inside an image-text model, run on text alone."""
    from transformers import Gemma3Config, Gemma3ForConditionalGeneration

    text = {
        "vocab_size": 97, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128, "sliding_window": 8,
        "initializer_range": 0.2,
    }  # fmt: skip
    vision = {
        "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2,
        "image_size": 28, "patch_size": 14,
    }  # fmt: skip
    tokens = {"mm_tokens_per_image": 4, "image_token_index": 96, "boi_token_index": 94, "eoi_token_index": 95}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return Gemma3ForConditionalGeneration(Gemma3Config(text_config=text, vision_config=vision, **tokens)).eval()


HELD: dict[str, Callable[[Path], Any]] = {
    "offloaded": offloaded,
    "sharded": sharded,
    "adapted": adapted,
    "int8 weights": eight_bit,
    "LLM.int8()": lambda folder: bitsandbytes(folder, load_in_8bit=True),
    "nf4": lambda folder: bitsandbytes(folder, load_in_4bit=True, bnb_4bit_quant_type="nf4"),
    "multimodal": multimodal,
}


@pytest.mark.parametrize("kind", HELD)
def test_models_in_hand_are_used_as_they_are(kind: str, tmp_path: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the libraries' own
        model = HELD[kind](tmp_path)
    # Fetching replaces the place holders of offloaded weights, with or without rotoscope.
    before = {name: p for name, p in model.named_parameters() if kind not in ("offloaded", "sharded")}
    lm = rs.wrap(model, characters())
    assert lm.model is model
    assert [layer.position for layer in lm.anatomy.layers] == ["rotary"] * 3
    report = rs.doctor(lm)
    assert report.ok, report.reasons
    found = conduct(list(STUDIES.values()), lm, Options(size="quick", texts=2, tokens=50))
    assert found.tables["heads"].form1.notna().all()
    assert all(model.get_parameter(name) is p for name, p in before.items())


def test_what_offloaded_and_sharded_models_show_is_what_the_plain_one_shows(tmp_path: Path) -> None:
    plain = observe(rs.wrap(tiny("llama")), IDS, seed=0)
    for make in (offloaded, sharded):
        found = observe(rs.wrap(make(tmp_path)), IDS, seed=0)
        for name in ("heads", "dims"):
            assert found[name].equals(plain[name]), name


def test_quantization_changes_what_is_seen_a_little(tmp_path: Path) -> None:
    plain = observe(rs.wrap(tiny("llama")), IDS, seed=0)["dims"].rms
    coarse = observe(rs.wrap(eight_bit(tmp_path)), IDS, seed=0)["dims"].rms
    assert 0 < (plain / coarse - 1).abs().max() < 0.05

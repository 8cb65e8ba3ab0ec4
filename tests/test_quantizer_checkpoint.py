"""Quantized checkpoints: built by hand, loaded, and held against the same arithmetic written out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.functional import linear as product
from transformers import AutoModelForCausalLM, CompressedTensorsConfig

import rotoscope as rs
from rotoscope.errors import BadInput, Refused
from rotoscope.model.lm import LM
from rotoscope.quantizers import checkpoint
from tests.tiny import tiny

GROUP = 32
BOTH = {"num_bits": 8, "type": "int", "symmetric": True}
W8A8 = {"weights": {**BOTH, "strategy": "channel"}, "input_activations": {**BOTH, "strategy": "token", "dynamic": True}}
W4 = {"weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP}}
IDS = torch.arange(3, 43).view(2, 20)


@pytest.fixture(scope="module")
def lm() -> LM:
    return rs.wrap(tiny("llama", layers=2), source="tiny")


@pytest.fixture(scope="module")
def w8a8(lm: LM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {}
    for name, weight in linears(lm.model):
        values, scale = eight(weight)
        tensors |= {f"{name}.weight": values, f"{name}.weight_scale": scale}
    return written(lm, tmp_path_factory.mktemp("w8a8"), "int-quantized", W8A8, tensors)


@pytest.fixture(scope="module")
def w4(lm: LM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    tensors = {}
    for name, weight in linears(lm.model):
        codes, scale, zero = four(weight)
        parts = {"packed": packed(codes), "scale": scale, "zero_point": packed(zero.T).T.contiguous()}
        tensors |= {f"{name}.weight_{part}": tensor for part, tensor in parts.items()}
        tensors[f"{name}.weight_shape"] = torch.tensor(weight.shape)
    return written(lm, tmp_path_factory.mktemp("w4"), "pack-quantized", W4, tensors)


def linears(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            yield name, module.weight.detach()


def eight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Codes −128 … 127 and a scale a row."""
    scale = weight.abs().amax(1, keepdim=True) / 127.5
    return (weight / scale).round().clamp(-128, 127).to(torch.int8), scale


def four(weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Codes and zero points 0 … 15, scales ``[out, groups]``; 0 is on every grid."""
    groups = weight.view(len(weight), -1, GROUP)
    low, high = groups.amin(-1).clamp(max=0), groups.amax(-1).clamp(min=0)
    scale = (high - low) / 15
    zero = (-low / scale).round()
    codes = ((groups / scale[..., None]).round() + zero[..., None]).clamp(0, 15)
    return codes.view_as(weight).int(), scale, zero.int()


def packed(codes: Tensor) -> Tensor:
    """Eight codes a word, the first lowest."""
    words = torch.zeros(len(codes), -(-codes.shape[1] // 8), dtype=torch.int64)
    for column, code in enumerate(codes.long().unbind(1)):
        words[:, column // 8] |= code << 4 * (column % 8)
    return torch.where(words >= 2**31, words - 2**32, words).int()


def written(lm: LM, folder: Path, layout: str, scheme: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    quantized = {name for name, _ in linears(lm.model)}
    rest = {n: p.detach() for n, p in lm.model.named_parameters() if n.removesuffix(".weight") not in quantized}
    how = {
        "quant_method": "compressed-tensors", "format": layout, "quantization_status": "compressed",
        "ignore": ["lm_head"], "config_groups": {"group_0": {"targets": ["Linear"], **scheme}},
    }  # fmt: skip
    lm.model.config.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    architectures = [type(lm.model).__name__]
    (folder / "config.json").write_text(
        json.dumps({**config, "architectures": architectures, "quantization_config": how})
    )
    save_file({**rest, **tensors}, folder / "model.safetensors", {"format": "pt"})
    return folder


def by_hand(lm: LM, quantize: Any, inputs: bool) -> Tensor:
    """Logits of the model with its linear layers written out."""
    model = deepcopy(lm.model)
    for name, weight in linears(model):
        module = model.get_submodule(name)
        module.weight.data = quantize(weight)
        if inputs:
            module.forward = lambda x, w=module.weight: product(rounded(x), w)
    with torch.no_grad():
        return model(IDS).logits


def rounded(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / scale).round().clamp(-128, 127) * scale


def from_eight(weight: Tensor) -> Tensor:
    codes, scale = eight(weight)
    return codes * scale


def from_four(weight: Tensor) -> Tensor:
    codes, scale, zero = four(weight)
    values = (codes.view(len(weight), -1, GROUP) - zero[..., None]) * scale[..., None]
    return values.view_as(weight)


def logits(lm: LM) -> Tensor:
    with torch.no_grad():
        return lm.model(IDS).logits


def test_w8a8_computes_with_rounded_inputs(lm: LM, w8a8: Path) -> None:
    loaded = checkpoint.load(w8a8, lm)
    torch.testing.assert_close(logits(loaded), by_hand(lm, from_eight, True), rtol=1e-4, atol=1e-4)
    weights_only = by_hand(lm, from_eight, False)
    assert (logits(loaded) - weights_only).norm() > 1e-3 * weights_only.norm()
    assert loaded.tokenizer is lm.tokenizer
    assert loaded.trained_length == lm.trained_length


def test_four_asymmetric_bits_are_those_of_the_grid(lm: LM, w4: Path) -> None:
    loaded = checkpoint.load(w4, lm)
    torch.testing.assert_close(logits(loaded), by_hand(lm, from_four, False), rtol=1e-4, atol=1e-4)


def test_w8a8_without_its_rounded_inputs_is_refused(lm: LM, w8a8: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Dequantized on loading, it would compute with weights alone and look better than it is."""
    dropped = {"quantization_config": CompressedTensorsConfig(dequantize=True)}
    model: Any = AutoModelForCausalLM.from_pretrained(w8a8, **dropped)
    torch.testing.assert_close(model(IDS).logits.detach(), by_hand(lm, from_eight, False), rtol=1e-4, atol=1e-4)
    monkeypatch.setattr(checkpoint, "_route", lambda how: dropped)
    with pytest.raises(Refused, match="promises quantized inputs, but 0% of its linear layers round theirs"):
        checkpoint.load(w8a8, lm)


def test_four_asymmetric_bits_do_not_load_by_the_default_route(
    lm: LM, w4: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoint, "_route", lambda how: {})
    with pytest.raises(BadInput, match="cannot be loaded"):
        checkpoint.load(w4, lm)


def test_what_it_says_about_them(lm: LM, w8a8: Path, w4: Path) -> None:
    weights = dict(linears(lm.model))
    elements = sum(weight.numel() for weight in weights.values())
    rows = sum(len(weight) for weight in weights.values())
    for folder, dequantized, rounding, bits in (
        (w8a8, from_eight, 1, 8 * elements + 32 * rows),
        # codes; a scale of 32 bits and a zero point of 4 for each group; the shape, two numbers of 64 bits
        (w4, from_four, 0, (4 + 36 / GROUP) * elements + 128 * len(weights)),
    ):
        said = checkpoint.about(checkpoint.load(folder, lm), lm)
        changed = sum(int((dequantized(weight) != weight).sum()) for weight in weights.values())
        assert said == {
            "bits": pytest.approx(bits / elements),
            "share_changed": pytest.approx(changed / elements),
            "share_rounding": rounding,
            "bytes": (folder / "model.safetensors").stat().st_size,
        }


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_rounding_of_inputs_is_told_from_that_of_floats(dtype: torch.dtype) -> None:
    """Eight bits for each token or for all of them, and eight of a float, against the floating type's own."""
    weight = torch.randn(48, 320, generator=torch.Generator().manual_seed(1)).to(dtype)
    most = 5.0

    def static(x: Tensor) -> Tensor:
        return (x / (most / 127)).round().clamp(-128, 127) * (most / 127)

    def small_float(x: Tensor) -> Tensor:
        scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-9) / 448
        return (x / scale).to(torch.float8_e4m3fn).to(dtype) * scale

    class Layer(nn.Module):
        def __init__(self, how: Any):
            super().__init__()
            self.how = how

        def forward(self, x: Tensor) -> Tensor:
            return product(self.how(x), weight, weight[:, 0])

    holder = rs.wrap(tiny("llama", layers=1, dtype=dtype), source="any")
    off = {how: checkpoint._unadditive(Layer(how), 320, most, holder) for how in (rounded_floats, static, small_float)}
    assert min(off.values()) > 1.4 * checkpoint.ROUNDED
    assert checkpoint._unadditive(Layer(lambda x: x), 320, most, holder) < checkpoint.ROUNDED / 2


def rounded_floats(x: Tensor) -> Tensor:
    return x if not x.any() else rounded(x)


def test_a_weight_is_read_off_a_layer_that_stores_it_otherwise() -> None:
    codes = torch.randint(-8, 8, (5, 7), generator=torch.Generator().manual_seed(0), dtype=torch.int8)

    class Layer(nn.Module):
        weight = codes

        def forward(self, x: Tensor) -> Tensor:
            return product(x, self.weight * 0.25, torch.ones(5))

    read = checkpoint.effective_weight(Layer(), 7, torch.float32, torch.device("cpu"))
    assert torch.equal(read, codes * 0.25)


def test_a_checkpoint_that_left_most_weights_alone_is_refused(lm: LM, tmp_path: Path) -> None:
    name, weight = next(linears(lm.model))
    values, scale = eight(weight)
    others = {f"{n}.weight": w for n, w in linears(lm.model) if n != name}
    tensors = {**others, f"{name}.weight": values, f"{name}.weight_scale": scale}
    scheme = {"targets": [f"re:.*{name}"], "weights": W8A8["weights"]}
    share = weight.numel() / sum(w.numel() for _, w in linears(lm.model))
    with pytest.raises(Refused, match=f"changed {share:.0%} of the weights"):
        checkpoint.load(written(lm, tmp_path, "int-quantized", scheme, tensors), lm)


def test_another_models_checkpoint_is_refused(w4: Path) -> None:
    deeper = rs.wrap(tiny("llama", layers=3), source="deeper")
    with pytest.raises(Refused, match=r"no checkpoint of deeper: it has no model\.layers\.2"):
        checkpoint.load(w4, deeper)
    shallower = rs.wrap(tiny("llama", layers=1), source="shallower")
    with pytest.raises(Refused, match="no checkpoint of shallower: layers or vocabularies differ in number"):
        checkpoint.load(w4, shallower)


def test_what_is_no_quantized_checkpoint(lm: LM, w4: Path, tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="no readable config"):
        checkpoint.load(tmp_path / "nowhere", lm)
    lm.model.save_pretrained(tmp_path)
    with pytest.raises(BadInput, match="has no quantization_config"):
        checkpoint.load(tmp_path, lm)
    (tmp_path / "config.json").write_bytes((w4 / "config.json").read_bytes())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(Refused, match="pickle"):
        checkpoint.load(tmp_path, lm)


def test_weights_that_are_missing_are_not_made_up(lm: LM, w4: Path, tmp_path: Path) -> None:
    tensors = load_file(w4 / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    (tmp_path / "config.json").write_bytes((w4 / "config.json").read_bytes())
    with pytest.raises(Refused, match=r"lacks the weights of model\.norm"):
        checkpoint.load(tmp_path, lm)

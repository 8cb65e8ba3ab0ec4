"""Weights that lie on a low-bit grid already are told from those that do not."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from tiny import tiny
from torch import Tensor

import rotoscope as rs
from rotoscope.quantizers import RTN, grid_bits, low_bit_grid


def _stored(kind: str, weight: Tensor) -> Tensor:
    """As GGUF brings it back."""
    known = GGMLQuantizationType[kind]
    return torch.from_numpy(dequantize(quantize(weight.numpy().astype(np.float32), known), known))


def _weight(seed: int = 0, shape: tuple[int, int] = (48, 128)) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kind", "bits"), [("Q4_1", 4), ("Q4_0", 4), ("Q5_1", None), ("Q8_0", None), ("F16", None)])
def test_formats(kind: str, bits: int | None) -> None:
    assert grid_bits(_stored(kind, _weight())) == bits


def test_one_block_off_the_grid_is_seen() -> None:
    weight = _stored("Q4_1", _weight())
    weight[-1, -32:] = _weight(1)[0, :32]
    assert grid_bits(weight) is None


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("group", [32, 64])
def test_rounded_weights_lie_on_their_grid(bits: int, group: int) -> None:
    pytest.importorskip("torchao")
    lm = rs.wrap(tiny("llama", hidden_size=128, intermediate_size=192))
    with RTN(bits, group).on(lm):
        table = low_bit_grid(lm)
    assert set(table["bits"]) == {bits}
    assert table["distinct"].between(2 ** (bits - 1) + 1, 2**bits).all()
    assert set(table["share"]) == {1.0}
    assert list(table["layer"]) == sorted([0, 1, 2] * 7)
    assert table["name"][8] == "model.layers.1.self_attn.k_proj"


def test_a_mixed_model() -> None:
    model = tiny("llama")
    with torch.no_grad():
        weight = model.model.layers[2].mlp.down_proj.weight
        weight.copy_(_stored("Q4_1", weight))
    table = low_bit_grid(rs.wrap(model)).set_index("name")
    found = table["bits"].dropna()
    assert dict(found) == {"model.layers.2.mlp.down_proj": 4}
    assert table["share"].drop("model.layers.2.mlp.down_proj").max() == 0


def test_inputs_narrower_than_a_block_tell_nothing() -> None:
    assert grid_bits(_weight(shape=(8, 31)).sign()) is None
    table = low_bit_grid(rs.wrap(tiny("llama", intermediate_size=20))).set_index("name")
    assert table["distinct"]["model.layers.0.mlp.down_proj"] == 0


def test_trained_weights_lie_on_none() -> None:
    table = low_bit_grid(rs.load("control:rope"))
    assert len(table) > 0
    assert table["bits"].isna().all()
    assert table["share"].max() < 0.01


@pytest.mark.slow
def test_the_demo_lies_on_four_bits(demo: rs.LM) -> None:
    table = low_bit_grid(demo)
    assert len(table) == 210
    assert (table["bits"] == 4).all()
    assert (table["distinct"] <= 16).all()

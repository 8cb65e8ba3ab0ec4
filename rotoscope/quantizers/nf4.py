"""nf4: four bits on a grid of normal quantiles (QLoRA, Dettmers et al. 2023, 2305.14314)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from rotoscope.errors import BadInput
from rotoscope.quantizers.base import Linear, Quantized, Quantizer, check_group
from rotoscope.quantizers.library import importing

SIZES = (32, 64, 128, 256, 512, 1024, 2048, 4096)


@dataclass(frozen=True)
class NF4(Quantizer):
    """Round weights, divided by their block's largest magnitude, to the nearest of 16 quantiles of a normal variable.

    By bitsandbytes, without its second quantization of the scales.

    Parameters
    ----------
    block : int
        Weights along the input that share a scale: 32, 64, … 4,096.
    layers
        One decoder layer, several, or None for all.

    Raises
    ------
    BadInput
        If there is no such block; on opening, if blocks do not divide the inputs of a layer: they would run on from
        one row to the next.
    """

    name: ClassVar[str] = "nf4"
    library: ClassVar[str] = "bitsandbytes"
    block: int = 64

    def __post_init__(self) -> None:
        if self.block not in SIZES:
            raise BadInput(f"blocks of nf4 have {', '.join(map(str, SIZES))} weights, not {self.block}")

    def check(self, linears: Sequence[Linear]) -> None:
        check_group(self.block, linears, SIZES)

    def quantize(self, linear: Linear, learned: Any) -> Quantized:
        weight = linear.weight
        with importing(self.library, self.name):
            from bitsandbytes.functional import dequantize_4bit, quantize_4bit
        exact = weight.float() if weight.dtype == torch.float64 else weight
        codes, state = quantize_4bit(exact.contiguous(), blocksize=self.block, quant_type="nf4")
        values = dequantize_4bit(codes, state).to(weight)
        return Quantized(values, values, 8 * (codes.nbytes + state.absmax.nbytes))

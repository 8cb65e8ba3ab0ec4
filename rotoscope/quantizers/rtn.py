"""Round to nearest: each group of weights on an even grid of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from rotoscope.errors import BadInput
from rotoscope.quantizers.base import EXACT_BITS, Linear, Quantized, Quantizer, check_group
from rotoscope.quantizers.library import importing, through_torchao

BITS = range(2, 9)


@dataclass(frozen=True)
class RTN(Quantizer):
    """Round every weight to the nearest value of its group's grid (torchao's ``IntxWeightOnlyConfig``).

    Parameters
    ----------
    bits : int
        2 … 8 per weight.
    group : int
        Weights along the input that share a scale; 0: a whole row. ``RTN(8, 0, True)`` is the common int8.
    symmetric : bool
        Grids centred on 0, by scale alone. Otherwise from the group's smallest to its largest value, 0 among them.
    keep : mapping of str to torch.Tensor, optional
        Rows that stay exact: by the layer's name within the model, boolean ``[out]``. As rows have scales of their
        own, the others are what they would be without it. They count 16 bits a weight.
    layers
        One decoder layer, several, or None for all.

    Raises
    ------
    BadInput
        If there is no such width or group; on opening, if groups do not divide the inputs of a layer, or ``keep``
        names a layer or rows that are not there.
    """

    name: ClassVar[str] = "rtn"
    bits: int = 4
    group: int = 64
    symmetric: bool = False
    keep: Mapping[str, Tensor] | None = field(default=None, repr=False)

    def __post_init__(self) -> None:
        if self.bits not in BITS:
            raise BadInput(f"bits are {BITS.start} to {BITS[-1]}, not {self.bits}")
        if self.group < 0:
            raise BadInput(f"a group has one weight or more, or is 0 for a whole row; not {self.group}")

    def check(self, linears: Sequence[Linear]) -> None:
        if self.group:
            check_group(self.group, linears)
        there = {linear.name: linear.weight.shape[0] for linear in linears}
        for name, rows in (self.keep or {}).items():
            if name not in there:
                raise BadInput(f"keep names {name}, which is no linear layer of the decoder layers chosen")
            if rows.dtype != torch.bool or rows.shape != (there[name],):
                raise BadInput(f"keep takes one boolean for each of the {there[name]} rows of {name}")

    def quantize(self, linear: Linear, learned: Any) -> Quantized:
        weight = linear.weight
        with importing(self.library, self.name):
            from torchao.quantization import IntxWeightOnlyConfig, PerAxis, PerGroup
            from torchao.quantization.quant_primitives import MappingType
        config = IntxWeightOnlyConfig(
            weight_dtype=getattr(torch, f"int{self.bits}"),
            granularity=PerGroup(self.group) if self.group else PerAxis(0),
            mapping_type=MappingType.SYMMETRIC if self.symmetric else MappingType.ASYMMETRIC,
        )
        stored = through_torchao(config, weight)
        values = stored.dequantize().to(weight.dtype)
        scale_bits = stored.scale.itemsize * 8 + (0 if self.symmetric else stored.zero_point.itemsize * 8)
        row_bits = self.bits * linear.width + scale_bits * stored.scale.shape[1]
        kept = self._kept(linear)
        values[kept] = weight[kept]
        exact = int(kept.sum())
        bits = row_bits * (len(weight) - exact) + EXACT_BITS * linear.width * exact
        return Quantized(values, values, bits, exact * linear.width)

    def _kept(self, linear: Linear) -> Tensor:
        weight = linear.weight
        none = torch.zeros(len(weight), dtype=torch.bool)
        return (self.keep or {}).get(linear.name, none).to(weight.device)

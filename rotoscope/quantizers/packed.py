"""Four bits in torchao's packed format: round to nearest through the kernel that AWQ uses, too."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear as product

from rotoscope.errors import BadInput
from rotoscope.quantizers.base import Linear, Quantized, Quantizer, check_group
from rotoscope.quantizers.library import importing, through_torchao

SIZES = (32, 64, 128)
_MIDDLE = 8  # the code whose value is the zero point


@dataclass(frozen=True)
class Packed(Quantizer):
    """What methods on the packed format share.

    Parameters
    ----------
    group : int
        Weights along the input that share a scale: 32, 64 or 128.
    layers
        One decoder layer, several, or None for all.

    Raises
    ------
    BadInput
        If there is no such group; on opening, if groups do not divide the inputs of a layer.

    Notes
    -----
    The format is bfloat16's: weights are rounded to it before, and scales and zero points are kept in it. What the
    kernel multiplies by is read off exactly and put into plain parameters of the model's own type, so that the rest of
    the model stays as it is and differences from it are the quantizer's alone.
    """

    group: int = 64

    def __post_init__(self) -> None:
        if self.group not in SIZES:
            raise BadInput(f"the packed format has groups of 32, 64 or 128, not {self.group}")

    def check(self, linears: Sequence[Linear]) -> None:
        check_group(self.group, linears, SIZES)


@dataclass(frozen=True)
class PackedInt4(Packed):
    """Round to nearest, 4 bits, from each group's smallest to its largest weight: what to hold `AWQ` against.

    Parameters and errors are those of `Packed` (torchao's ``PrototypeInt4WeightOnlyConfig``).
    """

    name: ClassVar[str] = "packed-int4"

    def quantize(self, linear: Linear, learned: Any) -> Quantized:
        values, bits = packed_values(linear.weight.bfloat16().cpu(), self.group, self.name)
        values = values.to(linear.weight)
        return Quantized(values, values, bits)


def int4_config(group: int, who: str) -> Any:
    """torchao's config of the packed format."""
    with importing("torchao", who):
        from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    return PrototypeInt4WeightOnlyConfig(group_size=group, set_inductor_config=False)


def packed_values(weight: Tensor, group: int, who: str) -> tuple[Tensor, float]:
    """What the kernel multiplies by, float32 ``[out, in]``, and the bits that it is stored in.

    The kernel gives them away when it multiplies the identity, rounded to bfloat16. Which of the group's 16 values each
    one is, is clear all the same, unless the group's weights are so alike that bfloat16 does not tell them apart.
    """
    rows, width = weight.shape
    stored = through_torchao(int4_config(group, who), in_sixteens(weight))
    rounded = product(torch.eye(width, dtype=weight.dtype), stored).T.float()
    scale, zero = stored.scale_and_zero.float().transpose(0, 1).repeat_interleave(group, 1).unbind(-1)
    codes = ((rounded - zero) / scale).round().clamp(-_MIDDLE, _MIDDLE - 1)
    of_groups = 2 * stored.scale_and_zero.itemsize * width // group
    return (codes * scale + zero)[:rows], (4 * width + 8 * of_groups) * rows


def in_sixteens(weight: Tensor) -> Tensor:
    """A weight or bias with rows of zeros up to a multiple of 16, as the format has it; rows do not mix."""
    return torch.cat([weight, weight.new_zeros(-len(weight) % 16, *weight.shape[1:])])

"""W8A8: 8-bit weights and 8-bit inputs, multiplied as integers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn.functional import linear as product

from rotoscope.errors import BadInput, Refused
from rotoscope.interventions.base import Run
from rotoscope.model.forwards import Forward, around
from rotoscope.quantizers.base import Linear, Quantized, Quantizer
from rotoscope.quantizers.library import importing, through_torchao

if TYPE_CHECKING:
    from rotoscope.model.lm import LM

_TRIED = 4
_FELT = (1e-4, 0.1)  # rounding of floats is below, eight bits of a normal variable are within, overflow is above


@dataclass(frozen=True)
class Integers(Quantizer):
    """What methods with products of 8-bit integers share.

    Raises
    ------
    BadInput
        On opening, if the model is in float64.
    Refused
        On opening, if inputs would not be quantized, or products overflow on this processor; in a forward, if the model
        uses a weight otherwise than to multiply the layer's input.
    """

    kind: ClassVar[str] = "activations"

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        super().attach(lm, run, stack)
        stack.enter_context(around(lm.model, self._lead))

    def check(self, linears: Sequence[Linear]) -> None:
        if any(linear.weight.dtype == torch.float64 for linear in linears):
            raise BadInput(f"{self.name} does not run in float64: load the model in float32")

    def _lead(self, forward: Forward, proceed: Callable[..., Any]) -> Any:
        try:
            return proceed(**forward.arguments)
        except NotImplementedError as error:
            if "Int8Tensor" not in str(error):
                raise
            why = "this model uses the weight of a linear layer otherwise than to multiply its input"
            raise Refused(f"{self.name} needs whole linear layers, but {why}") from error


@dataclass(frozen=True)
class W8A8(Integers):
    """Quantize weights per row and, in every forward, inputs per token, both to 8 bits and symmetric.

    Products are of integers (torchao's ``Int8DynamicActivationInt8WeightConfig``). Whether they are is tried on
    every layer on opening.

    Parameters
    ----------
    layers
        One decoder layer, several, or None for all.

    Raises
    ------
    BadInput, Refused
        As for `Integers`.
    """

    name: ClassVar[str] = "w8a8"

    def quantize(self, linear: Linear, learned: Any) -> Quantized:
        return through_int8(linear, None, self.name)


def through_int8(linear: Linear, smoothing: Tensor | None, who: str) -> Quantized:
    """A weight for products of 8-bit integers.

    Parameters
    ----------
    linear : Linear
        The layer.
    smoothing : torch.Tensor, optional
        By what each input is divided before it is quantized, ``[in]``, and its weights multiplied.
    who : str
        The method, for messages.
    """
    with importing("torchao", who):
        from torchao.quantization import Int8DynamicActivationInt8WeightConfig
    config = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    weight = linear.weight
    stored = through_torchao(config, weight if smoothing is None else weight * smoothing)
    values = stored.dequantize()
    bits = 8 * weight.numel() + 8 * stored.scale.itemsize * stored.scale.numel()
    if smoothing is not None:
        stored.act_pre_scale = 1 / smoothing
        values = values * stored.act_pre_scale
        bits += 8 * smoothing.itemsize * smoothing.numel()
    _check_integers(stored, values, linear.name)
    return Quantized(stored, values, bits)


def _check_integers(stored: Any, values: Tensor, name: str) -> None:
    """Refuse a weight under which inputs are not rounded, or by too much; ``values`` is for inputs not yet smoothed."""
    if values.shape[1] == 1 or not values.any():
        return  # eight bits hold a single input exactly
    x = torch.randn(_TRIED, values.shape[1], generator=torch.Generator().manual_seed(0)).to(values.device)
    if stored.act_pre_scale is not None:
        x = x / stored.act_pre_scale.float()
    plain = x @ values.float().T
    off = float((product(x, stored).float() - plain).norm() / plain.norm())
    if not _FELT[0] < off < _FELT[1]:
        raise Refused(f"8-bit products of {name} are {off:.0e} off: inputs are not quantized as they should be")

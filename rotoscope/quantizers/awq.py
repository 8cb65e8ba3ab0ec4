"""AWQ: weights of strong inputs enlarged before rounding (Lin et al. 2024, 2306.00978)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from rotoscope.quantizers.base import Linear, Quantized
from rotoscope.quantizers.calibration import Calibration, watch
from rotoscope.quantizers.library import importing
from rotoscope.quantizers.packed import Packed, in_sixteens, int4_config, packed_values

if TYPE_CHECKING:
    from rotoscope.model.lm import LM


@dataclass(frozen=True)
class AWQ(Packed):
    """Scale inputs' weights by the mean ``|x|`` to the power that loses least, round to 4 bits, scale back.

    Parameters
    ----------
    group : int
        Weights along the input that share a scale: 32, 64 or 128.
    calibration : sequence of sequences of int
        Texts, as token ids, that powers are chosen on.
    layers
        One decoder layer, several, or None for all.

    Raises
    ------
    BadInput
        As for `Packed`; on opening, if there is no calibration, or no token of it reaches some layer.

    Notes
    -----
    The search is torchao's, over 20 powers for each layer by itself, in bfloat16. The model reads the texts in its own
    type. Its inputs to all layers are in memory during the search: 2 bytes a value, shared between layers that read
    the same; a model of 135 M parameters has some 0.2 MB for each token.
    """

    name: ClassVar[str] = "awq"
    calibration: Calibration = field(default=(), repr=False)

    def learn(self, lm: LM, linears: Sequence[Linear]) -> Mapping[str, Any]:
        config = int4_config(self.group, self.name)
        with importing(self.library, self.name):
            from torchao.prototype.awq.core import AWQObserver
        seen: dict[str, list[Tensor]] = {linear.name: [] for linear in linears}
        last: tuple[Any, Any] = (None, None)

        def see(name: str, x: Tensor) -> None:
            nonlocal last
            if last[0] is None or last[0].data_ptr() != x.data_ptr() or last[0].shape != x.shape:
                last = (x, x.reshape(1, -1, x.shape[-1]).to("cpu", torch.bfloat16))
            seen[name].append(last[1])

        watch(lm, linears, self.calibration, see, self.name)
        found = {}
        for linear in linears:
            weight, bias = (None if x is None else _ready(x) for x in (linear.weight, linear.module.bias))
            observer = AWQObserver(weight, bias, config)
            observer.inputs = seen.pop(linear.name)
            found[linear.name] = observer.calculate_qparams()
        return found

    def quantize(self, linear: Linear, learned: Any) -> Quantized:
        values, bits = packed_values(linear.weight.bfloat16().cpu() * learned, self.group, self.name)
        back = 1 / learned
        values = (values * back.float()).to(linear.weight)
        return Quantized(values, values, bits + 8 * back.nbytes)


def _ready(x: Tensor) -> Tensor:
    return in_sixteens(x.detach().to("cpu", torch.bfloat16))

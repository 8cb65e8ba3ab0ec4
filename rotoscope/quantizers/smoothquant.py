"""SmoothQuant: outliers of inputs moved into the weights before both are quantized (Xiao et al. 2023, 2211.10438)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, ClassVar

from rotoscope.errors import BadInput
from rotoscope.quantizers.base import Linear, Quantized
from rotoscope.quantizers.calibration import Calibration, watch
from rotoscope.quantizers.library import importing
from rotoscope.quantizers.w8a8 import Integers, through_int8

if TYPE_CHECKING:
    from rotoscope.model.lm import LM


@dataclass(frozen=True)
class SmoothQuant(Integers):
    """Divide each input by ``max |x|^α / max |w|^(1−α)``, multiply its weights by that, and quantize as `W8A8` does.

    Parameters
    ----------
    alpha : float
        0: weights alone decide, 1: inputs alone.
    calibration : sequence of sequences of int
        Texts, as token ids, that the largest inputs are measured on.
    layers
        One decoder layer, several, or None for all.

    Raises
    ------
    BadInput
        If alpha is not within 0 … 1; on opening, if there is no calibration, or no token of it reaches some layer.
    Refused
        As for `Integers`.

    Notes
    -----
    Every layer has factors of its own, applied to its input when it is called, as torchao's ``SmoothQuantConfig``
    does it; in the paper layers that read the same norm share theirs, and the norm takes them up.
    """

    name: ClassVar[str] = "smoothquant"
    alpha: float = 0.5
    calibration: Calibration = field(default=(), repr=False)

    def __post_init__(self) -> None:
        if not 0 <= self.alpha <= 1:
            raise BadInput(f"alpha is a number from 0 to 1, not {self.alpha}")

    def learn(self, lm: LM, linears: Sequence[Linear]) -> Mapping[str, Any]:
        with importing(self.library, self.name):
            from torchao.prototype.smoothquant.core import RunningAbsMaxSmoothQuantObserver
        observers = {linear.name: RunningAbsMaxSmoothQuantObserver(linear.weight, self.alpha) for linear in linears}
        watch(lm, linears, self.calibration, lambda name, x: observers[name](x), self.name)
        return {name: observer.calculate_qparams()[0] for name, observer in observers.items()}

    def quantize(self, linear: Linear, learned: Any) -> Quantized:
        return through_int8(linear, learned, self.name)

"""SkipAttention: no attention sublayer from one layer on (Ben-Artzy & Schwartz 2024, section 5)."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from rotoscope.interventions.base import Intervention, Run
from rotoscope.interventions.boundary import at_end, counting
from rotoscope.model.layers import at_boundary, decoder_layers
from rotoscope.model.sublayer import sublayers, without_attention

if TYPE_CHECKING:
    from rotoscope.model.lm import LM


@dataclass(frozen=True)
class SkipAttention(Intervention):
    """For every token, attention adds nothing to the residual stream in the layers from ``layer`` on.

    Parameters
    ----------
    layer : int
        The first layer to skip attention in, 0 … L; at L none is skipped.

    Notes
    -----
    What goes is all that attention adds: an output bias and a norm of its output, too. Layers without attention, and
    the recurrent part of layers that have both, stay as they are. Keys and values are still made, so that caches keep
    their length; nothing reads them.
    """

    name: ClassVar[str] = "skip"
    layer: int

    def attach(self, lm: LM, run: Run, stack: ExitStack) -> None:
        layers = decoder_layers(lm.model)
        if at_end(layers, self.layer, run, stack):
            return

        def count(layer: int) -> None:
            run.fired += 1

        skipped = [k for k in sublayers(lm.model) if k >= self.layer]
        stack.enter_context(without_attention(lm.model, skipped, count))
        if not skipped:  # no layer from here on has attention
            stack.enter_context(at_boundary(layers, self.layer, counting(run)))

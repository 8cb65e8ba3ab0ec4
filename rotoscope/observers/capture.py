"""Plain capture, for short texts and tests."""

from __future__ import annotations

from dataclasses import replace

from rotoscope.model.call import AttentionCall
from rotoscope.observers.base import PerLayer


class Capture(PerLayer[list[AttentionCall]]):
    """Keeps the calls themselves, tensors detached; memory grows with tokens and layers.

    ``layers[i]`` is the list of calls that layer ``i`` made, in order.
    """

    def observe(self, call: AttentionCall) -> None:
        kept = replace(call, q=call.q.detach(), k=call.k.detach(), v=call.v.detach())
        self._seen.setdefault(call.layer, []).append(kept)

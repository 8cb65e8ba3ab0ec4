"""Sums for the causal-matrix fit, from rotated queries and keys as attention sees them."""

from __future__ import annotations

import torch

from rotoscope.errors import BadInput
from rotoscope.model.call import AttentionCall
from rotoscope.observers.base import PerLayer
from rotoscope.stats.causal import CausalSums, causal_sums


class Causal(PerLayer[list[CausalSums]]):
    """Row, column and diagonal sums of the real logits of each row of text, position 0 left out.

    ``layers[i]`` holds one :class:`~rotoscope.stats.causal.CausalSums` per row of text. Sliding windows are not
    applied: the fit describes ``q · k`` over every pair ``j ≤ i``.
    """

    @torch.no_grad()
    def observe(self, call: AttentionCall) -> None:
        if call.k.shape[2] != call.q.shape[2]:
            raise BadInput("the causal fit reads whole texts in one forward: run the model without a cache")
        for row, real in enumerate(call.tokens & ~call.first):
            at = real.nonzero()[:, 0]
            if len(at) > 1:
                q, k = (x[row, :, at[0] : at[-1] + 1] for x in (call.q, call.k))
                group = len(q) // len(k)
                parts = [causal_sums(q[i * group : (i + 1) * group], k[i : i + 1]) for i in range(len(k))]
                sums = CausalSums.stack(parts)
                kept = (self._keep(x) for x in (sums.squares, sums.rows, sums.columns, sums.diagonals))
                self._seen.setdefault(call.layer, []).append(CausalSums(*kept))

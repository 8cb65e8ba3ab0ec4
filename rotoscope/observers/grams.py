"""Un-rotated second moments of queries and keys: all that the full-grid additive fit needs."""

from __future__ import annotations

import torch

from rotoscope.model.call import AttentionCall
from rotoscope.model.rotary import Rotation
from rotoscope.observers.base import PerLayer, new_keys
from rotoscope.stats.moments import Moments

Sums = tuple[Moments, torch.Tensor]
_BYTES = 2**20


class LayerGrams:
    """Moments of un-rotated queries ``[heads, …]`` and keys ``[kv_heads, …]`` of one layer.

    Attributes
    ----------
    q, k : Moments
        Of every token but position 0, whose sink key would inflate r.
    q0, k0 : torch.Tensor
        Position 0 of each row itself, ``[heads or kv_heads, rows, 2 · pairs]``.
    phase : torch.Tensor
        Sum of the keys' unit phases per pair, complex ``[kv_heads, pairs]``, position 0 left out.
    """

    def __init__(self, rotation: Rotation, q: Sums, k: Sums, phase: torch.Tensor):
        self.rotation = rotation
        (self.q, self.q0), (self.k, self.k0) = q, k
        self.phase = phase

    def add(self, q: Sums, k: Sums, phase: torch.Tensor) -> None:
        """Count another batch."""
        self.q, self.q0 = self.q.add_(q[0]), torch.cat([self.q0, q[1]], 1)
        self.k, self.k0 = self.k.add_(k[0]), torch.cat([self.k0, k[1]], 1)
        self.phase += phase

    def for_heads(self, of_keys: torch.Tensor) -> torch.Tensor:
        """Rows of a key quantity ``[kv_heads, …]`` repeated so that row ``a`` is what query head ``a`` reads."""
        return of_keys.repeat_interleave(self.q.sum.shape[0] // self.k.sum.shape[0], 0)

    def queries(self, position0: bool = False) -> Moments:
        """Query moments, with position 0 or without."""
        return self.q + Moments.of(self.q0) if position0 else self.q

    def keys(self, position0: bool = False) -> Moments:
        """Key moments, with position 0 or without, one row per query head."""
        k = self.k + Moments.of(self.k0) if position0 else self.k
        return Moments(k.n, self.for_heads(k.sum), self.for_heads(k.gram))

    def turns(self, distances: int) -> Moments:
        """Moments of the turns at distances 0 … ``distances - 1``."""
        return Moments.of(torch.from_numpy(self.rotation.angles(distances)).to(self.q.sum.device))


class Grams(PerLayer[LayerGrams]):
    """Streams ``Σ x xᵀ`` of queries and keys before rotary embedding, float64, over batches and texts.

    Layers whose rotation is not reached are passed over; ``anatomy`` names them.
    """

    @torch.no_grad()
    def observe(self, call: AttentionCall) -> None:
        if call.rotation is None or (call.rotation.pairs and call.table is None):
            return
        q, _ = _sums(call, call.q)
        k, phase = _sums(call, new_keys(call.k, call))
        seen = self._seen.get(call.layer)
        if seen is None:
            q, k = ((Moments(m.n, self._keep(m.sum), self._keep(m.gram)), self._keep(first)) for m, first in (q, k))
            self._seen[call.layer] = LayerGrams(call.rotation, q, k, self._keep(phase))
        else:
            seen.add(q, k, phase)


def _sums(call: AttentionCall, x: torch.Tensor) -> tuple[Sums, torch.Tensor]:
    """Moments of all tokens but position 0, position 0 itself, and the sum of unit phases of the former.

    A few heads at a time: float64 copies of all of them would be most of what observing costs in memory.
    """
    first = call.first
    rest = call.tokens & ~first
    batch, heads, tokens, width = x.shape
    step = max(1, _BYTES // (8 * batch * tokens * width))
    parts = []
    for start in range(0, heads, step):
        z = call.unrotate(x[:, start : start + step])
        kept = _select(z, rest)
        of = Moments.of(kept)
        phase = torch.sgn(torch.complex(*kept.chunk(2, -1))).sum(-2)
        parts.append((of.sum, of.gram, _select(z, first).clone(), phase))
    total, gram, zeroth, phases = (torch.cat(column) for column in zip(*parts, strict=True))
    return (Moments(int(rest.sum()), total, gram), zeroth), phases


def _select(z: torch.Tensor, real: torch.Tensor) -> torch.Tensor:
    """The real tokens of a batch as one list: ``[batch, heads, tokens, dims]`` → ``[heads, n, dims]``."""
    if z.shape[0] == 1:
        at = real[0].nonzero()[:, 0]
        if len(at) and len(at) == at[-1] - at[0] + 1:
            return z[0, :, at[0] : at[-1] + 1]
    return z.transpose(0, 1)[:, real]

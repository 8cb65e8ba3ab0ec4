"""How spread attention is, and how much of it goes to position 0."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from rotoscope.model.call import AttentionCall
from rotoscope.observers.base import PerLayer


@dataclass
class Spread:
    """Sums over real query tokens, ``[heads]``: entropy in nats, attention to position 0."""

    n: int
    entropy_sum: torch.Tensor
    sink_sum: torch.Tensor

    @property
    def entropy(self) -> torch.Tensor:
        """Mean entropy of a query's attention ``[heads]``, nats."""
        return self.entropy_sum / self.n

    @property
    def sink_mass(self) -> torch.Tensor:
        """Mean attention to position 0 ``[heads]``; rows with learned sinks need not sum to 1."""
        return self.sink_sum / self.n


class Entropy(PerLayer[Spread]):
    """Attention entropy and sink mass, computed block by block of query rows so that no logits are kept.

    Parameters
    ----------
    rows : int
        Query rows computed at a time.
    """

    def __init__(self, rows: int = 128):
        super().__init__()
        self.rows = rows

    @torch.no_grad()
    def observe(self, call: AttentionCall) -> None:
        heads, length = call.q.shape[1:3]
        real = call.tokens
        entropy, sink = (torch.zeros(heads, dtype=torch.float64, device=call.q.device) for _ in range(2))
        first = self._position0(call)
        for start in range(0, length, self.rows):
            rows = slice(start, start + self.rows)
            weights = probabilities(call, rows)
            kept = real[:, None, rows]
            entropy += torch.where(kept, torch.special.entr(weights).sum(-1), 0).double().sum((0, 2))
            to_first = weights.gather(-1, first[:, None, None, None].expand(*weights.shape[:-1], 1))[..., 0]
            sink += torch.where(kept, to_first, 0).double().sum((0, 2))
        seen = self._seen.get(call.layer)
        n = int(real.sum())
        if seen is None:
            self._seen[call.layer] = Spread(n, entropy, sink)
        else:
            seen.n, seen.entropy_sum, seen.sink_sum = seen.n + n, seen.entropy_sum + entropy, seen.sink_sum + sink

    @staticmethod
    def _position0(call: AttentionCall) -> torch.Tensor:
        """Index of each row's first real key ``[batch]``."""
        keys = call.k.shape[2]
        if call.padding is None:
            return torch.zeros(call.q.shape[0], dtype=torch.long, device=call.q.device)
        return call.padding[:, -keys:].to(call.q.device).int().argmax(-1)


def probabilities(call: AttentionCall, rows: slice = slice(None)) -> torch.Tensor:
    """Attention weights of some query rows, with softcap, bias, mask, sinks: ``[batch, heads, rows, keys]``.

    float64 where the logits are, else float32.
    """
    return softmax(call, call.logits(rows), call.allowed(rows), biases(call, rows))


def biases(call: AttentionCall, rows: slice) -> Iterator[torch.Tensor]:
    """What is added to the logits of some query rows behind the softcap, broadcastable to their shape."""
    if call.bias is not None:
        yield call.bias[..., rows, :]
    if call.mask is not None and call.mask.dtype != torch.bool:
        yield call.mask if call.mask.shape[-2] == 1 else call.mask[..., rows, :]


def softmax(
    call: AttentionCall, logits: torch.Tensor, allowed: torch.Tensor, beside: Iterable[torch.Tensor]
) -> torch.Tensor:
    """The weights that a call makes of logits, keys that may be attended to and what is added to the logits."""
    logits = logits if logits.dtype == torch.float64 else logits.float()
    if call.softcap is not None:
        logits = call.softcap * torch.tanh(logits / call.softcap)
    for bias in beside:
        logits = logits + bias.to(logits.dtype)
    logits = logits.masked_fill(~allowed, -torch.inf)
    if call.sinks is not None:
        sink = call.sinks.to(logits.dtype).reshape(1, -1, 1, 1).expand(*logits.shape[:-1], 1)
        return torch.cat([logits, sink], -1).softmax(-1)[..., :-1].nan_to_num(0)
    return logits.softmax(-1).nan_to_num(0)

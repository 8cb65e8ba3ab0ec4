"""Attention at some positions of a long text: how spread it is, how much goes to position 0, how high logits reach."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from rotoscope.errors import BadInput
from rotoscope.model.call import AttentionCall
from rotoscope.observers.base import PerLayer
from rotoscope.observers.entropy import biases, softmax


@dataclass
class AtPositions:
    """Means over heads and over the queries looked at, one value per place, float64 ``[places]``.

    Attributes
    ----------
    entropy : torch.Tensor
        Of a query's attention, nats.
    sink_mass : torch.Tensor
        Attention to position 0.
    largest_logit : torch.Tensor
        The largest logit of a query among the keys that it may attend to.
    """

    entropy: torch.Tensor
    sink_mass: torch.Tensor
    largest_logit: torch.Tensor


class ByPosition(PerLayer[AtPositions]):
    """Looks at blocks of queries, here and there in a text, so that memory and time stay linear in its length.

    Parameters
    ----------
    starts : sequence of int
        Where the blocks begin.
    rows : int
        Queries of each.

    Notes
    -----
    For texts run one at a time, without padding or cache. Where a layer calls attention several times in a forward,
    the first call counts.
    """

    def __init__(self, starts: Sequence[int], rows: int = 32):
        super().__init__()
        self.starts, self.rows = tuple(starts), rows

    @torch.no_grad()
    def observe(self, call: AttentionCall) -> None:
        if call.index:
            return
        if len(call.q) > 1 or call.k.shape[2] != call.q.shape[2] or not bool(call.tokens.all()):
            raise BadInput("attention by position is read off one whole text: run the model without padding or cache")
        if max(self.starts) >= call.q.shape[2]:
            raise BadInput(f"there is no position {max(self.starts)} in a text of {call.q.shape[2]} tokens")
        seen = [self._block(call, slice(start, start + self.rows)) for start in self.starts]
        self._seen[call.layer] = AtPositions(*torch.tensor(seen, dtype=torch.float64).unbind(1))

    @staticmethod
    def _block(call: AttentionCall, rows: slice) -> tuple[float, float, float]:
        logits, allowed = call.logits(rows), call.allowed(rows)
        weights = softmax(call, logits, allowed, biases(call, rows))
        largest = logits.masked_fill(~allowed, -torch.inf).amax(-1)
        entropy = torch.special.entr(weights).sum(-1)
        return entropy.double().mean().item(), weights[..., 0].double().mean().item(), largest.double().mean().item()

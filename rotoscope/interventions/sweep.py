"""All manipulations of previous tokens at all depths, from one recorded pass.

What a sweep gives at k is what the intervention of the same name gives under ``on(lm, prompt=…)`` at ``layer=k``, with
the same seed; it costs a fraction of one forward per k.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from rotoscope.errors import BadInput
from rotoscope.interventions.manipulate import Keys, noised, prefix_keys, shuffled
from rotoscope.model.lm import LM
from rotoscope.model.prompts import Prompts
from rotoscope.model.sweep import Logits, Recorded, edited, recorded
from rotoscope.model.sweep_freeze import frozen
from rotoscope.model.sweep_skip import skipped

__all__ = ["Prompts", "Sweep"]


@dataclass(frozen=True)
class Sweep:
    """Depth sweeps over one batch of prompts.

    Every method yields ``(k, logits)`` for the ks in ascending order, each once; logits are those from the last prompt
    token on, ``[batch, prompts.last, vocabulary]``. At ``k = L`` they are the clean ones, exactly. Ben-Artzy & Schwartz
    2024, section 3.

    Attributes
    ----------
    past
        The recorded pass: ``past.clean`` are its logits, ``past.prompts`` what it was run on.
    """

    past: Recorded

    @classmethod
    def over(cls, lm: LM, prompts: Prompts, exempt_first: bool = False) -> Sweep:
        """Run the model once on a batch and keep ``(L + 1) · batch · tokens · hidden`` numbers of it.

        Parameters
        ----------
        lm : LM
            The model.
        prompts : Prompts
            Prompts padded on the left, and behind them the answers' tokens that are scored, if there is more than one.
        exempt_first : bool
            Leave position 0 as it is.

        Raises
        ------
        Refused
            If a boundary of the model is not one state a token.
        """
        return cls(recorded(lm, prompts, exempt_first))

    def noise(self, ks: Iterable[int], seed: int = 0) -> Logits:
        """Noise of the same norm in place of each previous token's ``h[k]``; the layers from k on run as ever."""
        return self._redrawn(noised, ks, seed)

    def shuffle(self, ks: Iterable[int], seed: int = 0) -> Logits:
        """The coordinates of each previous token's ``h[k]`` permuted; the layers from k on run as ever."""
        return self._redrawn(shuffled, ks, seed)

    def freeze(self, ks: Iterable[int]) -> Logits:
        """The previous tokens' ``h[k]`` held in every layer from k on; the last tokens run as ever."""
        return frozen(self.past, ks)

    def skip(self, ks: Iterable[int], rows: int = 256) -> Logits:
        """No attention for any token from layer k on; at most ``rows`` sequences (or one batch) run at once."""
        return skipped(self.past, ks, rows)

    def swap(self, ks: Iterable[int], donor: Sweep, where: Tensor, source: Tensor) -> Logits:
        """A donor's ``h[k]`` in place of that of some tokens; the layers from k on run as ever.

        Parameters
        ----------
        ks : iterable of int
            Boundaries.
        donor : Sweep
            The same model on as many donor prompts.
        where : torch.Tensor
            Which tokens are replaced, boolean ``[batch, tokens]``.
        source : torch.Tensor
            Which of the donor's tokens take their places, in the same order, boolean ``[batch, donor's tokens]``.

        Raises
        ------
        BadInput
            If a row has not as many places as donor tokens.
        """
        where, source = (x.to(self.past.clean.device, torch.bool) for x in (where, source))
        uneven = (where.sum(-1) != source.sum(-1)).nonzero()[:, 0].tolist()
        if uneven:
            counts = (int(x[uneven[0]].sum()) for x in (source, where))
            raise BadInput("row {}: {} donor tokens for {} places; they must be as many".format(uneven[0], *counts))

        def put(h: Tensor, k: int) -> Tensor:
            out = h.clone()
            out[where.to(h.device)] = donor.past.h[k][source.to(h.device)].to(h)
            return out

        return edited(self.past, ks, put)

    @cached_property
    def _keys(self) -> Keys:
        return prefix_keys(self.past.prompts.ids, self.past.prompts.mask.bool())

    def _redrawn(self, change: Callable[..., Tensor], ks: Iterable[int], seed: int) -> Logits:
        return edited(self.past, ks, lambda h, k: change(h, self.past.changed, self._keys, seed, k))

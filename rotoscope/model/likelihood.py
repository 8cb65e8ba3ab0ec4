"""How likely a text's tokens are, without all of its logits at once."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from rotoscope.errors import BadInput
from rotoscope.model.anatomy import relative, rounding_floor
from rotoscope.model.layers import at_boundary, decoder_layers
from rotoscope.model.lm import LM, evaluating
from rotoscope.model.prompts import takes
from rotoscope.model.residual import resume

_ROWS = 128
_TRIED = 8


@torch.no_grad()
def token_nll(lm: LM, ids: Tensor, chunk: int = 1024) -> Tensor:
    """Negative log-likelihood of every token but the first, given those before it.

    One forward runs through all layers; the model's own norm, head and softcap then turn ``h[L]`` into logits piece by
    piece. A text of 12,288 tokens would have 2.4 GB of them in float32 with a vocabulary of 49,152. Where a model does
    not resume exactly at L, as is tried on a few tokens each time, all logits are taken at once.

    Parameters
    ----------
    lm : LM
        The model; interventions that are open on it count.
    ids : torch.Tensor
        Token ids ``[batch, tokens]``, no padding.
    chunk : int
        Tokens whose logits are held at a time, over all rows.

    Returns
    -------
    torch.Tensor
        Nats, float64 ``[batch, tokens - 1]`` on the CPU; column ``i`` scores token ``i + 1``.

    Raises
    ------
    BadInput
        If there are fewer than two tokens, or not one row of them at least.
    """
    if ids.ndim != 2 or not len(ids) or ids.shape[1] < 2:
        raise BadInput(f"likelihoods need ids [batch, tokens] of two tokens or more, not {list(ids.shape)}")
    ids = ids.to(lm.device)
    given = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "use_cache": False}
    columns = torch.arange(ids.shape[1] - 1, device=ids.device)
    pieces = columns.split(max(1, chunk // len(ids)))

    def logits(keep: Tensor) -> Tensor:
        out: Tensor = lm.model(**given, logits_to_keep=keep).logits
        return out

    with evaluating(lm.model):
        if len(pieces) > 1 and "logits_to_keep" in takes(lm.model):
            in_pieces = _in_pieces(lm, logits, ids, pieces)
            if in_pieces is not None:
                return in_pieces
        return _nll(lm.model(**given).logits[:, :-1], ids[:, 1:])


def _in_pieces(lm: LM, logits: Callable[[Tensor], Tensor], ids: Tensor, pieces: tuple[Tensor, ...]) -> Tensor | None:
    """The first piece from a whole forward, the others resumed at its end; None where that gives something else."""
    layers = decoder_layers(lm.model)
    ends: list[Tensor] = []
    with at_boundary(layers, len(layers), ends.append):
        first = logits(pieces[0])
    with resume(lm.model, len(layers), ends[0]):
        few = pieces[0][:_TRIED]
        try:
            again = logits(few)
            exact = relative(again, first[:, : len(few)]) <= rounding_floor(lm.model, lm.dtype)
        except Exception:  # whatever the model does that misses what its layers would have left it
            exact = False
        if not exact:
            return None
        found = [_nll(first, ids[:, pieces[0] + 1])]
        del first
        found += [_nll(logits(piece), ids[:, piece + 1]) for piece in pieces[1:]]
    return torch.cat(found, 1)


def _nll(logits: Tensor, targets: Tensor) -> Tensor:
    """Nats of ``targets`` ``[batch, n]`` under ``logits`` ``[batch, n, vocabulary]``, a few rows at a time."""
    found = []
    for x, of in zip(logits.flatten(0, 1).split(_ROWS), targets.flatten().split(_ROWS), strict=True):
        exact = x if x.dtype == torch.float64 else x.float()
        found.append(cross_entropy(exact, of.to(x.device), reduction="none"))
    return torch.cat(found).cpu().double().view(targets.shape)

"""How likely a text is under a changed model, and how far that moves its predictions from the model's own.

What is kept of a forward is ``h[L]``; norm and head turn it into logits a few tokens at a time, so that two models'
logits of a whole text are never in memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.nn.functional import kl_div

from rotoscope.model.anatomy import relative, rounding_floor
from rotoscope.model.layers import at_boundary, decoder_layers
from rotoscope.model.lm import LM, evaluating
from rotoscope.model.prompts import takes
from rotoscope.model.residual import resume

COLUMNS = 128
_TRIED = 8


@dataclass(frozen=True)
class Ends:
    """What a forward over a text left: ``h[L]`` ``[1, tokens, hidden]``, or logits where they do not follow from it."""

    ids: Tensor
    states: Tensor | None
    logits: Tensor | None = None

    def pieces(self, lm: LM, columns: Tensor) -> Iterator[Tensor]:
        """Log-probabilities ``[columns, vocabulary]`` after some columns, a few at a time; by the head of ``lm``."""
        for some in columns.split(COLUMNS):
            if self.logits is not None:
                found = self.logits[some.to(self.logits.device)]
            else:
                assert self.states is not None
                with evaluating(lm.model), resume(lm.model, len(decoder_layers(lm.model)), self.states.to(lm.device)):
                    found = _logits(lm, self.ids, some.to(lm.device))
            yield (found if found.dtype == torch.float64 else found.float()).log_softmax(-1).cpu()


@torch.no_grad()
def run(lm: LM, ids: Sequence[int] | Tensor, **given: Any) -> Ends:
    """Run a model, as it is now, over a text.

    Parameters
    ----------
    ids
        Token ids of the text.
    given
        What else the model takes: a cache, and the mask and positions that go with it.
    """
    batch = torch.as_tensor(list(ids) if not isinstance(ids, Tensor) else ids, device=lm.device).view(1, -1)
    arguments = {"attention_mask": torch.ones_like(batch), "use_cache": False, **given}
    layers = decoder_layers(lm.model)
    kept: list[Tensor] = []
    with evaluating(lm.model):
        if not _resumes(lm):
            return Ends(batch, None, lm.model(input_ids=batch, **arguments).logits[0].cpu())
        with at_boundary(layers, len(layers), lambda state: kept.append(state.detach().cpu())):
            _logits(lm, batch, torch.arange(1, device=lm.device), **arguments)
    return Ends(batch, kept[0])


@torch.no_grad()
def compare(
    lm: LM, clean: Ends, changed: Ends, targets: Tensor, columns: Tensor, head: LM | None = None
) -> tuple[float, float, float]:
    """Mean nats of some targets under both, and ``KL(clean ‖ changed)``.

    Parameters
    ----------
    lm : LM
        The model itself; nothing may be open on it.
    targets
        The ids that follow ``columns``.
    head : LM, optional
        The model whose head reads the changed states, where it is another one.

    Returns
    -------
    tuple
        Negative log-likelihood clean and changed, and the divergence: nats a token.
    """
    totals = torch.zeros(3, dtype=torch.float64)
    both = zip(
        clean.pieces(lm, columns), changed.pieces(head or lm, columns), targets.cpu().split(COLUMNS), strict=True
    )
    for p, q, of in both:
        nll = [-x.gather(1, of[:, None]).double().sum() for x in (p, q)]
        divergence = kl_div(q, p, reduction="none", log_target=True).double().sum()
        totals += torch.stack([*nll, divergence])
    a, b, c = (totals / len(targets)).tolist()
    return a, b, c


def text(lm: LM, ids: Sequence[int]) -> Ends:
    """A clean run over a text, remembered: every method is compared with it."""
    known = _KNOWN.setdefault(lm.model, {})
    key = tuple(ids)
    if key not in known:
        known[key] = run(lm, ids)
    return known[key]


_KNOWN: WeakKeyDictionary[Any, dict[tuple[int, ...], Ends]] = WeakKeyDictionary()
_EXACT: WeakKeyDictionary[Any, bool] = WeakKeyDictionary()


def _logits(lm: LM, ids: Tensor, columns: Tensor, **given: Any) -> Tensor:
    """Logits after some columns ``[columns, vocabulary]``."""
    arguments = {"attention_mask": torch.ones_like(ids), "use_cache": False, **given}
    if "logits_to_keep" in takes(lm.model):
        return lm.model(input_ids=ids, **arguments, logits_to_keep=columns).logits[0]  # type: ignore[no-any-return]
    return lm.model(input_ids=ids, **arguments).logits[0, columns]  # type: ignore[no-any-return]


def _resumes(lm: LM) -> bool:
    """Whether norm and head alone turn ``h[L]`` into the model's logits; tried once, on a few tokens."""
    if lm.model not in _EXACT:
        layers = decoder_layers(lm.model)
        ids = torch.arange(1, _TRIED + 1, device=lm.device)[None]
        kept: list[Tensor] = []
        columns = torch.arange(_TRIED, device=lm.device)
        with at_boundary(layers, len(layers), kept.append):
            expected = _logits(lm, ids, columns)
        try:
            with resume(lm.model, len(layers), kept[0]):
                exact = relative(_logits(lm, ids, columns), expected) <= rounding_floor(lm.model, lm.dtype)
        except Exception:  # whatever the model does that misses what its layers would have left it
            exact = False
        _EXACT[lm.model] = exact
    return _EXACT[lm.model]

"""Depth sweeps: what a model says when its previous tokens are changed from layer k on, for many k at a time.

States below k never change, so they are recorded once, and each k starts from them. How much of the model then has to
run differs from model to model: `quickest` tries the cheaper ways on a few tokens against the plain one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from rotoscope.errors import BadInput, Refused
from rotoscope.model.anatomy import FLOOR, probe_ids, relative, rounding_floor
from rotoscope.model.lm import LM, evaluating
from rotoscope.model.prompts import Prompts, takes
from rotoscope.model.residual import record, replace, resume

Logits = Iterator[tuple[int, Tensor]]
"""``(k, logits)`` for each k in ascending order, as in `Recorded.clean`."""


@dataclass(frozen=True)
class Recorded:
    """One plain forward over some prompts, from which sweeps start.

    Attributes
    ----------
    lm
        The model.
    prompts
        What it was run on.
    exempt_first
        Whether position 0 is left as it is.
    h
        ``h[0]`` to ``h[L]``, each ``[batch, tokens, hidden]``.
    clean
        Logits from the last prompt token on, ``[batch, prompts.last, vocabulary]``. Of an answer that stands behind the
        prompt, column ``i`` scores token ``i``.
    """

    lm: LM
    prompts: Prompts
    exempt_first: bool
    h: list[Tensor]
    clean: Tensor

    @property
    def model(self) -> nn.Module:
        """The model itself."""
        return self.lm.model  # type: ignore[no-any-return]

    @property
    def depth(self) -> int:
        """L, the number of layers."""
        return len(self.h) - 1

    @property
    def changed(self) -> Tensor:
        """Which tokens are changed: the previous ones, boolean ``[batch, tokens]``."""
        previous = self.prompts.previous
        return previous & ~self.prompts.first if self.exempt_first else previous

    def boundaries(self, ks: Iterable[int]) -> list[int]:
        """``ks`` in ascending order, each once.

        Raises
        ------
        BadInput
            If one of them is not one of 0 … L.
        """
        ordered = sorted({*ks})
        if wrong := [k for k in ordered if not 0 <= k <= self.depth]:
            raise BadInput(f"there is no boundary {wrong[0]}: this model has 0 to {self.depth}")
        return ordered

    def answer(self, start: int = 0, past: bool = True, **more: Any) -> Tensor:
        """Run the model as it is at the moment on the columns from ``start`` on; logits as in `clean`."""
        arguments = {"use_cache": False, **self.prompts.arguments(self.model, start, past=past), **more}
        return _last(self.model(**arguments, **_fewer(self.model, self.prompts)).logits, self.prompts)


Way = Callable[[Recorded, int], Tensor]
"""Computes the logits at one k."""


def recorded(lm: LM, prompts: Prompts, exempt_first: bool = False) -> Recorded:
    """Run a model once on some prompts and keep what sweeps start from.

    Memory: ``(L + 1) · batch · tokens · hidden`` numbers are kept, so a batch is best no larger than what the model
    runs on quickly.

    Parameters
    ----------
    lm : LM
        The model.
    prompts : Prompts
        The prompts, and the answers' tokens behind them.
    exempt_first : bool
        Leave position 0 as it is.

    Raises
    ------
    Refused
        If a boundary of the model is not one state a token.
    """
    prompts = prompts.to(lm.device)
    with evaluating(lm.model):
        kept = record(lm.model, **{**prompts.arguments(lm.model), **_fewer(lm.model, prompts)})
    if kept.h[0].ndim != 3 or kept.logits is None:
        name = type(lm.model).__name__
        raise Refused(f"{name} carries several residual streams, or has no head: there is no depth to sweep over")
    return Recorded(lm, prompts, exempt_first, kept.h, _last(kept.logits, prompts))


def edited(past: Recorded, ks: Iterable[int], edit: Callable[[Tensor, int], Tensor]) -> Logits:
    """Put ``edit(h[k], k)`` in place of ``h[k]`` and let the layers from k on run as ever, for each k.

    Half the cost of as many forwards, if the ks are spread evenly. ``k = L`` gives the clean logits.
    """
    for k in past.boundaries(ks):
        yield k, past.clean if k == past.depth else _edited(past, k, edit)


@contextmanager
def begin(past: Recorded, k: int, state: Tensor) -> Iterator[None]:
    """Start the forward in the block at layer k with ``state``, or replace ``h[k]`` where the model cannot resume."""
    way = resume if quickest(past.lm, "resume", (_resumed, _replaced)) is _resumed else _put
    with way(past.model, k, state):
        yield


def quickest(lm: LM, name: str, ways: Sequence[Way]) -> Way:
    """The first way that agrees with the last one, which is taken to be right.

    It is tried once per model, at four depths on two rows of a few tokens (one padded, a multi-token answer), and
    remembered by ``name``.
    """
    known = _QUICKEST.setdefault(lm.model, {})
    if name not in known:
        past = _probe(lm)
        ks = sorted({0, min(1, past.depth - 1), past.depth // 2, past.depth - 1})
        expected = [ways[-1](past, k) for k in ks]
        known[name] = next((way for way in ways[:-1] if _agrees(way, past, ks, expected)), ways[-1])
    return known[name]


_QUICKEST: WeakKeyDictionary[nn.Module, dict[str, Way]] = WeakKeyDictionary()
_TOLERANCE = 50
"""Times the rounding floor: ways may add up in another order, and frozen states let that grow from layer to layer."""
_WRONG = 0.1
"""Relative difference that is no rounding in any dtype."""


@torch.no_grad()
def _edited(past: Recorded, k: int, edit: Callable[[Tensor, int], Tensor]) -> Tensor:
    with evaluating(past.model), begin(past, k, edit(past.h[k], k)):
        return past.answer()


def _resumed(past: Recorded, k: int) -> Tensor:
    with resume(past.model, k, past.h[k]):
        return past.answer()


def _replaced(past: Recorded, k: int) -> Tensor:
    return past.clean


@contextmanager
def _put(model: nn.Module, k: int, state: Tensor) -> Iterator[None]:
    with replace(model, k, lambda _: state):
        yield


@torch.no_grad()
def _agrees(way: Way, past: Recorded, ks: Sequence[int], expected: Sequence[Tensor]) -> bool:
    # many modeling files compute attention weights, routers or scans in float32 whatever the model's dtype
    floor = max(rounding_floor(past.model, past.lm.dtype), FLOOR[torch.float32])
    allowed = min(_TOLERANCE * floor, _WRONG)
    try:
        return all(relative(way(past, k), right) <= allowed for k, right in zip(ks, expected, strict=True))
    except Exception:  # whatever a layer does that misses what another would have left it
        return False


def _probe(lm: LM) -> Recorded:
    ids = probe_ids(lm.model, lm.anatomy.vocabulary, 12)[0].tolist()
    for shorter in (3, 0):
        past = recorded(lm, Prompts.of([ids[:9], ids[shorter:9][::-1]], [ids[9:11], ids[10:12]]))
        if not past.clean.isnan().any():  # some attention gives NaN under padding in float64
            break
    return past


def _fewer(model: nn.Module, prompts: Prompts) -> dict[str, int]:
    return {"logits_to_keep": prompts.last} if "logits_to_keep" in takes(model) else {}


def _last(logits: Tensor, prompts: Prompts) -> Tensor:
    return logits[:, -prompts.last :]

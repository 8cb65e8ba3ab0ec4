"""Each new token becomes a previous one at the next step: with a cache, it is brought again."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import Tensor

from rotoscope.errors import BadInput, Refused
from rotoscope.model.columns import with_one_before
from rotoscope.model.forwards import Forward, covered

_MEND = "use the model with use_cache=False"


class Redo:
    """Leads forwards so that a step with a cache brings the token before it once more, now as a previous one.

    The cache gives that token up first. Prompts run as they are.
    """

    def __init__(self, stack: ExitStack) -> None:
        self._ids: Tensor | None = None
        self._padded = False
        self._order = stack.enter_context(ExitStack())

    def __call__(self, forward: Forward, proceed: Callable[..., Any]) -> Any:
        if forward.ids is None:
            raise BadInput("scope all-previous needs token ids: give the model input_ids, not inputs_embeds")
        arguments = dict(forward.arguments)
        if forward.past:
            arguments = with_one_before(forward, self._take_back(forward))
        elif forward.cache is not None:
            self._prepare(forward.cache)
        self._ids, self._padded = forward.ids[:, -1:], not bool(forward.real[:, -1].all())
        output = proceed(**arguments)
        return _last(output, forward.ids.shape[1]) if forward.past else output

    def _prepare(self, cache: Any) -> None:
        cache.activate_past_recording()  # sliding windows keep what a step back needs
        self._order.close()
        self._order.enter_context(covered(cache, "reorder_cache", _refuse_beams))

    def _take_back(self, forward: Forward) -> Tensor:
        """Take the last token out of the cache and return its ids ``[batch, 1]``."""
        if self._ids is None or len(self._ids) != len(forward.real):
            raise BadInput("a step of scope all-previous needs its own prompt's prefill inside the same block")
        if self._padded:
            raise BadInput("scope all-previous needs rows that end in a token: pad on the left")
        cache = forward.cache
        slides = [layer for layer, sliding in enumerate(cache.is_sliding) if sliding]
        if not cache.is_croppable or any(_forgot(cache, layer) for layer in slides):
            raise Refused(f"this model's cache cannot take back a token, as scope all-previous needs: {_MEND}")
        cache.crop(-1)
        return self._ids


def _forgot(cache: Any, layer: int) -> bool:
    """Whether a sliding window no longer knows what lay before it."""
    full: bool = cache.get_seq_length(layer) >= cache.get_max_length(layer)
    return full and not cache.is_recording_past(layer)


def _refuse_beams(order: Tensor) -> None:
    raise Refused(f"scope all-previous cannot follow beams through a cache: {_MEND}")


def _last(output: Any, tokens: int) -> Any:
    """The output for the last tokens only."""
    for name in ("logits", "last_hidden_state"):
        if isinstance(getattr(output, name, None), Tensor):
            setattr(output, name, getattr(output, name)[:, -tokens:])
    return output

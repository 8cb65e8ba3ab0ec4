"""New keys and values on their way into a cache: writers change them there, so that later steps read what was written.

Where a layer writes into no cache, or in another form, the same writers change what the attention call receives.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from rotoscope.errors import Refused
from rotoscope.model.call import AttentionCall, NewKeys, Writer
from rotoscope.model.forwards import covered

_Pair = tuple[Tensor, Tensor]
Widths = tuple[int, int, int]
"""Heads of keys and values, width of a key, width of a value."""


class Writes:
    """What writers did to the keys and values of the forward in progress, layer by layer."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._caches: set[int] = set()
        self._written: dict[int, list[_Pair]] = {}
        self._late: set[int] = set()
        self._layer = -1
        self._widths: Widths | None = None
        self._writers: Sequence[Writer] = ()
        self._padding: Tensor | None = None
        self._next = 0
        self._staged = False

    def cover(
        self, cache: Any, layer: int, widths: Widths | None, writers: Sequence[Writer], padding: Tensor | None
    ) -> None:
        """Be there when ``layer``, which is about to run, updates its cache; ``widths`` are those of its keys."""
        self._layer, self._widths, self._writers, self._padding = layer, widths, writers, padding
        if id(cache) not in self._caches and hasattr(cache, "update"):
            self._caches.add(id(cache))
            self._stack.enter_context(covered(cache, "update", partial(self._update, cache, cache.update)))

    def close(self) -> None:
        """Give the caches back."""
        self._stack.close()
        self._caches.clear()
        self._written.clear()
        self._late.clear()

    def begin(self, call: AttentionCall, parts: Sequence[Any]) -> AttentionCall:
        """The call as the first part sees it: parts in front of a writer see what it has not changed yet.

        Raises
        ------
        Refused
            If the cache does not hand over the keys that were written into it.
        """
        steps = self._written.get(call.layer)
        self._next, self._staged = 0, False
        if steps is None:
            return call
        written, there = steps[-1][0], call.k[:, :, -call.q.shape[2] :]
        if not call.slots and (there.shape != written.shape or not _equal(there[0, :, -1], written[0, :, -1])):
            raise Refused(
                f"layer {call.layer} keeps keys in another form than attention reads them, so that they cannot be "
                "changed in its cache: use the model with use_cache=False"
            )
        last = max(i for i, part in enumerate(parts) if isinstance(part, Writer))
        self._staged = not all(isinstance(part, Writer) for part in parts[:last])
        return self._put(call, steps[0]) if self._staged else call

    def through(self, call: AttentionCall, writer: Writer) -> AttentionCall:
        """The call with the keys and values that the next writer makes of it, or made of it on their way to the cache.

        In a staged call the writers' own order counts: the first met is the first asked.
        """
        steps = self._written.get(call.layer)
        if steps is None:
            if self._caches and call.layer not in self._late:
                return call  # it reads what another layer wrote
            past = call.k.shape[2] - call.q.shape[2]
            new = writer.write(NewKeys(call.layer, call.k, call.v, call.padding, past, 0, call.index))
            return replace(call, k=new.k, v=new.v)
        self._next += 1
        return self._put(call, steps[self._next]) if self._staged else call

    def _update(self, cache: Any, original: Callable[..., _Pair], k: Tensor, v: Tensor, *args: Any, **kw: Any) -> _Pair:
        if self._widths is not None and self._widths != (k.shape[1], k.shape[3], v.shape[3]):
            # Some layers keep a compressed form: what attention makes of it is changed anew in every step.
            self._late.add(self._layer)
            return original(k, v, *args, **kw)
        past = int(cache.get_seq_length(args[0] if args else kw["layer_idx"]))
        new = NewKeys(self._layer, k, v, self._padding, past, past)
        steps = [(k, v)]
        for writer in self._writers:
            new = writer.write(new)
            steps.append((new.k, new.v))
        self._written[self._layer] = steps
        return original(*steps[-1], *args, **kw)

    @staticmethod
    def _put(call: AttentionCall, new: _Pair) -> AttentionCall:
        old = call.k.shape[2] - new[0].shape[2]
        if old:
            new = (torch.cat([call.k[:, :, :old], new[0]], 2), torch.cat([call.v[:, :, :old], new[1]], 2))
        return replace(call, k=new[0], v=new[1])


def _equal(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num())

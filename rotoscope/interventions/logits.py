"""Attention computed block by block of query rows, with logits or a mask of one's own.

No more than ``[batch, heads, rows, keys]`` is ever held, and of the keys only those that a block of rows can attend to.
Observers that stand behind such an edit see its logits and its mask.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from rotoscope.errors import BadInput
from rotoscope.interventions.base import Run
from rotoscope.model.call import AttentionCall, Output
from rotoscope.model.rotary import AngleTable
from rotoscope.observers.entropy import biases, softmax

Columns = tuple[slice, ...]
"""Some keys: one range of columns after the other."""
Logits = Callable[[slice, Columns], Tensor]
"""Scaled logits, before softcap and mask, of some query rows and keys: ``[batch, heads, rows, keys]``."""
EVERY: Columns = (slice(None),)
_ROWS, _NUMBERS = 128, 2**24


@dataclass(frozen=True)
class Near:
    """A Λ-shaped mask: each row's first tokens, and the nearest ones.

    Attributes
    ----------
    first, window : int
        Tokens at the start of the row; nearest tokens, the query's own among them.
    zero : torch.Tensor
        Column of each row's position 0 among the keys ``[batch or 1]``; below 0 where a cache let go of it.
    """

    first: int
    window: int
    zero: Tensor

    @cached_property
    def _start(self) -> tuple[int, int]:
        """The columns that hold first tokens, of any row."""
        return max(0, int(self.zero.min())), max(0, int(self.zero.max()) + self.first)

    def columns(self, start: int, stop: int) -> Columns:
        """The keys that queries in columns ``start`` to ``stop`` may reach."""
        low = max(0, start - self.window + 1)
        a, b = self._start
        if a >= b or b >= low:
            return (slice(min(a, low) if a < b else low, stop),)
        return slice(a, b), slice(low, stop)

    def permits(self, queries: Tensor, keys: Tensor) -> Tensor:
        """For columns of queries ``[rows]`` and keys ``[keys]``: boolean ``[batch or 1, 1, rows, keys]``."""
        near = queries[:, None] - keys < self.window
        start = keys - self.zero[:, None] < self.first
        return (near | start[:, None])[:, None]


@dataclass(frozen=True)
class Blocks(AttentionCall):
    """A call that computes its attention block by block.

    Attributes
    ----------
    prepare : callable or None
        Gives the logits that stand in place of ``q · k``; called once, with the call as it runs.
    near : Near or None
        A Λ-shaped mask beside the call's own.
    """

    prepare: Callable[[Blocks], Logits] | None = field(default=None, repr=False)
    near: Near | None = field(default=None, repr=False)

    @cached_property
    def _own(self) -> Logits:
        assert self.prepare is not None
        # A call without the function that it keeps: a circle would hold the layer's tensors until they are collected.
        return self.prepare(replace(self, prepare=None))

    def block(self, rows: slice, columns: Columns) -> Tensor:
        """Scaled logits of some rows and keys ``[batch, heads, rows, keys]``."""
        if self.prepare is not None:
            return self._own(rows, columns)
        return grouped(self.q[:, :, rows], pick(self.k, columns, 2).transpose(-1, -2)) * self.scaling

    def permitted(self, rows: slice, columns: Columns) -> Tensor:
        """Which of some keys some rows may attend to, boolean, broadcastable to ``[batch, heads, rows, keys]``."""
        queries, keys = self.at(rows, columns)
        if self.mask is None:
            allowed = (keys <= queries[:, None])[None, None]
        else:
            allowed = pick(AttentionCall.allowed(self, rows), columns, -1)
        return allowed if self.near is None else allowed & self.near.permits(queries, keys)

    def at(self, rows: slice, columns: Columns) -> tuple[Tensor, Tensor]:
        """Columns among the keys of some query rows ``[rows]`` and of some keys ``[keys]``."""
        length, keys = self.q.shape[2], self.k.shape[2]
        columns_of = torch.arange(keys, device=self.q.device)
        return columns_of[keys - length :][rows], pick(columns_of, columns, 0)

    def reach(self, rows: slice) -> Columns:
        """The keys that some rows, given by numbers, can attend to."""
        past = self.k.shape[2] - self.q.shape[2]
        start, stop = past + rows.start, past + rows.stop
        return (slice(0, stop),) if self.near is None else self.near.columns(start, stop)

    def logits(self, rows: slice = slice(None)) -> Tensor:
        return self.block(rows, EVERY)

    def allowed(self, rows: slice = slice(None)) -> Tensor:
        return self.permitted(rows, EVERY)


def blockwise(call: Blocks, rows: int | None = None) -> Output:
    """What the layer's own attention returns, ``[batch, tokens, heads, v_head_dim]`` and no weights.

    Parameters
    ----------
    call : Blocks
        Softcap, bias, mask, learned sinks and shared key heads are the call's own.
    rows : int, optional
        Query rows at a time, by default 128, or fewer where these would be more than 2²⁴ logits.
    """
    batch, heads, length = call.q.shape[:3]
    rows = rows or max(1, min(_ROWS, _NUMBERS // (batch * heads * call.k.shape[2])))
    out = call.v.new_empty(batch, length, heads, call.v.shape[-1])
    for start in range(0, length, rows):
        some = slice(start, min(start + rows, length))
        columns = call.reach(some)
        beside = [pick(bias, columns, -1) for bias in biases(call, some)]
        weights = softmax(call, call.block(some, columns), call.permitted(some, columns), beside)
        out[:, some] = grouped(weights.to(call.v.dtype), pick(call.v, columns, 2)).transpose(1, 2)
    return out, None


def with_logits(call: AttentionCall, prepare: Callable[[Blocks], Logits]) -> Blocks:
    """The call with logits of one's own.

    Raises
    ------
    BadInput
        If it has such already.
    """
    if isinstance(call, Blocks) and call.prepare is not None:
        raise BadInput("two interventions put logits of their own in place of a layer's: open one at a time")
    return _blocks(call, prepare=prepare)


def narrowed(call: AttentionCall, near: Near) -> Blocks:
    """The call with a Λ-shaped mask beside its own.

    Raises
    ------
    BadInput
        If it has one already.
    """
    if isinstance(call, Blocks) and call.near is not None:
        raise BadInput("two Λ-shaped masks are open on one model: open one at a time")
    return _blocks(call, near=near)


def _blocks(call: AttentionCall, **changes: Any) -> Blocks:
    given = {f.name: getattr(call, f.name) for f in fields(call)}
    return Blocks(**{**given, "run": blockwise, **changes})


class Tables:
    """The angle table of every column whose key a layer attends to, those of earlier forwards included."""

    def __init__(self) -> None:
        self._held: dict[tuple[int, int], AngleTable] = {}
        self._joined: list[tuple[AngleTable, AngleTable, AngleTable]] = []

    def of(self, call: AttentionCall, past: int) -> AngleTable:
        """The table of all columns up to this call's last, ``past`` of which earlier forwards brought.

        Raises
        ------
        BadInput
            If the cache holds tokens of forwards outside the open block.
        """
        assert call.table is not None
        key, now = (call.layer, call.index), call.table
        if past:
            before = self._held.get(key)
            if before is None or before.one.shape[1] < past:
                raise BadInput("a step with a cache needs the forwards that filled it inside the same open block")
            now = self._join(before, now, past)
        self._held[key] = now
        return now

    def _join(self, before: AngleTable, now: AngleTable, past: int) -> AngleTable:
        # Layers share a table; so they do the joined one, and what was computed from it.
        for a, b, known in self._joined:
            if a is before and b is now:
                return known
        batch = max(before.one.shape[0], now.one.shape[0])
        halves = ((before.one, now.one), (before.two, now.two))
        one, two = (torch.cat([a[:, :past].expand(batch, -1, -1), b.expand(batch, -1, -1)], 1) for a, b in halves)
        joined = AngleTable(one, two)
        self._joined = [*self._joined[-3:], (before, now, joined)]
        return joined


def earlier(call: AttentionCall, run: Run) -> int:
    """Tokens, padding included, that stand before this call's; a layer with a window hands over fewer keys."""
    past = call.k.shape[2] - call.q.shape[2]
    return past if run.forward is None else max(past, run.forward.past)


def position0(call: AttentionCall, past: int) -> Tensor:
    """Column of each row's position 0 among all tokens so far ``[batch or 1]``."""
    total = past + call.tokens.shape[1]
    if call.padding is None or call.padding.shape[1] != total:
        return torch.zeros(1, dtype=torch.long, device=call.q.device)
    return call.padding.to(call.q.device, torch.bool).int().argmax(-1)


def grouped(x: Tensor, y: Tensor) -> Tensor:
    """``x`` ``[batch, heads, rows, n]`` times ``y`` ``[batch or 1, kv_heads, n, m]``, each head with its own."""
    batch, heads, rows, width = x.shape
    kv = y.shape[1]
    return (x.reshape(batch, kv, heads // kv * rows, width) @ y).view(batch, heads, rows, -1)


def pick(x: Tensor, columns: Columns, dim: int) -> Tensor:
    """Some columns of one dimension; a view where they are one range."""
    before = (slice(None),) * (dim % x.ndim)
    parts = [x[(*before, some)] for some in columns]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim)

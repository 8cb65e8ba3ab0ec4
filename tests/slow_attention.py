"""Attention with all logits laid out, by loops over rows and heads in complex float64: what fast code is held against.

Nothing of the package's un-rotation, softmax or masks is used: a family's pairing of dims is written down here, its
angles are read off the table that the layer received.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rotoscope.model.call import AttentionCall

HALF, INTERLEAVED = "half", "interleaved"
# Which dims of a head of width 16 rotate, and how they pair.
PAIRS: dict[str, tuple[str, int, int]] = {
    "llama": (HALF, 0, 16),  # two query heads read one key head
    "mistral": (HALF, 0, 16),  # a window of 5
    "gemma2": (HALF, 0, 16),  # softcap, a window on every other layer
    "stablelm": (HALF, 0, 4),  # a quarter of the dims
    "glm": (INTERLEAVED, 0, 8),
    "gpt_oss": (HALF, 0, 16),  # learned sinks, a scaled table, a window on every other layer
    "deepseek_v3": (HALF, 8, 16),  # the last half of the dims, values narrower than keys
}


@dataclass(frozen=True)
class Head:
    """One head of one row: what its logits are made from."""

    call: AttentionCall
    head: int
    q: np.ndarray  # un-rotated [columns, pairs]
    k: np.ndarray
    u: np.ndarray  # turn of each column [columns, pairs]
    real: np.ndarray  # which columns are no padding
    w: np.ndarray  # unscaled real logits [columns, columns]
    permitted: np.ndarray

    @property
    def zero(self) -> int:
        return int(self.real.argmax())


class Slow:
    """Slow attention with the unscaled logits that ``form`` gives; an observer that holds edited calls against it.

    ``apart`` lists the largest difference of each call. Layers are compared one by one: many families' norms round to
    float32, so that equal ones would drift apart by their last bit.

    ``permits(i, j, zero)`` narrows the mask: query and key columns, and the row's first column that is no padding.
    """

    def __init__(self, family: str, form: Callable[[Head], np.ndarray], permits: Any = None):
        self.family, self.form, self.permits = family, form, permits
        self.apart: list[float] = []

    def observe(self, call: AttentionCall) -> None:
        there = call.tokens
        self.apart.append((call.run(call)[0] - self.attend(call))[there].abs().max().item())

    def attend(self, call: AttentionCall) -> torch.Tensor:
        batch, heads, length, _ = call.q.shape
        group = heads // call.k.shape[1]
        out = np.zeros((batch, length, heads, call.v.shape[-1]))
        real = np.ones((batch, length), bool) if call.padding is None else call.padding.bool().numpy()
        for b in range(batch):
            for h in range(heads):
                head = self.head(call, b, h, real[b])
                logits = self.form(head) * call.scaling
                if call.softcap:
                    logits = call.softcap * np.tanh(logits / call.softcap)
                logits = np.where(head.permitted, logits, -np.inf)
                sink = [] if call.sinks is None else [float(call.sinks[h])]
                for i in range(length):
                    if not real[b, i]:
                        continue
                    e = np.exp(np.append(logits[i], sink) - logits[i].max())
                    out[b, i, h] = e[:length] / e.sum() @ call.v[b, h // group].double().numpy()
        return torch.from_numpy(out).to(call.v.dtype)

    def head(self, call: AttentionCall, b: int, h: int, real: np.ndarray) -> Head:
        q, k = call.q[b, h].double().numpy(), call.k[b, h // (call.q.shape[1] // call.k.shape[1])].double().numpy()
        kind, start, stop = PAIRS[self.family]
        pairs = (stop - start) // 2
        m = np.arange(pairs)
        first, second = (start + m, start + m + pairs) if kind == HALF else (start + 2 * m, start + 2 * m + 1)
        assert call.table is not None
        table = [half[b % len(half), :, :pairs].double().numpy() for half in (call.table.one, call.table.two)]
        u = table[0] + 1j * table[1]
        still = [d for d in range(q.shape[1]) if d < start or d >= stop]
        un_q, un_k = (
            np.concatenate(
                [
                    (x[:, first] + 1j * x[:, second]) / u,
                    x[:, still[: len(still) // 2]] + 1j * x[:, still[len(still) // 2 :]],
                ],
                1,
            )
            for x in (q, k)
        )
        u = np.concatenate([u, np.ones((len(q), len(still) // 2))], 1)
        i, j = np.indices((len(q), len(q)))
        permitted = (j <= i) & real[None]
        if call.window:
            permitted &= i - j < call.window
        if self.permits is not None:
            permitted &= self.permits(i, j, int(real.argmax()))
        return Head(call, h, un_q, un_k, u, real, q @ k.T, permitted)


def product(q: np.ndarray, k: np.ndarray, turn: np.ndarray) -> np.ndarray:
    """``Re Σ q_i conj(k_j) turn_ij`` for queries ``[i or 1, pairs]``, keys and turns ``[i, j, pairs]``."""
    return (q[:, None] * k.conj()[None] * turn).sum(-1).real


def turns(head: Head) -> np.ndarray:
    """``e^{i d θ}`` of every pair of columns, from the table ``[i, j, pairs]``."""
    return head.u[:, None] * head.u.conj()[None]

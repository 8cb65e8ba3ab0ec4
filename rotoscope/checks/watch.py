"""What observers ought to have seen: the same sums, taken in float64 with a mask that the caller knows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

import torch

from rotoscope.checks.bench import Batch, apart
from rotoscope.model.call import AttentionCall, Output
from rotoscope.observers import Causal, Entropy, Grams, Moments
from rotoscope.observers.entropy import probabilities

Sums = dict[tuple[int, str], torch.Tensor]


class Truth:
    """Sums over the real tokens of a batch, chosen by the batch's own mask and not by what a call says of padding."""

    def __init__(self, batch: Batch, cached: bool = False):
        self.batch, self.cached = batch, cached
        self.at = slice(0, batch.ids.shape[1])
        self.sums: dict[tuple[int, str], dict[int, torch.Tensor]] = {}
        self.calls: dict[int, int] = {}

    def observe(self, call: AttentionCall) -> None:
        layer, at = call.layer, self.at
        self.calls[layer] = self.calls.get(layer, 0) + 1
        real = self.batch.real[:, at].to(call.q.device)
        first = real & (self.batch.mask.cumsum(-1)[:, at].to(real.device) == 1)
        new = {"q": call.q, "k": call.k[:, :, -real.shape[1] :], "v": call.v[:, :, -real.shape[1] :]}
        for name, x in new.items():
            self._add(call, f"{name} sum", _choose(x, real).sum(1))
            self._add(call, f"{name} squares", _choose(x, real).square().sum(1))
            self._add(call, f"{name} at 0", _choose(x, first).sum(1))
        if call.rotation is not None and (call.table is not None or not call.rotation.pairs):
            for name in ("q", "k"):
                z = _choose(call.unrotate(new[name]), real & ~first)
                self._add(call, f"{name} gram", z.transpose(-1, -2) @ z)
        if not self.cached:
            self._attention(call, real, first)

    def _attention(self, call: AttentionCall, real: torch.Tensor, first: torch.Tensor) -> None:
        weights = probabilities(call)
        entropy = torch.special.entr(weights).sum(-1, keepdim=True)
        self._add(call, "entropy", _choose(entropy, real)[..., 0].sum(1))
        on_first = (weights * first[:, None, None]).sum(-1, keepdim=True)
        self._add(call, "sink mass", _choose(on_first, real)[..., 0].sum(1))
        group = call.q.shape[1] // call.k.shape[1]
        for row, kept in enumerate(real & ~first):
            if int(kept.sum()) > 1:
                q, k = call.q[row][:, kept].double(), call.k[row][:, kept].double()
                pairs = (q @ k.repeat_interleave(group, 0).transpose(-1, -2)).tril()
                self._add(call, "causal squares", pairs.square().sum((-1, -2)))
                self._add(call, "causal sums", pairs.sum((-1, -2)))

    def _add(self, call: AttentionCall, name: str, value: torch.Tensor) -> None:
        by_call = self.sums.setdefault((call.layer, name), {})
        by_call[call.index] = by_call[call.index] + value if call.index in by_call else value

    def against(self, seen: Sums) -> dict[int, float]:
        """The largest difference by layer."""
        worst: dict[int, float] = {}
        for key in self.sums.keys() | seen.keys():
            value = _gap(seen[key], self.sums[key]) if key in self.sums and key in seen else float("inf")
            worst[key[0]] = max(worst.get(key[0], 0.0), value)
        return worst


class Seen:
    """The observers whose sums are compared, in one place."""

    def __init__(self, cached: bool = False):
        self.moments, self.grams, self.entropy, self.causal = Moments(), Grams(), Entropy(), Causal()
        self.parts = (self.moments, self.grams, *(() if cached else (self.entropy, self.causal)))

    def sums(self) -> Sums:
        """What they hold, under the names of `Truth`."""
        return dict(self._sums())

    def _sums(self) -> Iterator[tuple[tuple[int, str], torch.Tensor]]:
        for layer, of_layer in self.moments._seen.items():
            for name, dims in of_layer.items():
                yield (layer, f"{name} sum"), dims.sum
                yield (layer, f"{name} squares"), dims.squares
                yield (layer, f"{name} at 0"), dims.first
        for layer, grams in self.grams._seen.items():
            yield (layer, "q gram"), grams.q.gram
            yield (layer, "k gram"), grams.k.gram
        for layer, spread in self.entropy._seen.items():
            yield (layer, "entropy"), spread.entropy_sum
            yield (layer, "sink mass"), spread.sink_sum
        for layer, rows in self.causal._seen.items():
            yield (layer, "causal squares"), torch.stack([row.squares for row in rows]).sum(0)
            yield (layer, "causal sums"), torch.stack([row.rows.sum(-1) for row in rows]).sum(0)


class Weighted:
    """An editor that changes nothing: it compares what attention returns with softmax(logits) · V of its own."""

    def __init__(self, truth: Truth):
        self.truth = truth
        self.layers: dict[int, float] = {}

    def edit(self, call: AttentionCall) -> AttentionCall:
        def run(changed: AttentionCall) -> Output:
            out, weights = call.run(changed)
            real = self.truth.batch.real[:, self.truth.at].to(out.device)
            group = call.q.shape[1] // call.v.shape[1]
            mine = probabilities(call).to(call.v.dtype) @ call.v.repeat_interleave(group, 1)
            mine = mine.transpose(1, 2)
            found = apart(out.reshape(mine.shape)[real], mine[real])
            self.layers[call.layer] = max(self.layers.get(call.layer, 0.0), found)
            return out, weights

        return replace(call, run=run)


def _gap(seen: torch.Tensor, by_call: Mapping[int, torch.Tensor]) -> float:
    """Several calls of a layer are told apart as further heads, or added up."""
    calls = [by_call[i].cpu() for i in sorted(by_call)]
    apart_as_heads = torch.cat(calls)
    same = seen.shape == apart_as_heads.shape
    return apart(seen.cpu(), apart_as_heads if same else torch.stack(calls).sum(0))


def _choose(x: torch.Tensor, which: torch.Tensor) -> torch.Tensor:
    """``[batch, heads, tokens, dims]`` → the chosen tokens of all rows, float64 ``[heads, n, dims]``."""
    return x.transpose(1, 2)[which].transpose(0, 1).double()

"""Magnitudes of Q, K and V per head and dim (Jin et al. 2025): what massive values are read from."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from rotoscope.model.call import AttentionCall
from rotoscope.observers.base import PerLayer, new_keys


@dataclass
class DimSums:
    """Sums over real tokens of one tensor, each ``[heads, dims]``, float64, and the values at position 0."""

    n: int
    sum: torch.Tensor
    squares: torch.Tensor
    first: torch.Tensor

    @property
    def rms(self) -> torch.Tensor:
        """Root mean square over tokens ``[heads, dims]``."""
        return (self.squares / self.n).sqrt()

    @property
    def mean(self) -> torch.Tensor:
        """Mean over tokens ``[heads, dims]``."""
        return self.sum / self.n

    @property
    def offset(self) -> torch.Tensor:
        """|mean| over standard deviation, over tokens ``[heads, dims]``."""
        mean = self.mean
        return mean.abs() / (self.squares / self.n - mean.square()).clamp_min(0).sqrt()

    @property
    def sign0(self) -> torch.Tensor:
        """Sign of position 0's value times the sign of the other tokens' mean, ``[heads, dims]``: -1 = opposed."""
        return self.first.sign() * (self.sum - self.first).sign()

    def add(self, other: DimSums) -> None:
        self.n += other.n
        self.sum += other.sum
        self.squares += other.squares
        self.first += other.first


class Moments(PerLayer[dict[str, DimSums]]):
    """Root mean square and mean of Q, K and V over real tokens, streaming over batches and texts.

    ``M[h, d]`` is the root mean square over tokens of post-RoPE values at head ``h``, dim ``d`` (science of Jin et
    al. 2025, with RMS in place of a plain norm so that it does not grow with length).

    Attributes
    ----------
    rms, mean : dict
        ``rms[layer]["q" | "k" | "v"]`` → ``[heads, head_dim]``.
    layers : dict
        ``layers[layer]["q" | "k" | "v"]`` → :class:`DimSums`.
    """

    @property
    def rms(self) -> dict[int, dict[str, torch.Tensor]]:
        return {layer: {name: sums.rms for name, sums in seen.items()} for layer, seen in self.layers.items()}

    @property
    def mean(self) -> dict[int, dict[str, torch.Tensor]]:
        return {layer: {name: sums.mean for name, sums in seen.items()} for layer, seen in self.layers.items()}

    @torch.no_grad()
    def observe(self, call: AttentionCall) -> None:
        seen = self._seen.setdefault(call.layer, {})
        real, first = call.tokens, call.first
        for name, x in (("q", call.q), ("k", new_keys(call.k, call)), ("v", new_keys(call.v, call))):
            sums = dim_sums(x, real, first)
            if name in seen:
                seen[name].add(sums)
            else:
                seen[name] = DimSums(sums.n, *map(self._keep, (sums.sum, sums.squares, sums.first)))


def dim_sums(x: torch.Tensor, real: torch.Tensor, first: torch.Tensor) -> DimSums:
    """Sums of ``x`` ``[batch, heads, tokens, dims]`` over real tokens; float32 inside a call, float64 between calls."""
    x = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x
    if not bool(real.all()):
        x = torch.where(real[:, None, :, None], x, 0)
    at = torch.where(first[:, None, :, None], x, 0) if bool(first.any()) else x[:, :, :0]
    squares = torch.linalg.vector_norm(x, dim=2).double().square()
    return DimSums(int(real.sum()), x.sum(2).double().sum(0), squares.sum(0), at.sum(2).double().sum(0))

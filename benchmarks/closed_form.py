"""The closed-form fit against building the tensor: 256³ for the ratio, 4096³ for one head on one core."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

from rotoscope.stats.additive import fit

PAIRS = 32


def draw(n: int, p: int, d: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    q, k = (torch.randn(m, PAIRS, dtype=torch.complex128, generator=g) for m in (n, p))
    return q, k, torch.arange(d)[:, None] * 1e5 ** (-torch.arange(PAIRS).double() / PAIRS)


def tensor(q: torch.Tensor, k: torch.Tensor, angles: torch.Tensor) -> float:
    """Form 1's r from the whole tensor, real matrix products only."""
    turned = q[:, None] * torch.polar(torch.ones_like(angles), angles)
    left, right = (torch.cat([x.real, x.imag], -1) for x in (turned, k))
    w = (left.flatten(0, 1) @ right.T).view(len(q), len(angles), len(k))
    rest = w - w.mean(1, keepdim=True) - w.mean(2, keepdim=True) + w.mean((1, 2), keepdim=True)
    return (1 - rest.square().sum() / (w - w.mean()).square().sum()).sqrt().item()


def median_seconds(call: Callable[[], object], runs: int = 7) -> float:
    call()
    times = []
    for _ in range(runs):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def main() -> None:
    torch.set_num_threads(1)
    small = draw(256, 256, 256)
    slow, fast = median_seconds(lambda: tensor(*small)), median_seconds(lambda: fit(*small))
    print(f"r of form 1: tensor {tensor(*small):.12f}, closed form {fit(*small).form1.item():.12f}")
    print(f"256 x 256 x 256, one core: tensor {slow:.3f} s, closed form {fast * 1e3:.2f} ms, ratio {slow / fast:,.0f}")
    large = draw(4096, 4096, 4096)
    print(f"4096 x 4096 x 4096, one core: closed form {median_seconds(lambda: fit(*large)):.3f} s a head")


if __name__ == "__main__":
    main()

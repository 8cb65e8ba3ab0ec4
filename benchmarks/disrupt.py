"""What disrupting costs: prefill of 1,024 tokens of the demo model, plain and under `Disrupt`, in one process.

Every round runs each variant once, one after the other. Before anything is timed, an empty selection is shown to change
nothing. Prints medians, and medians of each round's own ratio to plain.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import nullcontext

import torch

import rotoscope as rs
from rotoscope.interventions import Disrupt
from rotoscope.studies.options import Options
from rotoscope.studies.texts import texts

TOKENS, ROUNDS, WANTED = 1024, 9, 1.3
VARIANTS = {
    "plain": None,
    "top-1": Disrupt(),
    "top-1, all positions": Disrupt(positions="all"),
    "change-matched": Disrupt(selection="change-matched"),
    "pooled top-2 of Q, K and V": Disrupt("QKV", "top-2", "pooled"),
}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    lm = rs.load("demo")
    ids = torch.tensor([texts(lm, Options(texts=1, tokens=TOKENS))[0].ids])

    def prefill(how: Disrupt | None) -> tuple[torch.Tensor, float]:
        with nullcontext() if how is None else how.on(lm):
            start = time.perf_counter()
            logits = lm.model(ids, use_cache=True, logits_to_keep=1).logits
            return logits, time.perf_counter() - start

    assert torch.equal(prefill(Disrupt(selection="top-0"))[0], prefill(None)[0])
    seconds: dict[str, list[float]] = {name: [] for name in VARIANTS}
    for _ in range(rounds):
        for name, times in seconds.items():
            times.append(prefill(VARIANTS[name])[1])
    print(f"{TOKENS} tokens, {rounds} rounds, {torch.get_num_threads()} threads; medians")
    for name, times in seconds.items():
        ratios = [own / plain for own, plain in zip(times, seconds["plain"], strict=True)]
        print(f"{name:28s} {statistics.median(times):6.3f} s   × {statistics.median(ratios):.2f}   (wanted: {WANTED})")


if __name__ == "__main__":
    main()

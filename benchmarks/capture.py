"""What observing costs: forwards over 1,024 tokens of the demo model, each variant in a process of its own.

Prints each variant's median seconds, its ratio to the plain sdpa forward of the same round, and the peak memory that
it adds.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time

TOKENS, RUNS, ROUNDS = 1024, 3, 5
VARIANTS = {
    "plain": (),
    "moments": ("Moments",),
    "moments + full grid": ("Moments", "Grams"),
    "moments + full grid + causal": ("Moments", "Grams", "Causal"),
    "entropy": ("Entropy",),
}


def measure(variant: str) -> None:
    """In a process of its own: median seconds of a forward, and peak memory."""
    import torch

    import rotoscope as rs
    from rotoscope.studies.options import Options
    from rotoscope.studies.texts import texts

    lm = rs.load("demo")
    ids = torch.tensor([texts(lm, Options(texts=1, tokens=TOKENS))[0].ids])
    times = []
    with torch.no_grad():
        for _ in range(RUNS + 1):
            parts = [getattr(rs.observers, name)() for name in VARIANTS[variant]]
            start = time.perf_counter()
            if parts:
                with rs.tap(lm, *parts):
                    lm.model(ids, use_cache=False, logits_to_keep=1)
            else:
                lm.model(ids, use_cache=False, logits_to_keep=1)
            times.append(time.perf_counter() - start)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(json.dumps({"seconds": statistics.median(times[1:]), "peak_mb": peak}))


def run(variant: str) -> dict[str, float]:
    done = subprocess.run([sys.executable, __file__, "--variant", variant], check=True, capture_output=True, text=True)
    return json.loads(done.stdout.splitlines()[-1])  # type: ignore[no-any-return]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    given = parser.parse_args()
    if given.variant:
        measure(given.variant)
        return
    rounds = [{variant: run(variant) for variant in VARIANTS} for _ in range(given.rounds)]
    print(f"{TOKENS} tokens, {given.rounds} rounds, medians; ratio and memory against the plain forward of each round")
    for variant in VARIANTS:
        seconds = statistics.median(r[variant]["seconds"] for r in rounds)
        ratio = statistics.median(r[variant]["seconds"] / r["plain"]["seconds"] for r in rounds)
        added = statistics.median(r[variant]["peak_mb"] - r["plain"]["peak_mb"] for r in rounds)
        print(f"{variant:30s} {seconds:6.2f} s   x {ratio:.3f}   {added:+.0f} MB")


if __name__ == "__main__":
    main()

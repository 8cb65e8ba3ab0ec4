"""The demo model past its trained length: 12,288 tokens where it was trained on 8,192, each variant in its own process.

Prints each variant's seconds and peak memory, and the mean NLL by position. With a Λ-shaped mask and a cap on
distances it must stay under 4 GB.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import time

PARTS = 12
LIMIT_GB = 4.0
MUST = "lambda+cap"


def measure(variant: str, trained: int) -> None:
    """In a process of its own: seconds, peak memory, NLL by position."""
    import dataclasses

    import rotoscope as rs
    from rotoscope.studies import length
    from rotoscope.studies.options import Options

    lm = dataclasses.replace(rs.load("demo"), trained_length=trained)
    cell = next(cell for cell in length.cells(lm, Options(texts=1)) if cell.name == length.NAME.format(variant, 0))
    start = time.perf_counter()
    nll = length.score(lm, **{**cell.arguments, "watched": False})["nll"]
    seconds = time.perf_counter() - start
    step = trained * length.REACH / PARTS
    by_part = nll.groupby((nll.position // step).astype(int)).nll.mean()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(
        json.dumps({"seconds": seconds, "peak_gb": peak, "nll": {int(part): float(x) for part, x in by_part.items()}})
    )


def main() -> None:
    from rotoscope.studies.length import REACH, VARIANTS

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--variant", choices=VARIANTS)
    parser.add_argument("--trained", type=int, default=8192, help="run as if trained on so many tokens")
    given = parser.parse_args()
    if given.variant:
        measure(given.variant, given.trained)
        return
    tokens = int(REACH * given.trained)
    print(f"{tokens:,} tokens, trained length {given.trained:,}; NLL of each {tokens // PARTS:,} tokens, nats")
    for variant in VARIANTS:
        command = [sys.executable, __file__, "--variant", variant, "--trained", str(given.trained)]
        of = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        curve = " ".join(f"{of['nll'][str(part)]:5.2f}" if str(part) in of["nll"] else "   - " for part in range(PARTS))
        print(f"{variant:12s} {of['seconds']:7.1f} s {of['peak_gb']:6.2f} GB   {curve}", flush=True)
        assert variant != MUST or of["peak_gb"] < LIMIT_GB, f"{variant} takes more than {LIMIT_GB} GB"


if __name__ == "__main__":
    main()

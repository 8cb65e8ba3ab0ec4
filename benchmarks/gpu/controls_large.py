"""Trains the large controls (27 M parameters, 205 M tokens each) on one GPU and prints the verdict on claim M5.

    python benchmarks/gpu/controls_large.py OUT [--resume]

Eight models, one at a time; ``OUT`` holds them as ``rotoscope controls audit OUT`` reads them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from rotoscope.controls import sets
from rotoscope.controls.train import train
from rotoscope.studies import rope


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this needs a GPU; the small set trains on a CPU: rotoscope controls train")
    out = Path(sys.argv[1])
    for record in train(out, "large", jobs=1, resume="--resume" in sys.argv):
        print(record["name"], f"loss {record['loss']:.4f}", f"key-value {record['key_value']:.2f}", flush=True)
    (claim,) = rope.judged(sets.curves(sets.members(out))).claims
    print(claim.verdict, claim.value, claim.interval, claim.reason, sep="\n")


if __name__ == "__main__":
    main()

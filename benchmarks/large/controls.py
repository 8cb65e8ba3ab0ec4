"""Trains a control again by the command that its record holds, and prints how far its held-out loss comes from that.

    python benchmarks/large/controls.py [NAME=rope-0]

Takes a quarter of an hour on one core. Exit code 1 where the losses differ by more than .02 nats a token.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path

from rotoscope.controls import sets

CLOSE = 0.02


def main() -> None:
    name = sys.argv[1] if len(sys.argv) > 1 else "rope-0"
    (record,) = (control.record for control in sets.members() if control.name == name)
    command = [sys.executable, "-m", "rotoscope.cli", *shlex.split(record["command"])[1:]]
    with tempfile.TemporaryDirectory() as out:
        print(record["command"], flush=True)
        subprocess.run([*command, "--out", out, "--resume"], check=True)
        again = json.loads((Path(out) / name / sets.RECORD).read_text("utf-8"))
    apart = again["loss"] - record["loss"]
    print(f"{name}: shipped {record['loss']:.4f}, again {again['loss']:.4f}, apart {apart:+.4f} nats a token")
    sys.exit(abs(apart) > CLOSE)


if __name__ == "__main__":
    main()

"""What doctor tries on a model, one kind of check a file; none of it leaves anything on the model."""

from __future__ import annotations

from collections.abc import Iterator

from rotoscope.checks import boundaries, edits, forwards, rotation
from rotoscope.checks.bench import Bench, Check


def checks(bench: Bench) -> Iterator[Check]:
    """All checks, the cheapest and most telling first."""
    for room in (forwards, rotation, boundaries, edits):
        yield from room.checks(bench)

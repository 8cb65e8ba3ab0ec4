"""Studies: one question each, from cells to tables and claims. A new study is one file and one line here."""

from __future__ import annotations

from rotoscope.studies import depth, massive, position, quantization, rope
from rotoscope.studies.conduct import Study, conduct, plan
from rotoscope.studies.options import SIZES, Options

STUDIES: dict[str, Study] = {study.NAME: study for study in (position, massive, rope, quantization, depth)}
"""Every study by name, in the order of the report."""

__all__ = [
    "SIZES", "STUDIES", "Options", "Study", "conduct", "depth", "massive", "plan", "position", "quantization", "rope",
]  # fmt: skip

"""Reaches attention that a modeling file computes by itself, past transformers' attention interface.

Old families and code that comes with a checkpoint multiply queries with keys, take a softmax and weigh the values in
lines of their own. Instead of one adapter a family, `watch` follows those lines as they run and `reach` learns from
one short forward which modules they belong to.
"""

from __future__ import annotations

from rotoscope.model.adapters.reach import attend_with, find

__all__ = ["attend_with", "find"]

"""Observers read attention calls and reduce them on the spot; none keeps logits."""

from __future__ import annotations

from rotoscope.observers.capture import Capture
from rotoscope.observers.causal import Causal
from rotoscope.observers.entropy import Entropy
from rotoscope.observers.grams import Grams
from rotoscope.observers.moments import Moments

__all__ = ["Capture", "Causal", "Entropy", "Grams", "Moments"]

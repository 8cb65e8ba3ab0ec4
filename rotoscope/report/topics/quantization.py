"""Quantization: which weights and which cache keep what the model reads from context, and what massive values have
to do with it."""

from __future__ import annotations

from rotoscope.report.figure import Topic
from rotoscope.report.topics import (
    quantization_inside,
    quantization_loss,
    quantization_methods,
    quantization_protected,
    quantization_tasks,
)

TOPIC = Topic(
    "quantization",
    "Quantization: what keeps context",
    "Weights, activations or the KV cache are stored in fewer bits, and the same texts and items are scored again. If "
    "massive values carry what is read from context, methods that keep them should keep context best.",
    (
        quantization_tasks.SCATTER,
        quantization_tasks.BY_METHOD,
        quantization_loss.BITS,
        quantization_protected.CHART,
        quantization_loss.LAYERS,
        quantization_inside.LOGITS,
        quantization_inside.EFFECTS_AGAIN,
        quantization_methods.TABLE,
        quantization_methods.GRID,
    ),
    optional=True,
)

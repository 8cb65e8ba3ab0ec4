"""Position generalization, the causal half: replaced logits, disorder, length, and what goes together over layers."""

from __future__ import annotations

from rotoscope.report.figure import Topic
from rotoscope.report.topics import joint, length, perturb, replace

TOPIC = Topic(
    "generalization",
    "Position generalization: what the model bears",
    "If the logits that the model uses are position + semantics, it should work with that sum in their place, bear "
    "some disorder, and go on past its trained length once distances are clamped.",
    (
        replace.BARS,
        replace.TASKS,
        perturb.DOSES,
        perturb.DISTANCE,
        length.NLL,
        length.ATTENTION,
        joint.RANKS,
        joint.VALUES,
        joint.CORRELATIONS,
        joint.DISRUPTED,
    ),
    optional=True,
)

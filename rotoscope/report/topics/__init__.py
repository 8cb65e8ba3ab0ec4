"""What the report shows, topic by topic. A new topic is one file here and one line in `TOPICS`."""

from rotoscope.report.figure import Topic
from rotoscope.report.topics import (
    depth,
    disrupt,
    generalization,
    layers,
    massive,
    position,
    quantization,
    rope,
)

TOPICS: tuple[Topic, ...] = (
    position.TOPIC,
    generalization.TOPIC,
    massive.TOPIC,
    rope.TOPIC,
    disrupt.TOPIC,
    quantization.TOPIC,
    depth.TOPIC,
    layers.TOPIC,
)

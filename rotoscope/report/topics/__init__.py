"""What the report shows, topic by topic. A new topic is one file here and one line in `TOPICS`."""

from rotoscope.report.figure import Topic
from rotoscope.report.topics import depth, disrupt, layers, massive, position

TOPICS: tuple[Topic, ...] = (position.TOPIC, massive.TOPIC, disrupt.TOPIC, depth.TOPIC, layers.TOPIC)

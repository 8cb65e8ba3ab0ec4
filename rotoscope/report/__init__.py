"""A result as one self-contained HTML file. Never runs a model."""

from rotoscope.report.figure import Figure
from rotoscope.report.page import figures, write

__all__ = ["Figure", "figures", "write"]

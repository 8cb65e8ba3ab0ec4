"""What all tests share: threads that wait without spinning, and the demo model, loaded once."""

from __future__ import annotations

import os

import pytest

# Read when torch starts its threads. Spinning ones cost 20 times the work on cores that others use too.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import rotoscope as rs


@pytest.fixture(scope="session")
def demo() -> rs.LM:
    """The demo model in float32; leave it as found."""
    return rs.load("demo")

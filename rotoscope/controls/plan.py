"""How large the controls are and how long they are trained."""

from __future__ import annotations

from dataclasses import dataclass, replace

from rotoscope.errors import BadInput


@dataclass(frozen=True)
class Plan:
    """One size of the set: the decoder, and its training.

    Attributes
    ----------
    layers, hidden, heads, mlp : int
        Shape of the decoder; heads are of ``hidden / heads`` dims.
    steps, batch : int
        Updates, and rows of 256 tokens in each.
    rate : float
        Peak of the learning rate, after a linear rise over the first 5 % of steps; it falls to 0 along a cosine.
    decay : float
        Weight decay.
    logged : tuple of int
        Steps after which the curve is measured, the last one besides.
    threads : int
        Of the CPU, for each model.
    """

    layers: int
    hidden: int
    heads: int
    mlp: int
    steps: int
    batch: int
    rate: float
    decay: float
    logged: tuple[int, ...]
    threads: int = 1

    @property
    def rows(self) -> int:
        return self.steps * self.batch

    def of(self, steps: int | None) -> Plan:
        """The same with another number of steps."""
        if steps is None:
            return self
        if steps < 1:
            raise BadInput(f"steps must be at least 1, not {steps}")
        return replace(self, steps=steps)


PLANS = {
    "small": Plan(
        layers=4, hidden=192, heads=3, mlp=512, steps=1750, batch=16, rate=2e-3, decay=0.1,
        logged=(0, 100, 250, 500, 750, 1000, 1250, 1500, 1750),
    ),
    "large": Plan(
        layers=8, hidden=512, heads=8, mlp=1408, steps=12500, batch=64, rate=1e-3, decay=0.1,
        logged=(0, 250, 500, 1000, 2000, 4000, 6000, 8000, 10000, 12500),
    ),
}  # fmt: skip

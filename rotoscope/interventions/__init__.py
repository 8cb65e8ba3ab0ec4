"""Changes to what a model computes, as context managers on the user's own model; one file each, one line here."""

from __future__ import annotations

from importlib.metadata import entry_points
from typing import Any

from rotoscope.errors import BadInput
from rotoscope.interventions.base import Intervention, Run, Together
from rotoscope.interventions.disrupt import Disrupt
from rotoscope.interventions.freeze import Freeze
from rotoscope.interventions.length import DistanceCap, LambdaMask
from rotoscope.interventions.noise import Noise
from rotoscope.interventions.quantize_kv import QuantizeKV
from rotoscope.interventions.replace_logits import LogitMeans, ReplaceLogits
from rotoscope.interventions.shallow import shallow_prefill
from rotoscope.interventions.shift import ShiftPositions
from rotoscope.interventions.shuffle import Shuffle
from rotoscope.interventions.skip import SkipAttention
from rotoscope.interventions.spec import arguments
from rotoscope.interventions.swap import Swap
from rotoscope.model.quiet import in_short

_KINDS: tuple[type[Intervention], ...] = (
    Disrupt, Noise, Shuffle, Freeze, SkipAttention, Swap, ShiftPositions, LambdaMask, DistanceCap,
    QuantizeKV,
)  # fmt: skip

INTERVENTIONS: dict[str, type[Intervention]] = {kind.name: kind for kind in _KINDS}
"""Every intervention by the name that users type."""

GROUP = "rotoscope.interventions"


def parse(text: str) -> Intervention:
    """An intervention from text: ``disrupt:selection=top-2:layers=3-7``; several are joined by ``+``.

    Raises
    ------
    BadInput
        If there is none of that name, or it takes no such argument.
    """
    parts = [_one(part) for part in text.split("+")]
    return parts[0] if len(parts) == 1 else Together(tuple(parts))


def _one(text: str) -> Intervention:
    name, _, rest = text.strip().partition(":")
    kind: Any = INTERVENTIONS.get(name)
    if kind is None:
        found = [entry for entry in entry_points(group=GROUP) if entry.name == name]
        if not found:
            known = ", ".join([*INTERVENTIONS, *(entry.name for entry in entry_points(group=GROUP))])
            raise BadInput(f"there is no intervention {name!r}; there are {known}")
        try:
            kind = found[0].load()
        except Exception as error:  # whatever the other package does wrong
            why = in_short(error)
            raise BadInput(f"the intervention {name!r}, {found[0].value}, cannot be loaded: {why}") from None
        if not (isinstance(kind, type) and issubclass(kind, Intervention)):
            raise BadInput(f"{found[0].value}, installed as the intervention {name!r}, is not an Intervention")
    built: Intervention = kind(**arguments(kind, rest))
    return built


__all__ = [
    "INTERVENTIONS", "Disrupt", "DistanceCap", "Freeze", "Intervention", "LambdaMask", "LogitMeans", "Noise",
    "QuantizeKV", "ReplaceLogits", "Run", "ShiftPositions", "Shuffle", "SkipAttention", "Swap", "Together", "parse",
    "shallow_prefill",
]  # fmt: skip

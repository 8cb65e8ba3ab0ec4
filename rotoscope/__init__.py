"""Traces what attention does in a decoder language model, layer by layer.

    import rotoscope as rs

    lm = rs.load("demo")
    with rs.tap(lm, rs.observers.Moments()) as (moments,):
        lm.model(**batch)

Everything here is imported when first asked for, so that ``import rotoscope`` is instant.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rotoscope import (
        engine,
        errors,
        interventions,
        model,
        observers,
        quantizers,
        report,
        results,
        stats,
        studies,
        tasks,
    )
    from rotoscope.doctor import doctor
    from rotoscope.errors import BadInput, NeverFired, Refused, RotoscopeError
    from rotoscope.interventions.shallow import shallow_prefill
    from rotoscope.model.lm import LM, wrap
    from rotoscope.model.loading import load
    from rotoscope.model.tap import tap
    from rotoscope.results import Claim, Result, read
    from rotoscope.tasks.evaluate import evaluate

    __version__: str

__all__ = [
    "LM",
    "BadInput",
    "Claim",
    "NeverFired",
    "Refused",
    "Result",
    "RotoscopeError",
    "__version__",
    "doctor",
    "engine",
    "errors",
    "evaluate",
    "interventions",
    "load",
    "model",
    "observers",
    "quantizers",
    "read",
    "report",
    "results",
    "shallow_prefill",
    "stats",
    "studies",
    "tap",
    "tasks",
    "wrap",
]

_HOME = {
    "LM": "rotoscope.model.lm",
    "BadInput": "rotoscope.errors",
    "Claim": "rotoscope.results",
    "NeverFired": "rotoscope.errors",
    "Refused": "rotoscope.errors",
    "Result": "rotoscope.results",
    "RotoscopeError": "rotoscope.errors",
    "doctor": "rotoscope.doctor",
    "evaluate": "rotoscope.tasks.evaluate",
    "load": "rotoscope.model.loading",
    "read": "rotoscope.results",
    "shallow_prefill": "rotoscope.interventions.shallow",
    "tap": "rotoscope.model.tap",
    "wrap": "rotoscope.model.lm",
}
"""Where the names live that are not rooms themselves."""


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        value: Any = version("rotoscope")
    elif name in _HOME:
        value = getattr(import_module(_HOME[name]), name)
    elif name in __all__:
        value = import_module(f"rotoscope.{name}")
    else:
        raise AttributeError(f"module 'rotoscope' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """Keeps ``rs.doctor`` the function: importing the module of that name would put itself in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "doctor" and isinstance(value, ModuleType):
            value = value.doctor
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package

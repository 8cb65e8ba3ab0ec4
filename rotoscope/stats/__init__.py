"""Tensors in, numbers out; no models.

The modules load when first named, so that intervals do not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from types import ModuleType

__all__ = ["additive", "intervals", "nulls"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        return import_module(f"{__name__}.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

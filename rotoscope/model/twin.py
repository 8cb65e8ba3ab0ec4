"""The same architecture with random weights: what additivity and magnitudes are without training."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import psutil
import torch

from rotoscope.errors import Refused
from rotoscope.model.lm import LM


def random_twin(lm: LM, seed: int) -> LM:
    """A model of the same class and config, freshly initialised, float32 on the CPU or on the model's own device.

    The global random state is left as found.

    Raises
    ------
    Refused
        If the twin would not fit into free memory, or its class cannot be built from a config.
    """
    model = lm.model.get_base_model() if hasattr(lm.model, "get_base_model") else lm.model
    config = copy.deepcopy(model.config)
    if getattr(config, "quantization_config", None) is not None:
        del config.quantization_config
    needed = 4 * sum(p.numel() for p in _meta(type(model), config).parameters())
    if needed > 0.8 * free_memory(lm.device):
        raise Refused(f"a twin with random weights needs {needed / 2**30:.1f} GiB of memory, more than is free")
    devices = [] if lm.device.type == "cpu" else [lm.device]
    with torch.random.fork_rng(devices, device_type="cuda"):
        torch.random.default_generator.manual_seed(seed)
        if devices:
            torch.cuda.manual_seed_all(seed)
        with torch.device(lm.device):
            twin = type(model)._from_config(config, dtype=torch.float32)
    # Same class, same config: what was measured of the anatomy holds for the twin.
    return replace(lm, model=twin.eval(), source=f"{lm.source}, random weights, seed {seed}", file_hash=None)


def free_memory(device: torch.device) -> int:
    """Bytes that can still be had on a device; unknown ones count as the CPU's."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return int(psutil.virtual_memory().available)


def _meta(kind: Any, config: Any) -> torch.nn.Module:
    try:
        with torch.device("meta"):
            return kind._from_config(copy.deepcopy(config))  # type: ignore[no-any-return]
    except Exception as error:
        raise Refused(f"no twin of {kind.__name__} with random weights can be built: {error}") from error

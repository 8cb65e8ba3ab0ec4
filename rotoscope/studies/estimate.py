"""Would an audit of this model fit? Told from its config, before anything is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from os import PathLike
from typing import Any

import torch

from rotoscope.errors import BadInput
from rotoscope.model.estimate import TOKENS, Sizes, sizes
from rotoscope.model.loading import check_device, check_dtype, load_config
from rotoscope.model.twin import free_memory
from rotoscope.studies.memory import capture, in_words


@dataclass(frozen=True)
class Estimate:
    """Bytes of the parts of an audit, and whether they fit together into the free memory of the device.

    Attributes
    ----------
    source : str
    sizes : Sizes
        Weights and one forward.
    device : str
    free : int
        Bytes free there now.
    """

    source: str
    sizes: Sizes
    device: str
    free: int

    @property
    def all_layers(self) -> int:
        """What observing all layers in one forward adds."""
        return capture(self.sizes.layers, self.sizes.tokens)

    @property
    def one_layer(self) -> int:
        """What observing one layer a forward adds."""
        return max(capture([layer], self.sizes.tokens) for layer in self.sizes.layers)

    @property
    def twin(self) -> int:
        """The weights of a random twin, which is float32 and stands beside the model."""
        return 4 * self.sizes.parameters

    @property
    def fits(self) -> dict[str, bool]:
        """What can be done in the free memory."""
        model = self.sizes.weight_bytes + self.sizes.forward_bytes
        return {
            "all layers at once": model + self.all_layers <= self.free,
            "one layer at a time": model + self.one_layer <= self.free,
            # as a twin is built only where it leaves a fifth of what is free
            "random-weights twins": model + self.twin / 0.8 <= self.free,
        }

    def summary(self) -> dict[str, Any]:
        """The same in JSON's own types."""
        return {
            "model": self.source,
            "class": self.sizes.model,
            "dtype": str(self.sizes.dtype).removeprefix("torch."),
            "device": self.device,
            "parameters": self.sizes.parameters,
            "attention_layers": len(self.sizes.layers),
            "tokens": self.sizes.tokens,
            "weight_bytes": self.sizes.weight_bytes,
            "forward_bytes": self.sizes.forward_bytes,
            "cache_bytes": self.sizes.cache_bytes,
            "capture_all_bytes": self.all_layers,
            "capture_one_bytes": self.one_layer,
            "twin_bytes": self.twin,
            "free_bytes": self.free,
            "fits": self.fits,
        }

    def lines(self) -> list[str]:
        """The same in words."""
        of = self.sizes
        dtype = str(of.dtype).removeprefix("torch.")
        rows = [
            (f"weights, {dtype}", of.weight_bytes),
            (f"a forward of {of.tokens:,} tokens adds", of.forward_bytes),
            (f"a cache of {of.tokens:,} tokens", of.cache_bytes),
            (f"observing all {len(of.layers)} layers at once adds", self.all_layers),
            ("observing one layer at a time adds", self.one_layer),
            ("a random-weights twin adds", self.twin),
            (f"free on {self.device}", self.free),
        ]
        lines = [f"{self.source}: {of.model}, {of.parameters:,} parameters"]
        lines += [f"{name:45s}{in_words(size):>12s}" for name, size in rows]
        lines += [f"{name}: {'fits' if ok else 'does not fit'}" for name, ok in self.fits.items()]
        return [*lines, self._advice()]

    def _advice(self) -> str:
        fits = self.fits
        if not fits["one layer at a time"]:
            return "use a smaller --dtype or a larger device"
        if not fits["all layers at once"]:
            room = self.free - self.sizes.weight_bytes - self.sizes.forward_bytes
            return f"use --max-memory {int(room / 1e6)}MB"
        if not fits["random-weights twins"]:
            return "P2 will read: not tested"
        return "the audit fits"


def estimate(
    source: str | PathLike[str] = "demo",
    *,
    device: str | torch.device | None = None,
    dtype: str | torch.dtype | None = None,
    revision: str | None = None,
    tokens: int = TOKENS,
) -> Estimate:
    """What an audit of a model would take; nothing of it is loaded but its config.

    Parameters
    ----------
    source, device, dtype, revision
        As for ``rotoscope.load``.
    tokens : int
        Length of a text.

    Raises
    ------
    BadInput
        If there is no such model, device or dtype.
    Refused
        If it is no decoder, or its forward cannot be followed without numbers.
    """
    where = check_device(device, None) or torch.device("cpu")
    kind = check_dtype(dtype, where.type == "cpu")
    name, config = load_config(source, revision=revision)
    if not isinstance(kind, torch.dtype):
        own = getattr(config.get_text_config(decoder=True), "dtype", None) or getattr(config, "dtype", None)
        kind = own if isinstance(own, torch.dtype) else torch.float32
    longest = getattr(config.get_text_config(decoder=True), "max_position_embeddings", None) or tokens
    if tokens < 1:
        raise BadInput(f"tokens must be at least 1, not {tokens}")
    return Estimate(name, sizes(config, name, kind, min(tokens, longest)), str(where), free_memory(where))

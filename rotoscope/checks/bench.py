"""Where checks are made: forwards of the untouched and of the tapped model, and how far two results are apart."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import psutil
import torch

from rotoscope.errors import Refused, RotoscopeError
from rotoscope.model.anatomy import probe_ids, rounding_floor
from rotoscope.model.lm import LM
from rotoscope.model.tap import tap

LENGTHS = (1, 7, 33)
AFFORDABLE = 6e11  # parameters times tokens that one forward beyond a sliding window may cost
CACHE_NAMES = ("cache", "past_key_values", "cache_params")
LEFT = "left padding"


class ModelRaised(RotoscopeError):
    """The untouched model does not run on a batch, so that there is nothing to compare with."""


@dataclass(frozen=True)
class Measure:
    """One comparison.

    Attributes
    ----------
    check, case : str
        What was compared, on what batch.
    difference : float
        Largest absolute difference over the largest absolute value; a count for what is counted; NaN: not tested.
    allowed : float
        The largest that rounding explains.
    whose : str
        ``ours``: a larger difference is a fault; ``the model's``: it is how the untouched model behaves.
    strict : bool
        Whether rounding is no excuse.
    layers : mapping
        The difference by layer, where it has one.
    note : str
        Why it was not tested, or what was found.
    """

    check: str
    case: str
    difference: float
    allowed: float
    whose: str = "ours"
    strict: bool = False
    layers: Mapping[int, float] = field(default_factory=dict)
    note: str = ""

    @property
    def passed(self) -> bool:
        """Whether the difference is allowed; what was not tested passes."""
        return not self.difference > self.allowed


class Check(NamedTuple):
    """A function that makes measures, with the names to use where it cannot."""

    name: str
    case: str
    run: Callable[[Bench], Iterator[Measure]]


@dataclass(frozen=True)
class Batch:
    """Rows of token ids, padded to one length: ``ids`` and ``mask`` are ``[rows, tokens]``."""

    case: str
    ids: torch.Tensor
    mask: torch.Tensor

    @property
    def real(self) -> torch.Tensor:
        """Which tokens are no padding."""
        return self.mask.bool()

    @property
    def positions(self) -> torch.Tensor:
        """Each token's position in its own row, padding left out of the count."""
        return (self.mask.cumsum(-1) - 1).clamp_min(0)

    def row(self, i: int) -> torch.Tensor:
        """The ids of one row without its padding."""
        return self.ids[i][self.real[i]]


class Bench:
    """A model, and what is needed to run it in many ways."""

    def __init__(self, lm: LM):
        self.lm = lm
        self.model = lm.model
        self.floor = rounding_floor(lm.model, lm.dtype)
        base = self.model.get_base_model() if hasattr(self.model, "get_base_model") else self.model
        self.takes = _parameters(base)
        self.raised: set[str] = set()
        self._alone: dict[tuple[int, ...], torch.Tensor] = {}

    @property
    def lengths(self) -> list[int]:
        """Tokens of the rows tried, one of them longer than every sliding window if that is affordable."""
        wanted = {*LENGTHS}
        if self.window >= max(LENGTHS) and self.affordable(self.window + 4):
            wanted.add(self.window + 4)
        return sorted({min(n, self.lm.trained_length or n) for n in wanted})

    @property
    def window(self) -> int:
        """The widest sliding window, 0 if there is none."""
        return max((layer.window or 0 for layer in self.lm.anatomy.layers), default=0)

    def affordable(self, tokens: int) -> bool:
        """Whether a forward over so many tokens is cheap enough."""
        return bool(tokens * sum(p.numel() for p in self.model.parameters()) <= AFFORDABLE)

    def row(self, n: int) -> torch.Tensor:
        """A row of ``n`` ordinary ids."""
        return probe_ids(self.model, self.lm.anatomy.vocabulary, n)[0]

    def batch(self, case: str, rows: Sequence[torch.Tensor], left: bool = True) -> Batch:
        """Rows side by side, padded on the left or on the right."""
        length = max(map(len, rows))
        config = self.model.config.get_text_config(decoder=True)
        padding = getattr(config, "pad_token_id", None) or 0
        ids = torch.full((len(rows), length), padding, device=rows[0].device)
        mask = torch.zeros_like(ids)
        for i, row in enumerate(rows):
            at = slice(length - len(row), length) if left else slice(0, len(row))
            ids[i, at], mask[i, at] = row, 1
        return Batch(case, ids, mask)

    def arguments(self, batch: Batch, at: slice = slice(None)) -> dict[str, torch.Tensor]:
        """What the model's forward takes for some tokens of a batch, those before them being in the cache."""
        given = {"input_ids": batch.ids[:, at], "attention_mask": batch.mask[:, : at.stop]}
        if "position_ids" in self.takes:
            given["position_ids"] = batch.positions[:, at]
        return given

    def plain(self, batch: Batch) -> torch.Tensor:
        """Logits of the untouched model ``[rows, tokens, vocabulary]``.

        Raises
        ------
        ModelRaised
            If it does not run.
        """
        with self.untouched(batch.case):
            return self.run(batch)

    def run(self, batch: Batch) -> torch.Tensor:
        """Logits of one forward without a cache, of the model as it is at the moment."""
        logits: torch.Tensor = self.model(**self.arguments(batch), use_cache=False).logits
        return logits.to(batch.ids.device)

    def alone(self, row: torch.Tensor) -> torch.Tensor:
        """Logits ``[tokens, vocabulary]`` of the untouched model on a row by itself; remembered."""
        key = tuple(row.tolist())
        if key not in self._alone:
            self._alone[key] = self.plain(self.batch("", [row]))[0]
        return self._alone[key]

    def tapped(self, batch: Batch, *parts: Any) -> torch.Tensor:
        """Logits under the tap."""
        with tap(self.lm, *parts):
            return self.run(batch)

    @contextmanager
    def untouched(self, case: str) -> Iterator[None]:
        """What raises in this block is the model's doing; such cases are remembered."""
        try:
            yield
        except Exception as error:
            self.raised.add(case)
            raise ModelRaised(f"{type(error).__name__}: {error}") from error

    def padded(self, rows: Sequence[torch.Tensor], instead: str) -> Batch:
        """Rows padded on the left, or the longest by itself where the model does not run on those."""
        if LEFT not in self.raised:
            return self.batch(LEFT, rows)
        return self.batch(instead, [max(rows, key=len)])


def _parameters(model: Any) -> frozenset[str]:
    """What a forward takes by name; one that hands on whatever it gets takes what the model inside it takes."""
    own = inspect.signature(model.forward).parameters
    inner = getattr(model, "base_model", model)
    if inner is not model and any(p.kind is p.VAR_KEYWORD for p in own.values()):
        return frozenset(own) | frozenset(inspect.signature(inner.forward).parameters)
    return frozenset(own)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference over the largest absolute value of ``b``; NaN in the same places is equal."""
    if a.shape != b.shape:
        return float("inf")
    if not a.numel() or torch.equal(a, b):
        return 0.0
    a, b = a.double(), b.double()
    both = a.isnan() & b.isnan()
    gap = (a - b).abs().masked_fill(both, 0).max() / b.abs().nan_to_num(0).max().clamp_min(1e-30)
    return float(gap.nan_to_num(torch.inf))


def in_double(lm: LM) -> LM | str:
    """The model in float64, everything measured of it kept; or why there is none."""
    parameters = list(lm.model.parameters())
    if lm.dtype == torch.float64:
        return "it is float64 already"
    if getattr(lm.model, "is_quantized", False) or not all(p.is_floating_point() for p in parameters):
        return "quantized weights have no float64"
    needed = 1.3 * 8 * sum(p.numel() for p in parameters)
    if len({p.device for p in parameters}) > 1 or lm.device.type not in ("cpu", "cuda"):
        return "the model is spread over several devices"
    free = psutil.virtual_memory().available if lm.device.type == "cpu" else torch.cuda.mem_get_info(lm.device)[0]
    if needed > 0.8 * free:
        return f"it takes {needed / 2**30:.1f} GiB, more than is free"
    try:
        model = copy.deepcopy(lm.model).double()
        if hasattr(model, "set_experts_implementation"):
            model.set_experts_implementation("eager")  # the grouped matrix product refuses doubles
        return replace(lm, model=model)
    except (Refused, RuntimeError, TypeError, ValueError) as error:
        return f"no copy of it can be made: {error}"

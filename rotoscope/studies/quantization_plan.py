"""Which methods a size runs, on what, and what they are called."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import gcd

from rotoscope import quantizers
from rotoscope.errors import BadInput
from rotoscope.interventions import parse as parse_intervention
from rotoscope.interventions.quantize_kv import QuantizeKV
from rotoscope.model.lm import LM
from rotoscope.quantizers.base import linear_layers
from rotoscope.studies.arms import NONE, PAIRS
from rotoscope.studies.options import Options
from rotoscope.tasks import find

REFERENCE = "reference"
WEIGHTS, ACTIVATIONS, CACHE = "weights", "activations", "cache"
GROUP, CHANNEL_GROUP = 64, 32
"""Values that share a scale, where widths allow it; tokens that do, of keys that are quantized per channel."""
SPECS = {
    "rtn-int8": "rtn:bits=8:group=0:symmetric=yes",
    "rtn-int4": "rtn:bits=4:group={weights}",
    "rtn-int3": "rtn:bits=3:group={weights}",
    "w8a8": "w8a8",
    "nf4": "nf4:block={weights}",
    "smoothquant": "smoothquant",
    "packed-int4": "packed-int4:group={weights}",
    "awq": "awq:group={weights}",
    "kv-fp8": "quantize-kv:kind=fp8",
    "kv-int8": "quantize-kv:kind=int8:group={cache}",
    "kv-int4": "quantize-kv:kind=int4:group={cache}",
    "kv-int3": "quantize-kv:kind=int3:group={cache}",
    "kv-int2": "quantize-kv:kind=int2:group={cache}",
    "kv-int2-channel": "quantize-kv:kind=int2:keys=channel:group={channel}",
}
"""Methods by the names that tables have, as the registries of quantizers and interventions read them."""
SMOOTHED = {"awq": "packed-int4", "smoothquant": "w8a8"}
"""Methods that the claim compares with rounding to the same grid."""
SEEDS = 5


@dataclass(frozen=True)
class Method:
    """A way to quantize: its name in tables, what it quantizes, and how, in words that a registry reads."""

    label: str
    kind: str
    spec: str

    @property
    def bits(self) -> int | None:
        """Bits a weight, where the spec names them."""
        if self.spec.startswith("rtn:"):
            return int(self.spec.partition("bits=")[2].partition(":")[0] or 4)
        return 4 if self.spec.split(":")[0] in ("nf4", "awq", "packed-int4") else None


@dataclass(frozen=True)
class Plan:
    """What a size runs.

    Attributes
    ----------
    texts, tokens
        Texts whose likelihood is measured, and tokens of each.
    methods
        By name.
    tasks
        Items of each task.
    cache_widths, weight_widths
        Methods whose losses channels are protected from.
    weight_items
        Items of each task that protected weights are scored on: every one of them is a forward over the whole prompt.
    layers
        Methods that are tried on each layer alone.
    layer_texts, layer_tokens
        Texts that this is measured on, and tokens of each.
    protect_layers, protect_weight_layers
        Whether whole layers are protected, too, from the first width: of caches, of weights.
    calibration
        Texts that methods are calibrated on.
    effect_tokens
        Leading tokens of the first text that massive values and additivity are measured on again.
    """

    texts: int
    tokens: int
    methods: tuple[str, ...]
    tasks: Mapping[str, int]
    cache_widths: tuple[str, ...] = ()
    weight_widths: tuple[str, ...] = ()
    weight_items: int = 20
    layers: tuple[str, ...] = ()
    layer_texts: int = 2
    layer_tokens: int = 256
    protect_layers: bool = False
    protect_weight_layers: bool = False
    calibration: int = 0
    effect_tokens: int = 256


_QUICK = ("rtn-int8", "rtn-int4", "w8a8", "kv-fp8", "kv-int4")
_STANDARD = (*_QUICK, "nf4", "rtn-int3", "kv-int8", "kv-int2", "kv-int2-channel")
_PAIR, _CITIES = (dict.fromkeys(pair, n) for pair, n in zip(PAIRS[:2], (40, 60), strict=True))
PLANS = {
    "quick": Plan(
        2, 256, _QUICK, {"capitals": 40, "capitals_in_context": 40}, cache_widths=("kv-int4",), effect_tokens=128
    ),
    "standard": Plan(
        4,
        512,
        _STANDARD,
        _PAIR,
        cache_widths=("kv-int4", "kv-int3"),
        weight_widths=("rtn-int4", "rtn-int3"),
        layers=("rtn-int4", "kv-int2"),
        protect_layers=True,
    ),
    "full": Plan(
        8,
        512,
        (*_STANDARD, "kv-int3", "smoothquant", "packed-int4", "awq"),
        {**dict.fromkeys(_PAIR, 100), **_CITIES, "capitals": 60, "capitals_in_context": 60},
        cache_widths=("kv-int4", "kv-int3", "kv-int2", "kv-int2-channel"),
        weight_widths=("rtn-int4", "rtn-int3"),
        weight_items=60,
        layers=("rtn-int4", "kv-int4", "kv-int2"),
        layer_texts=4,
        layer_tokens=512,
        protect_layers=True,
        protect_weight_layers=True,
        calibration=16,
    ),
}


def plan(options: Options) -> Plan | None:
    """What is run: the size's plan, with the user's own methods and tasks in place of its own; None if nothing is."""
    if options.methods == (NONE,):
        return None
    of_size = PLANS[options.size]
    if options.methods:
        # Widths whose loss is not wanted in the table are not protected either.
        of_size = replace(
            of_size,
            methods=options.methods,
            cache_widths=tuple(w for w in of_size.cache_widths if w in options.methods),
            weight_widths=tuple(w for w in of_size.weight_widths if w in options.methods),
            layers=tuple(m for m in of_size.layers if m in options.methods),
        )
    tasks = of_size.tasks
    if options.tasks:
        tasks = dict.fromkeys((find(text).spec for text in options.tasks), max(tasks.values()))
    limit = options.limit or 10**9
    return replace(of_size, tasks={spec: min(n, limit) for spec, n in tasks.items()})


def methods(lm: LM, names: tuple[str, ...]) -> list[Method]:
    """Methods by their names in tables, or as the registries of quantizers and interventions read them.

    Raises
    ------
    BadInput
        If there is no such method.
    """
    return [method(lm, name) for name in names]


def method(lm: LM, name: str) -> Method:
    """One of them."""
    spec = SPECS.get(name, name)
    if "{" in spec:
        spec = spec.format(**groups(lm))
    kind = spec.split(":")[0]
    if kind == QuantizeKV.name:
        parse_intervention(spec)
        return Method(name, CACHE, spec)
    if kind not in quantizers.QUANTIZERS:
        known = ", ".join([*SPECS, *quantizers.QUANTIZERS, QuantizeKV.name])
        raise BadInput(f"there is no method {name!r}; there are {known}")
    if name not in SPECS:  # what does not fit the model is told where it is tried
        quantizers.parse(spec)
    return Method(name, quantizers.QUANTIZERS[kind].kind, spec)


def groups(lm: LM) -> dict[str, int]:
    """How many values share a scale: the largest power of two up to 64 that divides every width."""
    inputs = gcd(GROUP, *(linear.width for linear in linear_layers(lm)))
    heads = gcd(GROUP, *(width for a in lm.anatomy.attention for width in (a.head_dim, a.v_head_dim)))
    return {"weights": inputs, "cache": heads, "channel": min(CHANNEL_GROUP, heads)}

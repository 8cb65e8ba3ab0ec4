"""Made-up tables of the quantization study: plausible numbers from one seed, no model needed."""

from __future__ import annotations

import numpy as np
import pandas as pd

LAYERS = 30
N = 60
TEXTS = 4
SEEDS = range(5)
TASKS = (
    ("capitals", "filler=144:facts=2", "parametric"),
    ("capitals_in_context", "filler=144", "contextual"),
    ("cities", "", "parametric"),
    ("cities_in_context", "", "contextual"),
)
CLEAN = {"capitals": 0.75, "capitals_in_context": 0.7, "cities": 0.5, "cities_in_context": 0.8}
CHANCE = {"cities": 0.5, "cities_in_context": 0.5}
METHODS = {  # kind, bits, ΔNLL, loss of parametric and of contextual retention
    "rtn-int8": ("weights", 8.06, 0.003, 0.0, 0.0),
    "rtn-int4": ("weights", 4.5, 0.22, 0.10, 0.18),
    "rtn-int3": ("weights", 3.5, 1.9, 0.72, 0.81),
    "nf4": ("weights", 4.5, 0.24, 0.12, 0.20),
    "packed-int4": ("weights", 4.5, 0.28, 0.12, 0.22),
    "awq": ("weights", 4.51, 0.11, 0.06, 0.07),
    "gptq": ("weights", 4.5, 0.09, 0.05, 0.08),
    "w8a8": ("activations", 8.06, 0.03, 0.02, 0.03),
    "smoothquant": ("activations", 8.07, 0.01, 0.01, 0.0),
    "kv-fp8": ("cache", 8.02, 0.008, 0.0, 0.0),
    "kv-int8": ("cache", 8.5, 0.0, 0.0, 0.0),
    "kv-int4": ("cache", 4.5, 0.02, 0.02, 0.06),
    "kv-int2": ("cache", 2.5, 0.72, 0.2, 0.7),
    "kv-int2-channel": ("cache", 3.0, 0.3, 0.1, 0.4),
}
PROTECTED = {"rtn-int4": (0.3, 4.53), "kv-int2": (1.4, 2.95)}


def tables(seed: int = 0, *, low_bit: bool = True) -> dict[str, pd.DataFrame]:
    """All tables that the section reads; `low_bit`: the weights lie on a 4-bit grid already."""
    rng = np.random.default_rng(seed)
    return {
        "quantization": _methods(rng),
        "quantization_layers": _layers(rng),
        "protected": _protected(rng),
        "quantization_logits": _logits(rng),
        "quantization_effects": _effects(rng),
        "quantization_grid": _grid(rng, low_bit),
    }


def _methods(rng: np.random.Generator) -> pd.DataFrame:
    nan = float("nan")
    every = {"reference": ("reference", 32.0, 0.0, 0.0, 0.0)} | METHODS
    rows = []
    for method, (kind, bits, dnll, parametric, contextual) in every.items():
        reference = kind == "reference"
        for task, variant, knowledge in TASKS:
            chance, clean = CHANCE.get(task, 0.0), CLEAN[task]
            lost = parametric if knowledge == "parametric" else contextual
            floor = task == "cities"  # the model as it is is at chance there
            kept = nan if floor else 1 - lost + (0.0 if reference else rng.normal(0, 0.01))
            accuracy = clean if floor else chance + kept * (clean - chance)
            rows.append(
                {
                    "method": method,
                    "kind": kind,
                    "bits": bits,
                    "share_changed": 0.0 if reference else nan if kind == "cache" else 0.998,
                    "bytes": 538e6 if reference else nan if kind == "cache" else 113e6 + 13.3e6 * bits,
                    "nll": 2.43 + dnll,
                    "dnll": dnll,
                    "dnll_low": nan if reference else dnll - 0.1 * abs(dnll) - 0.002,
                    "dnll_high": nan if reference else dnll + 0.1 * abs(dnll) + 0.002,
                    "kl": 0.8 * abs(dnll),
                    "kl_low": nan if reference else 0.7 * abs(dnll),
                    "kl_high": nan if reference else 0.9 * abs(dnll),
                    "n": TEXTS,
                    "task": task,
                    "variant": variant,
                    "knowledge": knowledge,
                    "items": N,
                    "chance": chance,
                    "accuracy": accuracy,
                    "retention": kept,
                    "low": nan if reference or floor else kept - 0.09,
                    "high": nan if reference or floor else kept + 0.09,
                    "dlogprob": -lost,
                    "dlogprob_low": -lost - 0.1,
                    "dlogprob_high": -lost + 0.1,
                    "note": "",
                }
            )
    absent = dict.fromkeys(rows[0], nan) | dict.fromkeys(("task", "variant", "knowledge"), "")
    absent |= {"method": "kv-int3", "kind": "cache", "n": 0, "note": "not reached"}
    return pd.DataFrame([*rows, absent])


def _layers(rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    for method, size in (("rtn-int4", 0.008), ("kv-int2", 0.05)):
        for layer in range(LAYERS):
            dnll = size * (1 + 3 * (layer in (0, 1, LAYERS - 1))) * rng.lognormal(0, 0.3)
            rows.append((layer, method, dnll, 0.6 * dnll, 1.4 * dnll, 2))
    return pd.DataFrame(rows, columns=["layer", "method", "dnll", "low", "high", "n"])


def _protected(rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    for width, (loss, bits) in PROTECTED.items():
        for task, variant, knowledge in TASKS[:2]:
            whole = loss * (1.0 if knowledge == "contextual" else 0.3)
            for arm, part in (("plain", 1.0), ("massive", 0.5), ("layers", 0.8)):
                dnll = part * whole
                arm_bits = METHODS[width][1] if arm == "plain" else bits
                rows.append((width, arm, -1, arm_bits, knowledge, task, variant, 0.9 + dnll, dnll, N))
            for seed in SEEDS:
                for arm, part in (("random", 0.85), ("random-layers", 0.88)):
                    dnll = whole * (part + rng.normal(0, 0.04))
                    rows.append((width, arm, seed, bits, knowledge, task, variant, 0.9 + dnll, dnll, N))
    names = ["width", "arm", "seed", "bits", "knowledge", "task", "variant", "nll", "dnll", "n"]
    return pd.DataFrame(rows, columns=names)


def _logits(rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    for method, (_, bits, *_) in METHODS.items():
        for layer in range(LAYERS):
            signal = 4 + 0.2 * layer
            massive, other = (signal * x * 2.0**-bits * rng.lognormal(0, 0.2) for x in (0.9, 1.6))
            rows.append((method, layer, massive, other, np.hypot(massive, other), signal))
    return pd.DataFrame(rows, columns=["method", "layer", "massive", "other", "total", "signal"])


def _effects(rng: np.random.Generator) -> pd.DataFrame:
    clean = {"massive_q": 0.77, "massive_k": 0.73, "massive_v": 0.02, "form1_within": 0.965}
    rows = [("reference", measure, value, value) for measure, value in clean.items()]
    for method, (kind, _, dnll, *_) in METHODS.items():
        for measure, value in clean.items():
            if kind == "cache" and measure != "massive_k":
                continue
            value += 0.04 * (kind == "cache")  # on fewer tokens
            rows.append((method, measure, value * (1 - 0.02 * dnll * rng.uniform(0.5, 1.5)), value))
    return pd.DataFrame(rows, columns=["method", "measure", "value", "clean"])


def _grid(rng: np.random.Generator, low_bit: bool) -> pd.DataFrame:
    names = ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")
    rows = [
        (
            layer,
            f"model.layers.{layer}.{name}",
            int(rng.integers(14, 17)) if low_bit else 32,
            4 if low_bit else None,
            float(low_bit),
        )
        for layer in range(LAYERS)
        for name in names
    ]
    table = pd.DataFrame(rows, columns=["layer", "name", "distinct", "bits", "share"])
    return table.astype({"bits": "Int64"})

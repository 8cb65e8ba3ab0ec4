"""Made-up tables of the causal half of position generalization: plausible numbers from one seed, no model needed."""

from __future__ import annotations

import math
from itertools import combinations

import numpy as np
import pandas as pd
from statsmodels.stats.proportion import proportion_confint

LAYERS, HEADS = 30, 9
TRAINED = 2048
KINDS = {  # ΔNLL at a share of 5 %
    "swap-adjacent": 0.01,
    "swap-arbitrary": 0.032,
    "jitter-adjacent": 0.004,
    "jitter-arbitrary": 0.028,
    "rotate-arbitrary": 0.06,
}
SHARES = (0.0, 0.01, 0.02, 0.05, 0.10, 0.20, 0.50)
ARMS = {  # ΔNLL with all layers replaced
    "form1": 0.35,
    "form2": 2.1,
    "form2-causal": 1.2,
    "permuted": 1.9,
    "f": 4.2,
    "g": 3.1,
    "form1-random-means": 2.6,
}
DISTANCES = (1, 4, 16, 64, 256, 1023)
VARIANTS = ("plain", "lambda", "cap", "lambda+cap", "dynamic-ntk", "yarn", "reference")
QUANTITIES = (
    "form1_within",
    "residual",
    "massive_energy_q",
    "massive_energy_k",
    "entropy",
    "sink_mass",
    "freeze_damage",
    "skip_damage",
    "freeze_step",
    "skip_step",
)


def tables(seed: int = 0) -> dict[str, pd.DataFrame]:
    """All tables that the section reads."""
    rng = np.random.default_rng(seed)
    joint = _joint(rng)
    return {
        "perturb": _perturb(),
        "distance": _distance(rng),
        "replace": _replace(),
        "replace_tasks": _replace_tasks(),
        "length": _length(),
        "length_attention": _length_attention(),
        "joint": joint,
        "joint_correlations": _correlations(joint),
        "joint_disrupted": _disrupted(),
    }


def _perturb() -> pd.DataFrame:
    rows = []
    for kind, at_few in KINDS.items():
        for share in SHARES:
            dnll = at_few * (share / 0.05) ** 1.3
            mean_shift = 0.0 if share == 0 else 1.0 if kind.endswith("adjacent") else 340.0
            targets = round(8 * 1021 * (1 - share) ** 3)
            rows.append((kind, share, share, mean_shift, 8, targets, dnll, 0.8 * dnll, 1.2 * dnll))
    names = ["kind", "share", "achieved", "mean_shift", "n", "targets", "dnll", "low", "high"]
    return pd.DataFrame(rows, columns=names)


def _distance(rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    for layer in range(LAYERS):
        for head in range(HEADS):
            key, distance = rng.lognormal(-1.6, 0.4), rng.lognormal(0.3, 0.4)
            rows += [(layer, head, d, key * math.log1p(d) / 7, distance * math.log1p(d) / 7) for d in DISTANCES]
    return pd.DataFrame(rows, columns=["layer", "head", "d", "key_axis_shift", "distance_axis_shift"])


def _replace() -> pd.DataFrame:
    rows = []
    ranges = {"all": 1.0, "0-9": 0.5, "10-19": 0.25, "20-29": 0.2, "0": 0.08, "12": 0.03, "29": 0.01}
    for layers, factor in ranges.items():
        for arm, dnll in ARMS.items():
            value = dnll * factor
            ratio = np.nan if arm == "permuted" else dnll / ARMS["permuted"]
            ends = (value - 0.1 * factor, value + 0.1 * factor)
            rows.append((arm, layers, value, *ends, 8, ratio, ratio - 0.05, ratio + 0.05))
    names = ["arm", "layers", "dnll", "low", "high", "n", "ratio", "ratio_low", "ratio_high"]
    return pd.DataFrame(rows, columns=names)


def _replace_tasks() -> pd.DataFrame:
    rows = []
    for task, variant, clean in (("capitals", "", 0.8), ("passkey", "tokens=128", 0.95)):
        for arm, dnll in {"clean": 0.0, **ARMS}.items():
            right = round(60 * clean * math.exp(-dnll))
            low, high = proportion_confint(right, 60, method="wilson")
            rows.append((task, variant, arm, 60, right / 60, low, high, 0.0, -dnll, -dnll - 0.1, -dnll + 0.1))
    names = ["task", "variant", "arm", "n", "accuracy", "low", "high", "chance"]
    return pd.DataFrame(rows, columns=[*names, "dlogprob", "dlogprob_low", "dlogprob_high"])


def _length() -> pd.DataFrame:
    worse = {"plain": 5.0, "lambda": 0.9, "cap": 0.7, "lambda+cap": 0.02, "dynamic-ntk": 0.15, "yarn": 0.1}
    rows = []
    for variant in VARIANTS:
        for start in range(0, 3072, 64):
            if variant == "reference" and start < TRAINED:
                continue
            nll = 2.9 + 1.5 * math.exp(-start / 150)
            if start >= TRAINED:
                nll += worse.get(variant, 0.0) * (start - TRAINED + 64) / 1024
            rows.append((variant, start, nll, nll - 0.1, nll + 0.1, 4))
    return pd.DataFrame(rows, columns=["variant", "position", "nll", "low", "high", "n"])


def _length_attention() -> pd.DataFrame:
    rows = []
    for variant in VARIANTS[:-1]:
        for layer in range(LAYERS):
            for start in range(0, 3072, 128):
                past = max(0, start - TRAINED) / 1024 if variant == "plain" else 0.0
                entropy = math.log(start + 60) - layer / 15 + past
                rows.append((variant, layer, start, entropy, 0.6 - 0.4 * past, 20 + layer / 3 + 6 * past))
    names = ["variant", "layer", "position", "entropy", "sink_mass", "largest_logit"]
    return pd.DataFrame(rows, columns=names)


def _joint(rng: np.random.Generator) -> pd.DataFrame:
    table = pd.DataFrame({"layer": range(LAYERS)})
    depth = table["layer"] / LAYERS
    table["form1_within"] = 0.94 + 0.04 * depth + rng.normal(0, 0.008, LAYERS)
    table["residual"] = 1 - table["form1_within"] ** 2
    for name, slope in zip(QUANTITIES[2:], (0.5, 0.4, -2.5, 0.7, -0.6, -0.5, 0.0, 0.0), strict=True):
        table[name] = 1 + slope * depth + rng.normal(0, 0.12, LAYERS)
    table.loc[0, "freeze_damage"] = np.nan
    table["task"] = "capitals"
    return table.assign(**{"form1_within_clean": table["form1_within"], "form1_within_top-1": table["residual"]})


def _correlations(joint: pd.DataFrame) -> pd.DataFrame:
    rho = joint[list(QUANTITIES)].corr(method="spearman")
    pairs = [(a, b, "") for a, b in combinations(QUANTITIES[1:6], 2)]
    pairs += [(a, b, task) for task in ("capitals", "arithmetic") for a in QUANTITIES[1:6] for b in QUANTITIES[6:]]
    rows = []
    for a, b, task in pairs:
        value = rho.at[a, b]
        part = 0.5 * value
        bounds = (value - 0.3, value + 0.3, part, part - 0.35, part + 0.35)
        rows.append((a, b, "layers", task, value, *bounds, LAYERS))
    for tensor in "qk":
        rows.append(("residual", f"massive_energy_{tensor}", "heads", "", -0.4, -0.5, -0.3, -0.9, -0.95, -0.8, 270))
    names = ["a", "b", "over", "task", "rho", "low", "high", "partial", "partial_low", "partial_high", "n"]
    return pd.DataFrame(rows, columns=names)


def _disrupted() -> pd.DataFrame:
    rows = []
    for arm, change in (("clean", 0.0), ("top-1", -0.08), ("change-matched", -0.01), ("top-1 all", -0.1)):
        for kind, value in (("form1", 0.97), ("form1_within", 0.965), ("form2_within", 0.85)):
            rows.append((arm, kind, value + change, change, change - 0.02, change + 0.02, LAYERS))
    return pd.DataFrame(rows, columns=["arm", "kind", "value", "change", "low", "high", "n"])

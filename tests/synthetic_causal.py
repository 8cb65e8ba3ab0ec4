"""Made-up tables of the causal half of massive and of depth: plausible numbers from one seed, no model needed.

Losses are chosen by hand (main arm: context suffers more with filler), outcomes are drawn item by item, so that
counts, intervals and tests are those of real items.
"""

from __future__ import annotations

import math

import numpy as np
import pandas as pd
from statsmodels.stats.proportion import proportion_confint

LAYERS = 30
N = 60
TASKS = [  # task, variant, knowledge, chance, clean probability, loss under the main arm
    ("capitals", "", "parametric", 0.0, 0.80, 0.05),
    ("capitals", "filler=48", "parametric", 0.0, 0.76, 0.10),
    ("capitals", "filler=144", "parametric", 0.0, 0.75, 0.20),
    ("cities", "", "parametric", 0.5, 0.50, 0.0),
    ("capitals_in_context", "", "contextual", 0.0, 0.66, 0.15),
    ("capitals_in_context", "filler=144", "contextual", 0.0, 0.75, 0.55),
    ("capitals_in_context", "filler=48", "contextual", 0.0, 0.70, 0.35),
    ("counterfactual-capitals", "", "contextual", 0.0, 0.85, 0.30),
    ("passkey", "tokens=128", "contextual", 0.0, 0.95, 0.70),
    ("passkey", "tokens=512", "contextual", 0.0, 0.90, 0.95),
    ("arithmetic", "", "reasoning", 0.0, 0.40, 0.30),
]
ARMS = [  # arm, group, targets, selection, replacement, positions, judged, harm relative to the main arm, change
    ("clean", "grid", "", "", "", "", True, 0.0, np.nan),
    ("top-1", "grid", "QK", "top-1", "token-mean", "all-but-0", True, 1.0, 0.011),
    ("top-1 all", "grid", "QK", "top-1", "token-mean", "all", True, 1.6, 0.02),
    ("only 0", "grid", "QK", "top-1", "token-mean", "only-0", True, 0.8, 0.009),
    ("top-2 pooled", "grid", "QK", "top-2", "pooled", "all", True, 3.0, 0.31),
    ("energy", "grid", "QK", "energy-matched", "token-mean", "all-but-0", False, 2.5, 0.4),
    ("change", "grid", "QK", "change-matched", "token-mean", "all-but-0", True, 0.3, 0.0111),
    ("smallest", "grid", "QK", "smallest", "token-mean", "all", False, 0.0, 1e-5),
    ("V", "grid", "V", "top-1", "token-mean", "all", True, 3.0, 0.05),
    ("mine", "own", "K", "lambda-4", "zero", "all", True, 1.2, 0.03),
]


def tables(seed: int = 0) -> dict[str, pd.DataFrame]:
    """All tables that the sections on disruption and depth read."""
    rng = np.random.default_rng(seed)
    items = _items(rng)
    disrupt = _disrupt(items)
    return {
        "items": items,
        "disrupt": disrupt,
        "dose": _dose(rng),
        "disrupt_layers": _disrupt_layers(rng),
        "disrupt_attention": _attention(rng),
        "disrupt_additivity": _additivity(rng),
        "outputs": _outputs(items),
        **_depth(rng),
    }


def _items(rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    for task, variant, _, _, clean, loss in TASKS:
        right = rng.random(N) < clean
        logprob = -rng.gamma(1.5, 0.6, N)
        for arm, *_, harm, _ in ARMS:
            kept = right & (rng.random(N) >= min(1.0, loss * harm))
            for i in range(N):
                rows.append(
                    {
                        "task": task,
                        "variant": variant,
                        "arm": arm,
                        "id": f"{task}-{i}",
                        "correct": float(kept[i]),
                        "logprob": logprob[i] - 3 * loss * harm * rng.uniform(0.5, 1.5),
                        "answer": f"right {i}" if kept[i] else f"wrong\n{i}",
                        "gold": f"right {i}",
                        "prompt_tokens": 40,
                    }
                )
    return pd.DataFrame(rows)


def _disrupt(items: pd.DataFrame) -> pd.DataFrame:
    rows = []
    facts = {(task, variant): (knowledge, chance) for task, variant, knowledge, chance, *_ in TASKS}
    for arm, group, targets, selection, replacement, positions, judged, _, change in ARMS:
        for (task, variant), (knowledge, chance) in facts.items():
            own = items[(items["task"] == task) & (items["variant"] == variant)]
            changed, clean = (own[own["arm"] == name].reset_index() for name in (arm, "clean"))
            right, n = int(changed["correct"].sum()), len(changed)
            low, high = proportion_confint(right, n, method="wilson")
            gain = clean["correct"].mean() - chance
            retention = (right / n - chance) / gain if gain > 0.1 else np.nan
            shift = changed["logprob"] - clean["logprob"]
            half = 1.96 * shift.std() / math.sqrt(n)
            p = 1.0 if arm == "clean" else min(1.0, 2.0 ** -int((changed["correct"] != clean["correct"]).sum()) * 2)
            rows.append(
                {
                    "task": task,
                    "variant": variant,
                    "knowledge": knowledge,
                    "arm": arm,
                    "group": group,
                    "targets": targets,
                    "selection": selection,
                    "replacement": replacement,
                    "positions": positions,
                    "n": n,
                    "accuracy": right / n,
                    "low": low,
                    "high": high,
                    "chance": chance,
                    "retention": retention,
                    "retention_low": retention - 0.1,
                    "retention_high": retention + 0.1,
                    "logprob": changed["logprob"].mean(),
                    "dlogprob": shift.mean(),
                    "dlogprob_low": shift.mean() - half,
                    "dlogprob_high": shift.mean() + half,
                    "p": np.nan if arm == "clean" else p,
                    "p_holm": np.nan if arm == "clean" else min(1.0, p * (len(ARMS) - 1)),
                    "change": change,
                    "judged": judged,
                }
            )
    return pd.DataFrame(rows)


def _measured(task: str, variant: str, accuracy: float, dlogprob: float) -> dict[str, object]:
    right = round(N * accuracy)
    low, high = proportion_confint(right, N, method="wilson")
    return {
        "task": task,
        "variant": variant,
        "n": N,
        "accuracy": right / N,
        "low": low,
        "high": high,
        "dlogprob": dlogprob,
        "dlogprob_low": dlogprob - 0.15,
        "dlogprob_high": dlogprob + 0.15,
    }


def _dose(rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    doses = [("top", k, float(k)) for k in (1, 2, 4, 8)]
    doses += [("lambda", k, 2.6 * 0.6 ** (k - 3)) for k in (3, 4, 5, 6, 7, 8)]
    for task, variant, knowledge, _, clean, loss in (TASKS[0], TASKS[4], TASKS[8]):
        for kind, dose, dims in doses:
            harm = min(1.0, loss * dims + 0.1 * rng.random())
            row = _measured(task, variant, clean * (1 - harm), -3 * harm)
            rows.append({"kind": kind, "dose": dose, "dims": dims, "knowledge": knowledge, **row})
    return pd.DataFrame(rows)


def _disrupt_layers(rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    for task, variant, knowledge, _, clean, loss in (TASKS[0], TASKS[4], TASKS[8]):
        for layer in range(LAYERS):
            harm = loss * math.exp(-(((layer - 12) / 4) ** 2)) * rng.uniform(0.5, 1)
            row = _measured(task, variant, clean * (1 - harm), -2 * harm)
            rows.append({"layer": layer, "knowledge": knowledge, **row})
    return pd.DataFrame(rows)


def _attention(rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    for arm, *_, harm, _ in ARMS:
        for layer in range(LAYERS):
            depth = layer / LAYERS
            rows.append(
                {
                    "arm": arm,
                    "layer": layer,
                    "kl": harm * rng.uniform(0.02, 0.1) * (1 + depth),
                    "entropy": 4.5 - 2.5 * depth + 0.2 * harm,
                    "sink_mass": max(0.0, 0.1 + 0.7 * depth - 0.15 * harm),
                }
            )
    return pd.DataFrame(rows)


def _additivity(rng: np.random.Generator) -> pd.DataFrame:
    rows = []
    for arm, *_, harm, _ in ARMS:
        for layer in range(LAYERS):
            value = 0.97 - 0.02 * harm - rng.uniform(0, 0.02)
            row = {"arm": arm, "layer": layer, "form1": value, "form1_within": value - 0.005}
            rows.append({**row, "form2_within": value - 0.12})
    return pd.DataFrame(rows)


def _outputs(items: pd.DataFrame) -> pd.DataFrame:
    ids = items["id"].str.rsplit("-", n=1).str[1].astype(int)
    arms = ["clean", "top-1", "change", "V"]
    rows = items[(ids < 2) & items["arm"].isin(arms)].copy()
    question = "Question: What is the capital of Laos?\nAnswer: The capital of Laos is "
    rows["prompt"] = ("…The grass is green. The sky is blue. The sun is yellow. " * 3 + question)[-240:]
    return rows[["task", "variant", "arm", "id", "prompt", "gold", "answer", "correct"]].reset_index(drop=True)


def _depth(rng: np.random.Generator) -> dict[str, pd.DataFrame]:
    curves, safe = [], []
    sparse = [0, 3, 7, 10, 13, 17, 20, 23, 27, 30]
    middle = {"noise": 23.0, "shuffle": 22.0, "freeze": 15.0, "skip": 24.0}
    tasks = [("capitals", "", 0.7, 100), ("arithmetic", "", 0.4, 40), ("passkey", "tokens=256", 0.95, 20)]
    for task, variant, clean, n in tasks:
        for manipulation, at in middle.items():
            losses = {}
            for k in range(LAYERS + 1) if manipulation in ("freeze", "skip") else sparse:
                share = 1 / (1 + math.exp(-(k - at) / 1.2))
                accuracy = clean if k == LAYERS else round(n * clean * share) / n
                low, high = proportion_confint(round(n * accuracy), n, method="wilson")
                loss = clean - accuracy
                dlogprob = 0.0 if k == LAYERS else -4 * (1 - share)
                losses[k] = loss + (0.04 if k < LAYERS else 0.0)
                curves.append(
                    {
                        "task": task,
                        "variant": variant,
                        "manipulation": manipulation,
                        "k": k,
                        "n": n,
                        "accuracy": accuracy,
                        "low": low,
                        "high": high,
                        "chance": 0.0,
                        "clean": clean,
                        "loss": loss,
                        "loss_low": loss - 0.04,
                        "loss_high": losses[k],
                        "logprob": -1 + dlogprob,
                        "dlogprob": dlogprob,
                        "dlogprob_low": dlogprob - 0.1,
                        "dlogprob_high": dlogprob + 0.1,
                    }
                )
            good = [k for k in losses if all(losses[j] < 0.05 for j in losses if j >= k)]
            none = task == "passkey"
            k = np.nan if none else float(min(good))
            at_k = curves[-1] if none else next(r for r in curves[::-1] if r["k"] == k)
            safe.append(
                {
                    "task": task,
                    "variant": variant,
                    "manipulation": manipulation,
                    "k": k,
                    "share": k / LAYERS,
                    "loss": np.nan if none else at_k["loss"],
                    "loss_high": np.nan if none else at_k["loss_high"],
                    "dlogprob": np.nan if none else at_k["dlogprob"],
                    "n": n,
                    "epsilon": 0.05,
                    "reason": "only 20 items" if none else "",
                }
            )
    swap = []
    for kind, cross in (("capitals", 17.0), ("months", 19.0), ("numbers", 40.0)):
        for k in sparse:
            donor = round(60 * 0.95 / (1 + math.exp((k - cross) / 1.0)))
            original = round((60 - donor) * (1 - 0.1 * rng.random()))
            row = {"set": kind, "k": k, "n": 60, "other": (60 - donor - original) / 60}
            for name, count in (("original", original), ("donor", donor)):
                low, high = proportion_confint(count, 60, method="wilson")
                row |= {name: count / 60, f"{name}_low": low, f"{name}_high": high}
            swap.append(row)
    cost = []
    for k in range(LAYERS + 1):
        share = k / LAYERS
        flops = share + (1 - share) * 0.07
        full = 1.9
        seconds = full * (flops + 0.12 * (1 - flops)) if k in (8, 15, 22) else np.nan
        cost.append(
            {
                "k": k,
                "share": share,
                "flops": flops,
                "seconds": seconds,
                "full_seconds": full if k in (8, 15, 22) else np.nan,
                "speedup": full / seconds,
                "tokens": 1024,
            }
        )
    return {
        "depth": pd.DataFrame(curves),
        "safe_depth": pd.DataFrame(safe),
        "swap": pd.DataFrame(swap),
        "depth_cost": pd.DataFrame(cost),
    }

"""A made-up result with every table that the report reads: plausible numbers from one seed, no model needed.

Names, texts, notes and headlines carry markup and script, as a model card or a web page might.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pandas as pd

from rotoscope.results import Claim, Result, provenance

HOSTILE = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>\u2028&amp;{{ 7 * 7 }}"
KINDS = ("form1", "form1_within", "form2", "form2_within")
ARMS = {  # mean drop of r in each of the kinds, and the arm's role
    "as_it_is": (0.0, "model"),
    "key_means_removed": (0.07, "arm"),
    "query_means_removed": (0.04, "arm"),
    "both_means_removed": (0.13, "arm"),
    "energies_equalised": (0.09, "arm"),
    "no_means_equal_energies": (0.25, "arm"),
    "isotropic_covariance": (0.02, "arm"),
    "matched_gaussian": (0.0, "check"),
    "random": (0.05, "null"),
    "random_key_means_removed": (0.31, "null"),
    "random_both_means_removed": (0.31, "null"),
    "random_energies_equalised": (0.08, "null"),
    "random_no_means_equal_energies": (0.30, "null"),
    "isotropic": (0.29, "null"),
}
TRAINED_LENGTH = 2048
LAMBDA = 5.0


def result(
    layers: int = 30,
    heads: int = 9,
    kv_heads: int = 3,
    head_dim: int = 64,
    *,
    bare: tuple[int, ...] = (),
    massive: bool = True,
    seed: int = 0,
) -> Result:
    """A result of a model with these sizes.

    Parameters
    ----------
    layers, heads, kv_heads, head_dim
        Sizes of the model.
    bare
        Layers without attention.
    massive
        Whether any dim exceeds the threshold.
    seed
        Of all numbers.
    """
    rng = np.random.default_rng(seed)
    attending = [layer for layer in range(layers) if layer not in bare]
    theta = 100_000.0 ** (-np.arange(head_dim // 2) / (head_dim // 2))
    tables = {"heads": _heads(rng, attending, heads, kv_heads)}
    tables["explanation"] = _explanation(tables["heads"])
    tables["pairs"] = _pairs(rng, attending, heads, theta)
    tables["magnitudes"] = _magnitudes(rng, attending, heads, kv_heads, head_dim, massive)
    tables["massive"] = _massive(tables["magnitudes"], theta)
    tables["massive_heads"] = _massive_heads(tables["magnitudes"], tables["massive"])
    tables["stability"] = _stability(rng, massive)
    tables["layers"] = _layers(rng, layers, bare, tables["heads"], tables["massive_heads"])
    tables["texts"] = pd.DataFrame(
        [(f"text-{i}", 1024, f"{i:064x}", HOSTILE[: 80 if i else 40]) for i in range(4)],
        columns=["text", "tokens", "sha256", "start"],
    )
    tables["anatomy"] = _anatomy(layers, bare, heads, kv_heads, head_dim)
    facts = provenance(
        seed=seed,
        command=f"rotoscope audit {HOSTILE} --out out",
        model=f"demo {HOSTILE}",
        source="made up",
        file_hash="0123456789abcdef" * 4,
        dtype="float32",
        device="cpu",
        trained_length=TRAINED_LENGTH,
        first_token_ids=[1, 504, 314],
        **{"lambda": LAMBDA},
    )
    facts["versions"]["torch"] = "0.0"  # only this process's imports would decide it
    return Result(tables, _claims(), _headline(), facts, [{"question": "BOS", "choice": "none", "why": HOSTILE}])


def _heads(rng: np.random.Generator, attending: list[int], heads: int, kv_heads: int) -> pd.DataFrame:
    rows = []
    for layer in attending:
        for head in range(heads):
            base = min(0.999, 0.975 + 0.012 * np.sin(layer / 4) - rng.gamma(1.5, 0.008))
            values = {
                "form1": base,
                "form1_within": base - rng.uniform(0.001, 0.01),
                "form2": base - rng.uniform(0.05, 0.15),
                "form2_within": base - rng.uniform(0.06, 0.2),
                "causal": base - rng.uniform(0.05, 0.15),
                "causal_within": base - rng.uniform(0.1, 0.2),
            }
            row = {
                "layer": layer,
                "head": head,
                "kv_head": head // (heads // kv_heads),
                "position": "rotary",
                **values,
                "predicted": np.clip(values["form1_within"] + rng.normal(0, 0.006), 0, 1),
                "slow_query_share": np.clip(0.8 * base + rng.normal(0, 0.06), 0, 1),
                "phase_resultant": rng.beta(8, 2),
            }
            for arm, (drop, _) in ARMS.items():
                if arm != "as_it_is":
                    row |= {
                        f"{kind}__{arm}": np.clip(values[kind] - drop * rng.uniform(0.8, 1.2), 0, 1) for kind in KINDS
                    }
            row |= {f"{kind}__random_causal": values[kind] - 0.03 for kind in ("causal", "causal_within")}
            rows.append(row)
    return pd.DataFrame(rows)


def _explanation(heads: pd.DataFrame) -> pd.DataFrame:
    rows = []
    wanted = [(arm, kind, role) for arm, (_, role) in ARMS.items() for kind in KINDS]
    wanted += [("as_it_is", kind, "model") for kind in ("causal", "causal_within")]
    wanted += [("random_causal", kind, "null") for kind in ("causal", "causal_within")]
    for arm, kind, role in wanted:
        value = heads[kind if arm == "as_it_is" else f"{kind}__{arm}"].mean()
        if arm in ("both_means_removed", "no_means_equal_energies") and kind.startswith("form2"):
            value = 0.0
        rows.append((arm, kind, value, value - 0.004, value + 0.004, value - 0.02, value + 0.02, len(heads), 4, role))
    columns = ["arm", "kind", "value", "low", "high", "low_heads", "high_heads", "n_heads", "n_texts", "role"]
    return pd.DataFrame(rows, columns=columns)


def _pairs(rng: np.random.Generator, attending: list[int], heads: int, theta: np.ndarray) -> pd.DataFrame:
    grid = pd.MultiIndex.from_product([attending, range(heads), range(len(theta))], names=["layer", "head", "pair"])
    pairs = grid.to_frame(index=False)
    pairs["theta"] = theta[pairs["pair"]]
    pairs["wavelength"] = 2 * np.pi / pairs["theta"]
    energy = pd.Series(rng.gamma(0.5 + 3 * pairs["pair"] / len(theta)))
    pairs["query_energy"] = energy / energy.groupby([pairs["layer"], pairs["head"]]).transform("sum")
    pairs["concentration"] = rng.lognormal(-1.5 + 3 * pairs["pair"] / len(theta), 1.0)
    turns = np.exp(1j * np.outer(theta, np.arange(1024))).mean(axis=1)
    pairs["rotation_spread"] = (1 - np.abs(turns) ** 2)[pairs["pair"]]
    return pairs


def _magnitudes(
    rng: np.random.Generator, attending: list[int], heads: int, kv_heads: int, head_dim: int, massive: bool
) -> pd.DataFrame:
    parts = []
    for layer in attending:
        for tensor, count, peak in (("Q", heads, 7.0), ("K", kv_heads, 6.0), ("V", kv_heads, 0.0)):
            grid = pd.MultiIndex.from_product([range(count), range(head_dim)], names=["head", "dim"])
            part = grid.to_frame(index=False)
            part.insert(0, "layer", layer)
            part.insert(2, "tensor", tensor)
            part["pair"] = -1 if tensor == "V" else part["dim"] % (head_dim // 2)
            rms = rng.lognormal(0.0, 0.3, len(part)) * (1.0 + layer / 30)
            for head in range(count if massive else 0):
                dim = rng.choice([head_dim // 2 - 5, head_dim - 4, head_dim - 9])
                rms[head * head_dim + dim] *= 1 + peak * rng.uniform(0.4, 1.4)
            part["rms"] = rms
            part["rms_pre"] = np.nan if tensor == "V" else rms * rng.uniform(0.9, 1.1, len(part))
            parts.append(part)
    table = pd.concat(parts, ignore_index=True)
    by_head = table.groupby(["layer", "head", "tensor"])
    table["ratio"] = table["rms"] / by_head["rms"].transform("mean")
    table["ratio_pre"] = table["rms_pre"] / by_head["rms_pre"].transform("mean")
    table["offset"] = rng.lognormal(-1, 0.7, len(table)) * np.where(table["ratio"] > LAMBDA, 12, 1)
    table["sign0"] = np.where(rng.random(len(table)) < np.where(table["ratio"] > LAMBDA, 0.7, 0.4), -1, 1)
    return table


def _massive(magnitudes: pd.DataFrame, theta: np.ndarray) -> pd.DataFrame:
    energy = magnitudes["rms"] ** 2
    share = energy / energy.groupby([magnitudes[c] for c in ("layer", "head", "tensor")]).transform("sum")
    rows = magnitudes.assign(energy_share=share)[magnitudes["ratio"] > LAMBDA].reset_index(drop=True)
    rows["wavelength"] = np.where(rows["pair"] >= 0, 2 * np.pi / theta[rows["pair"].clip(lower=0)], np.nan)
    rows["wavelength_ratio"] = rows["wavelength"] / TRAINED_LENGTH
    columns = ["layer", "head", "tensor", "dim", "pair", "ratio", "energy_share", "offset", "wavelength"]
    return rows[[*columns, "wavelength_ratio", "sign0"]]


def _massive_heads(magnitudes: pd.DataFrame, massive: pd.DataFrame) -> pd.DataFrame:
    keys = ["layer", "head", "tensor"]
    by_head = magnitudes.groupby(keys)
    top = magnitudes.loc[by_head["ratio"].idxmax(), [*keys, "dim", "pair"]].set_index(keys)
    table = pd.DataFrame({"max_ratio": by_head["ratio"].max(), "max_ratio_pre": by_head["ratio_pre"].max()})
    table["count"] = massive.groupby(keys).size().reindex(table.index, fill_value=0)
    table["energy_share"] = massive.groupby(keys)["energy_share"].sum().reindex(table.index, fill_value=0.0)
    table["top_dim"], table["top_pair"] = top["dim"], top["pair"]
    return table.reset_index()


def _stability(rng: np.random.Generator, massive: bool) -> pd.DataFrame:
    rows = []
    for tensor in "QKV":
        for a, b in combinations(range(4), 2):
            for rule in ("lambda-5", "top-1"):
                empty = rule == "lambda-5" and (tensor == "V" or not massive)
                count = 0 if empty else 200
                rows.append(
                    (tensor, f"text-{a}", f"text-{b}", rule, np.nan if empty else rng.uniform(0.8, 0.95), count, count)
                )
    return pd.DataFrame(rows, columns=["tensor", "text_a", "text_b", "rule", "jaccard", "n_a", "n_b"])


def _layers(
    rng: np.random.Generator, layers: int, bare: tuple[int, ...], heads: pd.DataFrame, massive_heads: pd.DataFrame
) -> pd.DataFrame:
    table = pd.DataFrame({"layer": range(layers)})
    table["kind"] = np.where(table["layer"].isin(bare), "none", "attention")
    table["position"] = np.where(table["layer"].isin(bare), "none", "rotary")
    means = heads.groupby("layer")[["form1", "form1_within", "form2_within", "predicted"]].mean()
    table = table.join(means, on="layer")
    for tensor in "QKV":
        own = massive_heads[massive_heads["tensor"] == tensor].groupby("layer")
        table[f"max_ratio_{tensor.lower()}"] = table["layer"].map(own["max_ratio"].mean())
        table[f"massive_{tensor.lower()}"] = table["layer"].map(own["count"].agg(lambda counts: (counts > 0).mean()))
    depth = table["layer"] / layers
    attends = table["kind"] == "attention"
    table["entropy"] = np.where(attends, 4.5 - 2.5 * depth + rng.normal(0, 0.2, layers), np.nan)
    table["sink_mass"] = np.where(attends, np.clip(0.1 + 0.7 * depth + rng.normal(0, 0.05, layers), 0, 1), np.nan)
    return table


def _anatomy(layers: int, bare: tuple[int, ...], heads: int, kv_heads: int, head_dim: int) -> pd.DataFrame:
    rows = []
    for layer in range(layers):
        none = layer in bare
        rows.append(
            {
                "layer": layer,
                "kind": "none" if none else "attention",
                "position": "none" if none else "rotary",
                "heads": 0 if none else heads,
                "kv_heads": 0 if none else kv_heads,
                "head_dim": 0 if none else head_dim,
                "v_head_dim": 0 if none else head_dim,
                "rotary_dims": 0 if none else head_dim,
                "pairing": "" if none else "half-split",
                "window": None,
                "softcap": None,
                "sinks": False,
                "calls": 0 if none else 1,
                "note": HOSTILE if none else "",
            }
        )
    return pd.DataFrame(rows)


def _claims() -> list[Claim]:
    def claim(claim_id: str, verdict: str, value: float | None, **more: object) -> Claim:
        return Claim(
            claim_id, HOSTILE if claim_id == "M4" else "A & B 2025", f"Statement {claim_id}.", verdict, value, **more
        )  # type: ignore[arg-type]

    return [
        claim(
            "P1",
            "partly",
            0.9698765432101234,
            interval=(0.9671, 0.97264),
            null=0.9203,
            null_name="the same architecture with random weights",
            rule="holds when the within-query lower bounds of form 1 and of form 2 are ≥ .95; partly when one is",
            reason="form 1 within-query has lower bound .962, form 2 within-query .845",
            n="270 heads, 4 texts",
            at_half="holds",
            at_double="fails",
            detectable=0.0041,
        ),
        claim(
            "P2",
            "holds",
            0.17812345,
            interval=(0.16, 0.196),
            null=0.0,
            null_name="no difference",
            rule="lower bound ≥ .10",
            reason=HOSTILE,
            n="270 heads, 3 seeds",
            at_half="holds",
            at_double="partly",
            detectable=0.02,
        ),
        claim(
            "M1",
            "fails",
            0.75,
            interval=(0.7, float("nan")),
            rule="…",
            n="450 heads",
            at_half="partly",
            at_double="fails",
        ),
        claim("M2", "not tested", None, reason="only 12 massive dims; the rule asks for 20"),
        claim("M3", "holds", 12_345.678, interval=(1.2e-7, 3.4e8), n="270 heads"),
    ]


def _headline() -> dict[str, object]:
    return {
        "mean form 1 r": 0.9698765,
        "mean form 2 within-query r": 0.84912,
        "massive heads share Q": 0.77,
        "massive heads share K": 0.73,
        "massive heads share V": 0.0222,
        "seconds": 151.37,
        "peak_memory_mb": 2412,
        "not a number": float("nan"),
        HOSTILE: "a word",
    }

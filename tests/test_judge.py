"""Verdict rules on made-up results whose answer is known: each claim can hold, hold partly, and fail."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from rotoscope.studies import massive, position
from rotoscope.studies.judge import Condition, scaled, scaled_from_one
from rotoscope.studies.options import Options

OPTIONS = Options(size="quick")
LAYERS, HEADS, DIMS = 12, 4, 16


def test_a_condition_is_met_by_its_worse_end_and_missed_by_its_better() -> None:
    for interval, state in (((0.6, 0.9), "met"), ((0.4, 0.9), "open"), ((0.1, 0.4), "missed")):
        c = Condition("r", 0.5, interval, ">=", 0.5)
        assert ("met" if c.met else "missed" if c.missed else "open") == state
        assert str(c).endswith(state)
    assert Condition("x", 0.01, (0.0, 0.02), "<=", 0.02).met
    assert not Condition("x", float("nan"), (float("nan"), float("nan")), ">=", 0.0).met


def test_thresholds_near_one_are_scaled_by_their_distance_from_it() -> None:
    assert scaled_from_one(0.95, 0.5) == pytest.approx(0.975)
    assert scaled_from_one(0.95, 2) == pytest.approx(0.90)
    assert scaled(0.10, 2) == pytest.approx(0.20)


def test_without_an_interval_nothing_is_tested() -> None:
    """One layer says nothing of the spread over layers, one text nothing of that over texts."""
    one_layer = heads(form1=0.9, form1_within=0.9, form2=0.9, form2_within=0.9).query("layer == 0")
    per_text = pd.concat([one_layer.assign(text=i) for i in range(3)])
    for rows in (per_text, heads(form1=0.9, form1_within=0.9, form2=0.9, form2_within=0.9).assign(text=0)):
        claim = position._p1(position.explanation(rows, heads(form1=0.9).assign(text=0), seed=0), "n")
        assert claim.verdict == "not tested"
        assert "no interval" in claim.reason


@pytest.mark.filterwarnings("error")
def test_p3_with_a_constant_rival() -> None:
    """When no pair is slow the rival ranks nothing, and any rank correlation is better."""
    rng = np.random.default_rng(2)
    frame = heads(form1_within=0)
    frame["form1_within"] = frame["predicted"] = rng.uniform(0.9, 0.99, len(frame))
    claim = position._p3(frame.assign(slow_query_share=0.0), OPTIONS, "n")
    assert (claim.verdict, claim.null) == ("holds", 0.0)


def heads(**columns: Any) -> pd.DataFrame:
    layer, head = np.divmod(np.arange(LAYERS * HEADS), HEADS)
    rng = np.random.default_rng(0)
    noise = rng.normal(0, 0.002, LAYERS * HEADS)
    return pd.DataFrame({"layer": layer, "head": head} | {k: v + noise for k, v in columns.items()})


@pytest.mark.parametrize(
    ("within1", "within2", "verdict", "half", "double"),
    [
        (0.985, 0.985, "holds", "holds", "holds"),
        (0.96, 0.96, "holds", "fails", "holds"),
        (0.965, 0.85, "partly", "fails", "partly"),
        (0.80, 0.70, "fails", "fails", "fails"),
        (0.93, 0.93, "fails", "fails", "holds"),
    ],
)
def test_p1(within1: float, within2: float, verdict: str, half: str, double: str) -> None:
    base = heads(form1=within1, form1_within=within1, form2=within2, form2_within=within2)
    per_text = pd.concat([base.assign(text=i) for i in range(3)])
    table = position.explanation(per_text, heads(form1=0.9).assign(text=0), seed=0)
    claim = position._p1(table, "n")
    assert (claim.verdict, claim.at_half, claim.at_double) == (verdict, half, double)
    assert claim.null == pytest.approx(0.9, abs=0.01)


@pytest.mark.parametrize(("gap", "verdict"), [(0.25, "holds"), (0.05, "partly"), (-0.05, "fails")])
def test_p2(gap: float, verdict: str) -> None:
    random = np.full(LAYERS * HEADS, 0.6)
    arms = ("both_means_removed", "no_means_equal_energies")
    frame = heads(**{f"form1__{a}": random + gap for a in arms}, **{f"form1__random_{a}": random for a in arms})
    frame["form1__both_means_removed"] += np.random.default_rng(1).normal(0, 0.005, len(frame))
    claim = position._p2(frame, 3, "", OPTIONS, "n")
    assert claim.verdict == verdict
    assert claim.value == pytest.approx(gap, abs=0.01)


@pytest.mark.parametrize(
    ("error", "slow_tells", "verdict"),
    [(0.002, False, "holds"), (0.002, True, "partly"), (0.05, False, "partly"), (0.5, False, "fails")],
)
def test_p3(error: float, slow_tells: bool, verdict: str) -> None:
    rng = np.random.default_rng(2)
    measured = rng.uniform(0.9, 0.99, LAYERS * HEADS)
    # A constant error of .05 keeps the order and breaks the size; a random one of .5 breaks both.
    shift = rng.normal(0, error, len(measured)) if error > 0.1 else error
    frame = heads(form1_within=0, predicted=0, slow_query_share=0)
    frame["form1_within"], frame["predicted"] = measured, measured + shift
    frame["slow_query_share"] = measured if slow_tells else rng.uniform(size=len(measured))
    assert position._p3(frame, OPTIONS, "n").verdict == verdict


def massive_heads(share: dict[str, float], ratio: dict[str, Any] | None = None) -> pd.DataFrame:
    """Each layer gives the first ``share`` of its heads one massive dim."""
    rows = []
    for tensor, part in share.items():
        for layer in range(LAYERS):
            for head in range(HEADS):
                top = ratio[tensor](layer) if ratio else 3.0
                has = int(head < round(part * HEADS)) if not callable(part) else int(head < part(layer) * HEADS)
                rows.append((layer, tensor, head, has, top))
    return pd.DataFrame(rows, columns=["layer", "tensor", "head", "count", "max_ratio"])


@pytest.mark.parametrize(
    ("share", "verdict"),
    [
        ({"Q": 0.75, "K": 0.75, "V": 0.0}, "holds"),
        ({"Q": 0.75, "K": 0.0, "V": 0.0}, "partly"),
        ({"Q": 0.75, "K": 0.75, "V": 0.25}, "partly"),  # V above .10
        ({"Q": 0.0, "K": 0.0, "V": 0.0}, "fails"),
        ({"Q": 0.5, "K": 0.5, "V": 0.5}, "fails"),
    ],
)
def test_m1(share: dict[str, float], verdict: str) -> None:
    claim = massive._m1(massive_heads(share), [massive_heads({"Q": 0.0, "K": 0.0, "V": 0.0})], OPTIONS, "n")
    assert claim.verdict == verdict
    assert claim.value == pytest.approx(min(share["Q"], share["K"]) - share["V"])


def m2(pairs: np.ndarray, stable: bool = True) -> Any:
    """Massive dims in given pairs, one a head; pairs 6 and 7 of 8 are slow."""
    n = len(pairs)
    layer, head = np.divmod(np.arange(n), HEADS)
    wavelength = pd.Series(
        np.tile([1, 2, 4, 8, 16, 32, 500, 900.0], LAYERS),
        index=pd.MultiIndex.from_product([range(LAYERS), range(8)], names=["layer", "pair"]),
    )
    found = pd.DataFrame({"layer": layer, "tensor": "Q", "head": head, "dim": pairs, "pair": pairs})
    found["wavelength"] = wavelength.loc[list(zip(layer, pairs, strict=True))].to_numpy()
    overlap = pd.DataFrame({"layer": np.arange(LAYERS), "tensor": "Q", "rule": "lambda-5"})
    overlap = overlap.assign(both=9 if stable else 2, either=10, text_a=0, text_b=1)
    magnitudes = pd.DataFrame({"pair": np.arange(8)})
    return massive._m2(found, magnitudes, overlap, wavelength, 256, OPTIONS, 2)


def test_m2() -> None:
    rng = np.random.default_rng(3)
    slow = np.full(LAYERS * HEADS, 6)
    anywhere = rng.integers(0, 8, LAYERS * HEADS)
    mostly = np.where(rng.random(LAYERS * HEADS) < 0.6, 7, anywhere)
    assert m2(slow).verdict == "holds"
    assert m2(slow, stable=False).verdict == "partly"
    assert m2(mostly).verdict == "partly"
    assert m2(anywhere).verdict == "fails"
    few = m2(slow[:12])
    assert few.verdict == "not tested"
    assert "12 massive" in few.reason


def test_permutations_know_nothing_of_the_pair() -> None:
    """Dims drawn at random beat about as many permutations as chance has it, gathered ones beat all."""
    rng = np.random.default_rng(4)
    layer, head = np.divmod(np.arange(48), HEADS)
    frame = pd.DataFrame({"layer": layer, "tensor": "Q", "head": head})
    magnitudes = pd.DataFrame({"pair": np.arange(8)})
    beaten = [
        massive._concentrated(frame.assign(pair=rng.integers(0, 8, 48)), magnitudes, seed)[1] for seed in range(12)
    ]
    assert 0.1 < np.mean(beaten) < 0.7
    assert massive._concentrated(frame.assign(pair=5), magnitudes, 0) == (1.0, 1.0)


GROWING = {"Q": lambda layer: 3.0 + layer, "K": lambda layer: 3.0 + layer}
FLAT = {"Q": lambda layer: 3.0 - layer * 0.1, "K": lambda layer: 3.0 - layer * 0.1}


@pytest.mark.parametrize(
    ("share", "ratio", "verdict"),
    [
        (lambda layer: 0.75, GROWING, "holds"),
        (lambda layer: 0.75, FLAT, "partly"),
        (lambda layer: 0.75 if layer > 2 else 0.0, GROWING, "fails"),
        (lambda layer: 0.25 if layer < 2 else 1.0, FLAT, "fails"),
        (lambda layer: 0.25 if layer < 2 else 1.0, GROWING, "partly"),
    ],
)
def test_m3(share: Any, ratio: Any, verdict: str) -> None:
    assert massive._m3(massive_heads({"Q": share, "K": share}, ratio), OPTIONS, "n").verdict == verdict


def test_m3_without_any_massive_dim_is_not_tested() -> None:
    claim = massive._m3(massive_heads({"Q": 0.0, "K": 0.0}), OPTIONS, "n")
    assert claim.verdict == "not tested"

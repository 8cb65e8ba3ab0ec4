"""Claim M6's rule on made-up items with planted effects."""

from __future__ import annotations

from typing import Any

import numpy as np
import pandas as pd
import pytest

from rotoscope.results import Claim
from rotoscope.studies.quantization_claim import m6

CONTEXT, RECALL = "key_value", "known_values"


def told(
    loss: float, gain: tuple[float, float], n: int = 60, seeds: int = 5, right: float = 0.8, width: str = "kv-int4"
) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Items of the model itself and of a width: what rounding loses, and what massive channels gain over random ones,
    contextual and parametric, with noise of items of .2 and of seeds of .02."""
    rng = np.random.default_rng(0)
    clean, protected = [], []
    for spec, better in zip((CONTEXT, RECALL), gain, strict=True):
        names = [f"{spec}-{i}" for i in range(n)]
        base = pd.DataFrame({"spec": spec, "id": names, "correct": (np.arange(n) < right * n) * 1.0, "chance": 0.0})
        base["logprob"] = -1 - rng.exponential(0.5, n)
        clean.append(base)
        random = base.logprob - 0.5 * loss + rng.normal(0, 0.01, n)  # sparing anything helps a little
        gains = better + rng.normal(0, 0.2, n)
        arms = [("plain", -1, base.logprob - loss), ("massive", -1, random + gains)]
        arms += [("random", s, random + rng.normal(0, 0.02, n)) for s in range(seeds)]
        for arm, draw, logprob in arms:
            own = base.assign(method=width, arm=arm, draw=draw, logprob=logprob)
            protected.append(own.sample(frac=1, random_state=len(protected)))
    return pd.concat(clean, ignore_index=True), pd.concat(protected, ignore_index=True)


def judged(
    *given: Any, methods: pd.DataFrame | None = None, on_grid: dict[str, str] | None = None, **more: Any
) -> Claim:
    clean, protected = told(*given, **more)
    return m6(clean, protected, pd.DataFrame() if methods is None else methods, on_grid or {}, 0)[0]


def test_better_and_more_so_in_context_holds() -> None:
    claim = judged(0.4, (0.3, 0.05))
    assert claim.verdict == "holds"
    assert claim.value == pytest.approx(0.3, abs=0.06)
    assert claim.null == pytest.approx(0.05, abs=0.06)
    assert claim.interval is not None
    half = 1.96 * 0.2 / np.sqrt(60)
    assert claim.interval[1] - claim.interval[0] == pytest.approx(2 * half, rel=0.3)
    assert "seeds" in claim.reason
    assert (claim.at_half, claim.at_double) == ("holds", "holds")


def test_better_everywhere_is_partly() -> None:
    assert judged(0.4, (0.3, 0.3)).verdict == "partly"
    assert judged(0.4, (0.2, 0.4)).verdict == "partly"


def test_not_better_fails() -> None:
    assert judged(0.4, (0.0, 0.0)).verdict == "fails"
    assert judged(0.4, (-0.3, 0.0)).verdict == "fails"


def test_where_nothing_is_tested() -> None:
    nothing = judged(0.03, (0.3, 0.0))
    assert nothing.verdict == "not tested"
    assert "kv-int4 0.03" in nothing.reason
    assert judged(0.08, (0.3, 0.0)).at_double == "not tested"
    assert "not above chance" in judged(0.4, (0.3, 0.0), right=0.0).reason
    assert "fewer than 20" in judged(0.4, (0.3, 0.0), n=19).reason
    assert "4 seeds of random channels" in judged(0.4, (0.3, 0.0), seeds=4).reason
    on_grid = judged(0.4, (0.3, 0.0), width="rtn-int4", on_grid={"rtn-int4": "the weights lie on a 4-bit grid"})
    assert on_grid.verdict == "not tested"
    assert "rtn-int4: the weights lie on a 4-bit grid" in on_grid.reason


def test_a_width_that_loses_nothing_does_not_count() -> None:
    clean, first = told(0.4, (0.3, 0.05))
    _, second = told(0.01, (-5.0, 3.0), width="kv-int8")
    claim, _ = m6(clean, pd.concat([second, first]), pd.DataFrame(), {}, 0)
    assert claim.verdict == "holds"
    assert claim.value == judged(0.4, (0.3, 0.05)).value


def rounded(clean: pd.DataFrame, gains: dict[str, tuple[float, float]]) -> pd.DataFrame:
    """Items under rounding, which loses .4, and under a method that gains over it, contextual and parametric."""
    rng = np.random.default_rng(3)
    found = []
    for method_, plain in (("awq", "packed-int4"), ("smoothquant", "w8a8")):
        for spec, gain in zip((CONTEXT, RECALL), gains[method_], strict=True):
            base = clean[clean.spec == spec]
            worse = base.logprob - 0.4
            found.append(base.assign(method=plain, logprob=worse))
            found.append(base.assign(method=method_, logprob=worse + gain + rng.normal(0, 0.2, len(base))))
    return pd.concat(found, ignore_index=True)


def test_awq_and_smoothquant_may_decide_instead() -> None:
    clean, _ = told(0.4, (0.0, 0.0))
    both = rounded(clean, {"awq": (0.3, 0.0), "smoothquant": (0.3, 0.05)})
    claim = judged(0.4, (0.0, 0.0), methods=both)
    assert claim.verdict == "holds"
    assert "awq against packed-int4" in claim.reason
    one = rounded(clean, {"awq": (0.3, 0.0), "smoothquant": (0.0, 0.0)})
    assert judged(0.4, (0.0, 0.0), methods=one).verdict == "fails"
    assert judged(0.4, (0.0, 0.0), methods=both, on_grid={"awq": "on a grid"}).verdict == "fails"
    assert judged(0.4, (0.0, 0.0), methods=both[both.method != "w8a8"]).verdict == "fails"

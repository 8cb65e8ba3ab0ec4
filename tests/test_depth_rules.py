"""Claims D1 to D4 and the tables of the depth study, on made-up items whose answer is known by counting."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from small import small

import rotoscope as rs
from rotoscope.engine import REFUSED
from rotoscope.results import Claim
from rotoscope.stats.curves import Curve
from rotoscope.stats.intervals import agresti_min, wilson
from rotoscope.studies import depth, depth_plan, depth_swap, depth_tables, swap_pairs
from rotoscope.studies.depth_cells import COST, SWAP, TASK
from rotoscope.studies.depth_plan import depths, manipulations, plan
from rotoscope.studies.items import slug
from rotoscope.studies.options import Options
from rotoscope.tasks import find

LAYERS = 20
EVERY = range(LAYERS)
Lost = Mapping[int, int]
"""From which depth on how many of the right answers are lost."""


def steps(lost: Lost, ks: Sequence[int] = EVERY) -> list[int]:
    return [lost[max(start for start in lost if start <= k)] for k in ks]


def curve(
    lost: Lost,
    *,
    n: int = 100,
    right: int = 80,
    nats: Mapping[int, float] | None = None,
    ks: Sequence[int] = EVERY,
    chance: float = 0.0,
) -> Curve:
    """The first so many right answers are lost at each depth, and log-likelihood with them."""
    clean = (np.arange(n) < right).astype(float)
    changed = np.stack([np.where(np.arange(n) < count, 0.0, clean) for count in steps(lost, ks)], 1)
    logprob = np.linspace(-3, -1, n)
    fall = np.array(steps(nats or {0: 0.0}, ks))  # type: ignore[arg-type]
    spread = np.resize([-0.01, 0.01], n)
    after = logprob[:, None] - fall + spread[:, None]
    return Curve(LAYERS, np.array(ks, float), clean, changed, logprob, after, chance)


def safe_from(k: int, **more: Any) -> Curve:
    """Ten answers lost below ``k`` and none from there on; ``k = L``: lost everywhere."""
    return curve({0: 10} if k == LAYERS else {0: 10, k: 0} if k else {0: 0}, **more)


def d1(*by_task: tuple[Curve, Curve]) -> Claim:
    """From noise and freeze of each task; skip harms nothing, shuffle all."""
    rest = {"skip": safe_from(0), "shuffle": safe_from(LAYERS)}
    return depth._d1({f"task-{i}": {"noise": a, "freeze": b, **rest} for i, (a, b) in enumerate(by_task)}, "", 0)


def d4(*skipped: Curve) -> Claim:
    rest = {"noise": safe_from(LAYERS), "freeze": safe_from(LAYERS)}
    return depth._d4({f"task-{i}": {**rest, "skip": c} for i, c in enumerate(skipped)}, "", 0)


@pytest.mark.parametrize(
    ("noise", "freeze", "verdict"),
    [
        (14, 12, "holds"),
        (12, 14, "holds"),
        (15, 12, "partly"),
        (12, 15, "partly"),
        (17, 17, "partly"),
        (18, 14, "partly"),  # freeze alone
        (LAYERS, 0, "partly"),
        (18, 15, "fails"),
        (14, 18, "fails"),  # noise alone is not enough
        (LAYERS, LAYERS, "fails"),
        (0, 0, "holds"),
    ],
)
def test_d1(noise: int, freeze: int, verdict: str) -> None:
    claim = d1((safe_from(noise), safe_from(freeze)))
    assert claim.verdict == verdict
    assert claim.value == pytest.approx(max(noise, freeze) / LAYERS)
    told = f"safe from {noise / LAYERS:.2f} L under noise, {freeze / LAYERS:.2f} L under freeze"
    assert claim.reason == told + " (1.00: at no depth tested)" * (max(noise, freeze) == LAYERS)


def test_d1_is_the_median_over_tasks_of_the_worse_of_the_two() -> None:
    # Medians of each would be .75 and .75, and "partly"; of the worse one .90.
    apart = d1((safe_from(18), safe_from(12)), (safe_from(12), safe_from(18)))
    assert (apart.value, apart.verdict) == (pytest.approx(0.9), "fails")
    # The mean of .60, .70 and 1 is .77.
    three = d1(*[(safe_from(k), safe_from(k)) for k in (12, LAYERS, 14)])
    assert (three.value, three.verdict) == (pytest.approx(0.7), "holds")
    two = d1(*[(safe_from(k), safe_from(k)) for k in (12, 16)])
    assert (two.value, two.verdict) == (pytest.approx(0.7), "holds")
    assert two.n == "100 items of task-0, 100 items of task-1"


def test_d1_at_half_and_double_of_the_loss_allowed() -> None:
    """Of 100 items 4 may be lost at .10, 1 at .05 and none at .025, by the upper bound."""
    claim = d1((curve({0: 10, 8: 4, 12: 1, 16: 0}), safe_from(0)))
    assert claim.value == pytest.approx(12 / LAYERS)
    assert (claim.verdict, claim.at_half, claim.at_double) == ("holds", "partly", "holds")
    never = d1((curve({0: 10, 12: 4, 19: 1}), curve({0: 4})))
    assert (never.verdict, never.at_half, never.at_double) == ("fails", "fails", "holds")


def test_d1_needs_every_deeper_depth_to_be_safe_too() -> None:
    dip = curve({0: 10, 6: 0, 16: 5, 17: 0})
    assert (d1((dip, safe_from(0))).value, d1((dip, safe_from(0))).verdict) == (pytest.approx(17 / 20), "partly")
    last = curve({0: 10, 6: 0, 19: 5})
    assert d1((last, last)).value == 1.0
    few = safe_from(9, ks=depths(LAYERS, 10))  # tested at 8 and 11, not between
    assert d1((few, few)).value == pytest.approx(11 / 20)


def test_log_likelihood_counts_besides_where_there_are_fewer_than_a_hundred_items() -> None:
    def of(n: int, nats: Mapping[int, float]) -> Claim:
        c = curve({0: 10, 8: 0}, n=n, right=60, nats=nats)
        return d1((c, c))

    falling = {0: 1.0, 12: 0.15, 16: 0.01}
    assert of(100, falling).value == of(100, {0: 0.0}).value == of(64, {0: 0.0}).value == pytest.approx(8 / 20)
    assert (of(64, falling).value, of(64, falling).verdict) == (pytest.approx(16 / 20), "partly")
    assert of(64, falling).at_double == "holds"  # .15 nats are below .2
    assert of(64, {0: 0.09}).value == pytest.approx(8 / 20)
    assert of(64, {0: 0.099}).value == 1.0  # .099 ± .0025: the upper bound decides
    assert of(64, {0: -5.0}).value == pytest.approx(8 / 20)


@pytest.mark.parametrize("n", [64, 100])
def test_the_interval_of_the_safe_depth_is_around_it(n: int) -> None:
    noise = curve({0: 10, 8: 1, 12: 0}, n=n, right=60, nats={0: 1.0, 16: 0.0})
    for claim in (d1((noise, safe_from(5, n=n))), d4(noise)):
        assert claim.value is not None
        assert claim.interval is not None
        assert claim.interval[0] <= claim.value <= claim.interval[1]


def test_the_interval_of_the_safe_depth_is_of_the_worse_manipulation_on_the_same_items() -> None:
    """One item of 100 is lost from depth 5 on, another from 10 on: a second draw of it, and the bound is too high."""
    noise, freeze = curve({0: 10, 5: 1, 15: 0}), curve({0: 10, 10: 0})
    claim = d1((noise, freeze))
    assert (claim.value, claim.null) == (pytest.approx(0.5), 1.0)
    rng = np.random.default_rng(5)
    twice = np.mean([np.sum(rng.integers(0, 100, 100) == 0) >= 2 for _ in range(2000)])
    assert 0.2 < twice < 0.33  # so that 97.5 % reaches 15 and 2.5 % stays at 10
    assert claim.interval == (0.5, 0.75)


@pytest.mark.parametrize(
    ("k", "verdict"), [(0, "holds"), (14, "holds"), (15, "partly"), (18, "partly"), (19, "fails"), (LAYERS, "fails")]
)
def test_d4(k: int, verdict: str) -> None:
    claim = d4(safe_from(k))
    assert (claim.verdict, claim.value) == (verdict, pytest.approx(k / LAYERS))
    assert f"{k / LAYERS:.2f} L" in claim.reason


def test_d4_is_the_median_over_tasks_and_knows_half_and_double() -> None:
    assert d4(safe_from(14), safe_from(LAYERS), safe_from(6)).value == pytest.approx(0.7)
    claim = d4(curve({0: 10, 8: 4, 15: 1, 19: 0}))
    assert (claim.verdict, claim.at_half, claim.at_double) == ("partly", "fails", "holds")


# --- D2 ---


def kept(share: float, deeper: float = 1.0, **more: Any) -> Curve:
    """So much is left of 80 right answers up to L/4, which is tested, and more above."""
    return curve({0: round(80 * (1 - share)), 6: round(80 * (1 - deeper))}, **more)


def d2(*by_task: tuple[Curve, Curve]) -> Claim:
    rest = {"skip": kept(1.0), "shuffle": kept(1.0)}
    return depth._d2({f"task-{i}": {"noise": a, "freeze": b, **rest} for i, (a, b) in enumerate(by_task)}, "", 0)


@pytest.mark.parametrize(
    ("noise", "freeze", "verdict", "half", "double"),
    [
        (0.0, 0.0, "holds", "holds", "holds"),
        (0.05, 0.0, "holds", "partly", "holds"),  # upper bound .10
        (0.0, 0.9, "partly", "partly", "partly"),
        (0.9, 0.0, "partly", "partly", "partly"),
        (0.9, 0.9, "fails", "fails", "fails"),
    ],
)
def test_d2(noise: float, freeze: float, verdict: str, half: str, double: str) -> None:
    claim = d2((kept(noise), kept(freeze)))
    assert claim.value == pytest.approx(max(noise, freeze))
    assert (claim.verdict, claim.at_half, claim.at_double) == (verdict, half, double)
    for part, share in zip(claim.reason.split("; "), (noise, freeze), strict=True):
        assert part.endswith("met") == (share <= 0.05)


def test_d2_between_its_two_bounds_is_neither_held_nor_failed() -> None:
    """Retention of .30 is not chance level, but "fails" asks for a lower bound above .50 under both."""
    for noise, freeze in ((0.3, 0.3), (0.1, 0.1), (0.9, 0.3), (0.3, 0.9), (0.55, 0.9)):
        assert d2((kept(noise), kept(freeze))).verdict == "partly"


def test_d2_looks_at_the_largest_retention_up_to_a_quarter_of_the_layers() -> None:
    # At 5 = L/4 half is left, at 6 all.
    at_quarter = curve({0: 80, 5: 40, 6: 0})
    assert d2((at_quarter, at_quarter)).value == pytest.approx(0.5)
    below = curve({0: 80, 2: 20, 3: 80, 6: 0})
    claim = d2((kept(0.0), below))
    assert (claim.value, claim.verdict) == (pytest.approx(0.75), "partly")
    rng = np.random.default_rng(0)
    drawn = rng.integers(0, 100, (4000, 100))
    retained = ((drawn >= 20) & (drawn < 80)).sum(1) / (drawn < 80).sum(1)
    assert claim.interval == pytest.approx(np.quantile(retained, [0.025, 0.975]), abs=0.015)


def test_d2_is_of_what_is_above_chance_and_the_median_over_tasks() -> None:
    # .80 → .35 with chance .30: .05 of .50 are left.
    claim = d2((kept(0.4375, chance=0.3), kept(0.4375, chance=0.3)))
    assert claim.value == pytest.approx(0.1)
    three = d2(*[(kept(share), kept(0.0)) for share in (0.0, 0.025, 0.9)])
    assert (three.value, three.verdict) == (pytest.approx(0.025), "holds")


# --- which tasks are judged ---


def test_tasks_at_chance_and_short_tasks_are_not_judged_and_said() -> None:
    def all_of(c: Curve) -> dict[str, Curve]:
        return dict.fromkeys(("freeze", "skip", "noise"), c)

    found = {
        "capitals": all_of(safe_from(8)),
        "cities": all_of(safe_from(20, right=59, chance=0.5)),
        "arithmetic": all_of(safe_from(20, n=99)),
    }
    judged, reason = depth._judged(found, 100, "passkey is too long")
    assert list(judged) == ["capitals"]
    assert reason.split("; ") == [
        "passkey is too long",
        "cities: clean accuracy 0.59 is not above chance (0.50)",
        "arithmetic has 99 items, fewer than 100",
    ]
    assert list(depth._judged(found, 60, "")[0]) == ["capitals", "arithmetic"]
    d1_claim = depth._d1(judged, reason, 0)
    assert d1_claim.value == pytest.approx(0.4)
    assert d1_claim.reason.endswith("arithmetic has 99 items, fewer than 100")
    for rule in (depth._d1, depth._d2, depth._d4):
        claim = rule({}, reason, 0)
        assert (claim.verdict, claim.reason) == ("not tested", reason)
        assert rule({}, "", 0).reason == "no task was run"


def test_nothing_right_is_at_chance() -> None:
    nothing = curve({0: 0}, n=100, right=0)
    assert depth._judged({"capitals": {"noise": nothing}}, 60, "")[0] == {}


# --- D3 ---

OBEYED = {"original": 0.0, "donor": 1.0}
IGNORED = {"original": 1.0, "donor": 0.0}
L3 = 30
KS = depths(L3, 10)  # 0 3 6 10 13 16 19 23 26 29


def swaps(
    shares: Mapping[int, Mapping[str, float]], n: int = 60, name: str = "capitals", ks: Sequence[int] = KS
) -> pd.DataFrame:
    """From which depth on what share of ``n`` pairs says what; the rest says something else."""
    rows = []
    for k in ks:
        now = shares[max(start for start in shares if start <= k)]
        said = [word for word, share in now.items() for _ in range(round(share * n))]
        said += ["other"] * (n - len(said))
        rows += [{"set": name, "k": k, "pair": pair, "said": word} for pair, word in enumerate(said)]
    return pd.DataFrame(rows).sample(frac=1, random_state=0)


def d3(*sets: pd.DataFrame, size: str = "standard", why_not: str = "") -> Claim:
    by_set = {items["set"].iloc[0]: items for items in sets}
    counts = pd.DataFrame(
        [{"set": s, "prompts": 90, "right": 30, "pairs": items.pair.nunique()} for s, items in by_set.items()]
    )
    return depth_swap.d3(by_set, counts, L3, Options(size=size), why_not)


@pytest.mark.parametrize(
    ("shares", "verdict", "half", "double", "reason"),
    [
        ({0: OBEYED, 13: IGNORED}, "holds", "partly", "holds", "ignored at every tested k ≥ 2L/3"),
        # At 10 = L/3 the donor must still be ahead, at 13 no more.
        ({0: OBEYED, 10: IGNORED}, "partly", "partly", "partly", "not every tested k ≤ L/3"),
        ({0: {"original": 0.5, "donor": 0.5}, 3: OBEYED, 13: IGNORED}, "partly", "partly", "partly", "not every"),
        # At 23, the first tested one above 2L/3, the original must be back; at 19 not yet.
        ({0: OBEYED, 23: IGNORED}, "holds", "partly", "holds", "donor above original at every tested"),
        ({0: OBEYED, 26: IGNORED}, "partly", "partly", "partly", "donor at 23 1 ["),
        # The donor's upper bound: 3 of 60 are .05, up to .137.
        ({0: OBEYED, 20: {"original": 0.95, "donor": 0.05}}, "partly", "partly", "holds", "donor at 23 0.05 ["),
        # The original's lower bound: 51 of 60 are .85, from .739 on.
        ({0: OBEYED, 20: {"original": 0.85, "donor": 0.0}}, "partly", "partly", "holds", "original at 23 0.85 ["),
        ({0: OBEYED}, "fails", "fails", "fails", "donor at 23 1 ["),
        ({0: IGNORED}, "fails", "fails", "fails", "not every tested k ≤ L/3"),
        ({0: {"other": 1.0}}, "fails", "fails", "fails", "original at 23 0 ["),
    ],
)  # fmt: skip
def test_d3(shares: Mapping[int, Mapping[str, float]], verdict: str, half: str, double: str, reason: str) -> None:
    claim = d3(swaps(shares))
    assert (claim.verdict, claim.at_half, claim.at_double) == (verdict, half, double)
    assert reason in claim.reason


def test_two_thirds_of_the_layers_are_among_the_upper_ones() -> None:
    ks = (0, 5, 10, 15, 20, 25)
    assert d3(swaps({0: OBEYED, 20: IGNORED}, ks=ks)).verdict == "holds"
    late = d3(swaps({0: OBEYED, 25: IGNORED}, ks=ks))
    assert late.verdict == "partly"
    assert "donor at 20 1 [" in late.reason


def test_the_crossover_is_where_two_lines_meet() -> None:
    """Donor .75 to .25 ahead at 10, original .90 to .10 at 13: from +.50 to −.80 in 3 layers."""
    shares = {0: OBEYED, 10: {"original": 0.25, "donor": 0.75}, 13: {"original": 0.9, "donor": 0.1}, 16: IGNORED}
    claim = d3(swaps(shares))
    assert claim.value == pytest.approx((10 + 3 * 0.5 / 1.3) / L3)
    original, donor = (
        np.stack([np.repeat(row, 60) for row in columns], 1)
        for columns in ([0.0, 0.25, 0.9, 1.0], [1.0, 0.75, 0.1, 0.0])
    )
    assert depth_swap.crossover(original, donor, np.array([6.0, 10, 13, 16])) == pytest.approx(10 + 3 * 0.5 / 1.3)
    rng = np.random.default_rng(0)
    lead10, lead13 = np.repeat([-1, 1], [15, 45]), np.repeat([-1, 1], [54, 6])
    drawn = []
    for _ in range(4000):
        rows = rng.integers(0, 60, 60)
        a, b = lead10[rows].mean(), lead13[rows].mean()
        drawn.append((10 + 3 * a / (a - b)) / L3)
    assert claim.interval == pytest.approx(np.quantile(drawn, [0.025, 0.975]), abs=0.003)


def test_a_crossover_is_for_good() -> None:
    """The last time that the donor is ahead counts; ahead at the deepest, it is never overtaken."""
    back = {0: OBEYED, 6: IGNORED, 16: OBEYED, 19: IGNORED}
    claim = d3(swaps(back))
    assert (claim.value, claim.verdict) == (pytest.approx((16 + 3 / 2) / L3), "partly")
    assert d3(swaps({0: OBEYED, 6: IGNORED, 29: OBEYED})).verdict == "fails"


def test_the_pairs_of_all_sets_count_together_and_stay_apart() -> None:
    """Pairs of two sets bear the same numbers, and are others."""
    sets = swaps({0: OBEYED, 13: IGNORED}, 40), swaps({0: OBEYED, 23: IGNORED}, 20, "months")
    claim = d3(*sets)
    assert claim.verdict == "holds"
    assert claim.n == "60 pairs (40 capitals, 20 months)"
    # From 13 to 19 40 of 60 ignore the donor: +1 at 10, −1/3 at 13.
    assert claim.value == pytest.approx((10 + 3 * 1 / (1 + 1 / 3)) / L3)


def test_d3_not_tested() -> None:
    few = d3(swaps({0: OBEYED, 13: IGNORED}, 59))
    assert few.verdict == "not tested"
    assert few.reason == "59 pairs, fewer than 60: 30 of 90 capitals prompts right"
    assert d3(swaps({0: OBEYED, 13: IGNORED}, 40), size="quick").verdict != "not tested"
    assert d3(swaps({0: OBEYED, 13: IGNORED}, 39), size="quick").verdict == "not tested"
    nothing = depth_swap.d3({}, pd.DataFrame(), L3, Options(), "no layer has attention")
    assert (nothing.verdict, nothing.reason) == ("not tested", "no layer has attention")


def test_too_few_pairs_are_the_reason_whatever_became_of_the_tasks() -> None:
    claim = d3(swaps({0: OBEYED, 13: IGNORED}, 5), why_not="arithmetic takes 300 tokens, the model was trained on 256")
    assert claim.verdict == "not tested"
    assert "5 pairs, fewer than 60" in claim.reason


# --- tables ---


def items_of(spec: str, by_name: Mapping[str, Curve]) -> pd.DataFrame:
    """What the cell of a task keeps, in no order."""
    task, frames = find(spec), []
    clean = next(iter(by_name.values()))
    ends = [("clean", clean.layers, clean.clean, clean.logprob)]
    for name, c in by_name.items():
        columns = zip(c.ks, c.changed.T, c.changed_logprob.T, strict=True)
        ends += [(name, int(k), right, logprob) for k, right, logprob in columns]
    for name, k, right, logprob in ends:
        ids = [f"i{i}" for i in range(len(right))]
        frames.append(
            pd.DataFrame({"id": ids, "correct": right, "logprob": logprob}).assign(
                manipulation=name, k=k, chance=clean.chance, prompt_tokens=9, task=task.name, variant=task.variant
            )
        )
    return pd.concat(frames).sample(frac=1, random_state=1)


def done_with(**by_spec: Mapping[str, Curve]) -> dict[str, Any]:
    return {f"{TASK}/{slug(spec)}": {"depth_items": items_of(spec, curves)} for spec, curves in by_spec.items()}


def test_curves_come_back_from_items_in_any_order() -> None:
    rng = np.random.default_rng(0)
    noisy = curve({0: 30, 8: 5, 14: 0}, ks=(0, 3, 12, 19))
    noisy = Curve(LAYERS, noisy.ks, noisy.clean, noisy.changed, rng.normal(size=100), rng.normal(size=(100, 4)), 0.25)
    freeze = Curve(
        LAYERS, np.array([2.0, 10.0]), noisy.clean, 1 - noisy.changed[:, :2], noisy.logprob,
        -noisy.changed_logprob[:, :2], 0.25,
    )  # fmt: skip
    found = depth_tables.curves(done_with(capitals={"noise": noisy, "freeze": freeze}), ["capitals", "cities"], LAYERS)
    assert list(found) == ["capitals"]
    assert set(found["capitals"]) == {"noise", "freeze"}
    for name, expected in (("noise", noisy), ("freeze", freeze)):
        got = found["capitals"][name]
        assert (got.layers, got.chance, got.ks.tolist()) == (LAYERS, 0.25, expected.ks.tolist())
        # Items may come in another order, the same one in all columns.
        one, other = (
            np.column_stack([c.logprob, c.clean, c.changed, c.changed_logprob])[np.argsort(c.logprob)]
            for c in (got, expected)
        )
        assert np.array_equal(one, other)


def test_the_table_of_depths_ends_with_the_clean_model() -> None:
    c = curve({0: 30, 5: 2}, ks=(0, 5, 10), nats={0: 0.7, 10: 0.1}, chance=0.25)
    table = depth_tables.depth({"capitals:filler=48": {"noise": c}}, 0)
    assert table.k.tolist() == [0, 5, 10, LAYERS]
    assert set(table.task + table.variant + table.manipulation) == {"capitalsfiller=48noise"}
    first, last = table.iloc[0], table.iloc[-1]
    assert (first.n, first.accuracy, first.clean, first.loss, first.chance) == pytest.approx((100, 0.5, 0.8, 0.3, 0.25))
    assert (first.low, first.high) == pytest.approx(wilson(50, 100))
    assert (first.loss_low, first.loss_high) == pytest.approx(agresti_min(c.clean, c.changed[:, 0]))
    assert first.dlogprob == pytest.approx(-0.7)
    assert first.dlogprob_low < first.dlogprob < first.dlogprob_high < -0.69
    assert first.logprob == pytest.approx(-2.7)
    assert (last.accuracy, last.loss, last.dlogprob, last.dlogprob_low, last.dlogprob_high) == (0.8, 0, 0, 0, 0)
    assert last.loss_low < 0 < last.loss_high


def test_the_table_of_safe_depths() -> None:
    found = {
        "capitals": {"noise": curve({0: 30, 6: 1}, nats={0: 0.4, 6: 0.2}), "skip": safe_from(LAYERS)},
        "cities": {"noise": safe_from(0, right=55, chance=0.5)},
        "arithmetic": {"freeze": curve({0: 10, 6: 0}, n=40, right=30, nats={0: 0.4, 9: 0.05})},
    }
    noise, skip, at_chance, few = depth_tables.safe_depth(found).itertuples()
    assert (noise.task, noise.manipulation, noise.k, noise.share) == ("capitals", "noise", 6, pytest.approx(0.3))
    assert (noise.loss, noise.dlogprob, noise.n, noise.epsilon) == pytest.approx((0.01, -0.2, 100, 0.05))
    assert 0.03 < noise.loss_high < 0.05
    assert noise.reason == ""
    assert np.isnan([skip.k, skip.share, skip.loss, skip.loss_high, skip.dlogprob]).all()
    assert "0 to 19" in skip.reason
    assert np.isnan([at_chance.k, at_chance.share]).all()
    assert at_chance.reason == "not tested: clean accuracy 0.55 is not above chance (0.50)"
    # Of 40 items the bound of no loss is .0467; the log-likelihood decides.
    assert (few.k, few.dlogprob) == (9, pytest.approx(-0.05))
    assert "0.1 nats" in few.reason


def test_the_table_of_swaps() -> None:
    items = swaps({0: {"original": 0.2, "donor": 0.5}, 13: IGNORED}, 10, "months")
    done = {f"{SWAP}/months": {"swap_items": items}, f"{SWAP}/numbers": {REFUSED: pd.DataFrame({"reason": ["x"]})}}
    table = depth_tables.swap(done)
    assert (table["set"].unique().tolist(), table.k.tolist(), table.n.unique().tolist()) == (["months"], KS, [10])
    row = table.iloc[2]
    assert (row.original, row.donor, row.other) == pytest.approx((0.2, 0.5, 0.3))
    assert (row.donor_low, row.donor_high) == pytest.approx(wilson(5, 10))
    assert (row.original_low, row.original_high) == pytest.approx(wilson(2, 10))


def test_the_cost_of_prefill_by_hand(demo: rs.LM) -> None:
    """Width 576, 9 heads and 3 key-value heads of 64, 1,536 in the middle; queries are paid for too."""
    table = depth_tables.depth_cost(demo, {}).set_index("k")
    q, kv, out, mlp, norms = 576 * 576, 2 * 576 * 192, 576 * 576, 3 * 576 * 1536, 2 * 576
    share = (q + kv) / (q + kv + out + mlp + norms)
    assert table.flops[[0, 15, 30]].tolist() == pytest.approx([share, 0.5 + 0.5 * share, 1.0], rel=1e-6)
    assert table.share[15] == 0.5
    assert table.speedup.isna().all()
    timed = pd.DataFrame({"k": [15], "seconds": [0.5], "full_seconds": [0.9], "tokens": [512]})
    table = depth_tables.depth_cost(demo, {COST: {"prefill": timed}}).set_index("k")
    assert table.speedup.dropna().to_dict() == {15: pytest.approx(1.8)}
    assert len(table) == 31


# --- the study's end, from cells to claims ---


def test_a_model_that_nothing_could_be_asked_says_why(tmp_path: Any) -> None:
    """One token a character, trained on 128: its tasks do not fit."""
    lm = rs.load(str(small(tmp_path)))
    result = depth.finish(lm, Options(size="full", tasks=("passkey:tokens=300",)), {})
    assert [(claim.id, claim.verdict) for claim in result.claims] == [(f"D{i}", "not tested") for i in (1, 2, 3, 4)]
    assert all("128" in claim.reason for claim in result.claims)
    refused = {f"{TASK}/capitals": {REFUSED: pd.DataFrame({"reason": ["out of memory"]})}}
    result = depth.finish(lm, Options(size="quick"), refused)
    assert all("out of memory" in claim.reason for claim in result.claims)


def test_verdicts_of_the_demo_s_shape(demo: rs.LM) -> None:
    """30 layers: quick on 64 capitals; 60 items would do for D2 alone."""

    def finish(n: int, size: str) -> dict[str, Claim]:
        clean, logprob = (np.arange(n) < n - 4).astype(float), np.full(n, -1.0)

        def safe(k: int) -> Curve:
            changed = np.where(np.arange(30) < k, 0.0, clean[:, None])
            return Curve(30, np.arange(30.0), clean, changed, logprob, np.repeat(logprob[:, None], 30, 1))

        cell = items_of("capitals", {"noise": safe(21), "freeze": safe(12), "skip": safe(25)})
        found = depth.finish(demo, Options(size=size), {f"{TASK}/capitals": {"depth_items": cell}})
        assert set(found.tables) == {"depth", "safe_depth", "depth_cost"}
        return {claim.id: claim for claim in found.claims}

    quick = finish(64, "quick")
    assert [claim.verdict for claim in quick.values()] == ["holds", "holds", "not tested", "partly"]
    assert quick["D1"].value == pytest.approx(0.7)
    assert quick["D3"].reason.startswith("0 pairs")
    few = finish(60, "quick")
    assert [claim.verdict for claim in few.values()] == ["not tested", "holds", "not tested", "not tested"]
    assert "capitals has 60 items, fewer than 64" in few["D1"].reason
    standard = finish(99, "standard")
    assert "capitals has 99 items, fewer than 100" in standard["D4"].reason
    assert standard["D2"].verdict == "holds"


# --- what is run ---


def test_depths_are_spread_evenly_with_both_ends() -> None:
    assert depths(30, 10) == KS == [0, 3, 6, 10, 13, 16, 19, 23, 26, 29]
    assert depths(30, None) == list(range(30))
    assert depths(6, 10) == list(range(6))
    for layers in range(1, 60):
        some = depths(layers, 10)
        assert (some[0], some[-1], len(some)) == (0, layers - 1, min(10, layers))
        assert max(np.diff(some), default=0) <= -(-layers // 9)


def test_plans_follow_size_tasks_and_limit() -> None:
    assert dict(plan(Options(size="quick")).tasks) == {"capitals": 64}
    assert plan(Options(size="quick")).pairs >= 40
    for size in ("standard", "full"):
        assert plan(Options(size=size)).tasks["capitals"] >= 100
        assert plan(Options(size=size)).pairs >= 60
    own = plan(Options(tasks=("cities", "passkey:tokens=64"), limit=70))
    assert (dict(own.tasks), own.pairs) == ({"cities": 70, "passkey:tokens=64": 70}, 60)
    few = manipulations(plan(Options()), 30, "capitals")
    assert {name: len(ks) for name, ks in few.items()} == {"freeze": 30, "skip": 30, "noise": 10, "noise-but-0": 10}
    full = manipulations(plan(Options(size="full")), 30, "arithmetic")
    assert {name: len(ks) for name, ks in full.items()} == {"freeze": 30, "skip": 30, "noise": 30, "shuffle": 30}
    assert depth_plan.EPSILON == 0.05


def test_pairs_can_trade_places() -> None:
    sides = [(1, 7), (1, 8), (2, 9), (1, 7), (2, 3), (1, 5)]  # tokens of the word, first token of the answer
    every = {
        (i, j)
        for i in range(6)
        for j in range(6)
        if sides[i][0] == sides[j][0] and sides[i][1] != sides[j][1]
    }  # fmt: skip
    found = swap_pairs.chosen(sides, 100, 0)
    assert len(found) == len(set(found))
    assert set(found) == every
    assert (0, 3) not in found
    some = swap_pairs.chosen(sides, 4, 0)
    assert len(some) == 4
    assert set(some) < every
    assert some == swap_pairs.chosen(sides, 4, 0)
    assert {tuple(swap_pairs.chosen(sides, 4, seed)) for seed in range(5)} != {tuple(some)}
    uses = np.zeros(6)
    for seed in range(300):
        for i, _ in swap_pairs.chosen(sides, 3, seed):
            uses[i] += 1
    assert stats.chisquare(uses, [sum(i == a for a, _ in every) * 900 / len(every) for i in range(6)]).pvalue > 1e-4


def test_the_prompts_of_a_set_differ_in_one_word_and_have_its_own_answer(demo: rs.LM) -> None:
    known = {"January": "February", "December": "January", "one": "two", "nineteen": "twenty", "France": "Paris"}
    usable = {}
    for name, make in swap_pairs.SETS.items():
        sides = list(make(demo))
        assert len({side.word for side in sides}) == len(sides)
        # Without the last place of its word, where its states are swapped, every prompt is the same.
        assert len({tuple(side.prompt.rsplit(side.word, 1)) for side in sides}) == 1
        assert all(known.pop(side.word, side.answer) == side.answer for side in sides)
        usable[name] = sum(side.prompt.count(side.word) == 1 for side in sides)
    assert known == {}
    # Words that stand in a prompt's own examples are left out.
    assert usable == {"capitals": 100, "months": 8, "numbers": 15}

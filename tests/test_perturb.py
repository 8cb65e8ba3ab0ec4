"""Text out of order, what the perturbation study scores, claim P5's rule, and the controlled distance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from scipy import stats
from small import small
from tiny import VOCABULARY, tiny

import rotoscope as rs
from rotoscope.engine import Engine
from rotoscope.interventions.shift import ShiftPositions
from rotoscope.model.call import AttentionCall
from rotoscope.results import Claim
from rotoscope.studies import distance, perturb
from rotoscope.studies.options import Options
from rotoscope.studies.transpose import transpose, word_starts

TOKENS = 200
IDS = torch.randint(3, VOCABULARY, (TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
FEW = IDS[:96]


# ---- transposition --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["adjacent", "arbitrary", "window-8"])
@pytest.mark.parametrize("share", [0.0, 0.01, 0.02, 0.05, 0.10, 0.20, 0.50])
def test_tokens_change_places(kind: str, share: float) -> None:
    made = transpose(TOKENS, share, kind, seed=4)
    new = made.apply(IDS)
    assert sorted(new) == sorted(IDS)
    assert new[0] == IDS[0]
    assert (made.order == np.arange(TOKENS)).all() == (share == 0 or (kind == "window-8" and share < 0.03))
    # every token of a pair, or of a window, moves
    assert abs(made.moved.sum() - share * TOKENS) <= (4 if kind == "window-8" else 1)
    assert made.share == made.moved.sum() / TOKENS
    for token, by in enumerate(made.displacement):
        assert new[token + by] == IDS[token]
    moved = np.flatnonzero(made.moved)
    assert made.mean_shift == pytest.approx(np.mean([abs(made.displacement[i]) for i in moved]) if len(moved) else 0)
    if kind == "adjacent":
        assert set(np.abs(made.displacement)) <= {0, 1}
    if kind == "window-8":
        assert all(made.order[i] != i and (made.order[i] - 1) // 8 == (i - 1) // 8 for i in moved)


@pytest.mark.parametrize("share", [0.02, 0.20, 0.50])
def test_neighbours_and_arbitrary_pairs_are_the_same_tokens(share: float) -> None:
    one, other = (transpose(TOKENS, share, kind, seed=9) for kind in ("adjacent", "arbitrary"))
    assert (one.moved == other.moved).all()
    assert other.mean_shift > 20  # a third of the text on average
    assert (transpose(TOKENS, share, seed=8).moved != one.moved).any()


def test_every_token_but_the_first_is_as_likely_to_move() -> None:
    moved = np.mean([transpose(11, 0.4, seed=seed).moved for seed in range(4000)], 0)
    assert moved[0] == 0
    # of 10 places in a row with 2 pairs, by counting the 28 ways to lay them
    ways = [(a, b) for a in range(1, 10) for b in range(a + 2, 10)]
    expected = [np.mean([i in (a, a + 1, b, b + 1) for a, b in ways]) for i in range(11)]
    assert len(ways) == 28
    assert np.abs(moved - expected).max() < 0.03


def test_words_move_whole() -> None:
    starts = [0, 2, 3, 6, 7, 9, 12, 13, 16, 18]
    words = [IDS[a:b] for a, b in zip(starts, [*starts[1:], 20], strict=True)]
    for kind in ("adjacent", "arbitrary", "window-3"):
        lengths = set()
        for seed in range(30):
            made = transpose(20, 0.6, kind, seed=seed, starts=starts)
            new, left = made.apply(IDS[:20]), list(words)
            assert new[:2] == words[0]
            at = 0
            while at < 20:  # ids are drawn from 94: no word begins like another
                word = next(w for w in left if new[at : at + len(w)] == w)
                left.remove(word)
                at += len(word)
            if kind == "arbitrary":
                # words of equal length change places, so that nothing between them moves
                assert all(made.displacement[i] in (0, *np.subtract.outer(starts, starts).ravel()) for i in range(20))
                stays = [i for w, i in zip(words, starts, strict=True) if not made.moved[i]]
                lengths |= {len(words[starts.index(i)]) for i in stays}
                assert all(made.order[i] == i for i in stays)
        assert kind != "arbitrary" or lengths <= {1, 2, 3}


class Pieces:
    """A tokenizer of given pieces, which loses the blank in front of a text as many do."""

    pieces = (" the", " c", "at", ",", "\n", "its", " paw", " ", "s")

    def decode(self, ids: Sequence[int], **_: Any) -> str:
        return "".join(self.pieces[i] for i in ids).removeprefix(" ")


def test_words_begin_behind_blanks() -> None:
    lm = rs.wrap(tiny("llama"), Pieces())
    assert word_starts(lm, range(9)) == [0, 1, 4, 5, 6, 7, 8]
    with pytest.raises(rs.errors.BadInput, match="words need a tokenizer"):
        word_starts(rs.wrap(tiny("llama")), range(9))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((10, 1.5), "from 0 to 1"),
        ((10, 1.0), "of 10 tokens or words, the first fixed, 100% cannot"),
        ((10, 0.9, "window-8"), None),
        ((17, 1.0, "window-12"), None),
        ((10, 0.5, "window-1"), "adjacent, arbitrary or window-8"),
        ((10, 0.5, "sorted"), "adjacent, arbitrary or window-8"),
        ((12, 1.0, "window-4"), "do not fit into runs of 4"),
    ],
)
def test_bad_transpositions(arguments: tuple[Any, ...], message: str | None) -> None:
    if message is None:
        assert transpose(*arguments, seed=0).moved.any()
        return
    with pytest.raises(rs.errors.BadInput, match=message):
        transpose(*arguments, seed=0)


# ---- what is scored -------------------------------------------------------------------------------------------------


def nll(model: Any, ids: Sequence[int], places: Sequence[int] | None = None) -> list[float]:
    """Nats of every token, the first one's 0; position ids given outright."""
    row = torch.tensor([list(ids)])
    at = torch.arange(row.shape[1])[None] if places is None else torch.tensor([list(places)])
    with torch.no_grad():
        logits = model(input_ids=row, attention_mask=torch.ones_like(row), position_ids=at, use_cache=False).logits
    likely = logits[0].double().log_softmax(-1)
    return [0.0, *(-likely[i - 1, ids[i]].item() for i in range(1, len(ids)))]


class Places:
    """The position ids and token ids that a model's decoder is given, forward by forward."""

    def __init__(self, model: Any):
        self.seen: list[tuple[list[int], list[int]]] = []
        model.model.register_forward_pre_hook(self._see, with_kwargs=True)

    def _see(self, module: Any, args: Any, given: dict[str, Any]) -> None:
        ids = given["input_ids"][0].tolist()
        at = given.get("position_ids")
        self.seen.append((ids, list(range(len(ids))) if at is None else at[0].tolist()))


def test_the_study_equals_forwards_done_by_hand() -> None:
    lm = rs.wrap(tiny("llama", dtype=torch.float64))
    seen = Places(lm.model)
    kinds = perturb.KINDS
    shares = (0.0, 0.05, 0.20)
    table = perturb.perturb(lm, FEW, shares, kinds, seed=3)["perturb"].set_index(["kind", "share"])
    forwards = seen.seen[:]
    assert len(forwards) == 1 + 2 * len(kinds), "clean once, and nothing run where nothing moves"
    clean = nll(lm.model, FEW)
    for i, share in enumerate(shares[1:]):
        of = dict(zip(kinds, forwards[1 + i * len(kinds) :], strict=False))
        swapped = of["swap-arbitrary"][0]
        disturbed = {t for t in range(len(FEW)) if swapped[t] != FEW[t]}  # equal ids may have changed places too
        jitter = [at - t for t, at in enumerate(of["jitter-arbitrary"][1])]
        moved = {t for t, by in enumerate(jitter) if by}
        assert disturbed <= moved
        assert 0 not in moved
        assert abs(len(moved) - share * len(FEW)) <= 1
        assert moved == {t for t, at in enumerate(of["jitter-adjacent"][1]) if at != t}
        assert all(0 <= at < len(FEW) for at in of["jitter-arbitrary"][1])
        kept = [t for t in range(2, len(FEW)) if not {t, t - 1, t - 2} & moved]
        for kind in kinds[:4]:
            after = nll(lm.model, *of[kind])
            row = table.loc[(kind, share)]
            assert row.targets == len(kept)
            assert row.achieved == pytest.approx(len(moved) / len(FEW))
            assert row.clean == pytest.approx(np.mean([clean[t] for t in kept]), abs=1e-9)
            assert row.nll == pytest.approx(np.mean([after[t] for t in kept]), abs=1e-9)
            assert row.dnll == pytest.approx(np.mean([after[t] - clean[t] for t in kept]), abs=1e-9)
            assert abs(row.dnll) > 1e-4
        shift = np.mean([abs(jitter[t]) for t in moved])
        for kind in ("swap-arbitrary", "jitter-arbitrary", "rotate-arbitrary"):
            assert table.loc[(kind, share)].mean_shift == pytest.approx(shift)
        assert table.loc[("jitter-adjacent", share)].mean_shift == table.loc[("swap-adjacent", share)].mean_shift == 1
        assert of["rotate-arbitrary"] == (FEW, list(range(len(FEW))))
    rotated = table.loc["rotate-arbitrary"].dnll
    assert abs(rotated[0.20]) > 1e-4
    # one draw of signs for all layers is jitter; here every layer has its own
    assert abs(rotated[0.20] - table.loc[("jitter-arbitrary", 0.20)].dnll) > 1e-6
    for kind in kinds:
        assert table.loc[(kind, 0.0), ["dnll", "achieved", "mean_shift"]].tolist() == [0, 0, 0]


def test_targets_need_two_undisturbed_tokens_in_front() -> None:
    moved = np.zeros(12, bool)
    moved[[4, 8]] = True
    assert np.flatnonzero(perturb.targets(moved)).tolist() == [2, 3, 7, 11]


# ---- the study ------------------------------------------------------------------------------------------------------


def ran(lm: rs.LM, **options: Any) -> tuple[dict[str, pd.DataFrame], Claim, list[str]]:
    some = Options(**options)
    cells = perturb.cells(lm, some)
    tables, (claim,) = perturb.finish(lm, some, Engine(None, progress=False).run(lm, cells))
    return tables, claim, [cell.name for cell in cells]


def test_sizes(tmp_path: Any) -> None:
    lm = rs.load(str(small(tmp_path / "model")))
    tables, claim, names = ran(lm, size="quick")
    assert names == [f"perturb/text-{i}" for i in range(6)]
    assert list(tables) == ["perturb"]
    assert sorted(set(tables["perturb"].kind)) == ["jitter-arbitrary", "swap-arbitrary"]
    assert sorted(set(tables["perturb"].share)) == [0.05, 0.20]
    assert claim.verdict != "not tested"
    quick = sum(cell.cost for cell in perturb.cells(lm, Options(size="quick")))
    assert quick == 6 * 128 * 5  # 256 tokens where the model was trained on so many
    tables, _, _ = ran(lm, size="standard", texts=2, tokens=64)
    assert tables["perturb"].groupby(["kind", "share"]).size().tolist() == [1] * 35
    assert sorted(set(tables["perturb"].kind)) == sorted(perturb.KINDS)
    for share, of in tables["perturb"].groupby("share"):
        assert of.targets.nunique() == 1, share
        assert (of.n == 2).all()
    assert sorted(tables["distance"].columns) == ["d", "distance_axis_shift", "head", "key_axis_shift", "layer"]


def test_without_position_ids_swaps_still_run(tmp_path: Any) -> None:
    lm = rs.load(str(small(tmp_path / "model", "bloom")))
    tables, claim, _ = ran(lm, size="quick", texts=2, tokens=64)
    assert set(tables["perturb"].kind) == {"swap-arbitrary"}
    assert (tables["perturb"].n == 2).all()
    assert claim.verdict == "not tested"
    assert "no positions from position ids" in claim.reason
    assert "only swaps of the text were run" in claim.reason


def test_learned_positions_are_jittered_and_not_rotated(tmp_path: Any) -> None:
    lm = rs.load(str(small(tmp_path / "model", "gpt2")))
    tables, claim, names = ran(lm, size="standard", texts=2, tokens=64)
    assert set(tables["perturb"].kind) == set(perturb.KINDS) - {"rotate-arbitrary"}
    assert claim.verdict != "not tested"
    assert "distance" not in tables
    assert not any("distance" in name for name in names)


def test_texts_that_are_too_short(tmp_path: Any) -> None:
    lm = rs.load(str(small(tmp_path / "model")))
    _, claim, _ = ran(lm, size="quick", texts=2, tokens=16)
    assert (claim.verdict, "too short" in claim.reason) == ("not tested", True)
    _, claim, _ = ran(lm, size="quick", texts=1, tokens=64)
    assert (claim.verdict, "no interval" in claim.reason) == ("not tested", True)


def test_means_over_texts_with_t_intervals() -> None:
    values = [0.01, 0.03, 0.02, np.nan, 0.06]
    columns = {"kind": "swap-adjacent", "share": 0.5, "achieved": 0.5, "mean_shift": 1.0, "targets": [5, 5, 5, 0, 5]}
    row = perturb.summary(pd.DataFrame({**columns, "dnll": values})).iloc[0]
    kept = np.array(values)[[0, 1, 2, 4]]
    half = stats.t.ppf(0.975, 3) * kept.std(ddof=1) / 2
    assert (row.n, row.targets) == (4, 20)
    assert [row.dnll, row.low, row.high] == pytest.approx([kept.mean(), kept.mean() - half, kept.mean() + half])


# ---- the rule -------------------------------------------------------------------------------------------------------

Bounds = tuple[float, float]
MINOR, BETWEEN, HARM = (0.0, 0.04), (0.03, 0.07), (0.06, 0.10)
CLEAR = (0.2, 0.4)


def judged(swaps: Bounds, jitter: Bounds, many_swaps: Bounds = CLEAR, many_jitter: Bounds = CLEAR) -> Claim:
    rows = [
        (kind, share, share, 80.0, 8, 1000, (low + high) / 2, low, high)
        for kind, share, (low, high) in (
            ("swap-arbitrary", 0.05, swaps), ("jitter-arbitrary", 0.05, jitter),
            ("swap-arbitrary", 0.20, many_swaps), ("jitter-arbitrary", 0.20, many_jitter),
        )
    ]  # fmt: skip
    columns = ["kind", "share", "achieved", "mean_shift", "n", "targets", "dnll", "low", "high"]
    return perturb.p5(pd.DataFrame(rows, columns=columns))


@pytest.mark.parametrize(
    ("bounds", "verdict"),
    [
        ((MINOR, MINOR), "holds"),
        ((BETWEEN, MINOR), "partly"),
        ((MINOR, BETWEEN), "partly"),
        ((HARM, MINOR), "partly"),
        ((MINOR, HARM), "partly"),
        ((BETWEEN, HARM), "partly"),
        ((HARM, HARM), "fails"),
        ((HARM, HARM, MINOR, MINOR), "fails"),
        ((MINOR, MINOR, BETWEEN, CLEAR), "partly"),
        ((MINOR, MINOR, CLEAR, BETWEEN), "partly"),
        ((MINOR, MINOR, MINOR, CLEAR), "partly"),
        ((MINOR, MINOR, CLEAR, MINOR), "partly"),
        (((0.0, 0.05), (0.0, 0.05)), "holds"),  # at most .05
        ((MINOR, MINOR, (0.05, 0.4), CLEAR), "partly"),  # more than .05
    ],
)
def test_p5(bounds: tuple[Bounds, ...], verdict: str) -> None:
    claim = judged(*bounds)
    assert claim.verdict == verdict
    assert claim.value == pytest.approx(sum(bounds[0]) / 2)
    assert claim.interval == bounds[0]
    assert claim.null == pytest.approx(sum(bounds[1]) / 2)
    assert claim.n == "8 texts, 1000 targets at 5%, 1000 at 20%"
    for label in ("swaps at 5%", "jitter at 5%", "swaps at 20%", "jitter at 20%"):
        assert label in claim.reason


def test_p5_at_half_and_double() -> None:
    claim = judged(MINOR, MINOR, (0.08, 0.2), (0.08, 0.2))
    assert (claim.at_half, claim.at_double) == ("partly", "partly")  # .04 is above .025; .08 is below .10
    claim = judged(HARM, HARM)
    assert (claim.at_half, claim.at_double) == ("fails", "holds")
    assert claim.detectable == pytest.approx((1.96 + 0.84) / 1.96 * 0.02, rel=0.01)


def test_p5_needs_all_that_it_judges() -> None:
    table = pd.DataFrame(
        [("swap-arbitrary", 0.05, 0.05, 80.0, 8, 1000, 0.02, 0.0, 0.04)],
        columns=["kind", "share", "achieved", "mean_shift", "n", "targets", "dnll", "low", "high"],
    )
    claim = perturb.p5(table)
    assert (claim.verdict, claim.reason) == ("not tested", "jitter-arbitrary at 5% was not run")


# ---- controlled distance --------------------------------------------------------------------------------------------


class Logits:
    def __init__(self, layer: int):
        self.layer = layer

    def observe(self, call: AttentionCall) -> None:
        if call.layer == self.layer:
            self.of = call.logits()[0, :, 1:, 1:].numpy()  # position 0 out


@pytest.mark.parametrize("family", ["llama", "gpt_oss", "phi", "cohere2"])
def test_axes_move_as_in_the_running_model(family: str) -> None:
    """Logits of all pairs, from the model itself with one layer at a dummy distance."""
    lm = rs.wrap(tiny(family, dtype=torch.float64))
    ids = FEW[:40]
    row = torch.tensor([ids])
    at = (1, 7, 30)
    table = distance.distances(lm, ids, at, at_once=1)["distance"].set_index(["layer", "d"])
    assert sorted({layer for layer, _ in table.index}) == [layer.layer for layer in lm.anatomy.rotary]
    for layer in lm.anatomy.rotary:
        found = {}
        for d in (0, *at):
            seen = Logits(layer.layer)
            with (
                torch.no_grad(),
                ShiftPositions("dummy", distance=d, layers=layer.layer).on(lm),
                rs.tap(lm, seen),
            ):
                lm.model(input_ids=row, attention_mask=torch.ones_like(row), use_cache=False)
            found[d] = seen.of
        unit = found[0].std(-1)  # [heads, queries]
        unit = np.sqrt((unit**2).mean(-1))
        for d in at:
            change = found[d] - found[0]
            mean = change.mean(-1, keepdims=True)
            of = table.loc[(layer.layer, d)]
            assert of["head"].tolist() == list(range(layer.heads))
            assert of.distance_axis_shift.to_numpy() == pytest.approx(np.sqrt((mean**2).mean((-1, -2))) / unit)
            assert of.key_axis_shift.to_numpy() == pytest.approx(np.sqrt(((change - mean) ** 2).mean((-1, -2))) / unit)


def test_a_head_whose_keys_differ_in_still_dims_alone_is_additive() -> None:
    """Keys that are alike wherever they rotate: distance moves every key's logit by the same."""
    lm = rs.wrap(tiny("phi", dtype=torch.float64))
    for layer in lm.anatomy.rotary:
        module = lm.model.model.layers[layer.layer].self_attn
        turning = torch.arange(layer.kv_heads * layer.head_dim) % layer.head_dim < layer.rotary_dims
        with torch.no_grad():
            module.k_proj.weight[turning] = 0
            module.k_proj.bias[turning] = 1.0
    table = distance.distances(lm, FEW, (3, 20), at_once=2)["distance"]
    assert table.key_axis_shift.max() < 1e-6
    assert table.distance_axis_shift.min() > 0.05

"""All studies on all controls: every number is that of the study on the control alone."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest
import torch

import rotoscope as rs
from rotoscope.controls import audit, sets
from rotoscope.model.shipped import POSITIONS
from rotoscope.studies import Options, texts

FEW = Options("quick", texts=2, tokens=48, limit=4, tasks=("key_value:pairs=2",), disrupt=("none",), parts=("perturb",))


@pytest.fixture(scope="module")
def result():
    return audit.audit(options=FEW)


def test_claims_are_those_of_the_studies(result):
    table = result.tables["control_claims"]
    assert set(zip(table.positions, table.seed, strict=True)) == {(p, s) for p in POSITIONS for s in (0, 1)}
    alone = rs.studies.position.run(rs.load("control:rope-1"), **vars(FEW)).claims
    mine = table[(table.positions == "rope") & (table.seed == 1)].set_index("id")
    for claim in alone:
        row = mine.loc[claim.id]
        assert row.verdict == claim.verdict
        if claim.value is not None:
            assert row.value == pytest.approx(claim.value)
            assert (row.low, row.high) == pytest.approx(claim.interval)
    without = table[table.positions == "none"].set_index("id").reason
    assert without.loc["P1"].str.contains("no layer rotates").all()


def test_m5_is_judged_once_from_the_curves(result):
    assert [claim.id for claim in result.claims] == ["M5"]
    assert set(result.tables["control_gaps"].positions) == {"learned", "alibi", "none"}


def test_shares_are_those_of_the_heads(result):
    heads, shares = result.tables["control_massive_heads"], result.tables["control_shares"]
    row = shares.set_index(["positions", "tensor", "part"]).loc[("rope", "K", "upper half")]
    some = heads[(heads.positions == "rope") & (heads.tensor == "K") & (heads.layer >= 2)]
    assert row.ratio == pytest.approx(some.max_ratio.mean())
    assert row.share == pytest.approx((some["count"] > 0).mean())
    assert (row.heads, row.seeds) == (12, 2)
    assert row.ratio_low <= row.ratio <= row.ratio_high


def test_likelihood_past_the_trained_length(result):
    table = result.tables["control_length"]
    furthest = table.groupby("positions").position.max()
    assert furthest["learned"] < 256 <= furthest[["rope", "alibi", "none"]].min()
    nll = []
    for seed in (0, 1):
        lm = rs.load(f"control:none-{seed}")
        whole = Options("quick", texts=2, tokens=512)
        for text in texts.texts(rs.wrap(lm.model, lm.tokenizer, trained_length=10**6), whole):
            ids = torch.tensor([text.ids])
            with torch.no_grad():
                logits = lm.model(input_ids=ids).logits.double().log_softmax(-1)
            nll.append(np.mean([-logits[0, i - 1, ids[0, i]].item() for i in range(320, 384)]))
    row = table[(table.positions == "none") & (table.position == 320)].iloc[0]
    assert row.nll == pytest.approx(np.mean(nll), abs=1e-5)
    assert row.n == 2


def test_another_set_and_resuming(tmp_path, result):
    some = sets.members()[:4]
    root = tmp_path / "set"
    root.mkdir()
    for control in some:
        (root / control.name).symlink_to(control.folder)
    first = audit.audit(root, out=tmp_path / "out", options=FEW)
    again = audit.audit(root, out=tmp_path / "out", options=FEW, resume=True)
    assert first.claims[0].verdict == "not tested"
    for name, table in first.tables.items():
        pd.testing.assert_frame_equal(table, again.tables[name])
    mine = first.tables["control_claims"]
    theirs = result.tables["control_claims"]
    both = mine.merge(theirs[theirs.seed == 0], on=["positions", "seed", "id"], suffixes=("", "_"))
    assert len(both) == len(mine)
    assert np.allclose(both.value, both.value_, equal_nan=True)

"""What the disruption and depth studies run, on the demo model, against the interventions used one by one."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import rotoscope as rs
from rotoscope.interventions import Disrupt, Freeze, Noise, SkipAttention, Swap
from rotoscope.observers.entropy import probabilities
from rotoscope.studies import depth_cells, disruption
from rotoscope.studies.arms import GRIDS, grid
from rotoscope.studies.disruption import SCORED
from rotoscope.studies.options import Options
from rotoscope.studies.swap_pairs import SETS

SEED = 3


def test_fewer_items_are_some_of_those_that_the_other_arms_are_asked(demo: rs.LM) -> None:
    """Passkeys lie at depths spread over their number: five asked anew would be none of these twelve."""
    every = disruption.score(demo, "passkey:tokens=64", 12, 12, SEED, None, 2048)["items"].set_index("id")
    some = disruption.score(demo, "passkey:tokens=64", 12, 5, SEED, None, 2048)["items"].set_index("id")
    assert len(some) == 5
    assert set(some.index) < set(every.index)
    assert np.allclose(some.logprob, every.logprob[some.index], atol=1e-3)


def test_a_cell_scores_what_evaluate_scores_under_the_intervention(demo: rs.LM) -> None:
    how = {"selection": "change-matched", "positions": "all"}
    tables = disruption.score(demo, "capitals", 6, 6, SEED, how, 2048)
    expected = rs.evaluate(demo, "capitals", n=6, seed=SEED, under=Disrupt(**how, seed=SEED))
    assert np.allclose(tables["items"].logprob, expected.logprob, atol=1e-4)
    other = rs.evaluate(demo, "capitals", n=6, seed=SEED, under=Disrupt(**how, seed=SEED + 1))
    assert not np.allclose(tables["items"].logprob, other.logprob, atol=1e-2)
    measured = tables["measured"].iloc[0]
    assert 0 < measured.change < measured.energy
    assert measured.heads == 6 * 30 * (9 + 3)


def test_every_size_asks_all_arms_from_one_set_of_items(demo: rs.LM) -> None:
    for size in GRIDS:
        options = Options(size=size)
        of_size = grid(options)
        assert of_size is not None
        n: dict[str, set[int]] = {}
        for cell in disruption.cells(demo, options):
            if cell.name.startswith(SCORED):
                n.setdefault(str(cell.arguments["spec"]), set()).add(cell.arguments["n"])
                assert cell.arguments["take"] <= cell.arguments["n"]
        assert set(n) == set(of_size.tasks)
        assert all(len(counts) == 1 for counts in n.values())


def test_divergence_of_attention_against_softmaxes_by_hand(demo: rs.LM) -> None:
    ids = demo.encode("The grass is green. The sky is blue. The sun is yellow.").tolist()
    how = {"selection": "top-2", "positions": "all"}
    found = disruption.attend(demo, ids, SEED, how, 30)["attention"].set_index("layer")
    clean = disruption.attend(demo, ids, SEED, None, 30)["attention"]
    assert np.allclose(clean.kl, 0, atol=1e-12)
    by_parts = disruption.attend(demo, ids, SEED, how, 7)["attention"].set_index("layer")
    assert np.allclose(by_parts, found, atol=1e-5)

    class Weights:
        def __init__(self) -> None:
            self.of: dict[int, torch.Tensor] = {}

        def observe(self, call: rs.model.call.AttentionCall) -> None:
            self.of[call.layer] = probabilities(call).double()

    before, after = Weights(), Weights()
    with torch.no_grad():
        with rs.tap(demo, before):
            demo.model(torch.tensor([ids]))
        with Disrupt(**how).on(demo), rs.tap(demo, after):
            demo.model(torch.tensor([ids]))
    for layer in (0, 13, 29):
        p, q = before.of[layer], after.of[layer]
        kl = sum(float(a * (a / b).log()) for a, b in zip(p.flatten(), q.flatten(), strict=True) if a > 0)
        assert found.kl[layer] == pytest.approx(kl / (9 * len(ids)), rel=1e-4)
        assert found.sink_mass[layer] == pytest.approx(float(q[..., 0].mean()), rel=1e-4)


def test_disruption_makes_the_logits_of_a_text_less_or_more_additive_and_clean_is_the_study_s_own(demo: rs.LM) -> None:
    ids = demo.encode(
        "A claim that fails on a model is a finding, and it is shown as plainly as one that holds."
    ).tolist()
    clean = disruption.additivity(demo, ids, SEED, None, 30)["additivity"]
    from rotoscope.studies.observe import observe

    heads = observe(demo, ids, SEED, ())["heads"]
    assert np.allclose(clean.form1_within, heads.groupby("layer").form1_within.mean(), atol=1e-9)
    zeroed = disruption.additivity(demo, ids, SEED, {"selection": "top-8", "replacement": "zero"}, 30)["additivity"]
    assert (zeroed.form1_within - clean.form1_within).abs().max() > 0.02


def test_outputs_are_what_generate_writes(demo: rs.LM) -> None:
    table = disruption.outputs(demo, "capitals", 2, SEED, {"selection": "top-2", "positions": "all"})["outputs"]
    prompt = "Question: What is the capital of China?\nAnswer: The capital of China is"
    assert table.prompt[0] == prompt
    batch = demo.tokenizer(prompt, return_tensors="pt")
    with Disrupt(selection="top-2", positions="all").on(demo):
        written = demo.model.generate(**batch, max_new_tokens=disruption.OUTPUT_TOKENS, do_sample=False, pad_token_id=0)
    text = demo.tokenizer.decode(written[0, batch.input_ids.shape[1] :], skip_special_tokens=True)
    assert table.answer[0] == text
    assert table.correct[0] == float("Beijing" in text[:9])


def test_a_swept_task_is_the_task_under_each_intervention(demo: rs.LM) -> None:
    ks = {"freeze": [18, 24], "skip": [25], "noise": [26], depth_cells.NOISE_BUT_0: [26]}
    items = depth_cells.sweep(demo, "capitals", 6, SEED, ks, 2048)["depth_items"].set_index(["manipulation", "k"])
    ways = {
        ("clean", 30): None,
        ("freeze", 18): Freeze(18),
        ("freeze", 24): Freeze(24),
        ("skip", 25): SkipAttention(25),
        ("noise", 26): Noise(26, seed=SEED),
        (depth_cells.NOISE_BUT_0, 26): Noise(26, seed=SEED, exempt_first=True),
    }
    assert set(items.index) == set(ways)
    for key, how in ways.items():
        expected = rs.evaluate(demo, "capitals", n=6, seed=SEED, under=how)
        assert np.allclose(items.loc[key].logprob, expected.logprob, atol=2e-3), key
        assert (items.loc[key].correct.to_numpy() == expected.correct.to_numpy()).all(), key


def test_a_swap_is_the_intervention_s(demo: rs.LM) -> None:
    tables = depth_cells.swap(demo, "months", 5, SEED, [3, 23, 28], 2048)
    counts = tables["swap_counts"].iloc[0]
    assert (counts.prompts, counts.right, counts.pairs) == (8, 8, 5)
    sides = {side.word: side for side in SETS["months"](demo)}
    items = tables["swap_items"]
    assert len(items) == 15
    pair = items[items.pair == 0].set_index("k").said
    # whichever pair it was, one of all ordered pairs of months must have just these three outcomes
    known = [word for word in sides if word not in ("April", "May", "September", "October")]

    def outcome(own: str, donor: str, k: int) -> str:
        batch = demo.tokenizer(sides[own].prompt, return_tensors="pt")
        how = Swap(k, sides[donor].prompt, span=own, donor_span=donor)
        with torch.no_grad(), how.on(demo):
            token = demo.tokenizer.decode(demo.model(**batch).logits[0, -1].argmax()).strip()
        return {sides[own].answer: "original", sides[donor].answer: "donor"}.get(token, "other")

    assert pair[3] == outcome(known[0], known[1], 3) == "donor"
    assert pair[28] == outcome(known[0], known[1], 28) == "original"


def test_seconds_of_a_shallow_prefill_are_measured(demo: rs.LM) -> None:
    table = depth_cells.prefill(demo, [10, 20], 32, SEED)["prefill"]
    assert table.k.tolist() == [10, 20]
    assert (table[["seconds", "full_seconds"]] > 0).all(None)

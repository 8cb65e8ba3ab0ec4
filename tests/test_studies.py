"""Studies on tiny models: what is written, what is refused, what a resumed run gives."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from small import characters
from tiny import tiny

import rotoscope as rs
from rotoscope.results import CATALOGUE
from rotoscope.studies import STUDIES, Options, conduct, observe, plan, texts
from rotoscope.studies.massive import pooled
from rotoscope.studies.swap_pairs import SETS

FEW = {"size": "quick", "texts": 2, "tokens": 60}


@pytest.fixture(scope="module")
def lm() -> rs.LM:
    return rs.wrap(tiny("llama"), characters())


@pytest.fixture(scope="module")
def result(lm: rs.LM) -> rs.Result:
    return conduct(list(STUDIES.values()), lm, Options(**FEW))


def test_the_tables_hold_what_is_promised(result: rs.Result) -> None:
    promised = {
        "heads": {"layer", "head", "form1", "form1_within", "form2", "form2_within", "predicted", "causal"},
        "massive": {"layer", "head", "tensor", "dim", "pair", "ratio", "energy_share", "offset"},
        "magnitudes": {"layer", "head", "tensor", "dim", "pair", "rms", "ratio", "rms_pre", "ratio_pre", "sign0"},
        "explanation": {"arm", "kind", "value", "low", "high", "low_heads", "high_heads", "n_heads", "n_texts"},
        "stability": {"tensor", "text_a", "text_b", "rule", "jaccard"},
        "layers": {"layer", "kind", "position", "form1_within", "max_ratio_q", "entropy", "sink_mass"},
    }
    for name, columns in promised.items():
        assert columns <= set(result.tables[name].columns), name
    assert len(result.tables["heads"]) == 12
    assert len(result.tables["magnitudes"]) == 3 * (4 + 2 + 2) * 16
    assert {c.id for c in result.claims} == set(CATALOGUE)
    arms = set(result.tables["explanation"].arm)
    assert {"as_it_is", "both_means_removed", "isotropic", "matched_gaussian", "random_both_means_removed"} <= arms


def test_values_follow_from_single_texts_and_seeds(lm: rs.LM, result: rs.Result) -> None:
    options = Options(**FEW)
    some = texts.texts(lm, options)
    alone = [observe.observe(lm, t.ids, seed=i)["heads"] for i, t in enumerate(some)]
    mean = np.mean([a.form2_within for a in alone], axis=0)
    assert np.allclose(result.tables["heads"].form2_within, mean, atol=1e-12)
    row = result.tables["explanation"].set_index(["arm", "kind"]).loc[("as_it_is", "form2_within")]
    per_text = [a.form2_within.mean() for a in alone]
    half = 12.706204736 * np.std(per_text, ddof=1) / np.sqrt(2)  # Student's t, one degree of freedom
    assert row.value == pytest.approx(np.mean(per_text))
    assert row.high - row.value == pytest.approx(half, rel=1e-6)
    twin = observe.observe_twin(lm, some[0].ids, seed=0)["heads"]
    assert not np.allclose(twin.form1, alone[0].form1, atol=1e-3)


def test_random_twins_differ_by_seed_repeat_with_it_and_leave_the_global_generator_alone(lm: rs.LM) -> None:
    from rotoscope.model.twin import random_twin

    before = torch.get_rng_state()
    one, same, other = (random_twin(lm, seed).model.lm_head.weight for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one, same)
    assert not torch.equal(one, other)


def test_twins_of_quantized_and_adapted_models_are_of_the_plain_class(lm: rs.LM) -> None:
    from peft import LoraConfig, get_peft_model

    from rotoscope.model.twin import random_twin

    adapted = rs.wrap(get_peft_model(tiny("llama"), LoraConfig(target_modules=["q_proj"])), characters())
    assert type(random_twin(adapted, 0).model) is type(lm.model)


def test_pooled_magnitudes_are_those_of_all_tokens_together() -> None:
    rng = np.random.default_rng(0)
    parts = [rng.normal(size=(n, 6)) * np.arange(1, 7) + 1 for n in (10, 30)]

    def frame(x: np.ndarray) -> pd.DataFrame:
        own = {"n": len(x), "mean": x.mean(0), "rms": np.sqrt((x**2).mean(0)), "first": x[0]}
        return pd.DataFrame(
            {"layer": 0, "tensor": "Q", "head": 0, "dim": np.arange(6), "pair": np.arange(6) % 3}
            | own
            | {"mean_pre": own["mean"], "rms_pre": own["rms"]}
        )

    out = pooled([frame(x) for x in parts])
    whole = np.concatenate(parts)
    rms = np.sqrt((whole**2).mean(0))
    assert np.allclose(out.rms, rms)
    assert np.allclose(out.ratio, rms / rms.mean())
    assert np.allclose(out.offset, abs(whole.mean(0)) / whole.std(0))
    rest = whole.sum(0) - sum(x[0] for x in parts)
    assert np.array_equal(out.sign0, np.sign(sum(x[0] for x in parts)) * np.sign(rest))


def test_unrotated_dims_come_back_to_their_own_places() -> None:
    """Interleaved, partial rotary: the un-rotated magnitudes of a key against the key projection's own output."""
    lm = rs.wrap(tiny("glm"), characters())
    kept = {}
    handle = lm.model.model.layers[0].self_attn.k_proj.register_forward_hook(lambda m, a, out: kept.update(k=out))
    dims = observe.observe(lm, range(3, 63), seed=0)["dims"]
    handle.remove()
    truth = kept["k"].detach().double().view(60, -1, lm.anatomy.layers[0].head_dim).square().mean(0).sqrt()
    mine = dims[(dims.layer == 0) & (dims.tensor == "K")].rms_pre.to_numpy()
    assert np.allclose(mine, truth.flatten(), rtol=1e-5)


def test_models_without_rotation_say_so_and_keep_the_rest() -> None:
    lm = rs.wrap(tiny("gpt2"), characters())
    found = conduct(list(STUDIES.values()), lm, Options(**FEW))
    verdicts = {c.id: (c.verdict, c.reason) for c in found.claims}
    for claim in ("P1", "P2", "P3", "M2"):
        assert verdicts[claim][0] == "not tested"
        assert "rotates" in verdicts[claim][1]
    assert verdicts["M1"][0] in ("holds", "partly", "fails")
    assert set(found.tables["layers"].position) == {"learned"}
    assert found.tables["heads"].causal.notna().all()


def test_layers_without_attention_are_named_not_dropped() -> None:
    found = conduct(list(STUDIES.values()), rs.wrap(tiny("jamba", layers=4), characters()), Options(**FEW))
    assert len(found.tables["layers"]) == len(found.tables["anatomy"]) == 4
    assert "none" in set(found.tables["layers"].kind)


def test_mixed_layers_fit_only_those_that_rotate() -> None:
    found = conduct([STUDIES["position"]], rs.wrap(tiny("cohere2"), characters()), Options(**FEW))
    heads = found.tables["heads"].groupby("position").form1.count()
    assert heads["none"] == 0
    assert heads["rotary"] == 8


def test_a_run_is_the_same_in_memory_on_disk_and_resumed(lm: rs.LM, result: rs.Result, tmp_path: Path) -> None:
    studies = list(STUDIES.values())
    conduct(studies, lm, Options(**FEW), out=tmp_path / "whole")
    # As if the run had been killed while that cell was in work.
    shutil.rmtree(tmp_path / "whole/cells/observe/trained/text-1")
    (tmp_path / "whole/summary.json").unlink()
    before = {p.name: p.read_bytes() for p in (tmp_path / "whole/tables").iterdir()}
    conduct(studies, lm, Options(**FEW), out=tmp_path / "whole", resume=True)
    after = {p.name: p.read_bytes() for p in (tmp_path / "whole/tables").iterdir()}
    assert before == after
    kept = rs.read(tmp_path / "whole")
    assert [c.verdict for c in kept.claims if c.id in ("P1", "M1")] == [
        c.verdict for c in result.claims if c.id in ("P1", "M1")
    ]
    pd.testing.assert_frame_equal(kept.tables["heads"], result.tables["heads"])
    assert kept.provenance["first_token_ids"]
    with pytest.raises(rs.BadInput, match="seed"):
        conduct(studies, lm, Options(**FEW, seed=1), out=tmp_path / "whole", resume=True)


def test_a_single_study_is_one_call(lm: rs.LM) -> None:
    found = rs.studies.massive.run(lm, **FEW)
    assert {c.id for c in found.claims} == {"M1", "M2", "M3", "M4"}


def test_a_plan_names_cells_and_runs_nothing(lm: rs.LM) -> None:
    table = plan(list(STUDIES.values()), lm, Options(**FEW))
    observed = table[table.cell.str.startswith("observe/")]
    assert len(observed) == 2 + 3
    assert observed.token_forwards.sum() == 2 * 60 + 3 * 1.5 * 60
    # Every prompt of single characters is longer than what this model was trained on: no task can be asked.
    causal = {f"{name}/text-{i}" for name in ("replace/all", "perturb") for i in range(2)}
    methods = {f"methods/{name}" for name in ("rtn-int8", "rtn-int4", "w8a8")}
    quantized = {f"quantization/{name}" for name in ("grid", "reference", "cache/texts", *methods)}
    swaps = {f"depth/swap/{name}" for name in SETS}
    assert set(table.cell) - set(observed.cell) == {"depth/cost", *swaps, *causal, *quantized}


@pytest.mark.parametrize(
    ("text", "options", "message"),
    [
        ("", {}, "0 tokens"),
        (" \n ", {}, "0 tokens"),
        ("too short", {}, "9 tokens"),
        ("x" * 100, {"tokens": 8}, "too short"),
    ],
)
def test_texts_too_short_to_measure_are_bad_input(lm: rs.LM, text: str, options: dict[str, int], message: str) -> None:
    with pytest.raises(rs.BadInput, match=message):
        texts.texts(lm, Options(text=text, **options))


def test_texts_are_distinct_and_no_more_than_the_text_gives(lm: rs.LM) -> None:
    some = texts.texts(lm, Options(text="".join(chr(97 + i % 26) for i in range(130)), texts=5, tokens=50))
    assert [len(t.ids) for t in some] == [50, 50]
    assert some[0].ids != some[1].ids
    longest = texts.texts(lm, Options(texts=1, tokens=10**6))
    assert len(longest[0].ids) == lm.trained_length


@pytest.mark.parametrize(
    "wrong", [{"size": "huge"}, {"texts": 0}, {"tokens": -1}, {"limit": 0}, {"seed": -1}, {"seed": 2**40}]
)
def test_options_out_of_range_are_bad_input(wrong: dict[str, int]) -> None:
    with pytest.raises(rs.BadInput):
        Options(**wrong)  # type: ignore[arg-type]


def test_stretches_of_blanks_are_no_texts(lm: rs.LM) -> None:
    """A tokenizer that swallows runs of blanks leaves some stretches nearly empty."""

    class Swallowing:
        def __call__(self, text: str, **kwargs: Any) -> Any:
            return lm.tokenizer(" ".join(text.split()), **kwargs)

    swallowing = replace(lm, tokenizer=Swallowing())
    some = texts.texts(swallowing, Options(text="some words " * 40 + " " * 4000, texts=4, tokens=16))
    assert [len(t.ids) for t in some] == [16]


def test_training_mode_changes_no_number(lm: rs.LM) -> None:
    """Dropout would."""
    model = tiny("gpt2", attn_pdrop=0.5, resid_pdrop=0.5, embd_pdrop=0.5)
    wrapped = rs.wrap(model, characters())
    plain = observe.observe(wrapped, range(3, 60), seed=0)
    model.train()
    trained = observe.observe(wrapped, range(3, 60), seed=0)
    assert model.training
    pd.testing.assert_frame_equal(plain["dims"], trained["dims"])


def test_other_weights_under_the_same_name_are_not_resumed(tmp_path: Path) -> None:
    model = tiny("llama")
    wrapped = rs.wrap(model, characters())
    conduct([STUDIES["massive"]], wrapped, Options(**FEW), out=tmp_path / "run")
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[3, 5] += 1
    with pytest.raises(rs.BadInput, match="weights"):
        conduct([STUDIES["massive"]], wrapped, Options(**FEW), out=tmp_path / "run", resume=True)

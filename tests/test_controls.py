"""The matched small models: what differs between them, what they are trained on, how they train and are told apart."""

from __future__ import annotations

import dataclasses
import json
import random

import numpy as np
import pandas as pd
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import rotoscope as rs
from rotoscope.controls import corpus, curve, data, lines, plan, sets, show, train
from rotoscope.errors import BadInput
from rotoscope.model.control import ControlConfig, ControlForCausalLM, alibi_slopes
from rotoscope.model.shipped import POSITIONS
from rotoscope.studies import rope
from rotoscope.tasks import evaluate, find
from rotoscope.tasks.known_values import known

TINY = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "max_position_embeddings": 40, "tie_word_embeddings": True, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 1, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    "initializer_range": 0.2,
}  # fmt: skip


def control(positions, seed=0, **more):
    torch.manual_seed(seed)
    return ControlForCausalLM(ControlConfig(positions=positions, **{**TINY, **more})).double().eval()


def logits(model, ids, **more):
    with torch.no_grad():
        return model(input_ids=ids, **more).logits


@pytest.fixture
def ids():
    return torch.randint(2, 97, (2, 20), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def shipped():
    return {name: rs.load(f"control:{name}") for name in POSITIONS}


class TestModels:
    def test_variants_differ_in_the_position_table_alone(self):
        own = {p: dict(control(p).named_parameters()) for p in POSITIONS}
        for positions, weights in own.items():
            extra = {"model.position_table.weight"} if positions == "learned" else set()
            assert set(weights) - set(own["rope"]) == extra
            assert all(torch.equal(weights[name], of_rope) for name, of_rope in own["rope"].items())

    def test_rope_is_the_plain_decoder(self, ids):
        model = control("rope")
        plain = LlamaForCausalLM(LlamaConfig(**TINY)).double().eval()
        plain.load_state_dict(model.state_dict())
        assert torch.equal(logits(model, ids), logits(plain, ids))

    def test_learned_is_no_positions_with_a_table_added(self, ids):
        model, bare = control("learned"), control("none")
        with torch.no_grad():
            states = model.model.embed_tokens(ids) + model.model.position_table.weight[: ids.shape[1]]
            assert torch.equal(logits(model, ids), bare(inputs_embeds=states).logits)

    def test_no_positions_cannot_tell_earlier_tokens_apart(self, ids):
        model = control("none", num_hidden_layers=1)
        turned = torch.cat([ids[:, :-1].flip(1), ids[:, -1:]], 1)
        assert torch.allclose(logits(model, ids)[:, -1], logits(model, turned)[:, -1], atol=1e-12)
        for positions in ("rope", "learned", "alibi"):
            model = control(positions, num_hidden_layers=1)
            assert not torch.allclose(logits(model, ids)[:, -1], logits(model, turned)[:, -1], atol=1e-3)

    @pytest.mark.parametrize(("attention", "close"), [("eager", 5e-6), ("sdpa", 1e-12)])  # eager takes float32 weights
    def test_alibi_by_hand(self, ids, attention, close):
        model = control("alibi", num_hidden_layers=1)
        model.set_attn_implementation(attention)
        layer, norm = model.model.layers[0], model.model.norm
        with torch.no_grad():
            h = model.model.embed_tokens(ids)
            x = layer.input_layernorm(h)
            q, k, v = (
                of(x).view(2, 20, 2, 16).transpose(1, 2)
                for of in (layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj)
            )
            scores = q @ k.transpose(-1, -2) / 4
            for head, slope in enumerate((2**-4, 2**-8)):
                for i in range(20):
                    for j in range(20):
                        scores[:, head, i, j] += -slope * (i - j) if j <= i else -torch.inf
            mixed = (scores.softmax(-1) @ v).transpose(1, 2).reshape(2, 20, 32)
            h = h + layer.self_attn.o_proj(mixed)
            h = h + layer.mlp(layer.post_attention_layernorm(h))
            assert torch.allclose(model.lm_head(norm(h)), logits(model, ids), atol=close)

    def test_slopes_as_the_paper_has_them(self):
        assert alibi_slopes(8) == [2.0**-i for i in range(1, 9)]
        assert alibi_slopes(3) == [2**-4, 2**-8, 2**-2]

    @pytest.mark.parametrize("positions", POSITIONS)
    def test_padding_cache_and_doctor(self, positions, ids):
        model = control(positions)
        padded = torch.cat([torch.ones(2, 4, dtype=torch.long), ids], 1)
        mask = torch.ones_like(padded)
        mask[:, :4] = 0
        at = (mask.cumsum(-1) - 1).clamp_min(0)
        alone = logits(model, ids)
        assert torch.allclose(logits(model, padded, attention_mask=mask, position_ids=at)[:, 4:], alone, atol=1e-12)
        with torch.no_grad():
            first = model(input_ids=ids[:, :12], use_cache=True)
            rest = model(input_ids=ids[:, 12:], cache=first.cache).logits
        assert torch.allclose(rest, alone[:, 12:], atol=1e-12)
        found = rs.doctor(rs.wrap(model))
        assert found.ok, found.reasons
        means = {"rope": "rotary"}
        assert rs.wrap(model).anatomy.layers[0].position == means.get(positions, positions)

    def test_no_position_past_the_table(self):
        with pytest.raises(BadInput, match="positions 0 to 39"):
            logits(control("learned"), torch.zeros(1, 41, dtype=torch.long))

    def test_unknown_positions(self):
        with pytest.raises(BadInput, match="sinusoidal"):
            ControlConfig(positions="sinusoidal")


class TestCorpus:
    def test_held_out_files_are_not_trained_on_and_the_studies_prose_is_in_neither(self):
        found = corpus.sources()
        prose = rs.studies.texts._default()[:2000]
        for source in found:
            assert source.held_out
            assert set(source.held_out).isdisjoint(source.trained)
            assert not any(prose in text for text in (*source.trained, *source.held_out))
        facts = corpus.manifest(found)
        assert corpus.differences(facts, facts) == []

    def test_another_version_is_named(self):
        recorded = {"sources": [{"name": "rich", "version": "1.0", "sha256": "a"}, {"name": "x", "version": "2"}]}
        here = {"sources": [{"name": "rich", "version": "2.0", "sha256": "b"}]}
        assert corpus.differences(here, recorded) == ["rich 2.0 (recorded: 1.0)", "x missing (recorded: 2)"]


class TestLines:
    def test_answers_are_right(self):
        """Every answer stands in the prompt, or is the value that the task of known values asks for."""
        rng = random.Random(5)
        taught, asked = known(), {"context": 0, "known": 0, "passkey": 0}
        for text, _ in zip(lines.documents(rng), range(400), strict=False):
            pairs = [line[len("The value of ") : -1] for line in text.split("\n") if line.startswith("The value of ")]
            told = dict(pair.split(" is ") for pair in pairs)
            for line in text.split("\n"):
                if line.startswith("Answer: "):
                    key, value = line[len("Answer: The value of ") : -1].split(" is ")
                    assert value == (told | taught)[key]
                    asked["context" if key in told else "known"] += 1
            if "pass key" in text:
                key = text.split("The pass key is ")[1][:5]
                assert text.endswith(f"The pass key is {key}.")
                asked["passkey"] += 1
        assert min(asked.values()) > 20

    def test_known_keys_are_no_keys_of_the_context(self):
        told = {name for example in find("key_value").examples(None, 60, 0) for name in example.id.split("-")[:1]}
        assert told.isdisjoint(known())
        for example in find("known_values").examples(None, 60, 0):
            assert known()[example.id.split("-")[0]] == example.gold[0]
            assert example.gold[0] not in example.prompt


class TestShipped:
    def test_parameters_differ_by_the_table(self, shipped):
        count = {p: sum(x.numel() for x in lm.model.parameters()) for p, lm in shipped.items()}
        hidden = shipped["rope"].anatomy.hidden
        assert count["rope"] == count["alibi"] == count["none"] == count["learned"] - data.LENGTH * hidden

    def test_records_agree_with_the_weights(self, shipped):
        """Accuracies in the records come from runs before the weights were rounded to half precision."""
        for control in sets.members():
            weights = rs.load(control.source).model.parameters()
            assert control.record["parameters"] == sum(x.numel() for x in weights)
            assert abs(control.record["loss"] - control.record["loss_before_rounding"]) < 0.02
        record = {c.name: c.record for c in sets.members()}["rope-0"]
        for task in ("key_value", "known_values"):
            again = evaluate(shipped["rope"], task, n=60, seed=1).correct.mean()
            assert abs(again - record[task]) <= 0.05

    def test_two_seeds_of_every_variant_at_six_steps_or_more(self):
        curves = sets.curves(sets.members())
        steps = curves["control_ratios"].groupby(["positions", "seed"]).step.nunique()
        assert set(steps.index) == {(p, s) for p in POSITIONS for s in (0, 1)}
        assert steps.min() >= 6

    def test_the_last_ratios_are_those_of_the_weights(self, shipped):
        again = curve.Curve(shipped["rope"], np.zeros((0, data.LENGTH), dtype=np.uint16), folder=sets.shipped_set())
        heads = again.heads()
        logged = sets.curves(sets.members())["control_ratios"].query("positions == 'rope' and seed == 0")
        logged = logged[logged.step == logged.step.max()]
        both = heads.merge(logged, on=["layer", "tensor", "head"])
        assert np.allclose(both.max_ratio_x, both.max_ratio_y, rtol=0.01)

    def test_show(self):
        text = show.text(show.rows())
        assert text.count("control:") == 8
        assert "rotoscope controls train --size small --positions rope --seeds 0" in text

    def test_another_name(self):
        with pytest.raises(BadInput, match="control:rope-0"):
            rs.load("control:sinusoidal")

    def test_no_set(self, tmp_path):
        with pytest.raises(BadInput, match="no finished controls"):
            sets.members(tmp_path)


@pytest.fixture
def little(monkeypatch):
    """A size that trains in seconds, on little text."""
    shape = {"layers": 2, "hidden": 64, "heads": 1, "mlp": 64}
    small = dataclasses.replace(plan.PLANS["small"], **shape, steps=6, batch=4, logged=(0, 3, 6))
    monkeypatch.setitem(plan.PLANS, "little", small)
    texts = tuple(f"x_{i} = {i} + {i * i}\n" * 20 for i in range(300))
    monkeypatch.setattr(corpus, "sources", lambda: [corpus.Source("some", "1", texts, ("y = 1\n" * 6000,), "0")])
    monkeypatch.setattr(data, "PROMPTS", 1000)
    monkeypatch.setattr(curve, "TASKS", {"key_value": 4, "known_values": 4, "passkey:tokens=128": 2})
    return "little"


class TestTraining:
    def test_resuming_changes_nothing(self, little, tmp_path, monkeypatch):
        whole = train.train_one(tmp_path / "a", little, "learned", 3)
        monkeypatch.setattr(train, "SAVED_EVERY", 2)
        measure = curve.Curve.measure

        def stopped(self, step):
            if step == 3:
                raise KeyboardInterrupt
            return measure(self, step)

        with monkeypatch.context() as patch:
            patch.setattr(curve.Curve, "measure", stopped)
            with pytest.raises(KeyboardInterrupt):
                train.train_one(tmp_path / "b", little, "learned", 3)
        resumed = train.train_one(tmp_path / "b", little, "learned", 3)
        assert resumed["loss"] == pytest.approx(whole["loss"], abs=1e-6)
        a, b = (pd.read_parquet(tmp_path / x / "learned-3" / "ratios.parquet") for x in "ab")
        pd.testing.assert_frame_equal(a, b, rtol=1e-4)
        assert sorted(a.step.unique()) == [0, 3, 6]

    def test_rows(self, little, tmp_path):
        tokenizer, rows = data.prepare(tmp_path, 40)
        assert rows.trained.shape == (40, data.LENGTH)
        assert (rows.trained[:, 0] == tokenizer.bos_token_id).all()
        read = [tokenizer.decode(row) for row in rows.trained]
        for row in read:
            prompt, *text = row.split("</s>")
            assert "The value of" in prompt or "pass key" in prompt
            assert "x_" not in prompt
            assert all("The value of" not in part and "pass key" not in part for part in text)
        assert sum("x_" in row for row in read) > 20
        assert json.loads((tmp_path / "manifest.json").read_text())["sources"][0]["name"] == "some"

    def test_a_set_is_judged(self, little, tmp_path):
        for positions in ("rope", "none"):
            for seed in (0, 1):
                train.train_one(tmp_path, little, positions, seed)
        claim = rope.judged(sets.curves(sets.members(tmp_path))).claims[0]
        assert claim.id == "M5"
        assert "K, RoPE − none" in claim.reason

    def test_bad_input(self, tmp_path):
        with pytest.raises(BadInput, match="medium"):
            train.train(tmp_path, "medium")
        train._same_set(tmp_path, "small", plan.PLANS["small"])
        with pytest.raises(BadInput, match="steps = 1750, now it is 5"):
            train._same_set(tmp_path, "small", plan.PLANS["small"].of(5))
        with pytest.raises(BadInput, match="--resume"):
            train.train(tmp_path)

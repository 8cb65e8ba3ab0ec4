"""Doctor passes what is exact, says what the model itself does, and catches what mutations break, by name."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny import tiny
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

import rotoscope as rs
from rotoscope.checks.edits import TRIALS
from rotoscope.doctor import Report, doctor, ranges
from rotoscope.model import residual, rotary
from rotoscope.model import tap as taps
from rotoscope.model.call import AttentionCall
from rotoscope.model.rotary import AngleTable
from rotoscope.observers.grams import LayerGrams

torch.set_num_threads(1)

TAP = "tapped = untouched"
CAUSAL = "no later token changes a logit"
OBSERVED = "observers = sums by hand"
WEIGHTS = "softmax(logits) · V = attention"
BEFORE = "un-rotated = those at position 0"
DISTANCE = "logits from un-rotated q, k, i - j"

# family: a part of every note that it must get; no other notes may come
NOTES: dict[str, list[str]] = {
    "llama": [],
    "mistral": [],
    "qwen3": [],
    "qwen3_moe": [],
    "gemma2": [],
    "gpt_oss": [],
    "phi": [],
    "cohere2": ["layers 2: no positions enter queries and keys"],
    "gpt_neox": [],
    "gptj": [],
    "deepseek_v3": [],
    "gpt2": ["layers 0-2: learned positions"],
    "jamba": ["layers 0, 2: no softmax attention", "layers 1: no positions"],
    "gemma3n_text": ["boundary in front", "boundaries 1-2 are not exact: resuming at layer 1", "more than one state"],
}


def examined(family: str, implementation: str | None = None, **overrides: Any) -> Report:
    """The report on a tiny model that was wrapped before anything is broken."""
    return doctor(wrapped(family, implementation, **overrides))


def wrapped(family: str, implementation: str | None = None, **overrides: Any) -> rs.LM:
    model = tiny(family, **overrides)
    if implementation is not None:
        model.set_attn_implementation(implementation)
    return rs.wrap(model)


def faults(report: Report) -> set[str]:
    """The names of the checks that found a fault; each has its sentence."""
    names = set(report.checks[report.checks.verdict == "fault"].check)
    assert not report.ok
    assert all(any(reason.startswith(name) for reason in report.reasons) for name in names)
    return names


@pytest.mark.parametrize("family", NOTES)
def test_a_family_is_exact_and_what_it_does_by_itself_is_noted(family: str) -> None:
    report = examined(family)
    assert report.ok, report.reasons
    assert len(report.notes) == len(NOTES[family])
    assert all(any(part in note for note in report.notes) for part in NOTES[family])
    assert set(report.checks.verdict) <= {"exact", "rounding", "the model's own", "not tested"}
    assert (report.checks.difference[report.checks.check == TAP] == 0).all()


@pytest.mark.parametrize("family", ["gpt2", "gemma2", "gpt_oss", "llama"])
def test_eager_attention_is_exact_too(family: str) -> None:
    report = examined(family, "eager")
    assert report.ok, report.reasons


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", ["llama", "gemma2"])
def test_other_precisions_have_floors_of_their_own(family: str, dtype: torch.dtype) -> None:
    report = examined(family, dtype=dtype)
    assert report.ok, report.reasons


def test_every_way_to_run_a_model_is_tried() -> None:
    report = examined("gemma2")
    cases = {check: set(some.case) for check, some in report.checks.groupby("check")}
    alone, cached = {"1 token", "7 tokens", "33 tokens"}, {"cache, 7 tokens", "cache, 33 tokens", "cache, left padding"}
    batched = {"batch of 2", "left padding", "right padding"}
    assert cases[TAP] == cases[OBSERVED] == cases[WEIGHTS] == alone | batched | cached
    assert cases["the model: row = row alone"] == batched | cached
    assert cases[CAUSAL] == alone | {"left padding"}
    assert cases["a real change is felt"] == set(TRIALS)


def test_a_row_longer_than_a_wide_window_is_among_those_tried() -> None:
    report = examined("mistral", sliding_window=40)
    assert report.ok
    assert "44 tokens" in set(report.checks.case)
    short = examined("mistral", sliding_window=40, max_position_embeddings=36)
    assert "36 tokens" in set(short.checks.case)
    assert any("window of 40 tokens is wider" in note for note in short.notes)


def test_the_table_says_what_each_layer_is_and_what_is_reached() -> None:
    table = examined("jamba", layers=4).table.set_index("layer")
    assert list(table.kind) == ["none", "attention"] * 2
    assert list(table.qkv) == list(table.logits) == ["none", "exact"] * 2
    gpt2 = examined("gpt2").table
    assert list(gpt2.pre_rope) == ["undefined"] * 3
    shared = examined("gemma3n_text").table
    assert list(shared.boundary) == ["exact", "not reached", "not reached"]
    assert shared.why[1] == "h[1] alone does not carry what the layers from here on need"


def test_a_terminal_of_100_columns_holds_the_report() -> None:
    for family in ("gemma2", "jamba"):
        report = examined(family, layers=6)
        assert max(map(len, report.text().splitlines())) <= 100
        assert report.text().endswith("rotoscope is exact here")
    assert "0-5" in examined("llama", layers=6).text()
    assert ranges([7, 0, 1, 2, 4, 5]) == "0-2, 4-5, 7"


def test_the_model_is_left_as_found() -> None:
    lm = wrapped("llama")
    model = lm.model.train()
    model.model.layers[1].eval()
    hook = model.model.layers[0].register_forward_hook(lambda *_: None)
    state, flags = torch.get_rng_state(), [m.training for m in model.modules()]
    weights = {name: p.clone() for name, p in model.named_parameters()}
    report = doctor(lm)
    assert report.ok
    assert "the model is in training mode; it was examined in evaluation mode" in report.notes
    assert [m.training for m in model.modules()] == flags
    assert torch.equal(state, torch.get_rng_state())
    assert type(model.config._attn_implementation) is str
    assert list(model.model.layers[0]._forward_hooks) == [hook.id]
    assert all(torch.equal(p, weights[name]) for name, p in model.named_parameters())
    assert all(p.grad is None for p in model.parameters())


def drop_mask_twin(monkeypatch: pytest.MonkeyPatch) -> None:
    """The tap's attention functions stay registered, their mask functions do not."""
    known = ALL_MASK_ATTENTION_FUNCTIONS._global_mapping
    ours = [name for name in known if str.__str__(name).startswith("rotoscope_")]
    assert ours
    for name in ours:
        monkeypatch.delitem(known, name)


@pytest.mark.parametrize(("implementation", "caught"), [("eager", {TAP, CAUSAL}), ("sdpa", {TAP})])
def test_a_dropped_mask_twin_is_caught(implementation: str, caught: set[str], monkeypatch: pytest.MonkeyPatch) -> None:
    lm = wrapped("llama", implementation)
    drop_mask_twin(monkeypatch)
    assert caught <= faults(doctor(lm))


def test_a_dropped_mask_twin_is_caught_where_it_loses_the_window(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = wrapped("mistral")  # a window of 5
    drop_mask_twin(monkeypatch)
    report = doctor(lm)
    assert TAP in faults(report)
    cases = set(report.checks.case[(report.checks.check == TAP) & (report.checks.verdict == "fault")])
    assert {"7 tokens", "33 tokens", "left padding"} <= cases
    assert "1 token" not in cases


def mutated(lm: rs.LM, **changes: Any) -> rs.LM:
    """The same model with another idea of how its layers rotate."""
    layers = [
        replace(layer, rotation=replace(layer.rotation, **changes)) if layer.rotation else layer
        for layer in lm.anatomy.layers
    ]
    return replace(lm, anatomy=replace(lm.anatomy, layers=tuple(layers)))


@pytest.mark.parametrize(
    ("family", "pairing"), [("llama", "interleaved"), ("phi", "interleaved"), ("glm", "half-split")]
)
def test_mixed_pairing_is_caught(family: str, pairing: str) -> None:
    report = doctor(mutated(wrapped(family), pairing=pairing))
    assert faults(report) == {BEFORE}  # logits of rotated-back vectors are right in any planes
    assert set(report.table.pre_rope) == {"wrong"}


def test_a_wrong_direction_is_caught() -> None:
    assert BEFORE in faults(doctor(mutated(wrapped("llama"), sign=-1)))


def test_wrong_angles_are_caught_though_the_table_is_right() -> None:
    lm = wrapped("llama")
    theta = lm.anatomy.layers[0].rotation.theta  # type: ignore[union-attr]
    assert faults(doctor(mutated(lm, theta=theta * 1.01))) == {DISTANCE}


def test_positions_shifted_by_one_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every logit stays right, for queries and keys are shifted alike."""
    lm = wrapped("llama")
    own = rotary.Rotation.turns

    def shifted(self: rotary.Rotation, table: AngleTable) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = own(self, table)
        turn = torch.polar(torch.ones_like(cos), torch.from_numpy(self.theta).expand_as(cos))
        turned = torch.complex(cos, sin) * turn
        return turned.real, turned.imag

    monkeypatch.setattr(rotary.Rotation, "turns", shifted)
    assert faults(doctor(lm)) == {BEFORE}


@pytest.mark.parametrize("which", ["q", "k"])
def test_a_table_rolled_by_one_token_is_caught(which: str, monkeypatch: pytest.MonkeyPatch) -> None:
    lm = wrapped("gpt_neox")
    own = AttentionCall.unrotate

    def rolled(self: AttentionCall, x: torch.Tensor) -> torch.Tensor:
        if self.table is None or (which == "k" and x is not self.k):
            return own(self, x)
        table = AngleTable(self.table.one.roll(1, 1), self.table.two.roll(1, 1))
        return own(replace(self, table=table), x)

    monkeypatch.setattr(AttentionCall, "unrotate", rolled)
    assert BEFORE in faults(doctor(lm))


def test_a_wrong_map_of_heads_to_key_heads_is_caught_in_the_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(self: AttentionCall, rows: slice = slice(None)) -> torch.Tensor:
        repeat = self.q.shape[1] // self.k.shape[1]
        return self.q[:, :, rows] @ self.k.repeat(1, repeat, 1, 1).transpose(-1, -2) * self.scaling

    lm = wrapped("llama")
    monkeypatch.setattr(AttentionCall, "logits", interleaved)
    report = doctor(lm)
    assert WEIGHTS in faults(report)
    assert set(report.table.logits) == {"wrong"}


def test_a_wrong_map_of_heads_to_key_heads_is_caught_in_the_moments(monkeypatch: pytest.MonkeyPatch) -> None:
    def interleaved(self: LayerGrams, of_keys: torch.Tensor) -> torch.Tensor:
        return of_keys.repeat(self.q.sum.shape[0] // self.k.sum.shape[0], *[1] * (of_keys.ndim - 1))

    lm = wrapped("llama")
    monkeypatch.setattr(LayerGrams, "for_heads", interleaved)
    assert faults(doctor(lm)) == {DISTANCE}


@pytest.mark.parametrize(
    "tokens",
    [
        lambda call: torch.ones(call.q.shape[0], call.q.shape[2], dtype=torch.bool),
        lambda call: call.padding[:, : call.q.shape[2]].bool(),  # takes the wrong end of the mask with a cache
        lambda call: call.padding[:, -call.q.shape[2] :].bool().flip(1),
    ],
    ids=["ignored", "wrong end", "wrong side"],
)
def test_padding_that_an_observer_gets_wrong_is_caught(
    tokens: Callable[[AttentionCall], torch.Tensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    lm = wrapped("gpt2")
    monkeypatch.setattr(AttentionCall, "tokens", property(tokens))
    report = doctor(lm)
    assert faults(report) == {OBSERVED}
    assert "wrong" in set(report.table.qkv)


def test_position_0_that_an_observer_gets_wrong_under_padding_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    def zeroth(call: AttentionCall) -> torch.Tensor:
        first = torch.zeros_like(call.tokens)
        first[:, 0] = call.tokens[:, 0]
        return first

    lm = wrapped("llama")
    monkeypatch.setattr(AttentionCall, "first", property(zeroth))
    assert faults(doctor(lm)) == {OBSERVED}


def test_a_tap_that_changes_an_output_by_little_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = taps._Wiring.attend

    def wrong(self: Any, layer: int, base: Any, *args: Any, **kwargs: Any) -> Any:
        out, weights = attend(self, layer, base, *args, **kwargs)
        return (out * (1 + 1e-6) if layer == 2 else out), weights

    lm = wrapped("llama")
    monkeypatch.setattr(taps._Wiring, "attend", wrong)
    report = doctor(lm)
    assert TAP in faults(report)  # rounding is no excuse for what must not round
    assert report.checks[report.checks.check == TAP].difference.max() < 2e-5


def test_a_hook_left_behind_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = wrapped("llama")
    close = taps._Wiring.close

    def forgets(self: Any, session: Any) -> None:
        self.hooks = self.hooks[1:]
        close(self, session)

    monkeypatch.setattr(taps._Wiring, "close", forgets)
    report = doctor(lm)
    assert faults(report) == {"the model is put back"}
    assert set(report.checks.case[report.checks.verdict == "fault"]) == {"after an exception", "after all checks"}


def test_a_name_left_on_the_config_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = wrapped("llama")
    close = taps._Wiring.close

    def forgets(self: Any, session: Any) -> None:
        self.saved = []
        close(self, session)

    monkeypatch.setattr(taps._Wiring, "close", forgets)
    assert "the model is put back" in faults(doctor(lm))


def test_an_intervention_that_does_nothing_or_too_much_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = wrapped("llama")
    monkeypatch.setitem(TRIALS, "sleeper", lambda lm, real: residual.replace(lm.model, 1, lambda h: h))
    report = doctor(lm)
    assert faults(report) == {"a real change is felt"}
    assert "[sleeper]" in report.reasons[0]
    monkeypatch.setitem(TRIALS, "sleeper", lambda lm, real: residual.replace(lm.model, 1, lambda h: h * 1.0001))
    assert "a change by nothing does nothing" in faults(doctor(lm))


def test_an_edit_that_does_not_reach_a_layer_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = wrapped("llama")
    attend = taps._Wiring.attend

    def deaf(self: Any, layer: int, base: Any, module: Any, q: Any, k: Any, v: Any, *args: Any, **kwargs: Any) -> Any:
        out = attend(self, layer, base, module, q, k, v, *args, **kwargs)
        return base(module, q, k, v, *args, **kwargs) if layer == 1 else out

    monkeypatch.setattr(taps._Wiring, "attend", deaf)
    report = doctor(lm)
    assert "an edit of each layer is felt" in faults(report)
    assert any("layer 1" in reason for reason in report.reasons)


def test_what_is_rounding_is_told_from_a_fault_in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    """A floor below what float32 can do: nothing is wrong, and float64 shows it."""
    lm = wrapped("llama")
    monkeypatch.setattr("rotoscope.checks.bench.rounding_floor", lambda model, dtype: 1e-8)
    report = doctor(lm)
    assert report.ok, report.reasons
    rerun = report.checks[report.checks.difference > report.checks.allowed]
    assert len(rerun) >= 3
    assert (rerun.float64 < 1e-7).all()
    assert set(rerun.verdict) == {"rounding"}


def test_without_memory_for_float64_a_difference_stays_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = wrapped("llama")
    monkeypatch.setattr("rotoscope.checks.bench.rounding_floor", lambda model, dtype: 1e-8)
    monkeypatch.setattr("rotoscope.checks.bench.psutil.virtual_memory", lambda: type("", (), {"available": 1e5}))
    report = doctor(lm)
    assert not report.ok
    assert any("more than is free" in note for note in report.checks.note)


def test_positions_that_a_model_derives_by_itself_are_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that counts padding as text, as one does whose caller gives no position_ids."""
    lm = wrapped("gpt2")
    own = type(lm.model).forward

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, cache: Any = None, use_cache: Any = None):
        return own(self, input_ids=input_ids, attention_mask=attention_mask, cache=cache, use_cache=use_cache)

    monkeypatch.setattr(type(lm.model), "forward", forward)
    report = doctor(lm)
    assert report.ok, report.reasons
    assert any("changes by" in note and "under left padding: it takes no position_ids" in note for note in report.notes)
    assert not any("right padding" in note for note in report.notes)


def test_a_model_that_does_not_run_under_padding_is_noted_not_blamed(monkeypatch: pytest.MonkeyPatch) -> None:
    lm = wrapped("llama")
    own = type(lm.model).forward

    def forward(self: Any, input_ids: Any = None, attention_mask: Any = None, position_ids: Any = None, **rest: Any):
        if attention_mask is not None and not attention_mask.bool().all():
            raise ValueError("no padding here")
        return own(self, input_ids=input_ids, attention_mask=attention_mask, position_ids=position_ids, **rest)

    monkeypatch.setattr(type(lm.model), "forward", forward)
    report = doctor(lm)
    assert report.ok, report.reasons
    assert any("does not run so: ValueError: no padding here" in note for note in report.notes)
    assert "one row" in set(report.checks.case[report.checks.check == BEFORE])


def test_json_holds_numbers_and_null_only() -> None:
    summary = examined("gemma3n_text").summary()
    assert set(summary) == {"model", "ok", "reasons", "notes", "layers", "checks"}
    assert dataclasses.is_dataclass(Report)
    assert {type(row["window"]) for row in summary["layers"]} == {int, type(None)}
    assert all(row["difference"] is None or row["difference"] >= 0 for row in summary["checks"])
    assert {row["verdict"] for row in summary["checks"]} >= {"exact", "the model's own"}

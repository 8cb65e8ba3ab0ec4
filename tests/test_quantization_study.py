"""The quantization study: what it measures against computations by hand, and a planted massive channel."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from small import small
from tiny import tiny

import rotoscope as rs
from rotoscope.engine import Engine
from rotoscope.errors import BadInput, Refused
from rotoscope.interventions import QuantizeKV, parse
from rotoscope.model.projections import projections, row_masks
from rotoscope.model.tap import tap
from rotoscope.quantizers import RTN
from rotoscope.results import Result
from rotoscope.studies import massive, quantization
from rotoscope.studies import quantization_cache as caches
from rotoscope.studies import quantization_cache_cells as cache_cells
from rotoscope.studies import quantization_cells as weight_cells
from rotoscope.studies import quantization_channels as channels
from rotoscope.studies import quantization_logits as logits
from rotoscope.studies.options import Options
from rotoscope.studies.quantization_plan import groups, method
from rotoscope.tasks.forward import Row
from rotoscope.tasks.forward import score as in_one_forward

SOME = {"size": "quick", "texts": 2, "tokens": 64, "limit": 6, "tasks": ("known_values:pairs=1", "key_value:pairs=1")}


def bare(family: str, **overrides: Any) -> rs.LM:
    """A tiny model without a tokenizer, but with its padding."""
    return rs.wrap(tiny(family, **overrides), SimpleNamespace(pad_token_id=0))


def ids(count: int, seed: int = 0) -> list[int]:
    return torch.randint(3, 97, (count,), generator=torch.Generator().manual_seed(seed)).tolist()


def ran(lm: rs.LM, **given: Any) -> tuple[Result, dict[str, Any]]:
    some = Options(**given)
    done = Engine(None, progress=False).run(lm, quantization.cells(lm, some))
    return quantization.finish(lm, some, done), done


@pytest.fixture(scope="module")
def control() -> rs.LM:
    return rs.load("control:rope")


@pytest.fixture(scope="module")
def quick(control: rs.LM) -> tuple[Result, dict[str, Any]]:
    return ran(control, **SOME)


# ---- which rows make a channel --------------------------------------------------------------------------------------


class Seen:
    def __init__(self) -> None:
        self.calls: dict[int, Any] = {}

    def observe(self, call: Any) -> None:
        self.calls[call.layer] = call


@pytest.mark.parametrize("family", ["llama", "gpt_neox", "phi3", "deepseek_v3", "gptj", "falcon"])
@torch.no_grad()
def test_rows_of_projections_give_the_first_token_s_queries_and_keys(family: str) -> None:
    lm = bare(family)
    outputs: dict[str, torch.Tensor] = {}
    hooks = [
        module.register_forward_hook(lambda m, a, out, name=name: outputs.__setitem__(name, out.flatten(0, -2)[0]))
        for name, module in lm.model.named_modules()
        if isinstance(module, torch.nn.Linear)
    ]
    with tap(lm, seen := Seen()):
        lm.model(input_ids=torch.tensor([ids(7)]), use_cache=False)
    for hook in hooks:
        hook.remove()
    found = projections(lm)
    assert sorted(found) == [0, 1, 2]
    for layer, call in seen.calls.items():
        for name, x in (("q", call.q), ("k", call.k)):
            of = found[layer][name]
            made = torch.empty(x.shape[1], x.shape[3])
            for number, module in enumerate(of.modules):
                mine = of.module == number
                made[mine] = outputs[module][of.row[mine]]
            assert torch.allclose(made, x[0, :, 0], atol=1e-6)  # position 0 does not turn


def test_norms_of_queries_and_keys_do_not_hide_their_rows() -> None:
    lm = bare("qwen3")
    of = projections(lm)[1]
    assert of["q"].modules == ("model.layers.1.self_attn.q_proj",)
    assert torch.equal(of["q"].row, torch.arange(96).view(4, 24))
    assert torch.equal(of["k"].row, torch.arange(48).view(2, 24))
    chosen = torch.zeros(2, 24, dtype=torch.bool)
    chosen[1, 3] = True
    masks = row_masks(projections(lm), lm, {1: {"k": chosen}})
    assert {name: mask.nonzero().flatten().tolist() for name, mask in masks.items()} == {
        "model.layers.1.self_attn.k_proj": [27]
    }


def test_queries_of_no_linear_layer_are_refused() -> None:
    with pytest.raises(Refused, match="layer 0 has no linear layers"):
        projections(bare("gpt2"))
    with pytest.raises(Refused, match="its keys do not come from rows"):
        projections(bare("gemma3n_text"))  # its upper layers have the keys of lower ones


# ---- which channels are massive -------------------------------------------------------------------------------------


def test_massive_channels_come_in_pairs_and_fill_half_a_head_at_most() -> None:
    units = torch.arange(16) % 8
    rms = torch.ones(3, 16)
    rms[0, 3] = 30.0  # one massive dim
    rms[1, 9], rms[1, 4] = 1.2, 1.1  # none: the largest, with its partner
    rms[2, :2] = 60.0
    chosen = [row.nonzero().flatten().tolist() for row in channels.massive(rms, units)]
    assert chosen == [[3, 11], [1, 9], [0, 1, 8, 9]]
    still = torch.arange(4)  # no dim turns: each by itself
    assert channels.massive(torch.tensor([[1.0, 9.0, 1.0, 1.0]]), still).tolist() == [[False, True, False, False]]


def test_random_channels_are_as_many_others_in_whole_pairs() -> None:
    lm = bare("llama", layers=5)
    found = channels.find(lm, [ids(40)])
    draws = [found.random(seed) for seed in range(3)]
    for layer, of in found.masks.items():
        for name, mask in of.items():
            for draw in draws:
                random = draw[layer][name]
                assert torch.equal(random.sum(-1), mask.sum(-1))
                assert not (random & mask).any()
                assert torch.equal(random[:, :8], random[:, 8:])
    assert any(not torch.equal(draws[0][layer]["k"], draws[1][layer]["k"]) for layer in found.masks)
    assert torch.equal(found.random(1)[2]["q"], draws[1][2]["q"])
    most = found.layers(2)
    assert min(found.energy[i] for i in most) > max(x for i, x in found.energy.items() if i not in most)
    for seed in range(4):
        assert not set(found.random_layers(2, seed)) & set(most)


# ---- many caches behind one prefill ---------------------------------------------------------------------------------

SPECS = ("quantize-kv:kind=int4:group=8", "quantize-kv:kind=int2:keys=channel:group=8", "quantize-kv:kind=fp8")


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt2", "gemma3n_text", "falcon_h1"])
def test_a_shared_prefill_gives_what_one_forward_each_gives(family: str) -> None:
    lm = bare(family)
    rows = [Row(tuple(ids(n, n)), tuple(ids(m, n + m))) for n, m in ((30, 2), (28, 2), (21, 3), (25, 2), (33, 1))]
    keep = {a.layer: torch.arange(a.head_dim).expand(a.kv_heads, -1) % 5 == 0 for a in lm.anatomy.attention}
    ways = {spec: parse(spec) for spec in SPECS} | {"kept": QuantizeKV("int3", group=8, keep=keep, first=1)}
    stores = {name: caches.Stored(lm, (how,)) for name, how in ways.items()}
    found = caches.score(lm, rows, {**stores, "clean": None}, 200)
    clean = in_one_forward(lm, rows, None, 200)
    assert [x.logprob for x in found["clean"]] == pytest.approx([x.logprob for x in clean], abs=2e-5)
    for name, how in ways.items():
        expected = in_one_forward(lm, rows, how, 200)
        assert [x.logprob for x in found[name]] == pytest.approx([x.logprob for x in expected], abs=2e-5)
        assert [x.likeliest for x in found[name]] == [x.likeliest for x in expected]
        assert max(abs(x.logprob - y.logprob) for x, y in zip(expected, clean, strict=True)) > 1e-2


def test_two_quantizers_share_the_layers_between_them() -> None:
    lm = bare("llama")
    rows = [Row(tuple(ids(20)), tuple(ids(2, 1)))]
    way = caches.Variant("quantize-kv:kind=int2:group=8", "layers", count=1)
    parts = way.parts(lm, [ids(40)])
    (kept,) = channels.find(lm, [ids(40)]).layers(1)
    assert [(part.kind, part.layers) for part in parts] == [
        ("int2", tuple(i for i in range(3) if i != kept)),
        ("int8", (kept,)),
    ]
    found = caches.score(lm, rows, {"both": caches.Stored(lm, parts)}, 200)["both"]
    expected = in_one_forward(lm, rows, rs.interventions.Together(parts), 200)
    assert found[0].logprob == pytest.approx(expected[0].logprob, abs=2e-5)


def test_models_that_cannot_go_on_from_a_cache_are_refused() -> None:
    rows = [Row(tuple(ids(20)), tuple(ids(2, 1)))]
    with pytest.raises(Refused, match="something else than the keys and values"):
        caches.score(bare("deepseek_v3"), rows, {"clean": None}, 200)
    with pytest.raises(Refused, match="to other logits than in one forward"):
        caches.score(bare("jamba"), rows, {"clean": None}, 200)


# ---- what is measured -----------------------------------------------------------------------------------------------


@torch.no_grad()
def likelihoods(model: Any, some: list[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([some]), use_cache=False).logits[0].double().log_softmax(-1)


@pytest.mark.parametrize("family", ["llama", "gemma2", "gpt_neo"])
def test_likelihood_and_divergence_are_those_of_all_logits(family: str) -> None:
    lm, some = bare(family), [ids(100, 1), ids(60, 2)]
    spec = "rtn:bits=3:group=16"
    found = weight_cells.weights(lm, spec, some, [], 32, {}, 0, 8)
    for i, text in enumerate(some):
        clean = likelihoods(lm.model, text)
        with RTN(3, 16).on(lm) as run:
            changed = likelihoods(lm.model, text)
        targets = torch.tensor(text[1:])[:, None]
        nll = [-x[:-1].gather(1, targets).mean().item() for x in (clean, changed)]
        kl = (clean.exp() * (clean - changed)).sum(-1)[:-1].mean().item()
        row = found["texts"].iloc[i]
        assert row[["clean", "nll", "kl"]].tolist() == pytest.approx([*nll, kl], abs=1e-4)
        assert kl > 0.01
    facts = found["facts"].iloc[0]
    assert facts.bits == run.measured["bits"] / run.measured["weights"]
    assert facts.share_changed == run.measured["changed"] / run.measured["should"]
    size = sum(p.numel() for p in lm.model.parameters())
    assert facts.bytes == 4 * (size - run.measured["weights"]) + run.measured["bits"] / 8


def test_texts_behind_a_quantized_cache() -> None:
    lm, text = bare("llama"), ids(64, 3)
    spec = "quantize-kv:kind=int3:group=8"
    found = cache_cells.likelihoods(lm, [text], {"kv": spec})
    clean = likelihoods(lm.model, text)
    with parse(spec).on(lm, prompt=32) as run:
        changed = likelihoods(lm.model, text)
    targets = torch.tensor(text[32:])[:, None]
    nll = [-x[31:-1].gather(1, targets).mean().item() for x in (clean, changed)]
    kl = (clean.exp() * (clean - changed)).sum(-1)[31:-1].mean().item()
    row = found["texts"].iloc[0]
    assert row[["clean", "nll", "kl"]].tolist() == pytest.approx([*nll, kl], abs=1e-4)
    assert kl > 1e-3
    assert found["facts"].bits[0] == 3 + 32 / 8
    assert run.fired
    single = cache_cells.layers(lm, spec, [1], [text])["texts"]
    with QuantizeKV("int3", group=8, layers=1).on(lm, prompt=32):
        one = -likelihoods(lm.model, text)[31:-1].gather(1, targets).mean().item()
    assert single[["layer", "text"]].to_numpy().tolist() == [[1, 0]]
    assert single.nll[0] == pytest.approx(one, abs=1e-4)


def test_errors_of_logits_are_split_exactly() -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, q2, k2 = (torch.randn(heads, 9, 6, generator=generator) for heads in (4, 2, 4, 2))
    masks = {0: {"q": torch.rand(4, 6, generator=generator) < 0.3, "k": torch.rand(2, 6, generator=generator) < 0.3}}
    before, after = {0: logits.Products(q, k, 0.5)}, {0: logits.Products(q2, k2, 0.5)}
    squares = np.zeros(4)
    for head in range(4):
        mine = masks[0]["q"][head] | masks[0]["k"][head // 2]
        for i in range(9):
            for j in range(i + 1):
                was, now = q[head, i] * k[head // 2, j] * 0.5, q2[head, i] * k2[head // 2, j] * 0.5
                error = now - was
                parts = error[mine].sum(), error[~mine].sum(), error.sum(), was.sum()
                squares += np.square([x.item() for x in parts])
    expected = np.sqrt(squares / (4 * 45))
    row = logits.errors(before, after, masks).iloc[0]
    assert row[["massive", "other", "total", "signal"]].to_numpy(float) == pytest.approx(expected, rel=1e-5)


# ---- the study ------------------------------------------------------------------------------------------------------


def test_the_table_holds_what_methods_give_by_hand(control: rs.LM, quick: tuple[Result, dict[str, Any]]) -> None:
    table = quick[0].tables["quantization"].set_index(["method", "task"])
    assert list(dict.fromkeys(table.index.get_level_values(0))) == [
        "reference", "rtn-int8", "rtn-int4", "w8a8", "kv-fp8", "kv-int4",
    ]  # fmt: skip
    clean = rs.evaluate(control, "key_value:pairs=1", n=6)
    for name, how in (("rtn-int4", RTN(4, 64)), ("kv-int4", QuantizeKV("int4"))):
        changed = rs.evaluate(control, "key_value:pairs=1", n=6, under=how)
        row = table.loc[(name, "key_value")]
        assert row.accuracy == changed.correct.mean()
        assert row.dlogprob == pytest.approx((changed.logprob - clean.logprob).mean(), abs=1e-5)
        assert (row.knowledge, row["items"], row.variant) == ("contextual", 6, "pairs=1")
    assert table.loc["rtn-int4"].share_changed.iloc[0] > 0.9
    assert table.loc["rtn-int8"].bits.iloc[0] < 8.3
    assert table.loc["kv-int4"].bits.iloc[0] == 4.5
    assert (table.loc["reference"].dlogprob == 0).all()
    assert (table.note == "").all()
    kl = table.groupby("method").kl.first()
    assert kl["rtn-int4"] > kl["w8a8"] > kl["rtn-int8"] > kl["reference"] == 0
    assert set(quick[0].tables) == {
        "quantization", "protected", "quantization_logits", "quantization_effects", "quantization_grid",
    }  # fmt: skip


def test_protected_and_random_channels_take_equal_bits(quick: tuple[Result, dict[str, Any]]) -> None:
    table = quick[0].tables["protected"]
    assert set(table.arm) == {"plain", "massive", "random"}
    assert sorted(table[table.arm == "random"].seed.unique()) == [0, 1, 2, 3, 4]
    bits = table[table.task == "key_value"].set_index(["arm", "seed"]).bits
    assert bits["plain", -1] == 4.5
    assert bits["massive", -1] > 4.5
    assert bits["random"].nunique() == 1
    assert bits["random", 0] == bits["massive", -1]


def test_an_audit_runs_the_model_itself_once(control: rs.LM) -> None:
    some = Options("quick")
    ours, theirs = ({cell.name: cell for cell in study.cells(control, some)} for study in (quantization, massive))
    shared = set(ours) & set(theirs)
    assert shared == {"disrupt/items/capitals/clean", "disrupt/items/capitals_in_context/clean"}
    for name in shared:
        assert ours[name].function is theirs[name].function
        assert ours[name].arguments == theirs[name].arguments
    for given in ({"limit": 7}, {"disrupt": ("none",)}, {"tasks": ("capitals",)}, {"size": "standard"}):
        both = [
            c for study in (massive, quantization) for c in study.cells(control, Options(**{"size": "quick", **given}))
        ]
        known: dict[str, Any] = {}
        for cell in both:
            assert known.setdefault(cell.name, cell).arguments == cell.arguments


def test_protected_rows_and_single_layers(control: rs.LM) -> None:
    result, done = ran(control, **{**SOME, "size": "standard", "limit": 2}, methods=("rtn-int4", "rtn-int3"))
    table = result.tables["protected"]
    assert set(table.width) == {"rtn-int4", "rtn-int3"}
    bits = table[table.task == "key_value"].set_index(["width", "arm", "seed"]).bits.sort_index()
    for width in ("rtn-int4", "rtn-int3"):
        assert bits[width, "plain", -1] < bits[width, "massive", -1]
        # rows of equal length in equal number, in every layer
        assert bits[width, "random"].tolist() == [bits[width, "massive", -1]] * 5
    layers = result.tables["quantization_layers"]
    assert layers.method.unique().tolist() == ["rtn-int4"]
    assert layers["layer"].tolist() == [0, 1, 2, 3]
    text = quantization.Work(
        control, Options(**{**SOME, "size": "standard", "limit": 2}), quantization.plan(Options())
    ).texts[0]  # type: ignore[arg-type]
    with RTN(4, 64, layers=2).on(control):
        changed = -likelihoods(control.model, text)[:-1].gather(1, torch.tensor(text[1:])[:, None]).mean().item()
    assert done["quantization/layers/rtn-int4/2"]["texts"].nll[0] == pytest.approx(changed, abs=1e-4)


def test_a_missing_library_is_a_line_and_no_crash(control: rs.LM, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "torchao"]:
        monkeypatch.setitem(sys.modules, name, None)
    result, _ = ran(control, **{**SOME, "limit": 2}, methods=("rtn-int8", "kv-fp8"))
    table = result.tables["quantization"].drop_duplicates("method").set_index("method")
    assert table.note["rtn-int8"] == "not tested: rtn needs torchao: pip install rotoscope[quant]"
    assert np.isnan(table.dnll["rtn-int8"])
    assert table.note["kv-fp8"] == ""


def test_weights_on_a_grid_are_marked(tmp_path: Path) -> None:
    lm = rs.load(str(small(tmp_path / "model")))
    with torch.no_grad():
        for name, module in lm.model.named_modules():
            if isinstance(module, torch.nn.Linear) and "layers" in name:
                blocks = module.weight.unflatten(1, (-1, 32))
                low, high = blocks.amin(-1, keepdim=True), blocks.amax(-1, keepdim=True)
                step = (high - low) / 15
                module.weight.copy_((((blocks - low) / step).round() * step + low).flatten(1))
    some = Options(**{**SOME, "size": "standard", "tasks": ("capitals",)})
    work = quantization.Work(lm, some, quantization.plan(some))  # type: ignore[arg-type]
    assert set(work.on_grid) == {"rtn-int4", "nf4"}
    assert "4-bit grid already" in work.on_grid["rtn-int4"]
    assert [width.label for width in work.weight_widths] == ["rtn-int3"]
    result, _ = ran(lm, **{**SOME, "tasks": ("capitals",), "limit": 2}, methods=("rtn-int4",))
    assert result.tables["quantization"].note.iloc[-1] == work.on_grid["rtn-int4"]
    assert (result.tables["quantization_grid"].bits == 4).all()


def test_methods_and_checkpoints_of_the_user(control: rs.LM) -> None:
    assert method(control, "rtn-int4").spec == "rtn:bits=4:group=64"
    assert groups(bare("qwen3")) == {"weights": 32, "cache": 8, "channel": 8}
    own = [c.name for c in quantization.cells(control, Options(**SOME, methods=("rtn:bits=5:group=32", "kv-int2")))]
    assert "quantization/methods/rtn-bits=5-group=32" in own
    assert not [name for name in own if "protected" in name]
    with pytest.raises(BadInput, match="no method 'awk'"):
        quantization.cells(control, Options(**SOME, methods=("awk",)))
    with pytest.raises(BadInput, match="NAME=DIR"):
        Options(checkpoints=("gptq",))
    with pytest.raises(BadInput, match="no method can be asked for beside it"):
        Options(methods=("none", "kv-int4"))
    result, done = ran(control, **SOME, methods=("none",))
    assert not done
    assert result.claims[0].verdict == "not tested"
    result, _ = ran(control, **{**SOME, "limit": 2}, methods=("kv-fp8",), checkpoints=("gptq=/nowhere",))
    table = result.tables["quantization"].set_index("method")
    assert table.note["gptq"].startswith("not tested: ")
    assert "/nowhere" in table.note["gptq"]


# ---- planted effects ------------------------------------------------------------------------------------------------


def test_sparing_a_planted_massive_channel_helps() -> None:
    """A pair of key dims is made 30 times as large, and the same pair of queries as much smaller: no logit changes."""
    lm = bare("llama")
    text, rows = ids(60, 5), [Row(tuple(ids(40, n)), tuple(ids(2, n + 1))) for n in range(8)]
    before = in_one_forward(lm, rows, None, 500)
    with torch.no_grad():
        for layer in lm.model.model.layers:
            for dims in (5, 13):
                layer.self_attn.k_proj.weight[dims::16] *= 30
                layer.self_attn.q_proj.weight[dims::16] /= 30
    planted = in_one_forward(lm, rows, None, 500)
    assert [x.logprob for x in planted] == pytest.approx([x.logprob for x in before], abs=1e-3)
    found = channels.find(lm, [text])
    for of in found.masks.values():
        assert all(row.nonzero().flatten().tolist() == [5, 13] for row in of["k"])
    spec = "quantize-kv:kind=int4:group=16:targets=K"
    stores = {
        (arm, draw): caches.Stored(lm, caches.Variant(spec, arm, draw).parts(lm, [text]))
        for arm, draw in (("plain", -1), ("massive", -1), *(("random", i) for i in range(3)))
    }
    named = {f"{arm}{draw}": stored for (arm, draw), stored in stores.items()}
    scored = caches.score(lm, rows, named, 500)
    off = {
        name: np.mean([abs(x.logprob - y.logprob) for x, y in zip(of, planted, strict=True)])
        for name, of in scored.items()
    }
    assert off["massive-1"] < 0.3 * min(off["random0"], off["random1"], off["random2"], off["plain-1"])
    assert len({stored.bits for (arm, _), stored in stores.items() if arm != "plain"}) == 1

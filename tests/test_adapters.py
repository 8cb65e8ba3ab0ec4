"""Families whose files compute attention by themselves: reached exactly, or left alone."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from small import characters
from tiny import tiny
from torch import Tensor, nn
from transformers import PreTrainedModel

import rotoscope as rs
from rotoscope.model import adapters
from rotoscope.model.call import AttentionCall
from rotoscope.model.layers import decoder_layers
from rotoscope.model.tap import tap, tap_model
from rotoscope.observers.entropy import probabilities
from rotoscope.stats.additive import fit
from rotoscope.studies import STUDIES, Options, conduct
from rotoscope.studies.observe import biased_additivity, observe

NEW = {"new_decoder_architecture": True, "num_kv_heads": 2}
OLD = {"multi_query": True}
WHOLE = {"multi_query": False}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    **{family: (family, {}) for family in ("bloom", "mpt", "gpt_neo", "xglm", "gpt_neox_japanese")},
    "bloom, 6 heads": ("bloom", {"hidden_size": 96, "n_head": 6}),
    **{
        f"falcon, {'alibi' if alibi else 'rotary'}, {heads}, {how}": (
            "falcon", {"alibi": alibi, "attn_implementation": how, **shape}
        )
        for alibi in (True, False)
        for heads, shape in (("grouped", NEW), ("one", OLD), ("all", WHOLE))
        for how in ("eager", "sdpa")
    },
}  # fmt: skip
EAGER = [name for name in MODELS if "sdpa" not in name]
ONCE = ["bloom", "mpt", "falcon, alibi, one, sdpa", "falcon, rotary, grouped, eager", "gpt_neo", "xglm"]


def build(name: str, **more: Any) -> PreTrainedModel:
    family, overrides = MODELS[name]
    return tiny(family, **overrides, **more)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(request.param)


@pytest.fixture
def batch() -> dict[str, Tensor]:
    ids = torch.randint(3, 97, (3, 11), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, :4] = 0
    mask[2, :9] = 0
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(autouse=True)
def no_gradients() -> Iterator[None]:
    with torch.no_grad():
        yield


class Calls:
    """Remembers every call."""

    def __init__(self) -> None:
        self.seen: list[AttentionCall] = []

    def observe(self, call: AttentionCall) -> None:
        self.seen.append(call)


class Edit:
    """Changes calls by a function."""

    def __init__(self, change: Callable[[AttentionCall], dict[str, Any]]):
        self.change = change

    def edit(self, call: AttentionCall) -> AttentionCall:
        return replace(call, **self.change(call))


def difference(a: Tensor, b: Tensor) -> float:
    return (a - b).abs().max().item()


def test_logits_are_exactly_those_of_the_untouched_model(model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    plain = model(**batch, use_cache=False).logits
    with tap_model(model, (calls := Calls(),)):
        tapped = model(**batch, use_cache=False).logits
    assert difference(plain, tapped) == 0.0
    assert [call.layer for call in calls.seen] == [0, 1, 2]


def test_generation_with_a_cache_is_exactly_that_of_the_untouched_model(
    model: PreTrainedModel, batch: dict[str, Tensor]
) -> None:
    def generate() -> Any:
        greedy = {"max_new_tokens": 5, "do_sample": False, "use_cache": True}
        return model.generate(**batch, **greedy, output_logits=True, return_dict_in_generate=True)

    plain = generate()
    with tap_model(model, (calls := Calls(),)):
        tapped = generate()
    assert torch.equal(plain.sequences, tapped.sequences)
    assert max(map(difference, plain.logits, tapped.logits)) == 0.0
    assert {call.q.shape[2] for call in calls.seen} == {11, 1}
    assert calls.seen[-1].k.shape[2] == 10 + len(plain.logits)


def test_equal_inputs_give_the_equal_bits_and_other_inputs_do_not(
    model: PreTrainedModel, batch: dict[str, Tensor]
) -> None:
    same = Edit(lambda c: {"q": c.q.clone(), "k": c.k.clone(), "v": c.v.clone()})
    plain = model(**batch).logits
    with tap_model(model, (same,)):
        assert difference(plain, model(**batch).logits) == 0.0
    for change in (
        lambda c: {"q": 2 * c.q},
        lambda c: {"k": -c.k},
        lambda c: {"v": 2 * c.v},
        lambda c: {"scaling": 2 * c.scaling},
    ):
        with tap_model(model, (Edit(change),)):
            assert difference(plain, model(**batch).logits) > 1e-2


def test_doubled_queries_and_doubled_scaling_are_the_same(model: PreTrainedModel, batch: dict[str, Tensor]) -> None:
    real = batch["attention_mask"].bool()
    both = []
    for change in (lambda c: {"q": 2 * c.q}, lambda c: {"scaling": 2 * c.scaling}, lambda c: {"k": 2 * c.k}):
        with tap_model(model, (Edit(change),)):
            both.append(model(**batch).logits[real])
    assert difference(both[0], both[1]) < 2e-5
    assert difference(both[0], both[2]) < 2e-5


def test_an_edited_mask_is_obeyed(model: PreTrainedModel) -> None:
    """With every token blind to the first, the first may be anything."""
    ids = torch.arange(10, 20)[None].repeat(2, 1)
    ids[1, 0] = 50

    def blind(call: AttentionCall) -> dict[str, Any]:
        mask = call.mask if call.mask is not None else torch.zeros(call.q.shape[2], call.k.shape[2])
        if mask.dtype == torch.bool:
            mask = torch.zeros(mask.shape).masked_fill(~mask, torch.finfo(torch.float32).min)
        mask = mask.clone()
        mask[..., 1:, 0] = torch.finfo(mask.dtype).min
        return {"mask": mask}

    assert difference(*model(ids).logits[:, 1:]) > 1e-2
    with tap_model(model, (Edit(blind),)):
        assert difference(*model(ids).logits[:, 1:]) < 2e-5


@pytest.mark.parametrize("name", EAGER)
def test_logits_and_masks_reproduce_the_weights_that_the_model_returns(name: str, batch: dict[str, Tensor]) -> None:
    model = build(name)
    real = batch["attention_mask"].bool()
    for change in (lambda c: {}, lambda c: {"q": 2 * c.q}):  # what is returned follows the edits
        with tap_model(model, (Edit(change), calls := Calls())):
            truth = model(**batch, output_attentions=True).attentions
        for call, weights in zip(calls.seen, truth, strict=True):
            for rows in (slice(None), slice(3, 9)):
                mine = probabilities(call, rows)
                kept = real[:, None, rows].expand(mine.shape[:3])
                assert difference(mine[kept], weights[:, :, rows][kept]) < 2e-6


def test_weights_times_values_are_what_the_output_projection_receives(
    model: PreTrainedModel, batch: dict[str, Tensor]
) -> None:
    """Also where torch's fused attention returns no weights."""
    adapters.find(model, decoder_layers(model))
    received: list[Tensor] = []
    real = batch["attention_mask"].bool()
    last = {"dense", "out_proj"}
    hooks = [
        module.register_forward_pre_hook(lambda _, args: received.append(args[0]))
        for name, module in model.named_modules()
        if name.split(".")[-1] in last
    ]
    with tap_model(model, (calls := Calls(),)):
        model(**batch)
    for hook in hooks:
        hook.remove()
    for call, truth in zip(calls.seen, received, strict=True):
        values = call.v.repeat_interleave(call.q.shape[1] // call.v.shape[1], 1)
        mine = (probabilities(call) @ values).transpose(1, 2).flatten(2)
        assert difference(mine[real], truth[real]) < 1e-5


def test_what_each_family_is(batch: dict[str, Tensor]) -> None:
    def layers(name: str) -> tuple[Any, ...]:
        return rs.wrap(build(name)).anatomy.layers

    def told(name: str) -> set[tuple[Any, ...]]:
        return {(x.position, x.heads, x.kv_heads, x.rotary_dims, x.pairing, x.scaling) for x in layers(name)}

    assert told("bloom") == told("mpt") == {("alibi", 4, 4, 0, "", 0.25)}
    assert told("gpt_neo") == {("learned", 4, 4, 0, "", 1.0)}
    assert told("xglm") == {("learned", 4, 4, 0, "", 1.0)}  # its queries come scaled
    assert told("gpt_neox_japanese") == {("rotary", 4, 4, 8, "half-split", 0.25)}
    for how in ("eager", "sdpa"):
        for heads, kv in (("grouped", 2), ("one", 1), ("all", 4)):
            assert told(f"falcon, rotary, {heads}, {how}") == {("rotary", 4, kv, 16, "half-split", 0.25)}
            assert told(f"falcon, alibi, {heads}, {how}") == {("alibi", 4, kv, 0, "", 0.25)}
    assert [layer.window for layer in layers("gpt_neo")] == [None, 5, None]


def test_slopes_are_those_of_the_alibi_paper() -> None:
    """A geometric sequence from 2^(-8/n), and where n is no power of two every other one of twice as many."""
    four, extra = [2.0**-2, 2.0**-4, 2.0**-6, 2.0**-8], [2.0**-1, 2.0**-3]
    for name, slopes in (
        ("bloom", four),
        ("mpt", four),
        ("bloom, 6 heads", four + extra),
        ("falcon, alibi, one, sdpa", [s / 4 for s in four]),  # divided by √head_dim as content is
        ("falcon, alibi, one, eager", [s / 2 for s in four]),  # where the modeling file adds the bias twice
    ):
        for layer in rs.wrap(build(name)).anatomy.layers:
            assert layer.slopes == pytest.approx(slopes, rel=1e-5), name
    assert rs.wrap(build("gpt_neo")).anatomy.layers[0].slopes is None


def test_slopes_rounded_to_bfloat16_still_fall_evenly() -> None:
    layer = rs.wrap(tiny("falcon", hidden_size=96, num_attention_heads=12, attn_implementation="sdpa")).anatomy.layers[
        0
    ]
    assert layer.position == "alibi"
    assert layer.slopes[0] == pytest.approx(0.5 / 8**0.5, rel=1e-2)


@pytest.mark.parametrize("name", ["falcon, rotary, grouped, sdpa", "falcon, rotary, one, eager", "gpt_neox_japanese"])
def test_unrotated_queries_are_the_projections_own(name: str, batch: dict[str, Tensor]) -> None:
    """The same token after any number of others has the same query in the first layer, before rotation."""
    lm = rs.wrap(build(name))
    ids = torch.full((1, 9), 7)
    with tap(lm, calls := Calls()):
        lm.model(ids)
    call = calls.seen[0]
    for x in (call.q, call.k):
        assert difference(x[:, :, :1].expand_as(x), x) > 1e-2
        z = call.unrotate(x)
        assert difference(z[:, :, :1].expand_as(z), z) < 1e-5


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_nothing_is_left_on_the_modules(error: type[BaseException], batch: dict[str, Tensor]) -> None:
    model = build("bloom")
    attention = model.transformer.h[1].self_attention
    run, calls = attention.forward, []

    def mine(*args: Any, **kwargs: Any) -> Any:  # as an offloading library puts it there
        calls.append(1)
        return run(*args, **kwargs)

    attention.forward = mine
    adapters.find(model, model.transformer.h)

    class Stop:
        def observe(self, call: AttentionCall) -> None:
            raise error

    before = [dict(module.__dict__) for module in model.modules()]
    with pytest.raises(error), tap_model(model, (Stop(),)):
        model(**batch)
    with pytest.raises(error), tap_model(model, (Calls(),)), tap_model(model, (Calls(),)):
        raise error
    calls.clear()
    with tap_model(model, (Calls(),)):
        model(**batch)
    assert len(calls) == 1
    assert attention.forward is mine
    for module, was in zip(model.modules(), before, strict=True):
        assert module.__dict__.keys() == was.keys()
        assert all(not value for name, value in module.__dict__.items() if name.endswith("_hooks"))
    assert all("forward" not in module.__dict__ for module in model.modules() if module is not attention)


@pytest.mark.parametrize(
    "name", ["bloom", "mpt", "falcon, rotary, one, sdpa", "gpt_neo", "falcon, alibi, grouped, eager"]
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_precisions(name: str, dtype: torch.dtype, batch: dict[str, Tensor]) -> None:
    model = build(name, dtype=dtype)
    lm = rs.wrap(model)
    assert {layer.scaling for layer in lm.anatomy.layers} == {1.0 if name == "gpt_neo" else 0.25}
    plain = model(**batch).logits
    with tap(lm, calls := Calls()):
        tapped = model(**batch).logits
    assert torch.equal(plain.nan_to_num(7), tapped.nan_to_num(7))
    real = batch["attention_mask"].bool()
    for call in calls.seen:  # padding is told from text whatever number stands for it
        may = call.allowed().expand(3, call.q.shape[1], 11, 11)
        assert not bool((may & ~real[:, None, None] & real[:, None, :, None]).any())


@pytest.mark.parametrize("name", ONCE)
def test_doctor_finds_nothing_wrong(name: str) -> None:
    report = rs.doctor(rs.wrap(build(name)))
    assert report.ok, report.reasons


@pytest.mark.parametrize("name", ONCE)
def test_both_studies_run(name: str) -> None:
    lm = rs.wrap(build(name), characters())
    found = conduct(list(STUDIES.values()), lm, Options(size="quick", texts=2, tokens=60))
    heads = found.tables["heads"]
    position = lm.anatomy.layers[0].position
    assert set(found.tables["layers"].position) == {position}
    assert heads.causal.notna().all()
    assert {c.id: c.verdict for c in found.claims}["M1"] != "not tested"
    if position == "alibi":
        assert "form1" not in heads
        assert heads.form2_within.between(0, 1).all()
        assert "trivial" in next(c.reason for c in found.claims if c.id == "P1")


def test_form_2_with_a_distance_term_is_that_of_the_full_grid() -> None:
    """Least squares on the grid itself, with queries, keys and slopes of the running model."""
    lm = rs.wrap(build("bloom"))
    ids = list(range(3, 43))
    found = observe(lm, ids, seed=0)["heads"]
    with tap(lm, calls := Calls(), grams := rs.observers.Grams()):
        lm.model(torch.tensor([ids]))
    for call, layer in zip(calls.seen, lm.anatomy.layers, strict=True):
        q, k = call.q[0, :, 1:].double(), call.k[0, :, 1:].double()  # position 0 left out
        content = 0.25 * q @ k.transpose(-1, -2)
        fall = torch.tensor(layer.slopes, dtype=torch.float64)[:, None] * torch.arange(40)
        w = (content[..., None] - fall[:, None, None, :]).numpy()
        mean = w.mean((1, 2, 3), keepdims=True)
        effects = [w.mean(axes, keepdims=True) - mean for axes in ((1, 2), (1, 3), (2, 3))]
        residual = w - mean - sum(effects)
        raw, within = w - mean, w - mean - effects[2]
        truth = {
            "form2": np.sqrt(1 - (residual**2).sum((1, 2, 3)) / (raw**2).sum((1, 2, 3))),
            "form2_within": np.sqrt(1 - (residual**2).sum((1, 2, 3)) / (within**2).sum((1, 2, 3))),
        }
        mine = biased_additivity(grams.layers[call.layer], layer.scaling, layer.slopes, 40)
        for name, values in truth.items():
            assert mine[name].numpy() == pytest.approx(values, abs=1e-9)
        reach = min(lm.trained_length or 1024, 1024)
        full = biased_additivity(grams.layers[call.layer], layer.scaling, layer.slopes, reach)
        assert not np.allclose(full["form2"], mine["form2"], atol=1e-3)
        rows = found[found.layer == call.layer]
        assert rows.form2_within.to_numpy() == pytest.approx(full["form2_within"].numpy())
        flat = fit(torch.complex(*q.chunk(2, -1)), torch.complex(*k.chunk(2, -1)), torch.zeros(40, 8).double())
        assert flat.form1.numpy() == pytest.approx(np.ones(4))  # why form 1 is not given


class Toy(nn.Module):
    """A decoder of no known file; ``scores`` says what its softmax receives."""

    def __init__(self, scores: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.embedding = nn.Embedding(97, 8)
        self.layers = nn.ModuleList(ToyLayer(scores) for _ in range(2))

    def get_input_embeddings(self) -> nn.Module:
        return self.embedding

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> Tensor:
        state = self.embedding(input_ids)
        for layer in self.layers:
            state = layer(state)
        return state


class ToyLayer(nn.Module):
    def __init__(self, scores: Callable[[Tensor, Tensor, Tensor], Tensor]):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(8, 8) for _ in range(4))
        self.scores = scores

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (f(x).view(*x.shape[:2], 2, 4).transpose(1, 2) for f in (self.q, self.k, self.v))
        mask = torch.full((x.shape[1], x.shape[1]), -torch.inf).triu(1)
        return x + self.o((self.scores(q, k, mask).softmax(-1) @ v).transpose(1, 2).flatten(2))


def plain(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return q @ k.mT / 3 + mask


def other_products_before(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    turn = torch.eye(4).expand(1, 1, 4, 4) @ torch.linalg.qr(torch.arange(16.0).view(1, 1, 4, 4).sin()).Q
    return (q @ turn) @ (k @ turn).mT / 3 + mask


def two_products_added(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return q @ k.mT + q @ q.mT + mask


def product_added_from_before(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    relative = (q @ q.mT) / 3
    return q @ k.mT + relative + mask


def capped(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return 5 * (q @ k.mT / 5).tanh() + mask


def squared(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return (q @ k.mT).square() + mask


def query_biased(q: Tensor, k: Tensor, mask: Tensor) -> Tensor:
    return q @ k.mT + 5 * (q.sum(-1, keepdim=True) * k.sum(-1)[:, :, None]) + mask


@pytest.mark.parametrize(
    ("scores", "scaling"),
    [(plain, 1 / 3), (other_products_before, 1 / 3)]
    + [(s, None) for s in (two_products_added, product_added_from_before, capped, squared, query_biased)],
)
def test_what_is_no_product_softmax_product_is_left_alone(
    scores: Callable[[Tensor, Tensor, Tensor], Tensor], scaling: float | None
) -> None:
    model = Toy(scores)
    found = adapters.find(model, model.layers)
    assert [x.scaling for x in found] == ([] if scaling is None else [pytest.approx(scaling)] * 2)
    assert all("forward" not in module.__dict__ for module in model.modules())

"""Random shapes, windows, paddings and dtypes: the tap stays exact, observers see text and not padding."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from tiny import LENGTH, VOCABULARY, tiny

import rotoscope as rs
from rotoscope.model.tap import tap
from rotoscope.observers import Capture, Entropy, Grams, Moments

torch.set_num_threads(1)

# Largest difference over largest value that rounding explains where the same numbers are reached by another way. The
# float64 models of transformers compute norms, softmax and rotary tables in float32.
TOLERANCE = {torch.float32: 1e-4, torch.float64: 1e-5, torch.bfloat16: 8e-2}
UNROTATED = {torch.float32: 1e-5, torch.float64: 1e-12, torch.bfloat16: 2e-2}


@dataclass(frozen=True)
class Shape:
    """A model to build and what its anatomy must turn out to be."""

    family: str
    heads: int
    kv_heads: int
    head_dim: int
    rotary_dims: int
    window: int | None
    dtype: torch.dtype
    implementation: str
    overrides: dict[str, Any]


@dataclass(frozen=True)
class Rows:
    """Texts of a batch, the padding beyond the longest of them, and the side it stands on."""

    lengths: tuple[int, ...]
    pad: int
    left: bool

    def texts(self) -> list[torch.Tensor]:
        g = torch.Generator().manual_seed(sum(self.lengths))
        return [torch.randint(3, VOCABULARY, (n,), generator=g) for n in self.lengths]

    def batch(self) -> dict[str, torch.Tensor]:
        texts, total = self.texts(), max(self.lengths) + self.pad
        ids, mask = torch.zeros(len(texts), total, dtype=torch.long), torch.zeros(len(texts), total, dtype=torch.long)
        for i, text in enumerate(texts):
            at = slice(total - len(text), total) if self.left else slice(0, len(text))
            ids[i, at], mask[i, at] = text, 1
        return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}


dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])
implementations = st.sampled_from(["sdpa", "eager"])


@st.composite
def llama_like(draw: Callable[..., Any]) -> Shape:
    """Grouped heads of any width, beside a hidden size that does not follow from them; a window or none."""
    kv_heads, group = draw(st.sampled_from([1, 2, 3])), draw(st.sampled_from([1, 2, 3]))
    head_dim, window = draw(st.sampled_from([2, 4, 6, 10, 16, 24])), draw(st.none() | st.integers(2, 40))
    overrides = {
        "hidden_size": draw(st.sampled_from([32, 48])), "num_attention_heads": kv_heads * group,
        "num_key_value_heads": kv_heads, "head_dim": head_dim, "sliding_window": window,
    }  # fmt: skip
    of = (kv_heads * group, kv_heads, head_dim, head_dim, window, draw(dtypes), draw(implementations))
    return Shape("mistral", *of, overrides)


@st.composite
def neox_like(draw: Callable[..., Any]) -> Shape:
    """A share of each head rotates."""
    heads, (head_dim, share) = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from(_SHARES))
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": share}
    overrides = {"hidden_size": heads * head_dim, "num_attention_heads": heads, "rope_parameters": rope}
    of = (heads, heads, head_dim, round(head_dim * share), None, draw(dtypes), draw(implementations))
    return Shape("gpt_neox", *of, overrides)


_SHARES = [(8, 0.25), (8, 0.5), (8, 1.0), (16, 0.25), (16, 0.5), (16, 0.75), (24, 0.25), (24, 1.0)]


@st.composite
def gpt2_like(draw: Callable[..., Any]) -> Shape:
    """Learned positions: nothing rotates."""
    heads, head_dim = draw(st.sampled_from([1, 2, 3, 4])), draw(st.sampled_from([5, 8, 16]))
    overrides = {"n_embd": heads * head_dim, "n_head": heads}
    return Shape("gpt2", heads, heads, head_dim, 0, None, draw(dtypes), draw(implementations), overrides)


rows = st.builds(
    Rows, st.lists(st.integers(1, 24), min_size=1, max_size=5).map(tuple), pad=st.integers(0, 40), left=st.booleans()
)


def build(shape: Shape) -> rs.LM:
    model = tiny(shape.family, layers=2, dtype=shape.dtype, **shape.overrides)
    model.set_attn_implementation(shape.implementation)
    return rs.wrap(model)


def apart(a: torch.Tensor, b: torch.Tensor) -> float:
    return ((a.double() - b.double()).abs().max() / b.double().abs().max().clamp_min(1e-30)).item()


@contextmanager
def projected(lm: rs.LM) -> Iterator[dict[int, tuple[torch.Tensor, torch.Tensor]]]:
    """Queries and keys ``[batch, heads, tokens, dim]`` as the model's own projections give them, before they rotate."""
    found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    handles = []

    def split(x: torch.Tensor, heads: int) -> torch.Tensor:
        return x.unflatten(-1, (heads, -1)).transpose(1, 2)

    for i, layer in enumerate(lm.anatomy.layers):
        if lm.model.config.model_type == "gpt2":

            def gpt2(_: Any, __: Any, out: torch.Tensor, i: int = i, n: int = layer.heads) -> None:
                q, k, _v = out.chunk(3, -1)
                found[i] = split(q, n), split(k, n)

            handles.append(lm.model.transformer.h[i].attn.c_attn.register_forward_hook(gpt2))
        elif lm.model.config.model_type == "gpt_neox":

            def neox(_: Any, __: Any, out: torch.Tensor, i: int = i, n: int = layer.heads) -> None:
                q, k, _v = split(out, n).chunk(3, -1)
                found[i] = q, k

            handles.append(lm.model.gpt_neox.layers[i].attention.query_key_value.register_forward_hook(neox))
        else:
            module, halves = lm.model.model.layers[i].self_attn, {}

            def llama(m: Any, __: Any, out: torch.Tensor, i: int = i, at: Any = (module, halves)) -> None:
                attention, own = at
                own["q" if m is attention.q_proj else "k"] = out
                a = lm.anatomy.layers[i]
                if len(own) == 2:
                    found[i] = split(own["q"], a.heads), split(own["k"], a.kv_heads)

            handles += [m.register_forward_hook(llama) for m in (module.q_proj, module.k_proj)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def holds(shape: Shape, some: Rows) -> None:
    lm = build(shape)
    for layer in lm.anatomy.layers:
        assert (layer.heads, layer.kv_heads, layer.head_dim) == (shape.heads, shape.kv_heads, shape.head_dim)
        assert (layer.rotary_dims, layer.window) == (shape.rotary_dims, shape.window)
        assert layer.position == ("rotary" if shape.rotary_dims else "learned")
    batch = some.batch()
    real = batch["attention_mask"].bool()
    plain = lm.model(**batch, use_cache=False).logits
    parts = moments, grams, entropy, calls = Moments(), Grams(), Entropy(rows=7), Capture()
    with tap(lm, *parts), projected(lm) as before:
        tapped = lm.model(**batch, use_cache=False).logits
    assert torch.equal(plain[real].nan_to_num(7e7), tapped[real].nan_to_num(7e7))
    if plain[real].isnan().any():
        # transformers' own eager softmax: the smallest double is minus infinity in float32
        assert (shape.dtype, shape.implementation) == (torch.float64, "eager")
        return
    unrotated(lm, calls, before, real, UNROTATED[shape.dtype])
    alone = Moments(), Grams(), Entropy(rows=7)
    with tap(lm, *alone):
        for text in some.texts():
            lm.model(input_ids=text[None], use_cache=False)
    same(lm, (moments, grams, entropy), alone, TOLERANCE[shape.dtype], shape.dtype)


def unrotated(lm: rs.LM, calls: Capture, before: Any, real: torch.Tensor, tolerance: float) -> None:
    """Rotating back gives the projections' own output, in the pairs that the anatomy names."""
    for layer in lm.anatomy.layers:
        (call,) = calls.layers[layer.layer]
        rotation = layer.rotation
        assert rotation is not None
        first, second = rotation.dims()
        for rotated, own in zip((call.q, call.k), before[layer.layer], strict=True):
            z = call.unrotate(rotated).transpose(1, 2)[real]
            own = own.transpose(1, 2)[real]
            if not rotation.pairs:
                assert torch.equal(z[..., : rotation.head_dim], own.double())
                continue
            real_part, imaginary = z.chunk(2, -1)
            scale = own.double().abs().max()
            for part, dims in ((real_part, first), (imaginary, second)):
                assert (part[..., : rotation.pairs] - own[..., dims].double()).abs().max() <= tolerance * scale


def same(lm: rs.LM, mine: Any, alone: Any, tolerance: float, dtype: torch.dtype) -> None:
    """Sums over a padded batch are the sums over its rows, each by itself."""
    for i in range(len(lm.anatomy.layers)):
        for name in "qkv":
            a, b = mine[0].layers[i][name], alone[0].layers[i][name]
            assert a.n == b.n
            assert apart(a.rms, b.rms) <= tolerance
            assert apart(a.first, b.first) <= tolerance
            assert (a.mean - b.mean).abs().max() <= tolerance * b.rms.max()
        a, b = mine[1].layers[i], alone[1].layers[i]
        assert (a.q.n, a.q0.shape) == (b.q.n, b.q0.shape)
        for which in ("q", "k"):
            if a.q.n:
                assert apart(getattr(a, which).gram, getattr(b, which).gram) <= 2 * tolerance
            assert apart(getattr(a, f"{which}0"), getattr(b, f"{which}0")) <= tolerance
        a, b = mine[2].layers[i], alone[2].layers[i]
        assert a.n == b.n
        # Attention by weights that were rounded to 8 bits is no finer than they are.
        loose = 10 * tolerance if dtype == torch.bfloat16 else tolerance
        assert (a.entropy - b.entropy).abs().max() <= loose * 3
        assert (a.sink_mass - b.sink_mass).abs().max() <= loose


LIKE = {"llama": llama_like(), "neox": neox_like(), "gpt2": gpt2_like()}
QUIET = [HealthCheck.too_slow, HealthCheck.data_too_large]
HARD = Rows((1, 24, 7, 1, 13), pad=40, left=True)


@pytest.mark.parametrize("like", LIKE)
def test_invariances_hold(like: str) -> None:
    @settings(max_examples=80, deadline=None, derandomize=True, database=None, suppress_health_check=QUIET)
    @given(LIKE[like], rows)
    def run(shape: Shape, some: Rows) -> None:
        holds(shape, some)

    run()


@pytest.mark.slow
@pytest.mark.parametrize("like", LIKE)
def test_invariances_hold_in_many_more_cases(like: str) -> None:
    @settings(max_examples=300, deadline=None, suppress_health_check=QUIET)
    @given(LIKE[like], rows)
    @example(Shape("gpt2", 4, 4, 16, 0, None, torch.float32, "sdpa", {}), HARD)
    def run(shape: Shape, some: Rows) -> None:
        holds(shape, some)

    run()


def test_cases_stay_within_what_the_models_can_do() -> None:
    assert max(HARD.lengths) + HARD.pad <= LENGTH

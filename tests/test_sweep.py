"""Sweeps against the plainest route: one full forward per row and k, with torch hooks on modules called by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from tiny import tiny
from torch import Tensor, nn

import rotoscope as rs
from rotoscope.errors import BadInput, Refused
from rotoscope.interventions.freeze import Freeze
from rotoscope.interventions.manipulate import noised, prefix_keys, shuffled
from rotoscope.interventions.noise import Noise
from rotoscope.interventions.shuffle import Shuffle
from rotoscope.interventions.skip import SkipAttention
from rotoscope.interventions.sweep import Prompts, Sweep
from rotoscope.model.layers import decoder_layers
from rotoscope.model.lm import LM
from rotoscope.model.sweep import _QUICKEST

L = 4
LLAMA = ("model.layers", "self_attn", "")
# where the layers are, what their attention is called, and a norm that only its output passes
FAMILIES = {
    "llama": LLAMA,
    "mistral": LLAMA,  # a window shorter than the prompts
    "gemma2": ("model.layers", "self_attn", "post_attention_layernorm"),
    "gpt_oss": LLAMA,
    "qwen3_moe": LLAMA,
    "deepseek_v3": LLAMA,
    "gpt_neox": ("gpt_neox.layers", "attention", ""),  # parallel residual
    "gpt2": ("transformer.h", "attn", ""),
    "opt": ("model.decoder.layers", "self_attn", ""),
    "bloom": ("transformer.h", "self_attention", ""),  # its attention adds the residual itself
    "gpt_neo": ("transformer.h", "attn", ""),
    "falcon": ("transformer.h", "self_attention", ""),
    "jamba": LLAMA,
    "lfm2": LLAMA,
    "falcon_h1": LLAMA,  # a recurrent part beside attention in every layer
}
# float64 with padding is NaN where eager attention's softmax runs in float32
UNPADDED = {"gemma2", "gpt_oss", "bloom", "gpt_neo"}
# routers, attention or scans that run in float32 whatever the dtype, so that other shapes round differently
SINGLE = {"deepseek_v3", "gpt_neo", "falcon_h1"}
KINDS = ("noise", "shuffle", "freeze", "skip", "swap")

ROWS = [[5, 17, 3, 44, 9, 61, 23, 12, 80], [7, 7, 52, 31, 90], [11, 64, 2, 38, 29, 70, 15]]
ANSWERS = [[33, 8], [21], []]
DONORS = [[40, 18, 77, 6, 50, 13, 92, 55], [60, 24, 35, 81, 19], [88, 45, 73, 10, 26, 4]]
SEED = 3


def rows_of(family: str) -> list[list[int]]:
    return [(row + row[::-1])[:9] if family in UNPADDED else row for row in ROWS]


@cache
def model_of(family: str) -> LM:
    return rs.wrap(tiny(family, layers=L, dtype=torch.float64))


@contextmanager
def hooked(layers: nn.ModuleList, act: Callable[[int, Tensor], Tensor]) -> Iterator[None]:
    def hook(index: int) -> Callable[..., Any]:
        return lambda module, args, kwargs: ((act(index, args[0].clone()), *args[1:]), kwargs)

    hooks = [layer.register_forward_pre_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@contextmanager
def deaf(family: str, layers: nn.ModuleList, k: int) -> Iterator[None]:
    _, attention, norm = FAMILIES[family]

    def silence(module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        nothing = args[1] if family == "bloom" else torch.zeros_like(output[0])
        return (nothing, *output[1:])

    hooks = []
    for layer in layers[k:]:
        if hasattr(layer, attention):
            hooks.append(getattr(layer, attention).register_forward_hook(silence))
            if norm:
                hooks.append(getattr(layer, norm).register_forward_hook(lambda m, a, out: torch.zeros_like(out)))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


@torch.no_grad()
def naive(lm: LM, family: str, kind: str, k: int, row: int, prompt: list[int], exempt: bool = False) -> Tensor:
    """Logits from the last prompt token on of one row by itself, ``[1 + answer, vocabulary]``."""
    layers = lm.model.get_submodule(FAMILIES[family][0])
    ids = torch.tensor([prompt + ANSWERS[row]])
    at = slice(int(exempt), len(prompt) - 1)
    where = torch.zeros(ids.shape, dtype=torch.bool)
    where[:, at] = True
    donor: dict[int, Tensor] = {}
    saved: dict[int, Tensor] = {}

    def act(layer: int, h: Tensor) -> Tensor:
        if kind in ("noise", "shuffle") and layer == k:
            change = noised if kind == "noise" else shuffled
            return change(h, where, prefix_keys(ids, torch.ones_like(ids)), SEED, k)
        if kind == "freeze" and layer == k:
            saved[k] = h[:, at].clone()
        if kind == "freeze" and layer >= k:
            h[:, at] = saved[k]
        if kind == "swap" and layer == k:
            h[:, 1:3] = donor[k][:, 2:4]
        return h

    def keep(layer: int, h: Tensor) -> Tensor:
        donor[layer] = h
        return h

    if kind == "swap":
        with hooked(layers, keep):
            lm.model(torch.tensor([DONORS[row]]), use_cache=False)
    if kind == "skip":
        with deaf(family, layers, k):
            return lm.model(ids, use_cache=False).logits[0, len(prompt) - 1 :]
    with hooked(layers, act):
        return lm.model(ids, use_cache=False).logits[0, len(prompt) - 1 :]


def columns(lengths: list[int], start: int, stop: int) -> Tensor:
    """Boolean places ``start`` to ``stop``, counted from each row's first token, in rows padded on the left."""
    out = torch.zeros(len(lengths), max(lengths), dtype=torch.bool)
    for row, length in enumerate(lengths):
        out[row, max(lengths) - length :][start:stop] = True
    return out


def swept(lm: LM, rows: list[list[int]], kind: str, ks: range, exempt: bool = False) -> dict[int, Tensor]:
    sweep = Sweep.over(lm, Prompts.of(rows, ANSWERS), exempt)
    if kind != "swap":
        seed = {"seed": SEED} if kind in ("noise", "shuffle") else {}
        return dict(getattr(sweep, kind)(ks, **seed))
    where = columns([len(row) for row in rows], 1, 3)
    where = torch.cat([where, torch.zeros(len(rows), 2, dtype=torch.bool)], 1)
    padded = [(d + d[::-1])[: len(DONORS[0])] for d in DONORS] if len({*map(len, rows)}) == 1 else DONORS
    source = columns([len(d) for d in padded], 2, 4)
    return dict(sweep.swap(ks, Sweep.over(lm, Prompts.of(padded)), where, source))


def difference(lm: LM, family: str, kind: str, exempt: bool = False) -> float:
    rows = rows_of(family)
    logits = swept(lm, rows, kind, range(L + 1), exempt)
    worst = 0.0
    for k in range(L + 1):
        for row, prompt in enumerate(rows):
            expected = naive(lm, family, kind, k, row, prompt, exempt)
            worst = max(worst, (logits[k][row, : len(expected)] - expected).abs().max().nan_to_num(torch.inf).item())
    return worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_sweep_equals_one_forward_per_row_and_depth(family: str, kind: str) -> None:
    assert difference(model_of(family), family, kind) <= (1e-5 if family in SINGLE else 1e-9)


@pytest.mark.parametrize("kind", ["noise", "shuffle", "freeze"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "jamba"])
def test_position_0_may_be_exempt(family: str, kind: str) -> None:
    assert difference(model_of(family), family, kind, exempt=True) <= 1e-9
    one, other = (swept(model_of(family), rows_of(family), kind, range(1, 2), exempt)[1] for exempt in (False, True))
    assert (one - other).abs().max() > 1e-3


@pytest.mark.parametrize("family", ["llama", "gemma2", "jamba"])
def test_a_sweep_gives_what_the_intervention_gives(family: str) -> None:
    lm = model_of(family)
    prompts = Prompts.of(rows_of(family), ANSWERS)
    ones = {
        "noise": Noise(2, seed=SEED),
        "shuffle": Shuffle(2, seed=SEED),
        "freeze": Freeze(2),
        "skip": SkipAttention(2),
    }
    for kind, intervention in ones.items():
        with intervention.on(lm, prompt=prompts.prompt), torch.no_grad():
            expected = lm.model(**prompts.arguments(lm.model), use_cache=False).logits[:, prompts.prompt - 1 :]
        difference = swept(lm, rows_of(family), kind, range(2, 3))[2] - expected
        assert difference[prompts.mask[:, prompts.prompt - 1 :].bool()].abs().max() <= 1e-9


@pytest.mark.parametrize(("family", "cheap"), [
    ("llama", {"freeze", "skip", "resume"}),
    ("gemma2", {"freeze", "skip", "resume"}),
    ("gpt_neox", {"freeze", "skip", "resume"}),
    ("gpt2", {"freeze", "skip", "resume"}),
    ("bloom", {"freeze", "skip", "resume"}),
    ("qwen3_moe", {"freeze", "skip", "resume"}),
    ("jamba", {"resume"}),
    ("falcon_h1", {"resume"}),
])  # fmt: skip
def test_the_cheap_ways_are_taken_where_tokens_meet_in_attention_only(family: str, cheap: set[str]) -> None:
    lm = model_of(family)
    for kind in ("noise", "freeze", "skip"):
        swept(lm, rows_of(family), kind, range(1, 2))
    ways = {name: way.__name__ for name, way in _QUICKEST[lm.model].items()}
    assert {name for name, way in ways.items() if way in ("_filled", "_joined", "_resumed")} == cheap


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_that_cannot_resume_runs_in_full(kind: str) -> None:
    model = tiny("llama", layers=L, dtype=torch.float64)
    beside: list[Tensor] = []  # what layer 0 hands to layer 3 beside the residual stream, within one forward
    first, last = (model.model.layers[i].mlp for i in (0, 3))
    model.model.register_forward_pre_hook(lambda *_: beside.clear())
    first.register_forward_hook(lambda m, a, out: beside.append(out))
    last.register_forward_hook(lambda m, a, out: out + sum(beside))
    lm = rs.wrap(model)
    assert difference(lm, "llama", kind) <= 1e-9
    assert {way.__name__ for way in _QUICKEST[model].values()} <= {"_replaced", "_held", "_all_tokens"}


def test_what_each_depth_costs() -> None:
    lm = model_of("llama")
    sweep = Sweep.over(lm, Prompts.of(ROWS, ANSWERS))
    tokens: list[int] = []
    layers = decoder_layers(lm.model)
    for kind in KINDS[:4]:
        list(getattr(sweep, kind)([1]))  # which way is best is found before counting
    mlps = [layer.mlp.register_forward_hook(lambda m, a, out: tokens.append(out.shape[:2].numel())) for layer in layers]
    rows, last, previous = 3, 3, 8
    for kind, expected in [
        ("noise", rows * (previous + last) * (4 + 3 + 2 + 1)),
        ("freeze", rows * last * (4 + 3 + 2 + 1)),
        ("skip", rows * last * (4 + 3 + 2 + 1)),
    ]:
        tokens.clear()
        list(getattr(sweep, kind)(range(L + 1)))
        assert sum(tokens) == expected
    tokens.clear()
    list(sweep.skip(range(L + 1), rows=2 * rows))
    assert max(tokens) == 2 * rows * last
    for hook in mlps:
        hook.remove()


def test_the_end_is_the_identity_and_nothing_is_left_behind() -> None:
    lm = model_of("llama")
    prompts = Prompts.of(ROWS, ANSWERS)
    before = {name: sorted(vars(module)) for name, module in lm.model.named_modules()}
    sweep = Sweep.over(lm, prompts)
    for kind in KINDS[:4]:
        results = list(getattr(sweep, kind)([L, 0, L]))
        assert [k for k, _ in results] == [0, L]
        assert torch.equal(results[1][1], sweep.past.clean)
        assert not torch.equal(results[0][1], sweep.past.clean)
    assert {name: sorted(vars(module)) for name, module in lm.model.named_modules()} == before
    assert torch.is_grad_enabled()
    assert torch.equal(Sweep.over(lm, prompts).past.clean, sweep.past.clean)


def test_bad_input_is_told_in_a_sentence() -> None:
    lm = model_of("llama")
    sweep = Sweep.over(lm, Prompts.of(ROWS))
    for kind in KINDS[:4]:
        for k in (-1, L + 1):
            with pytest.raises(BadInput, match=f"no boundary {k}: this model has 0 to {L}"):
                list(getattr(sweep, kind)([k]))
    with pytest.raises(BadInput, match="padded on the left"):
        Prompts(torch.ones(1, 4, dtype=torch.long), torch.tensor([[1, 1, 1, 0]]), 4)
    with pytest.raises(BadInput, match="two tokens or more"):
        Prompts.of([[3]])
    where = columns([len(row) for row in ROWS], 1, 3)
    with pytest.raises(BadInput, match="row 0: 1 donor tokens for 2 places"):
        sweep.swap([0], sweep, where, columns([len(row) for row in ROWS], 1, 2))
    with pytest.raises(Refused, match="several residual streams"):
        Sweep.over(rs.wrap(tiny("gemma3n_text", layers=L)), Prompts.of(ROWS))


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_on_the_demo_model_in_float64(kind: str, double: LM) -> None:
    rows = [[*row[:-1], 44] for row in ROWS]
    ks = [*range(8), *range(22, 31)]
    logits = swept(double, rows, kind, ks)  # type: ignore[arg-type]
    for k in ks:
        for row, prompt in enumerate(rows):
            expected = naive(double, "llama", kind, k, row, prompt)
            assert (logits[k][row, : len(expected)] - expected).abs().max() <= 1e-9


@pytest.fixture(scope="module")
def double() -> LM:
    """The demo model in float64, of its own."""
    return rs.load("demo", dtype="float64")

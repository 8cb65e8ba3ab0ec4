"""Noise, shuffle, freeze, skip and swap: against slow references, under batches, caches and generation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny import tiny
from torch import Tensor, nn

import rotoscope as rs
from rotoscope.checks.edits import traces
from rotoscope.interventions import (
    Disrupt,
    Freeze,
    Intervention,
    Noise,
    Shuffle,
    SkipAttention,
    Swap,
    Together,
    parse,
)
from rotoscope.interventions.manipulate import noised, prefix_keys, shuffled
from rotoscope.model.layers import decoder_layers, loop

L, NEW = 4, 20
WINDOW = 5  # of the tiny models that have one; prompts and continuations are longer

Manipulate = Callable[[int, Tensor, list[int]], Tensor]
"""Layer, states [tokens, width], row of ids: the states that the layer gets."""


@pytest.fixture(scope="module")
def models() -> Callable[[str], rs.LM]:
    known: dict[str, rs.LM] = {}

    def get(family: str) -> rs.LM:
        if family not in known:
            known[family] = rs.wrap(tiny(family, layers=L, dtype=torch.float64))
        return known[family]

    return get


def prompts(*lengths: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(3, 97, (n,), generator=generator).tolist() for n in lengths]


def padded(rows: list[list[int]]) -> dict[str, Tensor]:
    width = max(map(len, rows))
    ids = torch.tensor([[0] * (width - len(row)) + row for row in rows])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(-1) - 1).clamp_min(0)}


@torch.no_grad()
def generated(lm: rs.LM, rows: list[list[int]], new: int = NEW, **extra: Any) -> list[list[int]]:
    batch = padded(rows)
    del batch["position_ids"]
    out = lm.model.generate(**batch, max_new_tokens=new, do_sample=False, pad_token_id=0, eos_token_id=None, **extra)
    return out[:, batch["input_ids"].shape[1] :].tolist()  # type: ignore[no-any-return]


@torch.no_grad()
def logits(lm: rs.LM, **batch: Any) -> Tensor:
    return lm.model(**{"use_cache": False, **batch}).logits  # type: ignore[no-any-return]


# ---- a slow reference: one row, no cache, hooks of its own -----------------------------------------------------------


def manipulation(kind: str, k: int, exempt: bool, seed: int = 0) -> Manipulate:
    frozen: dict[str, Tensor] = {}

    def change(layer: int, h: Tensor, ids: list[int]) -> Tensor:
        out = h.clone()
        for t in range(1 if exempt else 0, len(ids) - 1):
            keys = prefix_keys(torch.tensor([ids]), torch.ones(1, len(ids), dtype=torch.bool))
            one = torch.zeros(1, len(ids), dtype=torch.bool)
            one[0, t] = True
            if kind == "freeze":
                if layer == k:
                    frozen[str(t)] = h[t].clone()
                if layer >= k:
                    out[t] = frozen[str(t)]
            elif layer == k:
                act = noised if kind == "noise" else shuffled
                out[t] = act(h[None], one, keys, seed, k)[0, t]
        return out

    return change


def slow(lm: rs.LM, row: list[int], change: Manipulate, new: int, fixed: bool = False) -> list[int]:
    """Greedy tokens, everything computed anew for each; ``fixed``: only the prompt's tokens are previous ones."""
    ids, layers = list(row), decoder_layers(lm.model)

    def hook(layer: int) -> Callable[..., Any]:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
            h = args[0] if args else kwargs["hidden_states"]
            n = len(row) if fixed else len(ids)
            h = torch.cat([change(layer, h[0, :n], ids[:n]), h[0, n:]])[None]
            return ((h, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": h})

        return before

    hooks = [layer.register_forward_pre_hook(hook(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        for _ in range(new):
            ids.append(int(logits(lm, input_ids=torch.tensor([ids]))[0, -1].argmax()))
    finally:
        for h in hooks:
            h.remove()
    return ids[len(row) :]


KINDS: dict[str, type[Any]] = {"freeze": Freeze, "noise": Noise, "shuffle": Shuffle}


@pytest.mark.parametrize("exempt", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_all_previous_with_a_cache_without_one_and_a_slow_reference_agree(
    models: Callable[[str], rs.LM], kind: str, exempt: bool
) -> None:
    lm, rows = models("llama"), prompts(8, 5, 1)
    reference = [slow(lm, row, manipulation(kind, 2, exempt), NEW) for row in rows]
    plain = generated(lm, rows)
    for cached in (True, False):
        with KINDS[kind](2, scope="all-previous", exempt_first=exempt).on(lm) as run:
            assert generated(lm, rows, use_cache=cached) == reference
        assert run.fired == NEW
    assert reference != plain


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("family", ["gpt_neox", "gemma3_text", "gpt2", "mixtral", "deepseek_v3", "lfm2"])
def test_all_previous_on_other_families(models: Callable[[str], rs.LM], family: str, kind: str) -> None:
    """Parallel residuals, windows narrower than the text, learned positions, experts, latent keys, convolutions."""
    lm, rows = models(family), prompts(9, 6)
    reference = [slow(lm, row, manipulation(kind, 1, False), 10) for row in rows]
    for cached in (True, False):
        with KINDS[kind](1, scope="all-previous").on(lm):
            assert generated(lm, rows, 10, use_cache=cached) == reference


@pytest.mark.parametrize("kind", KINDS)
def test_scope_prompt_leaves_generated_tokens_alone(models: Callable[[str], rs.LM], kind: str) -> None:
    lm, rows = models("llama"), prompts(8, 5)
    reference = [slow(lm, row, manipulation(kind, 2, False), NEW, fixed=True) for row in rows]
    with KINDS[kind](2).on(lm) as run:
        assert generated(lm, rows) == reference
    assert run.fired == 1  # decode steps change nothing
    with KINDS[kind](2).on(lm, prompt=8) as run:
        assert generated(lm, rows, use_cache=False) == reference
    assert run.fired == NEW


def test_demo_generates_the_same_with_a_cache_and_without(demo: rs.LM) -> None:
    rows = [demo.encode("Question: What is the capital of Chile?\nAnswer: The capital of Chile is").tolist()]
    with Freeze(20, scope="all-previous").on(demo):
        assert generated(demo, rows, 6) == generated(demo, rows, 6, use_cache=False)


def test_other_seeds_and_other_layers_draw_other_noise(models: Callable[[str], rs.LM]) -> None:
    lm, batch = models("llama"), padded(prompts(8))
    seen = []
    for how in (Noise(1), Noise(1, seed=1), Noise(2), Shuffle(1), Shuffle(1, seed=1)):
        with how.on(lm):
            seen.append(logits(lm, **batch)[0, -1])
            assert torch.equal(seen[-1], logits(lm, **batch)[0, -1])
    assert all((a - b).abs().max() > 1e-3 for i, a in enumerate(seen) for b in seen[:i])


@pytest.mark.parametrize("how", [Noise(1), Shuffle(1), Freeze(1), SkipAttention(1), Freeze(1, exempt_first=True)])
def test_a_left_padded_batch_equals_single_rows(models: Callable[[str], rs.LM], how: Intervention) -> None:
    lm, rows = models("llama"), prompts(9, 4, 2)
    with how.on(lm):
        together = logits(lm, **padded(rows))[:, -1]
        alone = torch.cat([logits(lm, **padded([row]))[:, -1] for row in rows])
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=0)  # norms and softmax are float32's
    assert (alone - torch.cat([logits(lm, **padded([row]))[:, -1] for row in rows])).abs().max() > 1e-2


@pytest.mark.parametrize("kind", [Noise, Shuffle, Freeze, SkipAttention])
@pytest.mark.parametrize("family", ["llama", "jamba"])
def test_the_identity_at_the_end_and_one_line_for_layers_that_are_not_there(
    models: Callable[[str], rs.LM], kind: Callable[..., Any], family: str
) -> None:
    lm, batch = models(family), padded(prompts(7))
    plain = logits(lm, **batch)
    with kind(L).on(lm) as run:
        assert torch.equal(logits(lm, **batch), plain)
        assert torch.equal(logits(lm, **batch), plain)
    assert run.fired == 2
    for k in (-1, L + 1):
        with pytest.raises(rs.BadInput, match=rf"no layer {k}: choose 0 to {L}"), kind(k).on(lm):
            pass
    with pytest.raises(rs.BadInput, match=rf"whole number from 0 to {L}, not 2\.5"), kind(2.5).on(lm):
        pass


def test_a_prompt_and_its_answer_in_one_forward(models: Callable[[str], rs.LM]) -> None:
    """The last prompt token and the answer's run normally, as if the answer came token by token."""
    lm, rows = models("llama"), prompts(8)
    answer = [11, 12, 13]
    with Freeze(2).on(lm, prompt=8):
        at_once = logits(lm, **padded([rows[0] + answer]))[0, 7:]
    with Freeze(2).on(lm) as run:
        out = lm.model(torch.tensor(rows), use_cache=True)
        steps = [out.logits[0, -1]]
        for token in answer:
            steps.append(lm.model(torch.tensor([[token]]), cache=out.past_key_values).logits[0, -1])
    torch.testing.assert_close(at_once, torch.stack(steps), atol=1e-5, rtol=0)
    assert run.fired == 1


def test_caches_that_cannot_take_back_a_token_are_refused(models: Callable[[str], rs.LM]) -> None:
    rows = prompts(8)
    with pytest.raises(rs.Refused, match="use_cache=False"), Freeze(1, scope="all-previous").on(models("jamba")):
        generated(models("jamba"), rows, 2)
    lm = models("llama")
    with pytest.raises(rs.Refused, match="beams"), Freeze(1, scope="all-previous").on(lm):
        generated(lm, rows, 3, num_beams=2)
    cache = lm.model(torch.tensor(rows), use_cache=True).past_key_values
    with pytest.raises(rs.BadInput, match="prefill inside the same block"), Freeze(1, scope="all-previous").on(lm):
        lm.model(torch.tensor([[5]]), cache=cache)
    window = models("mistral")  # whose own cache forgets at once what lies before the window
    with Freeze(1, scope="all-previous").on(window):
        cache = window.model(torch.tensor(rows), use_cache=True).past_key_values
        with pytest.raises(rs.Refused, match="take back"):
            window.model(torch.tensor([[5]]), cache=cache)


@pytest.mark.parametrize("scope", ["prompt", "all-previous"])
def test_it_composes_with_disrupt(models: Callable[[str], rs.LM], scope: str) -> None:
    lm, rows = models("llama"), prompts(8, 5)
    both = Together((Disrupt(selection="top-2", replacement="zero"), Freeze(2, scope=scope)))
    with both.on(lm, prompt=8) as run:
        cached = generated(lm, rows, 8)
    with both.on(lm, prompt=8):
        assert generated(lm, rows, 8, use_cache=False) == cached
    assert run.fired > 8
    for part in both.parts:
        with part.on(lm, prompt=8):
            assert generated(lm, rows, 8) != cached


@pytest.mark.parametrize(
    "how", [Noise(1), Freeze(1, scope="all-previous"), SkipAttention(1), Swap(1, donor=(4, 5, 6), positions=(0,))]
)
def test_the_model_is_put_back_after_an_exception(models: Callable[[str], rs.LM], how: Intervention) -> None:
    lm, batch = models("gpt2"), padded(prompts(6))
    plain, before = logits(lm, **batch), traces(lm.model)
    with pytest.raises(KeyboardInterrupt), how.on(lm):  # noqa: PT012
        logits(lm, **batch)
        raise KeyboardInterrupt
    with pytest.raises(IndexError), how.on(lm):
        logits(lm, input_ids=torch.tensor([[1000]]))
    with pytest.raises(rs.NeverFired), how.on(lm):
        pass
    assert traces(lm.model) == before
    assert torch.equal(logits(lm, **batch), plain)


# ---- skip ------------------------------------------------------------------------------------------------------------


def _after_residual(layer: Any, h: Tensor) -> Tensor:
    """A layer of each family without its attention sublayer, written out."""
    name = type(layer).__name__
    if name == "GPT2Block":
        return h + layer.mlp(layer.ln_2(h))
    if name == "GPTNeoXLayer":
        return h + layer.mlp(layer.post_attention_layernorm(h))
    if name == "Gemma2DecoderLayer":
        return h + layer.post_feedforward_layernorm(layer.mlp(layer.pre_feedforward_layernorm(h)))
    if name == "FalconH1DecoderLayer":
        return _falcon_h1(layer, h)
    if name == "BloomBlock":
        return layer.mlp(layer.post_attention_layernorm(h), h)
    if name == "Olmo2DecoderLayer":
        return h + layer.post_feedforward_layernorm(layer.mlp(h))
    if name == "JambaAttentionDecoderLayer":
        return h + layer.feed_forward(layer.pre_ff_layernorm(h))
    return h + layer.mlp(layer.post_attention_layernorm(h))


def _falcon_h1(layer: Any, h: Tensor) -> Tensor:
    normed = layer.input_layernorm(h)
    h = h + layer.mamba(hidden_states=normed) * layer.ssm_out_multiplier
    return h + layer.feed_forward(layer.pre_ff_layernorm(h))


SKIPPED = [
    "llama", "gpt2", "gpt_neox", "gemma2", "mixtral", "jamba", "falcon_h1", "bloom", "olmo2", "phi3", "qwen3_moe",
]  # fmt: skip


@pytest.mark.parametrize("family", SKIPPED)
def test_skip_equals_layers_written_out_without_attention(models: Callable[[str], rs.LM], family: str) -> None:
    """Output biases, parallel residuals, norms after attention, experts, recurrent layers and parts."""
    lm, batch = models(family), {"input_ids": torch.tensor(prompts(9))}
    layers, returns = decoder_layers(lm.model), loop(lm.model).returns[0]
    attention = {layer.layer for layer in lm.anatomy.attention}
    for k in (0, 2, L - 1):
        own = {i: layer.forward for i, layer in enumerate(layers) if i >= k and i in attention}

        def without(layer: nn.Module) -> Callable[..., Any]:
            def forward(*args: Any, **kwargs: Any) -> Any:
                out = _after_residual(layer, args[0] if args else kwargs["hidden_states"])
                return (out, *[None] * (returns - 1)) if returns else out

            return forward

        try:
            for i in own:
                layers[i].forward = without(layers[i])
            expected = logits(lm, **batch)
        finally:
            for i in own:
                del layers[i].forward
        with SkipAttention(k).on(lm) as run:
            got = logits(lm, **batch)
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=0)
        assert run.fired == max(1, len(own))
    assert (got - logits(lm, **batch)).abs().max() > 1e-4


@pytest.mark.parametrize("family", ["llama", "gpt2", "falcon_h1", "cohere2"])
@pytest.mark.parametrize("k", [0, 2])
def test_skip_generates_the_same_with_a_cache(models: Callable[[str], rs.LM], family: str, k: int) -> None:
    lm, rows = models(family), prompts(9, 6)
    with SkipAttention(k).on(lm):
        assert generated(lm, rows, 10) == generated(lm, rows, 10, use_cache=False)
    assert generated(lm, rows, 10) != generated_under(SkipAttention(k), lm, rows)


def generated_under(how: Intervention, lm: rs.LM, rows: list[list[int]]) -> list[list[int]]:
    with how.on(lm):
        return generated(lm, rows, 10)


# ---- swap ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", ["llama", "gpt2", "gpt_neox"])
def test_swap_by_index(models: Callable[[str], rs.LM], family: str) -> None:
    lm = models(family)
    rows, (donor,) = prompts(9, 6), prompts(7, 7)[1:]
    with torch.no_grad():
        states = lm.model(torch.tensor([donor]), output_hidden_states=True).hidden_states[2][0]

    def change(layer: int, h: Tensor, ids: list[int]) -> Tensor:
        out = h.clone()
        if layer == 2:
            out[1], out[4] = states[3], states[-1]
        return out

    with Swap(2, donor=donor, positions=(1, 4), donor_positions=(3, -1)).on(lm) as run:
        swapped = generated(lm, rows, 10)
    assert swapped == [slow(lm, row, change, 10) for row in rows]
    assert run.fired == 1
    assert swapped != generated(lm, rows, 10)


def test_swap_of_everything_below_the_last_token_asks_the_donors_question(models: Callable[[str], rs.LM]) -> None:
    lm = models("llama")
    row, donor = prompts(6, 6)
    with Swap(1, donor=donor, positions=range(6)).on(lm):
        swapped = logits(lm, **padded([row]))
    assert torch.equal(swapped, logits(lm, **padded([donor])))
    with Swap(L, donor=donor, positions=(0,)).on(lm):
        assert torch.equal(logits(lm, **padded([row])), logits(lm, **padded([row])))


def test_swap_by_span(demo: rs.LM) -> None:
    prompt, donor = "In Peru the capital of Peru is", "The town of Iran, yes Iran."
    batch = {"input_ids": demo.encode(prompt)[None]}
    with Swap(10, donor=donor, span="Peru", donor_span="Iran").on(demo):
        by_span = logits(demo, **batch)
    here, there = ([i for i, t in enumerate(words(demo, text)) if t in ("Peru", "Iran")] for text in (prompt, donor))
    assert len(here) == len(there) == 2
    with Swap(10, donor=donor, positions=here, donor_positions=there).on(demo):
        assert torch.equal(logits(demo, **batch), by_span)
    for span, other, message in (("Chad", "Iran", "does not stand"), ("capital", "Iran", "equal length")):
        with pytest.raises(rs.BadInput, match=message), Swap(10, donor, span=span, donor_span=other).on(demo):
            logits(demo, **batch)
    with pytest.raises(rs.BadInput, match="no token 40"), Swap(10, donor, positions=(40,)).on(demo):
        pass
    for strange in (999_999, -1):
        with pytest.raises(rs.BadInput, match=rf"token {strange} is none of"), Swap(10, [strange], (0,)).on(demo):
            pass
    for empty in ({"positions": ()}, {"positions": (1,), "donor_positions": []}):
        with pytest.raises(rs.BadInput, match="no tokens changes nothing"):
            Swap(10, donor, **empty)


def words(lm: rs.LM, text: str) -> list[str]:
    """Each token's own text."""
    return [lm.tokenizer.decode([i]).strip() for i in lm.encode(text).tolist()]


def test_a_span_holds_the_tokens_that_overlap_it(demo: rs.LM) -> None:
    from rotoscope.interventions.swap import spanned

    ids = demo.encode("The capital of Côte d'Ivoire is").tolist()
    places = spanned(demo, ids, "Côte d'Ivoire")
    assert demo.tokenizer.decode([ids[i] for i in places]) == " Côte d'Ivoire"
    assert spanned(demo, ids, "apit") == [ids.index(demo.encode(" capital").tolist()[0])]


def test_interventions_from_text() -> None:
    assert parse("freeze:layer=18") == Freeze(18)
    assert parse("noise:layer=3:exempt_first=yes:seed=4") == Noise(3, exempt_first=True, seed=4)
    assert parse("swap:layer=2:donor=Rome:positions=1-2:donor_positions=3,5") == Swap(
        2, "Rome", positions=(1, 2), donor_positions=(3, 5)
    )
    both = parse("skip:layer=9+shuffle:layer=2:scope=all-previous")
    assert both == Together((SkipAttention(9), Shuffle(2, scope="all-previous")))
    for text, message in (
        ("freeze", "freeze needs layer"),
        ("freeze:layer=2:scope=some", "scope is one of"),
        ("swap:layer=2:positions=1", "needs a donor"),
        ("swap:layer=2:donor=Rome", "either positions or a span"),
        ("swap:layer=2:donor=Rome:positions=5-3", r"positions=5-3 cannot be read; write numbers and ranges"),
        ("disrupt:layers=3,7-5", r"layers=3,7-5 cannot be read"),
    ):
        with pytest.raises(rs.BadInput, match=message):
            parse(text)

"""Boundaries on many families, against the model's own hidden states and against plain recomputation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from tiny import FAMILIES, tiny
from torch import Tensor, nn

from rotoscope.errors import BadInput, NeverFired, Refused
from rotoscope.model.residual import check, decoder_layers, record, replace, resume, stop

torch.set_num_threads(1)

L = 3
EXACT = sorted(set(FAMILIES) - {"t5", "gemma3n_text", "xglm"})  # the last's file does not run in float64
CAUSAL = sorted(set(EXACT) - {"bert"})
IDS = torch.randint(3, 97, (2, 12), generator=torch.Generator().manual_seed(1))
MASK = torch.ones_like(IDS)
MASK[0, :4] = 0
PADDED = {"input_ids": IDS.masked_fill(MASK == 0, 0), "attention_mask": MASK}
PLAIN = {"input_ids": IDS}
TOKEN = 6


@cache
def model_of(family: str, dtype: torch.dtype = torch.float64) -> Any:
    return tiny(family, layers=L, dtype=dtype)


@torch.no_grad()
def logits(model: Any, **batch: Any) -> Tensor:
    return model(use_cache=False, **batch).logits


@contextmanager
def counted(model: Any) -> Iterator[Counter[int]]:
    """Count by layer the forwards of what lies *inside* the layers, which a covered layer cannot reach."""
    counts: Counter[int] = Counter()
    handles = []
    for k, layer in enumerate(decoder_layers(model)):
        inside = next(layer.children())
        handles.append(inside.register_forward_hook(lambda *_, k=k: counts.update([k])))
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def traces(model: nn.Module) -> list[Any]:
    """Everything that a hook or a covered forward would leave behind, and which modules there are."""
    hooks = [name for name in vars(nn.Module()) if name.endswith("_hooks")]
    return [
        (name, id(module), sorted(vars(module)), [len(getattr(module, hook)) for hook in hooks])
        for name, module in model.named_modules()
    ]


def push(state: Tensor) -> Tensor:
    """Change one token, in a direction that no norm takes out again."""
    edited = state.clone()
    edited[..., TOKEN, :] += torch.linspace(-2, 2, state.shape[-1], dtype=state.dtype) ** 3
    return edited


@pytest.mark.parametrize("family", EXACT)
def test_boundaries_are_the_models_own_hidden_states(family: str) -> None:
    model = model_of(family)
    with torch.no_grad():
        own = model(**PLAIN, use_cache=False, output_hidden_states=True).hidden_states
    recorded = record(model, **PLAIN)
    assert len(recorded.h) == L + 1
    for k in range(L):  # the last of transformers' own is taken after the final norm
        assert torch.equal(recorded.h[k], own[k])
    assert torch.equal(recorded.logits, logits(model, **PLAIN))


@pytest.mark.parametrize("family", EXACT)
def test_resuming_is_exact_and_runs_nothing_below(family: str) -> None:
    model = model_of(family)
    plain, h = logits(model, **PLAIN), record(model, **PLAIN).h
    for k in range(L + 1):
        with resume(model, k, h[k]), counted(model) as counts:
            resumed = logits(model, **PLAIN)
        assert (resumed - plain).abs().max() <= 1e-12
        assert counts == Counter(range(k, L))


@pytest.mark.parametrize("family", EXACT)
def test_resuming_is_exact_under_left_padding(family: str) -> None:
    # float32: with padding, transformers' own eager attention gives NaN in float64, as its softmax runs in float32
    # where the mask's smallest double is minus infinity
    model = model_of(family, torch.float32)
    assert (logits(model, **PADDED) - logits(model, **PLAIN))[0, 4:].abs().max() > 1e-3  # the padding is felt
    assert check(model, PADDED).differences == (0.0,) * (L + 1)


@pytest.mark.parametrize(("family", "tail"), [
    ("llama", lambda m, h: m.lm_head(m.model.norm(h))),
    ("gpt2", lambda m, h: m.lm_head(m.transformer.ln_f(h))),
    ("gpt_neox", lambda m, h: m.lm_head(m.gpt_neox.final_layer_norm(h))),
])  # fmt: skip
def test_the_last_boundary_lies_before_the_final_norm(family: str, tail: Callable[[Any, Tensor], Tensor]) -> None:
    model = model_of(family)
    with torch.no_grad():
        assert torch.equal(tail(model, record(model, **PLAIN).h[L]), logits(model, **PLAIN))


@pytest.mark.parametrize("family", CAUSAL)
def test_replacing_acts_at_its_boundary_and_upwards_only(family: str) -> None:
    model = model_of(family)
    plain = record(model, **PLAIN)
    for k in range(L + 1):
        with replace(model, k, lambda state: state):
            assert torch.equal(logits(model, **PLAIN), plain.logits)
        with replace(model, k, push):
            changed = record(model, **PLAIN)
        assert all(torch.equal(changed.h[below], plain.h[below]) for below in range(k))
        assert torch.equal(changed.h[k], push(plain.h[k]))
        moved = (changed.logits - plain.logits).abs().amax(-1)
        assert (moved[:, :TOKEN] < 1e-9).all()
        assert (moved[:, TOKEN] > 1e-3).all()
        assert (moved[:, TOKEN + 1 :] > 1e-9).any() == (k < L)  # attention carries it on, the head does not
        with resume(model, k, push(plain.h[k])):
            assert torch.equal(logits(model, **PLAIN), changed.logits)


@pytest.mark.parametrize("family", EXACT)
def test_stopping_gives_the_boundary_and_runs_nothing_above(family: str) -> None:
    model = model_of(family)
    h = record(model, **PLAIN).h
    for k in range(L + 1):
        with counted(model) as counts, torch.no_grad(), stop(model, k) as at:
            model(**PLAIN)
            pytest.fail("the block is left from within the model")
        assert torch.equal(at.h, h[k])
        assert counts == Counter(range(k))


@pytest.mark.parametrize(
    "family", ["llama", "gemma3_text", "gpt_oss", "gpt2", "bloom", "cohere2", "jamba", "falcon_h1"]
)
def test_generation_with_a_cache_equals_recomputation(family: str) -> None:
    model = model_of(family)

    def scale(state: Tensor) -> Tensor:
        return state * torch.linspace(-1, 2, state.shape[-1], dtype=state.dtype)

    def generate() -> Tensor:
        return model.generate(
            IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8, do_sample=False, eos_token_id=None
        )

    untouched = generate()
    with replace(model, 1, scale):
        cached = generate()
        ids = IDS
        for _ in range(8):
            ids = torch.cat([ids, logits(model, input_ids=ids)[:, -1:].argmax(-1)], dim=1)
    assert torch.equal(cached, ids)
    assert not torch.equal(cached, untouched)


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["in the model", "in the block"])
def test_everything_is_restored_on_any_exit(fault: type[BaseException], where: str) -> None:
    model = tiny("llama", layers=L)
    plain, h = logits(model, **PLAIN), record(model, **PLAIN).h
    before = traces(model)

    def break_off(state: Tensor) -> Tensor:
        if where == "in the model":
            raise fault
        return state

    def run(block: AbstractContextManager[Any]) -> None:
        with block, replace(model, 2, break_off):
            if where == "in the block":
                raise fault
            model(**PLAIN)

    for block in (replace(model, 1, push), resume(model, 2, h[2]), resume(model, L, h[L]), stop(model, L)):
        with pytest.raises(fault):
            run(block)
        assert traces(model) == before
    assert torch.equal(logits(model, **PLAIN), plain)


def test_recording_breaks_off_cleanly() -> None:
    model = tiny("llama", layers=L)
    before = traces(model)
    with pytest.raises(IndexError):
        record(model, positions=[99], **PLAIN)
    assert traces(model) == before


def test_a_forward_that_someone_else_put_on_a_layer_is_back() -> None:
    model = tiny("llama", layers=L)
    h = record(model, **PLAIN).h
    layer = decoder_layers(model)[0]
    calls: list[int] = []
    own = type(layer).forward

    def theirs(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        return own(layer, *args, **kwargs)

    layer.forward = theirs
    with resume(model, 1, h[1]):
        logits(model, **PLAIN)
    assert layer.forward is theirs
    assert not calls
    logits(model, **PLAIN)
    assert calls


def test_blocks_nest() -> None:
    model = model_of("llama")
    h = record(model, **PLAIN).h
    with replace(model, 1, lambda state: state + 1), replace(model, 1, lambda state: state * 2):
        assert torch.equal(record(model, **PLAIN).h[1], (h[1] + 1) * 2)
    with stop(model, 1) as outer, stop(model, 2), torch.no_grad():
        model(**PLAIN)
    assert torch.equal(outer.h, h[1])
    with stop(model, 2) as at, resume(model, 1, h[1] * 2), torch.no_grad():
        model(**PLAIN)
    with torch.no_grad(), replace(model, 1, lambda state: state * 2):
        assert torch.equal(at.h, record(model, **PLAIN).h[2])


def test_an_edit_may_return_another_dtype() -> None:
    model = model_of("llama")
    h = record(model, **PLAIN).h
    with replace(model, 2, lambda state: state.bfloat16()):
        changed = record(model, **PLAIN)
    assert torch.equal(changed.h[2], h[2].bfloat16().double())


def test_positions_choose_tokens() -> None:
    model = model_of("llama")
    h = record(model, **PLAIN).h
    for k, state in enumerate(record(model, positions=[0, -1], **PLAIN).h):
        assert torch.equal(state, torch.stack([h[k][:, 0], h[k][:, 11]], dim=1))
    for k, state in enumerate(record(model, positions=torch.tensor([[3], [-2]]), **PLAIN).h):
        assert torch.equal(state, torch.stack([h[k][0, 3:4], h[k][1, 10:11]]))


def test_a_resumption_does_not_serve_generation() -> None:
    model = model_of("llama")
    h = record(model, **PLAIN).h
    with resume(model, 1, h[1]), pytest.raises(BadInput, match=r"shape \(2, 12, 64\).*\(2, 1, 64\)"):
        model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=3, do_sample=False)


def test_what_cannot_be_is_said_in_a_sentence() -> None:
    model = model_of("llama")
    with pytest.raises(BadInput, match="no boundary 4: this model has 0 to 3"), replace(model, 4, push):
        pass
    with pytest.raises(BadInput, match="no boundary -1"), stop(model, -1):
        pass
    with pytest.raises(BadInput, match=r"shape \(2, 12, 64\), not \(2, 1, 64\)"), replace(model, 0, lambda s: s[:, :1]):
        logits(model, **PLAIN)
    with pytest.raises(BadInput, match="not NoneType"), replace(model, L, lambda s: None):  # type: ignore[arg-type, return-value]
        logits(model, **PLAIN)
    with pytest.raises(NeverFired, match="boundary 2"), stop(model, 2):
        pass
    with pytest.raises(Refused, match="encoder-decoder"):
        check(model_of("t5"), PLAIN)


def test_shared_keys_and_values_are_reported() -> None:
    resumption = check(model_of("gemma3n_text"), PLAIN)
    assert resumption.worst == float("inf")
    assert resumption.differences[0] == resumption.differences[L] == 0.0
    assert resumption.reason.startswith("resuming at layer 1 raised KeyError")


def test_a_model_that_gives_nan_by_itself_is_reported() -> None:
    resumption = check(model_of("bloom"), PADDED)  # float64, eager, left padding
    assert resumption.worst == float("inf")
    assert resumption.reason == "BloomForCausalLM gives NaN on this batch by itself"


class Layer(nn.Module):
    """Takes its state by keyword and holds its weights in a list of experts called once each."""

    def __init__(self, wrap: Callable[[Tensor], Any]):
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.wrap = wrap
        self.beside: Tensor | float = 0.0

    def forward(self, *, hidden_states: Tensor) -> Any:
        self.beside = torch.tanh(self.experts[0](hidden_states))
        return self.wrap(hidden_states + self.beside + torch.tanh(self.experts[1](hidden_states)))


class Toy(nn.Module):
    """A decoder of no known architecture; `mode` names what is unusual between its layers."""

    def __init__(self, layers: int, mode: str = "", wrap: Callable[[Tensor], Any] = lambda state: (state, None, None)):
        super().__init__()
        self.embedding = nn.Embedding(97, 8)
        self.vision = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))  # the largest list, not called on text
        self.blocks = nn.ModuleList(Layer(wrap) for _ in range(layers))
        self.mode = mode

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> tuple[Tensor]:
        state = self.embedding(input_ids)
        self.blocks[0].beside = 0.0
        for block in [*self.blocks, *self.blocks] if self.mode == "looped" else self.blocks:
            output = block(hidden_states=state)
            state = output if isinstance(output, Tensor) else output[0]
            if self.mode == "scaled":
                state = state * 2
        return (state + self.blocks[0].beside if self.mode == "beside" else state,)


class Flat(nn.Module):
    """Holds no layers at all."""

    def forward(self, input_ids: Tensor, use_cache: bool = False) -> tuple[Tensor]:
        return (input_ids.float(),)


@pytest.mark.parametrize("layers", [1, 4])
@pytest.mark.parametrize("wrap", [lambda s: s, lambda s: (s,), lambda s: (s, None, None), lambda s: [s, None]])
def test_layers_are_found_by_what_they_do(layers: int, wrap: Callable[[Tensor], Any]) -> None:
    model = Toy(layers, wrap=wrap)
    assert decoder_layers(model) is model.blocks  # neither the larger list beside them nor the lists inside
    h = record(model, **PLAIN).h
    assert len(h) == layers + 1
    assert torch.equal(h[0], model.embedding(IDS))
    assert check(model, PLAIN).differences == (0.0,) * (layers + 1)


def test_what_goes_beside_the_stream_is_measured() -> None:
    model = Toy(3, "beside")
    resumption = check(model, PLAIN)
    lost = model.blocks[0].beside
    assert isinstance(lost, float)  # no longer written when the last forward bypassed layer 0
    assert resumption.differences[0] == 0.0
    with torch.no_grad():
        model(IDS)
    expected = model.blocks[0].beside.abs().max().item()
    assert resumption.differences[1:] == pytest.approx((expected,) * 3, rel=1e-5)
    assert resumption.reason == ""


def test_layers_that_are_no_single_stream_are_refused() -> None:
    with pytest.raises(Refused, match="several times a forward"):
        decoder_layers(Toy(2, "looped"))
    with pytest.raises(Refused, match="between its layers"):
        decoder_layers(Toy(2, "scaled"))
    with pytest.raises(Refused, match="does not run on token ids alone"):
        decoder_layers(nn.Linear(4, 4))
    with pytest.raises(Refused, match="no list of layers"):
        decoder_layers(Flat())


def test_layers_are_looked_for_again_when_they_change() -> None:
    model = tiny("llama", layers=L)
    assert len(record(model, **PLAIN).h) == L + 1
    model.model.layers = nn.ModuleList([model.model.layers[0], model.model.layers[2]])
    assert decoder_layers(model) is model.model.layers
    assert len(record(model, **PLAIN).h) == L
    assert check(model, PLAIN).worst == 0.0


def test_a_nested_text_model_beside_a_larger_vision_tower() -> None:
    from transformers import CONFIG_MAPPING, AutoModelForImageTextToText

    vision = CONFIG_MAPPING["clip_vision_model"](
        hidden_size=64, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4, image_size=28, patch_size=14
    )
    config = CONFIG_MAPPING["llava"](vision_config=vision, text_config=tiny("llama").config, image_token_index=96)
    model = AutoModelForImageTextToText.from_config(config).eval()
    assert decoder_layers(model) is model.model.language_model.layers
    assert check(model, PLAIN).worst == 0.0


def test_a_model_with_adapters() -> None:
    peft = pytest.importorskip("peft")
    base = tiny("llama", layers=L, dtype=torch.float64)
    plain = logits(base, **PLAIN)
    model = peft.get_peft_model(base, peft.LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False))
    assert decoder_layers(model) is base.model.layers
    assert check(model.eval(), PLAIN).worst == 0.0
    assert (logits(model, **PLAIN) - plain).abs().max() > 1e-3

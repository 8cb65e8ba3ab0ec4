"""Every name in transformers' registry of causal models: exact, refused in a sentence, never silently different.

What is expected of the representative families was read in their configs and modeling files: how positions enter each
layer of the tiny model, and how many dims turn.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch
import zoo
from census import DIFFERS, EXACT, NOT_BUILT, PAGE, PARTLY, REFUSED, counts, examine
from torch.utils._python_dispatch import TorchDispatchMode

import rotoscope as rs
from rotoscope.model.layers import decoder_layers
from rotoscope.model.residual import stop

# R rotary, N no positions, L absolute ones in the hidden states, A ALiBi, U positions that cannot be undone, - no
# attention; and the rotated dims, of a head_dim of 16 unless said.
EXPECTED: dict[str, tuple[str, int]] = {
    "llama": ("RRRR", 16),
    "mistral": ("RRRR", 16),  # all layers slide
    "mixtral": ("RRRR", 16),
    "qwen3_moe": ("RRRR", 16),
    "gemma2": ("RRRR", 16),  # windows alternate, softcap
    "gemma3_text": ("RRRR", 16),  # two tables
    "gemma3n_text": ("RRRRRRRR", 16),  # several streams, keys shared between layers
    "gpt_oss": ("RRRR", 16),  # sinks, YaRN
    "olmo2": ("RRRR", 16),
    "cohere": ("RRRR", 16),  # interleaved
    "cohere2": ("RRNN", 16),  # layers with full attention do not turn
    "smollm3": ("RRNN", 16),
    "exaone4": ("RRNN", 16),
    "llama4_text": ("RRUU", 16),  # layers that do not turn scale queries by position
    "phi": ("RRRR", 8),
    "stablelm": ("RRRR", 4),
    "gpt_neox": ("RRRR", 4),
    "glm": ("RRRR", 8),  # interleaved
    "gptj": ("RRRR", 8),  # interleaved, sine first
    "codegen": ("RRRR", 8),
    "deepseek_v2": ("RRRR", 16),  # latent attention, a complex table; 16 of 24
    "deepseek_v32": ("RRRR", 16),  # keys chosen by an indexer
    "longcat_flash": ("RRRR", 16),  # two attention modules a layer
    "diffllama": ("RRRR", 16),  # two attention calls a layer
    "falcon_h1": ("RRRR", 16),  # attention and recurrence side by side
    "recurrent_gemma": ("--R-", 8),  # the layer makes its own table
    "moshi": ("RRRR", 16),  # the same
    "roformer": ("RRRR", 16),  # one table of sines and cosines
    "zaya": ("RRRR", 8),  # a convolution over tokens before the rotation
    "hy_v4": ("RRRRR", 16),  # several states a token
    "hunyuan_v1_dense": ("UUUU", 0),  # a norm's weights after the rotation
    "inkling_text": ("UUUU", 0),  # learned bias by distance and query
    "jamba": ("-N-N", 0),
    "bamba": ("-R-R", 8),
    "granitemoehybrid": ("-N-N", 0),
    "lfm2": ("-R-R", 16),
    "minimax": ("R-R-", 16),
    "qwen3_next": ("--RR", 4),
    "nemotron_h": ("--N-", 0),
    "zamba2": ("--NN", 0),
    "gpt2": ("LLLL", 0),
    "opt": ("LLLL", 0),
    "gpt_neo": ("LLLL", 0),
    "bert": ("LLLL", 0),
    "bart": ("LLLL", 0),
    "bloom": ("AA", 0),  # two layers by default
    "mpt": ("AAAA", 0),
    "falcon": ("RRRR", 16),
}
NOT_REACHED = {
    "mamba": "attention interface",
    "xlnet": "attention interface",
    "hrm_text": "several times a forward",
    "blt": "33 keys where the text has 32 tokens",
    "deepseek_v4": "40 keys where the text has 32 tokens",
    "gemma4_unified_assistant": "token ids alone",
}
LETTER = {"rotary": "R", "none": "N", "learned": "L", "alibi": "A", "unknown": "U", "": "-"}
OTHERS = [name for name in zoo.NAMES if name not in EXPECTED and name not in NOT_REACHED]
TOKENS = 29


class Softmaxes(TorchDispatchMode):
    """Counts attention computations by layer: fused ones, and softmaxes over as many keys as there are tokens."""

    def __init__(self, model: torch.nn.Module):
        super().__init__()
        self.layers: Counter[int] = Counter()
        self.at: int | None = None
        for i, layer in enumerate(decoder_layers(model)):
            layer.register_forward_pre_hook(lambda *_, i=i: setattr(self, "at", i))
            layer.register_forward_hook(lambda *_: setattr(self, "at", None))

    def __torch_dispatch__(self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        out = function(*args, **(kwargs or {}))
        spelled = "softmax" in str(function) and out.ndim > 2 and out.shape[-1] in (TOKENS, TOKENS + 1)  # with a sink
        if spelled or "_scaled_dot_product" in str(function):
            self.layers[self.at if self.at is not None else -1] += 1
        return out


def attention_calls(name: str) -> dict[int, int]:
    """Attention computations by layer, counted in the operations of the untouched model; -1: outside the layers."""
    model = zoo.build(name)
    counter = Softmaxes(model)
    with torch.no_grad(), counter:
        model(input_ids=torch.arange(40, 40 + TOKENS)[None], use_cache=False)
    return dict(counter.layers)


@pytest.mark.parametrize("name", EXPECTED)
def test_a_representative_family_is_exact_and_its_layers_are_what_its_files_say(name: str) -> None:
    letters, rotary_dims = EXPECTED[name]
    record = examine(name)
    assert record.reason == ""
    assert record.verdict == (PARTLY if "-" in letters else EXACT)
    assert "".join(LETTER[layer.position] for layer in record.layers) == letters
    assert {layer.rotary_dims for layer in record.layers if layer.position == "rotary"} <= {rotary_dims}
    assert all(layer.note for layer in record.layers if layer.position == "unknown")
    assert attention_calls(name) == {layer.layer: layer.calls for layer in record.layers if layer.calls}


@pytest.mark.parametrize("name", NOT_REACHED)
def test_what_cannot_be_reached_is_refused_in_one_sentence(name: str) -> None:
    record = examine(name)
    assert record.verdict == REFUSED
    assert NOT_REACHED[name] in record.reason
    assert "\n" not in record.reason


@pytest.mark.parametrize("name", ["gptj", "codegen", "llama", "cohere", "glm", "deepseek_v2"])
def test_a_table_is_read_without_a_quarter_turn(name: str) -> None:
    """(sin, cos) read as (cos, sin) with the sign turned is a rotation, too; at position 0 nothing may turn."""
    for layer in examine(name).layers:
        assert layer.rotation is not None
        model = zoo.build(name)
        seen: list[Any] = []

        class Look:
            def observe(self, call: Any, seen: list[Any] = seen) -> None:
                seen.append((call.q, call.unrotate(call.q), call.rotation))

        with torch.no_grad(), rs.tap(rs.wrap(model), Look()):
            model(input_ids=torch.tensor([[40, 41]]), use_cache=False)
        for q, before, rotation in seen:
            first, second = rotation.dims()
            real, imaginary = before[:, :, 0].chunk(2, -1)
            assert torch.allclose(real[..., : rotation.pairs], q[:, :, 0, first].double(), atol=1e-6)
            assert torch.allclose(imaginary[..., : rotation.pairs], q[:, :, 0, second].double(), atol=1e-6)


def test_calls_of_one_layer_are_told_apart_in_the_tables() -> None:
    """diffllama's two calls share queries and keys and differ in values; longcat's are two modules."""
    from rotoscope.studies.observe import observe

    for name, shared in (("diffllama", True), ("longcat_flash", False)):
        lm = rs.wrap(zoo.build(name))
        tables = observe(lm, [*range(30, 70)], seed=0, arms=())
        heads = tables["heads"].query("layer == 0").sort_values("head")
        assert heads["head"].tolist() == [*range(8)]
        one, two = heads["form1"].to_numpy().reshape(2, 4)
        assert bool((one == two).all()) == shared
        rms = tables["dims"].query("layer == 0").sort_values(["head", "dim"]).groupby("tensor")["rms"]
        values = {tensor: column.to_numpy().reshape(2, -1) for tensor, column in rms}
        assert not (values["V"][0] == values["V"][1]).all()
        assert bool((values["Q"][0] == values["Q"][1]).all()) == shared


def test_calls_are_counted_anew_after_a_forward_that_was_broken_off() -> None:
    lm = rs.wrap(zoo.build("diffllama"))
    indices: list[int] = []

    class Look:
        def observe(self, call: Any) -> None:
            indices.append(call.index)

    with torch.no_grad(), rs.tap(lm, Look()):
        for k in (1, 2):
            with stop(lm.model, k):
                lm.model(input_ids=torch.tensor([[40, 41]]), use_cache=False)
    assert indices == [0, 1, 0, 1, 0, 1]


def test_models_are_small_random_and_leave_the_generator_alone() -> None:
    before = torch.get_rng_state()
    one, same, other = zoo.build("qwen3_next"), zoo.build("qwen3_next"), zoo.build("qwen3_next", seed=1)
    assert torch.equal(before, torch.get_rng_state())
    ids = torch.arange(40, 52)[None]
    with torch.no_grad():
        a, b, c = (model(input_ids=ids).logits for model in (one, same, other))
        moved = one(input_ids=ids.flip(1)).logits.flip(1)
    assert torch.equal(a, b)
    assert not torch.allclose(a, c)
    assert (a - moved).abs().max() > 0.1 * a.std()  # order matters
    assert sum(p.numel() for p in one.parameters()) < zoo.LARGEST


def test_the_page_says_what_is_found() -> None:
    rows = re.findall(r"^\| (\S+) \| (\w+) \| ([\w ]+?) \|", PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    page = {name: verdict for name, _, verdict in rows if name in zoo.NAMES}
    assert list(page) == list(zoo.NAMES)
    assert {name: page[name] for name in (*EXPECTED, *NOT_REACHED)} == {
        name: examine(name).verdict for name in (*EXPECTED, *NOT_REACHED)
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", OTHERS)
def test_every_other_name_is_exact_or_refused(name: str) -> None:
    record = examine(name)
    assert record.verdict != DIFFERS, record.reason
    assert bool(record.reason) == (record.verdict in (REFUSED, NOT_BUILT))
    if record.verdict in (EXACT, PARTLY):
        assert attention_calls(name) == {layer.layer: layer.calls for layer in record.layers if layer.calls}
        assert all(layer.note for layer in record.layers if layer.position == "unknown")


@pytest.mark.slow
def test_the_counts_of_the_whole_registry() -> None:
    total = counts([examine(name) for name in zoo.NAMES])
    print(dict(total))
    assert len(zoo.NAMES) == sum(total.values())
    assert len(zoo.NAMES) - total[NOT_BUILT] >= 150
    assert total[EXACT] >= 95
    assert total[DIFFERS] == 0

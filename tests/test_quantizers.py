"""Quantizers: each against a reference written here, exact restoration, and nothing passed over in silence."""

from __future__ import annotations

import builtins
from copy import deepcopy
from typing import Any

import pytest
import torch
from tiny import tiny
from torch import Tensor, nn
from torch.nn.functional import linear as product

import rotoscope as rs
from rotoscope.checks.edits import left_behind, traces
from rotoscope.errors import BadInput, Refused
from rotoscope.interventions import Disrupt, Together
from rotoscope.quantizers import AWQ, NF4, QUANTIZERS, RTN, W8A8, PackedInt4, Quantizer, SmoothQuant, parse
from rotoscope.quantizers.base import Linear, Quantized, linear_layers

pytest.importorskip("torchao")
pytest.importorskip("bitsandbytes")

_RANDOM = torch.Generator().manual_seed(0)
IDS = torch.randint(3, 90, (2, 20), generator=_RANDOM)
TEXTS = torch.randint(3, 90, (3, 24), generator=_RANDOM).tolist()
ALL = [
    RTN(4, 32), RTN(8, 0, True), W8A8(), NF4(32), PackedInt4(32), SmoothQuant(calibration=TEXTS),
    AWQ(32, calibration=TEXTS),
]  # fmt: skip
K_PROJ = "model.layers.1.self_attn.k_proj"


@pytest.fixture
def lm() -> rs.LM:
    """Untied, grouped queries, widths 64 and 96."""
    return rs.wrap(tiny("llama", tie_word_embeddings=False))


def _logits(lm: rs.LM) -> Tensor:
    with torch.no_grad():
        return lm.model(IDS).logits


def _weights(lm: rs.LM) -> dict[str, Tensor]:
    return {linear.name: linear.weight.clone() for linear in linear_layers(lm)}


def _parameters(model: nn.Module) -> list[tuple[str, int, int, bool, Tensor]]:
    named = model.named_parameters(remove_duplicate=False)
    return [(name, id(p), p.data_ptr(), p.requires_grad, p.detach().clone()) for name, p in named]


def _apart(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).norm() / b.double().norm())


def _grouped(weight: Tensor, group: int) -> Tensor:
    rows, width = weight.shape
    return weight.double().reshape(rows, width // (group or width), group or width)


def _rounded(weight: Tensor, bits: int, group: int, symmetric: bool) -> tuple[Tensor, Tensor]:
    """Round to nearest in float64; beside it, each weight's step, 0 where it is halfway between two values."""
    w = _grouped(weight, group)
    low, high = -(2 ** (bits - 1)), 2 ** (bits - 1) - 1
    smallest, largest = w.amin(-1, keepdim=True).clamp(max=0), w.amax(-1, keepdim=True).clamp(min=0)
    if symmetric:
        step, zero = torch.maximum(-smallest, largest) / ((high - low) / 2), torch.zeros_like(largest)
    else:
        step = (largest - smallest) / (high - low)
        zero = (low - (smallest / step).round()).clamp(low, high)
    values = (((w / step).round() + zero).clamp(low, high) - zero) * step
    return values.reshape(weight.shape), _clear(w / step, step).reshape(weight.shape)


def _clear(position: Tensor, step: Tensor) -> Tensor:
    """The step where one value is nearest, 0 where rounding of floats decides."""
    halfway = (position - position.floor() - 0.5).abs() < 1e-4
    return step.expand_as(position).masked_fill(halfway, 0)


def _assert_rounded(found: Tensor, expected: Tensor, step: Tensor) -> None:
    clear = step > 0
    assert clear.double().mean() > 0.95
    torch.testing.assert_close(found.double()[clear], expected[clear], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bits", [2, 3, 4, 8])
@pytest.mark.parametrize("group", [0, 32])
@pytest.mark.parametrize("symmetric", [False, True])
def test_rtn_is_rounding_to_nearest(lm: rs.LM, bits: int, group: int, symmetric: bool) -> None:
    before = _weights(lm)
    with RTN(bits, group, symmetric).on(lm):
        after = _weights(lm)
    for name, weight in before.items():
        _assert_rounded(after[name], *_rounded(weight, bits, group, symmetric))


def test_int8_per_row_is_torchaos_int8_weight_only(lm: rs.LM) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    theirs = deepcopy(lm.model)
    quantize_(theirs.model.layers, Int8WeightOnlyConfig(set_inductor_config=False))
    with RTN(8, 0, True).on(lm):
        for linear in linear_layers(lm):
            torch.testing.assert_close(linear.weight, theirs.get_submodule(linear.name).weight.dequantize())


def test_nf4_takes_the_nearest_of_its_sixteen_values(lm: rs.LM) -> None:
    levels = [  # QLoRA, appendix E
        -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
        -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
        0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
    ]  # fmt: skip
    before = _weights(lm)
    with NF4(32).on(lm) as run:
        after = _weights(lm)
    for name, weight in before.items():
        w = _grouped(weight, 32)
        scale = w.abs().amax(-1, keepdim=True)
        grid = torch.tensor(levels, dtype=torch.float64)
        off = ((w / scale)[..., None] - grid).abs()
        nearest = (grid[off.argmin(-1)] * scale).reshape(weight.shape)
        closest = off.topk(2, largest=False).values
        clear = (closest[..., 1] - closest[..., 0] > 1e-5).double().reshape(weight.shape)
        _assert_rounded(after[name], nearest, clear)
    assert run.measured["bits"] / run.measured["weights"] == 4 + 32 / 32


def _tinygemm(weight: Tensor, group: int) -> tuple[Tensor, Tensor]:
    """From each group's smallest to its largest value, offset and step in bfloat16; the step beside."""
    w = _grouped(weight, group)
    smallest, largest = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
    step = ((largest - smallest).bfloat16() / 15).double()
    middle = (smallest.bfloat16() + (step * 8).bfloat16()).double()
    bottom = middle - 8 * step
    codes = ((w - bottom) / step).round().clamp(0, 15)
    return ((codes - 8) * step + middle).reshape(weight.shape), step.expand_as(w).reshape(weight.shape)


def test_packed_int4_is_rounding_to_nearest_and_what_its_kernel_computes(lm: rs.LM) -> None:
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1), dtype=torch.bfloat16)
    before = _weights(lm)
    kernel = deepcopy(lm.model.get_submodule(K_PROJ)).bfloat16()
    quantize_(kernel, PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False))
    with PackedInt4(32).on(lm) as run:
        after = _weights(lm)
    for name, weight in before.items():
        expected, step = _tinygemm(weight.bfloat16(), 32)
        steps = ((after[name].double() - expected) / step).abs()
        assert steps.max() < 1.1  # its bfloat16 arithmetic decides otherwise where a weight lies between two values
        assert (steps > 0.1).double().mean() < 0.03
    torch.testing.assert_close(product(x.float(), after[K_PROJ]), kernel(x).float(), rtol=0.01, atol=0.01)
    assert run.measured["bits"] / run.measured["weights"] == 4 + 2 * 16 / 32


@pytest.mark.parametrize("quantizer", [PackedInt4(32), AWQ(32, calibration=TEXTS)], ids=lambda q: q.name)
def test_packed_rows_need_not_come_in_sixteens(quantizer: Quantizer) -> None:
    lm = rs.wrap(tiny("qwen2", head_dim=8, num_key_value_heads=1))  # 8 rows of keys, with biases
    weight = _weights(lm)[K_PROJ]
    with quantizer.on(lm):
        values = _weights(lm)[K_PROJ]
    assert values.shape == weight.shape == (8, 64)
    for row in range(8):
        assert 0.01 < _apart(values[row], weight[row]) < 0.2


def test_awq_is_torchaos_on_a_bfloat16_model() -> None:
    from torchao.prototype.awq.api import AWQConfig
    from torchao.prototype.awq.core import AWQObservedLinear
    from torchao.prototype.quantization.int4 import PrototypeInt4WeightOnlyConfig
    from torchao.quantization import quantize_

    lm = rs.wrap(tiny("qwen2", dtype=torch.bfloat16))  # biases on q, k, v
    theirs = deepcopy(lm.model)
    base = PrototypeInt4WeightOnlyConfig(group_size=32, set_inductor_config=False)
    quantize_(theirs.model.layers, AWQConfig(base, step="prepare"))
    with torch.no_grad():
        for text in TEXTS:
            theirs(torch.tensor([text]), use_cache=False)
    observed = lambda module, name: isinstance(module, AWQObservedLinear)  # noqa: E731
    quantize_(theirs.model.layers, AWQConfig(base, step="convert"), filter_fn=observed)
    moved = 0
    with AWQ(32, calibration=TEXTS).on(lm):
        for linear in linear_layers(lm):
            weight = theirs.get_submodule(linear.name).weight
            moved += bool((weight.act_pre_scale != 1).any())
            effective = product(torch.eye(linear.width, dtype=torch.bfloat16), weight).T
            assert _apart(linear.weight, effective) < 0.005  # bfloat16's rounding
    assert moved > 10


def test_awq_loses_less_than_rounding_where_some_inputs_are_strong() -> None:
    model = tiny("llama")
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight[::32] *= 20
    lm, module = rs.wrap(model), model.model.layers[0].self_attn.q_proj
    seen: list[Tensor] = []
    with module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())):
        _logits(lm)
    after = []
    with torch.no_grad():
        clean = module(seen[0])
        for quantizer in (AWQ(32, calibration=TEXTS), PackedInt4(32)):
            with quantizer.on(lm):
                after.append(_apart(module(seen[0]), clean))
    assert after[0] < 0.7 * after[1]


def _int8(x: Tensor) -> tuple[Tensor, Tensor]:
    step = x.abs().amax(-1, keepdim=True) / 127.5
    return (x / step).round().clamp(-128, 127), step


def _sign_of_largest(x: Tensor) -> Tensor:
    """-1 for rows whose largest magnitude is negative: it lies halfway between two values, -127 and -128."""
    return x.gather(-1, x.abs().argmax(-1, keepdim=True)).sign().float()


def _int8_product(x: Tensor, weight: Tensor, smoothing: Tensor) -> Tensor:
    """Both sides in 8 bits, in float64."""
    (codes, step), (rows, scale) = _int8(x.double() / smoothing), _int8(weight.double() * smoothing)
    return codes @ rows.T * step * scale.T


@pytest.mark.parametrize("quantizer", [W8A8(), SmoothQuant(0.3, calibration=TEXTS)], ids=lambda q: q.name)
@torch.no_grad()
def test_inputs_are_quantized_and_products_of_integers(lm: rs.LM, quantizer: Quantizer) -> None:
    seen: list[Tensor] = []
    module = lm.model.get_submodule(K_PROJ)
    with module.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach())):
        for text in TEXTS:
            lm.model(torch.tensor([text]))
    largest = torch.cat([x[0] for x in seen]).abs().amax(0).double()
    smoothing = torch.ones(64, dtype=torch.float64)
    if isinstance(quantizer, SmoothQuant):
        smoothing = largest**0.3 / module.weight.abs().amax(0).double() ** 0.7
    x = torch.randn(40, 64, generator=torch.Generator().manual_seed(2)) * torch.logspace(-1, 1, 64)
    x = x * _sign_of_largest(x / smoothing)
    module.weight.mul_(_sign_of_largest(module.weight * smoothing))
    weight = module.weight.clone()
    with quantizer.on(lm) as run:
        found = module(x)
        plain = (x / smoothing.float()) @ module.weight.dequantize().T
    assert _apart(found, _int8_product(x, weight, smoothing)) < 3e-4
    assert _apart(plain, _int8_product(x, weight, smoothing)) > 3e-3
    columns = sum(linear.width for linear in linear_layers(lm)) if isinstance(quantizer, SmoothQuant) else 0
    rows = sum(len(linear.weight) for linear in linear_layers(lm))
    assert run.measured["bits"] == 8 * run.measured["weights"] + 32 * (rows + columns)


def test_smoothquant_is_torchaos(lm: rs.LM) -> None:
    from torchao.prototype.smoothquant.api import SmoothQuantConfig
    from torchao.prototype.smoothquant.core import SmoothQuantObservedLinear
    from torchao.quantization import Int8DynamicActivationInt8WeightConfig, quantize_

    theirs = deepcopy(lm.model)
    base = Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)
    quantize_(theirs.model.layers, SmoothQuantConfig(base, step="prepare", alpha=0.5, use_running_absmax=True))
    with torch.no_grad():
        for text in TEXTS:
            theirs(torch.tensor([text]), use_cache=False)
        observed = lambda module, name: isinstance(module, SmoothQuantObservedLinear)  # noqa: E731
        for step in ("prepare_for_smoothquant_smoothing_factor", "convert"):
            config = SmoothQuantConfig(base, step=step, use_running_absmax=True)
            quantize_(theirs.model.layers, config, filter_fn=observed)
        expected = theirs(IDS).logits
    clean = _logits(lm)
    with SmoothQuant(0.5, calibration=TEXTS).on(lm):
        torch.testing.assert_close(_logits(lm), expected)
    assert _apart(expected, clean) > 1e-2


@pytest.mark.parametrize("off", ["not quantized", "overflow"])
def test_products_that_are_not_what_they_should_be_are_refused(
    lm: rs.LM, off: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from rotoscope.quantizers import w8a8

    def other(x: Tensor, stored: Any) -> Tensor:
        exact = x @ stored.dequantize().T
        return exact if off == "not quantized" else exact + 100

    monkeypatch.setattr(w8a8, "product", other)
    with pytest.raises(Refused, match=r"8-bit products of model.layers.0.self_attn.q_proj are .* off"), W8A8().on(lm):
        pass


@pytest.mark.parametrize("quantizer", ALL, ids=lambda q: q.name)
def test_all_linears_change_nothing_else_does_and_all_is_put_back(quantizer: Quantizer, lm: rs.LM) -> None:
    model = lm.model
    model.train()
    model.model.layers[0].self_attn.q_proj.weight.requires_grad_(False)
    parameters, left, clean = _parameters(model), traces(model), _logits(lm)
    weights = _weights(lm)
    inside: list[tuple[str, int]] = []
    with pytest.raises(KeyboardInterrupt):
        _broken_off(quantizer, lm, inside)
    assert [name for name, *_ in inside] == [name for name, *_ in parameters]
    changed = {after[0] for before, after in zip(parameters, inside, strict=True) if before[1] != after[1]}
    assert changed == {f"{name}.weight" for name in weights}
    for before, after in zip(parameters, _parameters(model), strict=True):
        assert before[:4] == after[:4]
        assert torch.equal(before[4], after[4])
    assert left_behind(left, traces(model)) == 0
    assert torch.equal(_logits(lm), clean)


def _broken_off(quantizer: Quantizer, lm: rs.LM, inside: list[tuple[str, int]]) -> None:
    clean, weights = _logits(lm), _weights(lm)
    total = sum(weight.numel() for weight in weights.values())
    with quantizer.on(lm) as run:
        assert _apart(_logits(lm), clean) > 1e-3
        assert run.fired == len(weights) == 21
        assert run.measured["should"] == run.measured["weights"] == total
        assert 0.9 * total < run.measured["changed"] <= total
        inside += [(name, id(p)) for name, p in lm.model.named_parameters(remove_duplicate=False)]
        raise KeyboardInterrupt


def test_an_error_halfway_puts_back_what_was_changed(lm: rs.LM) -> None:
    class Breaks(RTN):
        def quantize(self, linear: Linear, learned: Any) -> Quantized:
            if linear.name == K_PROJ:
                raise RuntimeError("halfway")
            return super().quantize(linear, learned)

    before = _parameters(lm.model)
    with pytest.raises(RuntimeError, match="halfway"), Breaks(4, 32).on(lm):
        pass
    assert [p[:4] for p in before] == [p[:4] for p in _parameters(lm.model)]


def test_what_is_measured(lm: rs.LM) -> None:
    before = _weights(lm)
    with RTN(4, 32, layers=[0, 2]).on(lm) as run:
        after = _weights(lm)
    chosen = [name for name in before if ".1." not in name]
    assert all(torch.equal(before[name], after[name]) for name in before if name not in chosen)
    assert run.fired == len(chosen) == 14
    assert run.measured["weights"] == sum(before[name].numel() for name in chosen)
    squares = sum(float((after[name] - before[name]).double().square().sum()) for name in chosen)
    assert run.measured["error"] == pytest.approx(squares, rel=1e-6)
    assert run.measured["energy"] == pytest.approx(sum(float(before[n].double().square().sum()) for n in chosen))
    assert run.measured["changed"] == sum(int((after[name] != before[name]).sum()) for name in chosen)
    assert run.measured["bits"] == run.measured["weights"] * (4 + (32 + 8) / 32)


def test_kept_rows_are_exact_and_others_are_as_without_them(lm: rs.LM) -> None:
    before = _weights(lm)
    rows = torch.zeros(32, dtype=torch.bool)
    rows[[3, 17, 31]] = True
    with RTN(3, 32).on(lm) as plain:
        rounded = _weights(lm)
    with RTN(3, 32, keep={K_PROJ: rows}).on(lm) as run:
        kept = _weights(lm)
    assert torch.equal(kept[K_PROJ][rows], before[K_PROJ][rows])
    assert not torch.equal(rounded[K_PROJ][rows], before[K_PROJ][rows])
    assert torch.equal(kept[K_PROJ][~rows], rounded[K_PROJ][~rows])
    assert all(torch.equal(kept[name], rounded[name]) for name in before if name != K_PROJ)
    assert run.measured["kept"] == 3 * 64
    assert run.measured["bits"] - plain.measured["bits"] == 3 * 64 * (16 - 3 - 40 / 32)


def test_everything_kept_is_no_shortfall(lm: rs.LM) -> None:
    keep = {name: torch.ones(len(weight), dtype=torch.bool) for name, weight in _weights(lm).items()}
    clean = _logits(lm)
    with RTN(3, 32, keep=keep).on(lm) as run:
        assert torch.equal(_logits(lm), clean)
    assert run.measured["bits"] == 16 * run.measured["weights"]


@pytest.mark.parametrize(
    ("keep", "said"),
    [
        ({"lm_head": torch.ones(97, dtype=torch.bool)}, "lm_head, which is no linear layer"),
        ({K_PROJ: torch.ones(31, dtype=torch.bool)}, "32 rows"),
        ({K_PROJ: torch.ones(32)}, "boolean"),
    ],
)
def test_rows_to_keep_that_are_not_there(lm: rs.LM, keep: dict[str, Tensor], said: str) -> None:
    with pytest.raises(BadInput, match=said), RTN(4, 32, keep=keep).on(lm):
        pass


@pytest.mark.parametrize(
    ("quantizer", "mend"),
    [
        (RTN(4, 64), "groups of 64 do not divide the 96 inputs of model.layers.0.mlp.down_proj; .* would do is 32"),
        (RTN(4, 48), "groups of 48 do not divide the 64 inputs of model.layers.0.self_attn.q_proj; .* would do is 32"),
        (PackedInt4(64), "the 96 inputs of model.layers.0.mlp.down_proj; the largest group that would do is 32"),
        (AWQ(128, calibration=TEXTS), "the largest group that would do is 32"),
        (NF4(64), "groups of 64 do not divide the 96 inputs .* would do is 32"),
        (NF4(32, layers=1), None),
    ],
)
def test_groups_that_do_not_divide(lm: rs.LM, quantizer: Quantizer, mend: str | None) -> None:
    before = _parameters(lm.model)
    if mend is None:
        with quantizer.on(lm) as run:
            assert run.fired == 7
        return
    with pytest.raises(BadInput, match=mend), quantizer.on(lm):
        pass
    assert [p[:4] for p in before] == [p[:4] for p in _parameters(lm.model)]


def test_no_group_would_do() -> None:
    lm = rs.wrap(tiny("llama", intermediate_size=90))
    with pytest.raises(BadInput, match=r"none would do"), NF4(32).on(lm):
        pass


@pytest.mark.parametrize(
    ("family", "said"),
    [
        ("mixtral", r"would change 14% of the weights of the decoder: mlp.experts.gate_up_proj is no linear layer"),
        ("gpt2", r"would change 0% of the weights of the decoder: mlp.c_fc.weight is no linear layer"),
    ],
)
@pytest.mark.parametrize("quantizer", [RTN(4, 32), W8A8(), AWQ(32, calibration=TEXTS)], ids=lambda q: q.name)
def test_weights_out_of_reach_are_refused(family: str, said: str, quantizer: Quantizer) -> None:
    lm = rs.wrap(tiny(family))
    before = _parameters(lm.model)
    with pytest.raises(Refused, match=f"^{quantizer.name} {said}$"), quantizer.on(lm):
        pass
    assert [p[:4] for p in before] == [p[:4] for p in _parameters(lm.model)]


def test_weights_that_lie_on_the_grid_are_refused(lm: rs.LM) -> None:
    for linear in linear_layers(lm):
        codes = torch.randint(-8, 8, linear.weight.shape, generator=torch.Generator().manual_seed(3)).reshape(-1, 32)
        codes[:, 0], codes[:, 1] = -8, 7  # a step of 1
        linear.weight.copy_(codes.reshape(linear.weight.shape))
    with pytest.raises(Refused, match=r"rtn changed 0% .*: they lie on its grid already"), RTN(4, 32).on(lm):
        pass


def test_tied_embeddings_and_head_stay() -> None:
    model = tiny("llama", tie_word_embeddings=True)
    lm = rs.wrap(model)
    clean = _logits(lm)
    with RTN(4, 32).on(lm) as run:
        assert model.lm_head.weight is model.model.embed_tokens.weight
        inside = {name for name, _ in model.named_parameters()}
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert "lm_head.weight" not in inside
    assert run.measured["should"] == sum(linear.weight.numel() for linear in linear_layers(lm))
    assert torch.equal(_logits(lm), clean)


def test_models_that_use_a_weight_by_itself() -> None:
    lm = rs.wrap(tiny("jamba"))
    before = _parameters(lm.model)
    with pytest.raises(Refused, match="needs whole linear layers"), W8A8().on(lm):
        lm.model(IDS)
    with pytest.raises(BadInput, match="no token of the calibration reached"), SmoothQuant(calibration=TEXTS).on(lm):
        pass
    assert [p[:4] for p in before] == [p[:4] for p in _parameters(lm.model)]


@pytest.mark.parametrize("quantizer", ALL, ids=lambda q: q.name)
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(quantizer: Quantizer, dtype: torch.dtype) -> None:
    lm = rs.wrap(tiny("llama", dtype=dtype, layers=1))
    if dtype is torch.float64 and quantizer.kind == "activations":
        with pytest.raises(BadInput, match="does not run in float64"), quantizer.on(lm):
            pass
        return
    clean = _logits(lm)
    with quantizer.on(lm):
        logits = _logits(lm)
    assert logits.dtype is dtype
    assert 1e-3 < _apart(logits, clean) < 0.5


def test_quantized_twice_or_not_in_memory(lm: rs.LM) -> None:
    with W8A8().on(lm), pytest.raises(Refused, match="q_proj is quantized already"), RTN(4, 32).on(lm):
        pass
    module = lm.model.get_submodule(K_PROJ)
    module.weight = nn.Parameter(module.weight.to("meta"))
    with pytest.raises(Refused, match=f"{K_PROJ} is offloaded"), RTN(4, 32).on(lm):
        pass


def test_together_with_other_interventions(lm: rs.LM) -> None:
    with Disrupt(selection="top-1").on(lm), RTN(4, 32).on(lm):
        nested = _logits(lm)
    with Together((Disrupt(selection="top-1"), RTN(4, 32))).on(lm) as run:
        assert torch.equal(_logits(lm), nested)
    assert run.measured["weights"] > 0
    with RTN(4, 32).on(lm):
        assert not torch.equal(_logits(lm), nested)


@pytest.mark.parametrize("quantizer", [SmoothQuant(), AWQ(32), SmoothQuant(calibration=[[]])])
def test_calibration_is_needed(lm: rs.LM, quantizer: Quantizer) -> None:
    with pytest.raises(BadInput, match=f"{quantizer.name} needs calibration"), quantizer.on(lm):
        pass


@pytest.mark.parametrize(
    ("quantizer", "library"),
    [(RTN(4, 32), "torchao"), (W8A8(), "torchao"), (NF4(32), "bitsandbytes"), (AWQ(32, calibration=TEXTS), "torchao")],
)
def test_a_missing_library_is_one_line(
    lm: rs.LM, quantizer: Quantizer, library: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.partition(".")[0] == library:
            raise ImportError(name)
        return found(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    message = rf"^{quantizer.name} needs {library}: pip install rotoscope\[quant\]$"
    with pytest.raises(BadInput, match=message), quantizer.on(lm):
        pass


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("rtn", RTN()),
        ("rtn:bits=3:group=32:symmetric=yes:layers=0,2-3", RTN(3, 32, True, layers=(0, 2, 3))),
        ("w8a8", W8A8()),
        ("smoothquant:alpha=0.8", SmoothQuant(0.8, calibration=TEXTS)),
        ("awq:group=32", AWQ(32, calibration=TEXTS)),
        ("packed-int4:group=128", PackedInt4(128)),
        ("nf4:block=32", NF4(32)),
    ],
)
def test_parse(text: str, expected: Quantizer) -> None:
    assert parse(text, TEXTS) == expected


def test_every_quantizer_is_registered() -> None:
    assert {q.name for q in ALL} == set(QUANTIZERS)
    assert {name: kind.kind for name, kind in QUANTIZERS.items() if kind.kind != "weights"} == {
        "w8a8": "activations",
        "smoothquant": "activations",
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("gptq", "there is no quantizer 'gptq'; there are rtn, "),
        ("rtn:width=4", "rtn takes "),
        ("rtn:bits=9", "bits are 2 to 8, not 9"),
        ("rtn:group=-1", "not -1"),
        ("rtn:keep=3", "keep of rtn cannot be typed"),
        ("awq:calibration=3", "calibration of awq cannot be typed"),
        ("awq:group=48", "32, 64 or 128, not 48"),
        ("nf4:block=48", "not 48"),
        ("smoothquant:alpha=2", "from 0 to 1, not 2"),
    ],
)
def test_bad_settings(text: str, said: str) -> None:
    with pytest.raises(BadInput, match=said):
        parse(text, TEXTS)

"""Queries and keys before rotary embedding, against what each modeling file fed its own rotary function."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
import torch
from tiny import tiny

import rotoscope as rs
from rotoscope.model.rotary import AngleTable, Rotation, angle_per_token, measure
from rotoscope.model.tap import tap

# family: (rotary dims of a 16- or 32-wide head, pairing)
KNOWN = {
    "llama": (None, "half-split"),
    "qwen3": (None, "half-split"),
    "gemma2": (None, "half-split"),
    "phi": (8, "half-split"),
    "gpt_neox": (4, "half-split"),
    "stablelm": (4, "half-split"),
    "glm": (8, "interleaved"),
    "cohere": (None, "interleaved"),
    "gpt_oss": (None, "half-split"),
}


@pytest.mark.parametrize("family", KNOWN)
def test_unrotated_equals_the_inputs_of_the_models_own_rotary_function(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = tiny(family)
    lm = rs.wrap(model)
    file = sys.modules[type(model).__module__]
    own = file.apply_rotary_pos_emb  # type: ignore[attr-defined]
    fed: list[tuple[torch.Tensor, torch.Tensor]] = []

    def spy(q: torch.Tensor, k: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        fed.append((q.clone(), k.clone()))
        return own(q, k, *args, **kwargs)

    monkeypatch.setattr(file, "apply_rotary_pos_emb", spy)
    ids = torch.randint(3, 97, (2, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.ones_like(ids)
    mask[0, :9] = 0
    calls = rs.observers.Capture()
    with torch.no_grad(), tap(lm, calls):
        model(input_ids=ids, attention_mask=mask)
    rotary, pairing = KNOWN[family]
    assert len(fed) == len(lm.anatomy.rotary) == 3
    for layer, (q, k) in zip(lm.anatomy.rotary, fed, strict=True):
        assert (layer.rotary_dims, layer.pairing) == (rotary or layer.head_dim, pairing)
        (call,) = calls.layers[layer.layer]
        assert layer.rotation is not None
        assert call.table is not None
        first, second = layer.rotation.dims()
        for rotated, before in ((call.q, q), (call.k, k)):
            z = call.unrotate(rotated)
            real, imaginary = z[..., : len(first)], z[..., z.shape[-1] // 2 :][..., : len(first)]
            scale = before.abs().max()
            assert ((real - before[..., first]).abs().max() / scale).item() < 1e-5
            assert ((imaginary - before[..., second]).abs().max() / scale).item() < 1e-5
            assert ((layer.rotation.rotate(z, call.table) - rotated).abs().max() / scale).item() < 1e-5


@pytest.mark.parametrize("width", [16, 15])
@pytest.mark.parametrize("pairing", ["half-split", "interleaved"])
@pytest.mark.parametrize("start", [0, 4])
def test_rotating_undoes_unrotating(width: int, pairing: str, start: int) -> None:
    rotation = Rotation(5, width, pairing, start, tuple(range(5)), theta=np.ones(5), scale=np.ones(5))
    g = torch.Generator().manual_seed(0)
    angle = torch.rand(1, 7, 5, generator=g)
    table = AngleTable(1.4 * angle.cos(), 1.4 * angle.sin())  # scaled tables are not unitary
    x = torch.randn(2, 3, 7, width, generator=g)
    z = rotation.unrotate(x, table)
    assert z.shape[-1] == 2 * (5 + (width - 10 + 1) // 2)
    assert torch.allclose(rotation.rotate(z, table), x.double(), atol=1e-12)


def test_logits_of_any_distance_follow_from_unrotated_vectors_and_angles(demo: rs.LM) -> None:
    """``w(i - j, q, k)`` equals the real scaled logit of the pair (i, j), layer by layer."""
    ids = torch.arange(500, 560)[None]
    calls = rs.observers.Capture()
    with torch.no_grad(), tap(demo, calls):
        demo.model(ids)
    for layer in (0, 11, 29):
        (call,) = calls.layers[layer]
        rotation = demo.anatomy.layers[layer].rotation
        assert rotation is not None
        q, k = (torch.complex(*call.unrotate(x).chunk(2, -1))[0] for x in (call.q, call.k))
        turns = torch.from_numpy(rotation.angles(60))
        i, j = 50, 13
        w = (q[4, i] * k[1, j].conj() * turns[i - j]).sum().real * call.scaling
        assert w.item() == pytest.approx(call.logits()[0, 4, i, j].item(), abs=2e-4)


def test_measured_angles_are_the_models(demo: rs.LM) -> None:
    truth = demo.model.model.rotary_emb.inv_freq.double()
    for layer in demo.anatomy.layers:
        assert torch.allclose(demo.anatomy.theta(layer.layer), truth, rtol=1e-6, atol=0)
    assert (demo.anatomy.layers[3].rotary_dims, demo.anatomy.layers[3].pairing) == (64, "half-split")


def test_angles_are_exact_from_long_tables() -> None:
    theta = np.logspace(0.4, -6, 9)
    found = angle_per_token(np.exp(1j * np.arange(32)[:, None] * theta))
    assert np.allclose(np.abs(found), np.minimum(theta % (2 * np.pi), 2 * np.pi - theta % (2 * np.pi)), rtol=1e-9)


def test_layers_without_rotation_are_told_apart() -> None:
    positions = {
        "cohere2": ["rotary", "rotary", "none"],
        "gpt2": ["learned"] * 3,
        "opt": ["learned"] * 3,
        "jamba": None,
    }
    for family, truth in positions.items():
        found = [layer.position for layer in rs.wrap(tiny(family)).anatomy.layers]
        assert found == truth if truth else set(found) <= {"none", ""}


def test_a_rotation_that_nothing_explains_is_not_claimed() -> None:
    g = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 2, 8, 16, generator=g), torch.randn(1, 1, 8, 16, generator=g)
    angle = torch.rand(1, 8, 16, generator=g)
    assert measure(q, k, AngleTable(angle.cos(), angle.sin()), 1e-5) is None
    assert measure(q, k, None, 1e-5) is None

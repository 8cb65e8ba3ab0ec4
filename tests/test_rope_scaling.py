"""Other rotary angles for the time of a block: held against models that were built with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny import LENGTH, tiny

import rotoscope as rs
from rotoscope.errors import BadInput, Refused
from rotoscope.interventions import DistanceCap
from rotoscope.model.rope_scaling import rescaled
from rotoscope.observers import Capture

IDS = torch.randint(3, 90, (1, 3 * LENGTH // 2), generator=torch.Generator().manual_seed(2))
YARN = {"rope_type": "yarn", "factor": 1.5}
DYNAMIC = {"rope_type": "dynamic", "factor": 1.5}
THETA = 10000.0


@torch.no_grad()
def logits(model: Any, ids: torch.Tensor = IDS) -> torch.Tensor:
    return model(ids, use_cache=False).logits  # type: ignore[no-any-return]


@pytest.mark.parametrize("parameters", [YARN, DYNAMIC, {"rope_type": "linear", "factor": 2.0}])
@pytest.mark.parametrize("family", ["llama", "mixtral", "gpt_neox", "glm", "deepseek_v3", "gemma3_text"])
def test_as_if_the_model_had_been_built_so(family: str, parameters: dict[str, Any]) -> None:
    lm = rs.wrap(tiny(family, layers=2))
    own = lm.model.config.rope_parameters
    before, held = repr(own), {name: x.clone() for name, x in lm.model.named_buffers()}
    plain = logits(lm.model)
    nested = any(isinstance(of, dict) for of in own.values())
    scaled = {k: {**of, **parameters} for k, of in own.items()} if nested else {**own, **parameters}
    head_dim = {"head_dim": 16} if family == "mixtral" else {}  # its config leaves it open, and scalings trip over that
    built = logits(tiny(family, layers=2, rope_parameters=scaled, **head_dim))
    with rescaled(lm, parameters):
        inside = logits(lm.model)
        again = logits(lm.model)
    assert torch.equal(inside, built)
    assert torch.equal(again, inside)
    assert (inside - plain).abs().max() > 0.05
    assert torch.equal(logits(lm.model), plain)
    assert repr(own) == before
    assert "forward" not in {name for m in lm.model.modules() for name in vars(m)}
    for name, x in lm.model.named_buffers():
        assert torch.equal(x, held[name]), name


def test_dynamic_angles_follow_the_length_of_the_text() -> None:
    lm = rs.wrap(tiny("llama", layers=1))
    m = torch.arange(8, dtype=torch.float64)

    def angles(ids: torch.Tensor) -> torch.Tensor:
        with rescaled(lm, DYNAMIC), rs.tap(lm, Capture()) as (seen,):
            logits(lm.model, ids)
        table = seen.layers[0][0].table
        return torch.atan2(table.two[0, 1, :8].double(), table.one[0, 1, :8].double())

    longer = THETA * (1.5 * IDS.shape[1] / LENGTH - 0.5) ** (16 / 14)  # transformers' dynamic NTK, d = 16
    assert torch.allclose(angles(IDS), longer ** (-m / 8), rtol=1e-5)
    assert torch.allclose(angles(IDS[:, :LENGTH]), THETA ** (-m / 8), rtol=1e-5)


def test_lengths_are_the_trained_one() -> None:
    model = tiny("llama", layers=1)
    lm = rs.wrap(model, trained_length=32)
    short = IDS[:, :32]
    with rescaled(lm, DYNAMIC):
        assert torch.equal(logits(model, short), logits(tiny("llama", layers=1), short))
        scaled = logits(model, IDS[:, :48])
    own = model.config.rope_parameters
    built = tiny("llama", layers=1, max_position_embeddings=32, rope_parameters={**own, **DYNAMIC})
    assert torch.equal(scaled, logits(built, IDS[:, :48]))


def test_it_nests_with_interventions_and_survives_an_exception() -> None:
    lm = rs.wrap(tiny("llama", layers=2))
    plain = logits(lm.model)
    seen = []

    def broken() -> None:
        with DistanceCap(9).on(lm), rescaled(lm, YARN):
            seen.append(logits(lm.model))
            raise RuntimeError("mine")

    with pytest.raises(RuntimeError, match="mine"):
        broken()
    assert torch.equal(logits(lm.model), plain)
    for alone in (DistanceCap(9).on(lm), rescaled(lm, YARN)):
        with alone:
            assert (logits(lm.model) - seen[0]).abs().max() > 0.05


@pytest.mark.parametrize("family", ["gptj", "gpt2", "bloom", "jamba"])
def test_refused_where_no_module_makes_angles_from_a_config(family: str) -> None:
    lm = rs.wrap(tiny(family, layers=2))
    with (
        pytest.raises(Refused, match="no module of this model makes its rotary angles from a config"),
        rescaled(lm, YARN),
    ):
        pass


def test_refused_where_the_angles_are_scaled_already() -> None:
    with (
        pytest.raises(Refused, match=r"scaled already \(yarn\)"),
        rescaled(rs.wrap(tiny("gpt_oss", layers=2)), DYNAMIC),
    ):
        pass


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"factor": 2.0}, "need a rope_type"),
        ({"rope_type": "spiral"}, "transformers makes no rotary angles of {'rope_type': 'spiral'}"),
        ({"rope_type": "yarn"}, "transformers makes no rotary angles"),
    ],
)
def test_bad_parameters(parameters: dict[str, Any], message: str) -> None:
    with pytest.raises(BadInput, match=message), rescaled(rs.wrap(tiny("llama", layers=1)), parameters):
        pass

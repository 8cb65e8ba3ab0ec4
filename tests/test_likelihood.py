"""Likelihood in pieces against all logits at once, on heads of every kind."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from tiny import VOCABULARY, tiny

import rotoscope as rs
from rotoscope.interventions import Noise
from rotoscope.model.likelihood import token_nll
from rotoscope.model.residual import replace

IDS = torch.randint(3, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(5))


def from_all_logits(model: torch.nn.Module, ids: torch.Tensor = IDS) -> np.ndarray:
    with torch.no_grad():
        logits = model(input_ids=ids, attention_mask=torch.ones_like(ids), use_cache=False).logits.double().numpy()
    total = np.log(np.exp(logits - logits.max(-1, keepdims=True)).sum(-1)) + logits.max(-1)
    rows, columns = np.indices((len(ids), ids.shape[1] - 1))
    return total[:, :-1] - logits[rows, columns, ids[:, 1:].numpy()]


class Widest:
    """The most logits that the model's head gave at once."""

    def __init__(self, model: torch.nn.Module):
        self.tokens = 0
        model.get_output_embeddings().register_forward_hook(self._see)  # type: ignore[operator]

    def _see(self, module: torch.nn.Module, args: object, output: torch.Tensor) -> None:
        self.tokens = max(self.tokens, output.shape[0] * output.shape[1])


# final softcap, logit factors, learned positions, ALiBi in the attention's own file, windows, a hybrid
@pytest.mark.parametrize(
    "family", ["llama", "gemma2", "cohere", "granite", "gpt2", "opt", "bloom", "mpt", "mistral", "falcon_h1", "jamba"]
)
def test_pieces_equal_the_whole(family: str) -> None:
    lm = rs.wrap(tiny(family, dtype=torch.float64))
    expected = from_all_logits(lm.model)
    seen = Widest(lm.model)
    found = token_nll(lm, IDS, chunk=10)
    assert found.dtype == torch.float64
    assert found.shape == (2, 36)
    assert np.abs(found.numpy() - expected).max() < 1e-9
    assert seen.tokens == 10
    assert np.abs(token_nll(lm, IDS).numpy() - expected).max() < 1e-9


def test_a_model_that_does_not_resume_gives_all_logits_at_once() -> None:
    """Its head needs what the first layer left beside the residual stream."""
    model = tiny("llama", dtype=torch.float64)
    left: list[torch.Tensor] = []
    model.model.layers[0].mlp.register_forward_hook(lambda module, args, out: left.append(out[0, 0, 0]))
    model.lm_head.register_forward_hook(lambda module, args, out: out * (1 + left.pop()) if left else out)
    lm = rs.wrap(model)
    expected = from_all_logits(model)
    seen = Widest(model)
    assert np.abs(token_nll(lm, IDS, chunk=10).numpy() - expected).max() < 1e-9
    assert seen.tokens == IDS.numel()


def test_half_precision_is_summed_in_single() -> None:
    lm = rs.wrap(tiny("llama", dtype=torch.bfloat16))
    assert np.abs(token_nll(lm, IDS, chunk=10).numpy() - from_all_logits(lm.model)).max() < 1e-5


def test_open_interventions_count_in_every_piece() -> None:
    """Also one at the last boundary, where the pieces resume."""
    lm = rs.wrap(tiny("llama", dtype=torch.float64))
    clean = from_all_logits(lm.model)
    with Noise(1, seed=3).on(lm):
        noisy, expected = token_nll(lm, IDS, chunk=10).numpy(), from_all_logits(lm.model)
    assert np.abs(noisy - expected).max() < 1e-9
    assert np.abs(noisy - clean).max() > 1
    with replace(lm.model, 3, lambda h: h.flip(-1)):
        flipped, expected = token_nll(lm, IDS, chunk=10).numpy(), from_all_logits(lm.model)
    assert np.abs(flipped - expected).max() < 1e-9
    assert np.abs(flipped - clean).max() > 1
    assert np.array_equal(from_all_logits(lm.model), clean)


def test_bad_ids() -> None:
    lm = rs.wrap(tiny("llama"))
    for ids in (torch.ones(1, 1, dtype=torch.long), torch.ones(5, dtype=torch.long)):
        with pytest.raises(rs.errors.BadInput, match="two tokens or more"):
            token_nll(lm, ids)

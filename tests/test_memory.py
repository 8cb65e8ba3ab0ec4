"""Memory: capture within a bound gives the same bytes, estimates are what is measured, a lack of it is said."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pandas as pd
import psutil
import pytest
import torch
from small import characters, small
from tiny import FAMILIES, VOCABULARY, tiny
from transformers import CONFIG_MAPPING
from typer.testing import CliRunner

import rotoscope as rs
from rotoscope import cli
from rotoscope.model.estimate import Allocations, sizes
from rotoscope.observers import Causal, Entropy, Grams, Moments, base
from rotoscope.report import write
from rotoscope.results import parquet_bytes
from rotoscope.studies import STUDIES, Options, conduct, observe
from rotoscope.studies.estimate import estimate
from rotoscope.studies.memory import capture, kept, layers_at_once, parse_bytes

FEW = {"size": "quick", "texts": 2, "tokens": 60}
IDS = [3 + 7 * i % 90 for i in range(60)]
WIDE = {"head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2}


def as_bytes(tables: dict[str, pd.DataFrame]) -> dict[str, bytes]:
    return {name: parquet_bytes(table) for name, table in tables.items()}


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("500MB", 500e6), ("2GB", 2e9), ("2GiB", 2**31), ("1000000", 1e6), ("1.5 gb", 1.5e9), ("64K", 64e3),
        ("7MiB", 7 * 2**20), ("1b", 1),
    ],
)  # fmt: skip
def test_sizes_read_as_people_write_them(text: str, size: float) -> None:
    assert parse_bytes(text) == size


@pytest.mark.parametrize("text", ["", "much", "0", "-1GB", "2XB", "GB", "1e9", "2 G i B", "٢GB", "inf", "9" * 400])
def test_what_is_no_size_is_bad_input(text: str) -> None:
    with pytest.raises(rs.BadInput, match=r"max-memory .* is no size") as refusal:
        parse_bytes(text)
    assert len(str(refusal.value)) < 150


@pytest.fixture(scope="module")
def lm() -> rs.LM:
    return rs.wrap(tiny("llama"), characters(), source="tiny")


@pytest.fixture(scope="module")
def free(lm: rs.LM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with all the memory that it wants."""
    out = tmp_path_factory.mktemp("free") / "run"
    conduct(list(STUDIES.values()), lm, Options(**FEW), out=out)
    return out


@pytest.mark.parametrize("family", ["llama", "jamba", "cohere2", "gemma2", "gpt2"])
def test_tables_are_the_same_to_the_byte_however_many_layers_are_observed_at_once(family: str) -> None:
    lm = rs.wrap(tiny(family, layers=4))
    whole = as_bytes(observe.observe(lm, IDS, 0))
    for at_once in (1, 2, 3):
        assert as_bytes(observe.observe(lm, IDS, 0, at_once=at_once)) == whole
    assert as_bytes(observe.observe(lm, IDS, 1)) != whole or family in ("gpt2", "jamba")  # only the arms draw anything


def test_a_bounded_run_and_one_short_of_memory_write_the_tables_of_a_free_one(
    lm: rs.LM, free: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    studies = list(STUDIES.values())
    bound = capture(lm.anatomy.attention[:1], 60)
    tight = conduct(studies, lm, Options(**FEW, max_memory=bound), out=tmp_path / "tight")
    assert tight.provenance["max_memory"] == bound
    assert rs.read(free).decisions == tight.decisions == []
    one_pass = observe._observe

    def crowded(lm: rs.LM, ids: Any, layers: Any, *rest: Any) -> Any:
        if len(layers) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return one_pass(lm, ids, layers, *rest)

    monkeypatch.setattr(observe, "_observe", crowded)
    short = conduct(studies, lm, Options(**FEW), out=tmp_path / "short")
    assert "out of memory, going on with 1 at once" in capsys.readouterr().err
    assert {d["reason"] for d in short.decisions} == {"out of memory"}
    assert sum(d["decision"].startswith("observe/") for d in short.decisions) == 5
    for name in ("tight", "short"):
        for path in free.rglob("*.parquet"):
            if path.stem in ("prefill", "depth_cost"):
                continue  # hold seconds
            assert (tmp_path / name / path.relative_to(free)).read_bytes() == path.read_bytes()
    assert [c.value for c in tight.claims] == [c.value for c in short.claims]


@pytest.mark.parametrize(
    ("family", "tokens", "shape"),
    [("llama", 60, {}), ("llama", 500, WIDE), ("glm", 200, {}), ("gpt2", 100, {}), ("phi", 40, {}), ("jamba", 90, {})],
)
def test_capture_keeps_what_is_said_and_uses_no_more(
    family: str, tokens: int, shape: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "Keep", partial(base.Keep, numbers=1))  # else whole blocks count, of which pages are free
    lm = rs.wrap(tiny(family, layers=4, **({"max_position_embeddings": 512} if shape else {}), **shape))
    ids = (IDS * 10)[:tokens]
    layers = lm.anatomy.attention
    moments, grams, causal, entropy = observers = (Moments(), Grams(), Causal(), Entropy())
    with torch.no_grad(), rs.tap(lm, *observers):
        lm.model(torch.tensor([ids]))
    for layer in layers:
        i = layer.layer
        held = [x for s in moments.layers[i].values() for x in (s.sum, s.squares, s.first)]
        held += [x for s in causal.layers[i] for x in (s.squares, s.rows, s.columns, s.diagonals)]
        held += [entropy.layers[i].entropy_sum, entropy.layers[i].sink_sum]
        g = grams.layers[i]
        held += [g.q.sum, g.q.gram, g.q0, g.k.sum, g.k.gram, g.k0, g.phase]
        assert kept(layer, tokens) == sum(x.nbytes for x in held)
    with Allocations(lm.model) as forward, torch.no_grad():
        lm.model(torch.tensor([ids]), use_cache=False)
    for at_once in (1, len(layers)):
        with Allocations(lm.model) as held_at_most:
            observe.observe(lm, ids, 0, at_once=at_once)
        said = capture(layers[:at_once], tokens)
        assert 0.4 * said < held_at_most.peak < said + forward.peak


def test_a_bound_chooses_the_most_layers_that_fit() -> None:
    layers = rs.wrap(tiny("llama", layers=5)).anatomy.attention
    assert layers_at_once(layers, 60, None) == 5
    for count in range(1, 6):
        assert layers_at_once(layers, 60, capture(layers[:count], 60)) == count
        assert layers_at_once(layers, 60, capture(layers[:count], 60) - 1) == count - 1 if count > 1 else True
    with pytest.raises(rs.BadInput, match=r"does not hold one layer of 60 tokens, which takes .*B: give more"):
        layers_at_once(layers, 60, capture(layers[:1], 60) - 1)


def test_a_twin_that_does_not_fit_leaves_p2_not_tested_and_the_rest_as_it_is(
    lm: rs.LM, free: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What happens to a 7B model in bfloat16 on a machine that holds it once."""
    studies = list(STUDIES.values())
    roomy = {c.id: c for c in rs.read(free).claims}
    with monkeypatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 1000}))
        short = conduct(studies, lm, Options(**FEW), out=tmp_path)
    found = {c.id: c for c in short.claims}
    assert found["P2"].verdict == "not tested"
    assert "needs 0.0 GiB of memory, more than is free" in found["P2"].reason
    assert found["P2"].rule
    for claim in ("P1", "P3", "M1", "M2", "M3"):
        assert (found[claim].verdict, found[claim].value) == (roomy[claim].verdict, roomy[claim].value)
    assert found["P1"].null is None
    assert found["M1"].null is None
    assert roomy["P1"].null is not None
    assert sum(d["decision"].endswith("is left out") for d in short.decisions) == 3
    assert "more than is free" in write(short, tmp_path / "report.html").read_text()
    resumed = {c.id: c for c in conduct(studies, lm, Options(**FEW), out=tmp_path, resume=True).claims}
    assert resumed["P2"] == roomy["P2"]


@pytest.mark.parametrize(
    "family", ["llama", "qwen3", "gemma2", "gpt2", "gpt_neox", "cohere2", "lfm2", "opt", "granite"]
)
def test_an_estimate_is_what_the_model_takes(family: str) -> None:
    model = tiny(family)
    ids = torch.tensor([IDS])
    with Allocations(model) as held, torch.no_grad():
        model(input_ids=ids, use_cache=False)
    with torch.no_grad():
        cache = model(input_ids=ids, use_cache=True).past_key_values
    found = sizes(model.config, family, torch.float32, len(IDS))
    assert found.parameters == sum(p.numel() for p in model.parameters())
    assert found.weight_bytes == sum(p.nbytes for p in model.parameters())
    assert found.forward_bytes == pytest.approx(held.peak, rel=0.15)  # a real CPU fuses a step or two
    pairs = [(layer.keys, layer.values) for layer in cache.layers if getattr(layer, "keys", None) is not None]
    if family not in ("gemma2", "cohere2"):  # which drop what has left the window
        assert found.cache_bytes == sum(k.nbytes + v.nbytes for k, v in pairs)
    measured = rs.wrap(model).anatomy.attention
    shapes = [(a.layer, a.heads, a.kv_heads, a.head_dim, a.v_head_dim, a.calls) for a in measured]
    assert [(a.layer, a.heads, a.kv_heads, a.head_dim, a.v_head_dim, a.calls) for a in found.layers] == shapes


def test_experts_are_estimated_in_the_type_that_their_kernel_takes() -> None:
    config = CONFIG_MAPPING["mixtral"](vocab_size=VOCABULARY, **FAMILIES["mixtral"](3))
    found = sizes(config, "mixtral", torch.float32, 60)
    assert found.weight_bytes == sum(p.nbytes for p in tiny("mixtral").parameters())
    assert found.dtype == torch.float32


def test_doctor_estimates_from_the_config_alone(tmp_path: Path) -> None:
    folder = small(tmp_path / "model", max_position_embeddings=4096)
    parameters = sum(p.numel() for p in rs.load(folder).model.parameters())
    (folder / "model.safetensors").unlink()
    done = CliRunner().invoke(cli.app, ["doctor", str(folder), "--estimate", "--json", "--dtype", "bfloat16"])
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["parameters"] == parameters
    assert found["weight_bytes"] == 2 * parameters
    assert found["tokens"] == 1024
    assert found["attention_layers"] == 3
    assert found["cache_bytes"] == 3 * 2 * 1024 * 2 * 16 * 2
    assert found["twin_bytes"] == 4 * parameters
    assert set(found["fits"].values()) == {True}
    text = CliRunner().invoke(cli.app, ["doctor", str(folder), "--estimate"])
    assert f"{parameters:,} parameters" in text.stdout
    assert "weights, float32" in text.stdout
    assert "the audit fits" in text.stdout


@pytest.mark.parametrize(
    ("room", "fits", "advice"),
    [
        ("nothing", [False, False, False], "use a smaller --dtype or a larger device"),
        ("one", [False, True, False], "use --max-memory"),
        ("all", [True, True, False], "P2 will read: not tested"),
        ("twin", [True, True, True], "the audit fits"),
    ],
)
def test_an_estimate_says_what_fits(
    room: str, fits: list[bool], advice: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    CONFIG_MAPPING["llama"](
        vocab_size=VOCABULARY, **{**FAMILIES["llama"](40), "intermediate_size": 10**5}
    ).save_pretrained(tmp_path)
    of = estimate(tmp_path)
    model = of.sizes.weight_bytes + of.sizes.forward_bytes
    added = {"nothing": 0, "one": of.one_layer + 10**6, "all": of.all_layers, "twin": 2 * of.twin}
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": model + added[room]}))
    found = estimate(tmp_path)
    assert list(found.fits.values()) == fits
    last = found.lines()[-1]
    assert last.startswith(advice)
    if room == "one":  # the bound that is advised is one that a run accepts
        assert 1 <= layers_at_once(of.sizes.layers, of.sizes.tokens, parse_bytes(last.split()[-1])) < 40

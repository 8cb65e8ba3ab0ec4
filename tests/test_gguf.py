"""GGUF files: converted once, exactly, atomically; what would be lost or is damaged leaves nothing behind."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from tiny import LENGTH, tiny
from transformers import PreTrainedModel

import rotoscope as rs
from rotoscope.model import cache, convert

HEADS, KV_HEADS, WIDTH = 4, 2, 64
IDS = torch.randint(3, 60, (2, 12), generator=torch.Generator().manual_seed(0))
TEXT = "low lower"

Change = Callable[[GGUFWriter], None]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("ROTOSCOPE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def _vocabulary() -> tuple[list[str], list[str]]:
    """Byte-level pieces for lower-case words, as GPT-2 spells them (Ġ is a space), and their merges."""
    single = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrstuvwxyz", "Ġ"]
    merges = ["l o", "lo w", "Ġ low", "e r"]
    return single + [merge.replace(" ", "") for merge in merges], merges


def _paired(weight: np.ndarray, heads: int) -> np.ndarray:
    """GGUF keeps the two halves of each rotary pair side by side."""
    rows, columns = weight.shape
    return weight.reshape(heads, 2, rows // heads // 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _model() -> PreTrainedModel:
    return tiny("llama", layers=2, vocab_size=len(_vocabulary()[0]), tie_word_embeddings=False)


_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def _tensors(model: PreTrainedModel) -> dict[str, np.ndarray]:
    named = {
        "token_embd": model.get_input_embeddings().weight,
        "output_norm": model.base_model.norm.weight,
        "output": model.get_output_embeddings().weight,
    }
    for index, layer in enumerate(model.base_model.layers):
        named |= {f"blk.{index}.{gguf}": layer.get_parameter(f"{name}.weight") for name, gguf in _NAMES.items()}
    arrays = {f"{name}.weight": tensor.detach().numpy() for name, tensor in named.items()}
    for name in arrays:
        if "attn_q." in name or "attn_k." in name:
            arrays[name] = _paired(arrays[name], HEADS if "attn_q." in name else KV_HEADS)
    return arrays


def _write(
    file: Path,
    change: Change = lambda writer: None,
    *,
    eight_bit: tuple[str, ...] = (),
    without: str = "",
    architecture: str = "llama",
    tokenizer: bool = True,
) -> Path:
    writer = GGUFWriter(file, architecture)
    writer.add_name("tiny")
    writer.add_block_count(2)
    writer.add_context_length(LENGTH)
    writer.add_embedding_length(WIDTH)
    writer.add_feed_forward_length(96)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(WIDTH // HEADS)
    pieces, merges = _vocabulary()
    writer.add_vocab_size(len(pieces))
    if tokenizer:
        writer.add_tokenizer_model("gpt2")
        writer.add_token_list(pieces)
        writer.add_token_types([TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (len(pieces) - 3))
        writer.add_token_merges(merges)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
    change(writer)
    for name, array in _tensors(_model()).items():
        if name in eight_bit:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(name, quantize(array, kind), raw_dtype=kind)
        elif name != without:
            writer.add_tensor(name, array)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file


def _logits(model: PreTrainedModel) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS.clamp(max=len(_vocabulary()[0]) - 1)).logits


def _complaint(file: Path, kind: type[Exception] = rs.BadInput) -> str:
    with pytest.raises(kind) as caught:
        rs.load(file)
    assert cache.entries() == []
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_conversion_keeps_every_value_and_happens_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    file = _write(tmp_path / "tiny.gguf")
    lm = rs.load(file)
    assert capfd.readouterr().err.splitlines() == ["Converting tiny.gguf, once"]
    assert torch.equal(_logits(lm.model), _logits(_model()))
    assert (lm.source, lm.trained_length) == (str(file), LENGTH)
    assert lm.encode(TEXT).tolist() == [_vocabulary()[0].index(piece) for piece in ("low", "Ġlow", "er")]
    monkeypatch.setattr(convert, "_build", None)
    again = rs.load(file)
    assert again.file_hash == lm.file_hash
    assert torch.equal(_logits(again.model), _logits(_model()))
    assert again.encode(TEXT).tolist() == lm.encode(TEXT).tolist()


def test_quantized_tensors_are_dequantized_and_recorded(tmp_path: Path) -> None:
    name = "blk.1.ffn_down.weight"
    lm = rs.load(_write(tmp_path / "tiny.gguf", eight_bit=(name,)))
    blocks = _tensors(_model())[name].reshape(-1, 32)
    scale = (np.abs(blocks).max(axis=1, keepdims=True) / 127).astype(np.float32)
    grid = np.round(blocks / scale) * scale.astype(np.float16).astype(np.float32)
    found = lm.model.base_model.layers[1].mlp.down_proj.weight.detach().numpy()
    np.testing.assert_allclose(found, grid.reshape(found.shape), rtol=1e-6)
    entry = cache.find(str(lm.file_hash))
    assert entry is not None
    assert entry.quantization == {"F32": 20, "Q8_0": 1}
    made_from = json.loads((entry.path / cache.PROVENANCE).read_text())
    assert (made_from["source"], made_from["sha256"]) == ("tiny.gguf", lm.file_hash)


def test_neighbours_of_the_file_are_not_read(tmp_path: Path) -> None:
    file = _write(tmp_path / "tiny.gguf")
    for name in ("config.json", "generation_config.json", "tokenizer_config.json", "tokenizer.json"):
        (tmp_path / name).write_text("{bad")
    assert rs.load(file).encode(TEXT).shape == (3,)


def test_file_without_tokenizer(tmp_path: Path) -> None:
    file = _write(tmp_path / "tiny.gguf", tokenizer=False)
    with pytest.warns(UserWarning, match="no tokenizer"):
        assert rs.load(file).tokenizer is None


@pytest.mark.parametrize("share", [0.0, 0.001, 0.02, 0.3, 0.9, 0.9999])
def test_file_cut_short(tmp_path: Path, share: float) -> None:
    file = _write(tmp_path / "tiny.gguf")
    data = file.read_bytes()
    file.write_bytes(data[: int(share * len(data))])
    message = _complaint(file)
    assert str(file) in message
    assert "not a GGUF file" in message or "cut short" in message


def test_file_of_another_kind(tmp_path: Path) -> None:
    file = tmp_path / "text.gguf"
    file.write_text("GGU, almost")
    assert "not a GGUF file" in _complaint(file)
    assert "unheard-of" in _complaint(_write(tmp_path / "other.gguf", architecture="unheard-of"))


def test_encoder_decoder_is_refused(tmp_path: Path) -> None:
    file = _write(tmp_path / "tiny.gguf", architecture="t5")
    assert "encoder-decoder" in _complaint(file, rs.Refused)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda writer: writer.add_tensor("rope_freqs.weight", np.ones(8, np.float32)), "rope_freqs.weight"),
        (lambda writer: writer.add_string("llama.rope.scaling.type", "yarn"), "yarn"),
        (lambda writer: writer.add_tensor("blk.0.attn_q.bias", np.ones(64, np.float32)), "does not fill"),
    ],
)
def test_what_transformers_would_pass_over_is_refused(tmp_path: Path, change: Change, words: str) -> None:
    assert words in _complaint(_write(tmp_path / "tiny.gguf", change), rs.Refused)


def test_what_transformers_would_make_up_is_refused(tmp_path: Path) -> None:
    assert "does not fill" in _complaint(_write(tmp_path / "a.gguf", without="blk.1.attn_k.weight"), rs.Refused)


def test_part_of_a_split_model(tmp_path: Path) -> None:
    file = _write(tmp_path / "tiny-00001-of-00002.gguf", lambda writer: writer.add_uint16("split.count", 2))
    assert "--merge" in _complaint(file)


def test_entries_are_listed_found_and_cleared(tmp_path: Path) -> None:
    assert (cache.entries(), cache.clear()) == ([], 0)
    lm = rs.load(_write(tmp_path / "tiny.gguf"))
    (killed := cache.root() / "models" / ".unfinished-x").mkdir()
    (killed / "model.safetensors").write_bytes(b"12345")
    unfinished, entry = cache.entries()
    assert (unfinished.name, unfinished.bytes) == ("(unfinished)", 5)
    assert (entry.name, entry.hash) == ("tiny.gguf", lm.file_hash)
    assert entry.bytes == sum(file.stat().st_size for file in entry.path.iterdir())
    assert cache.find("0" * 64) is None
    assert cache.clear() == entry.bytes + 5
    assert cache.entries() == []


def test_where_the_cache_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert cache.root() == tmp_path / "cache"
    monkeypatch.delenv("ROTOSCOPE_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache.root() == tmp_path / "rotoscope"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert cache.root() == Path.home() / ".cache" / "rotoscope"


def test_cache_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ROTOSCOPE_CACHE", str(tmp_path / "file" / "cache"))
    assert "ROTOSCOPE_CACHE" in _complaint(_write(tmp_path / "tiny.gguf"))


def test_damaged_entry_says_how_to_mend_it(tmp_path: Path) -> None:
    file = _write(tmp_path / "tiny.gguf")
    rs.load(file)
    (weights := cache.entries()[0].path / "model.safetensors").write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(rs.BadInput, match="rotoscope cache"):
        rs.load(file)


def test_two_at_once_both_get_the_one_entry(own_cache: Path) -> None:
    both_in = threading.Barrier(2, timeout=20)
    got: list[Path] = []

    def make(folder: Path) -> None:
        both_in.wait()
        (folder / "model").write_text("whole")

    threads = [threading.Thread(target=lambda: got.append(cache.obtain("key", make))) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert got == [own_cache / "models" / "key"] * 2
    assert (got[0] / "model").read_text() == "whole"
    assert list(got[0].parent.iterdir()) == [got[0]]


def test_nothing_is_left_of_a_conversion_that_is_interrupted(own_cache: Path) -> None:
    def interrupted(folder: Path) -> None:
        (folder / "model").write_text("half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cache.obtain("key", interrupted)
    assert list((own_cache / "models").iterdir()) == []

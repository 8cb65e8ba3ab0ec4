"""From a GGUF file to a folder of safetensors in the user's cache, once.

transformers reads GGUF by dequantizing it at every load, 10-40 s for a model of 135 million parameters; the converted
folder loads in a fraction of a second and holds the same float32 values.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections import Counter
from collections.abc import Iterator
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from rotoscope.errors import BadInput, Refused, RotoscopeError
from rotoscope.model import cache
from rotoscope.model.classes import auto_class
from rotoscope.model.files import sha256
from rotoscope.model.quiet import in_short, quiet

CONVERSION = 1
"""Raised when a change here makes earlier conversions wrong; it is part of every entry's key."""


def convert(file: Path) -> tuple[Path, str]:
    """The converted folder of a GGUF file, and the file's sha256.

    Raises
    ------
    BadInput
        If it is no GGUF file, is damaged, or is of a kind that transformers cannot read.
    Refused
        If transformers would leave out something that the file holds, or if it is no decoder.
    """
    with file.open("rb") as stream:
        if stream.read(4) != b"GGUF":
            raise BadInput(f"{file} is not a GGUF file")
    digest = sha256(file)
    return cache.obtain(f"{digest}-{CONVERSION}", lambda folder: _build(file, digest, folder)), digest


def _build(file: Path, digest: str, folder: Path) -> None:
    reader = _read(file)
    _refuse_what_would_be_lost(reader, file.name)
    print(f"Converting {file.name}, once", file=sys.stderr, flush=True)
    try:
        with quiet(), alone(file) as place, contextlib.redirect_stderr(io.StringIO()):  # one bar ignores quiet()
            _convert_model(reader, file.name, place, folder)
            if "tokenizer.ggml.model" in reader.fields:
                _convert_tokenizer(place, folder)
    except RotoscopeError:
        raise
    except Exception as error:
        raise BadInput(f"{file} cannot be converted: {in_short(error)}") from error
    made_from = {
        "conversion": CONVERSION,
        "source": file.name,
        "sha256": digest,
        "bytes": file.stat().st_size,
        "architecture": _text(reader, "general.architecture"),
        "quantization": dict(Counter(tensor.tensor_type.name for tensor in reader.tensors).most_common()),
        "versions": {name: version(name) for name in ("transformers", "gguf", "torch")},
        "created": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    (folder / cache.PROVENANCE).write_text(json.dumps(made_from, indent=2) + "\n", encoding="utf-8")


def _read(file: Path) -> Any:
    from gguf import GGUFReader

    try:
        return GGUFReader(file)
    except Exception as error:  # numpy's, whatever the first impossible offset or shape leads to
        raise BadInput(f"{file} is damaged or cut short: it does not read as GGUF ({in_short(error)})") from error


def _refuse_what_would_be_lost(reader: Any, name: str) -> None:
    """transformers reads a GGUF file's plain settings; scaled rotary tables and split files it passes over silently."""
    if "split.count" in reader.fields and reader.fields["split.count"].contents() > 1:
        raise BadInput(f"{name} is one part of a split model: merge the parts with llama-gguf-split --merge")
    tables = [tensor.name for tensor in reader.tensors if tensor.name.startswith("rope_")]
    architecture = _text(reader, "general.architecture")
    scaling = _text(reader, f"{architecture}.rope.scaling.type") or "none"
    if tables or (scaling != "none" and architecture != "gpt-oss"):
        raise Refused(
            f"{name} holds scaled rotary angles ({', '.join(tables) or scaling}), which transformers does not read "
            "from GGUF: load the model's safetensors instead"
        )


def _convert_model(reader: Any, name: str, place: Path, folder: Path) -> None:
    import torch
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(place, gguf_file=name, local_files_only=True)
    model, info = auto_class(config, name).from_pretrained(
        place, gguf_file=name, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    tied = model.config.tie_word_embeddings
    in_file = sum(int(t.n_elements) for t in reader.tensors if not (tied and t.name == "output.weight"))
    in_model = sum({tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values()}.values())
    if info["missing_keys"] or in_file != in_model:
        raise Refused(
            f"{name} does not fill the model that transformers builds for it ({in_file:,} values for {in_model:,}): "
            "load the model's safetensors instead"
        )
    # Dequantized weights, yet marked as quantized: save_pretrained refuses while any of the three marks is left.
    model.hf_quantizer = None
    model.is_quantized = False
    del model.config.quantization_config
    model.save_pretrained(folder)


def _convert_tokenizer(place: Path, folder: Path) -> None:
    from transformers import AutoTokenizer

    (file,) = place.iterdir()
    AutoTokenizer.from_pretrained(place, gguf_file=file.name, local_files_only=True).save_pretrained(folder)


@contextlib.contextmanager
def alone(file: Path) -> Iterator[Path]:
    """A folder in which the file is all there is: transformers would take settings from its neighbours."""
    with TemporaryDirectory() as place:
        (Path(place) / file.name).symlink_to(file.resolve())
        yield Path(place)


def _text(reader: Any, key: str) -> str:
    field = reader.fields.get(key)
    return str(field.contents()) if field is not None else ""

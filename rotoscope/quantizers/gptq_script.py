"""GPTQ (Frantar et al. 2023, 2210.17323) by llm-compressor, which needs an older transformers than rotoscope does.

This file runs alone, in an environment that has ``llmcompressor`` and no rotoscope::

    python gptq_script.py MODEL CALIBRATION OUT [--bits 4] [--group 64] [--symmetric]

MODEL is a folder that transformers loads, CALIBRATION a JSON file ``[[token ids], …]``, OUT the folder to write, in the
format of compressed-tensors. The output head is left as it is.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any


def compress(model: Any, texts: list[list[int]], bits: int, group: int, symmetric: bool) -> None:
    """Quantize the model's linear layers in place, each on the inputs that the layers quantized before it leave it."""
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme, QuantizationStrategy
    from datasets import Dataset
    from llmcompressor import oneshot
    from llmcompressor.modifiers.gptq import GPTQModifier

    weights = QuantizationArgs(
        num_bits=bits, symmetric=symmetric, strategy=QuantizationStrategy.GROUP, group_size=group
    )
    head = model.get_output_embeddings()
    recipe = GPTQModifier(
        config_groups={"linear": QuantizationScheme(targets=["Linear"], weights=weights)},
        ignore=[name for name, module in model.named_modules() if module is head],
    )
    columns = {"input_ids": texts, "attention_mask": [[1] * len(text) for text in texts]}
    oneshot(
        model=model,
        recipe=recipe,
        dataset=Dataset.from_dict(columns),
        num_calibration_samples=len(texts),
        max_seq_length=max(map(len, texts)),
        shuffle_calibration_samples=False,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("calibration", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--bits", type=int, default=4)
    parser.add_argument("--group", type=int, default=64)
    parser.add_argument("--symmetric", action="store_true")
    given = parser.parse_args()

    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(given.model, dtype="auto", local_files_only=True).eval()
    tokenizer = AutoTokenizer.from_pretrained(given.model, local_files_only=True)
    compress(model, json.loads(given.calibration.read_text(encoding="utf-8")), given.bits, given.group, given.symmetric)
    partial = given.out.with_name(f"{given.out.name}.partial")
    model.save_pretrained(partial, save_compressed=True)
    tokenizer.save_pretrained(partial)
    partial.rename(given.out)  # what is there is whole


if __name__ == "__main__":
    main()

"""Perplexity of the demo model under each quantizer, beside what the libraries' own ways to use them gave before.

    python benchmarks/large/quantization.py [--only NAME …] [--gptq DIR] [--list]

The text is the prose of ``pydoc_data.topics``; its last 2,048 tokens, as 4 × 512, are measured; calibration texts have
256 tokens and are spread over its first four fifths. Of a cache: tokens 257-512 of each, read after the others in a
second pass. All rows take some 20 minutes on one core, AWQ most of it. ``--gptq`` is a checkpoint that
``rotoscope quantize demo --prepare gptq`` made. Exit code 1 where a row is more than 3 % off.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

import rotoscope as rs
from rotoscope.interventions import QuantizeKV
from rotoscope.model.likelihood import token_nll
from rotoscope.model.lm import LM
from rotoscope.quantizers import AWQ, NF4, RTN, W8A8, PackedInt4, Quantizer, SmoothQuant, checkpoint
from rotoscope.quantizers.prepare import prose, spread

CLOSE = 0.03
TEXTS, TOKENS, PREFILL = 4, 512, 256


@dataclass(frozen=True)
class Found:
    """Perplexity, bits for each weight or cached value, share of the decoder's weights that changed."""

    perplexity: float
    bits: float = math.nan
    changed: float = math.nan


@dataclass
class Bench:
    """The model and its texts."""

    lm: LM

    @cached_property
    def ids(self) -> Tensor:
        return self.lm.encode(prose())

    @cached_property
    def held_out(self) -> Tensor:
        return self.ids[-TEXTS * TOKENS :].view(TEXTS, TOKENS)

    def calibration(self, samples: int) -> list[list[int]]:
        return spread(self.ids.tolist(), samples)

    def perplexity(self, lm: LM | None = None) -> float:
        return float(token_nll(lm or self.lm, self.held_out).mean().exp())


Measure = Callable[[Bench], Found]


def plain(bench: Bench) -> Found:
    return Found(bench.perplexity(), changed=0.0)


def weights(build: Callable[[Bench], Quantizer]) -> Measure:
    """A quantizer of this package on the model."""

    def measure(bench: Bench) -> Found:
        with build(bench).on(bench.lm) as run:
            of = run.measured
            return Found(bench.perplexity(), of["bits"] / of["weights"], of["changed"] / of["should"])

    return measure


def gptq(folder: str) -> Measure:
    """A prepared checkpoint."""

    def measure(bench: Bench) -> Found:
        loaded = checkpoint.load(folder, bench.lm)
        facts = checkpoint.about(loaded, bench.lm)
        return Found(bench.perplexity(loaded), facts["bits"], facts["share_changed"])

    return measure


def cache(backend: str | None, **settings: Any) -> Measure:
    """A cache of transformers, filled by one forward and read by the next."""

    def measure(bench: Bench) -> Found:
        from transformers import DynamicCache, QuantizedCache

        losses = []
        for ids in bench.held_out.split(1):
            config = bench.lm.model.config
            held = DynamicCache() if backend is None else QuantizedCache(backend, config, **settings)
            bench.lm.model(input_ids=ids[:, :PREFILL], cache=held, logits_to_keep=1)
            logits = bench.lm.model(input_ids=ids[:, PREFILL:], cache=held).logits
            losses.append(cross_entropy(logits[0, :-1].double(), ids[0, PREFILL + 1 :]))
        return Found(float(torch.stack(losses).mean().exp()))

    return measure


def quantize_kv(**settings: Any) -> Measure:
    """The same by ``QuantizeKV``, in one forward."""

    def measure(bench: Bench) -> Found:
        with QuantizeKV(**settings).on(bench.lm, prompt=PREFILL + 1) as run:
            losses = token_nll(bench.lm, bench.held_out)[:, PREFILL:]
            return Found(float(losses.mean().exp()), run.measured["bits"] / run.measured["values"])

    return measure


def quanto(bits: int, axis: int) -> Measure:
    return cache("quanto", nbits=bits, axis_key=axis, axis_value=axis, q_group_size=64, residual_length=64)


CHANNEL = {"keys": "channel", "values": "channel"}
ROWS: dict[str, tuple[float, str, Measure | None]] = {
    "float32": (11.4068, "-", plain),
    "rtn-int8": (11.440, "torchao", weights(lambda b: RTN(8, 0, True))),
    "rtn-int4-symmetric-64": (16.916, "torchao", weights(lambda b: RTN(4, 64, True))),
    "rtn-int4-symmetric-32": (16.125, "torchao", weights(lambda b: RTN(4, 32, True))),
    "rtn-int4-32": (13.801, "torchao", weights(lambda b: RTN(4, 32))),
    "rtn-int4-64": (14.615, "llm-compressor", weights(lambda b: RTN(4, 64))),
    "rtn-int3-symmetric-64": (84.3, "torchao", weights(lambda b: RTN(3, 64, True))),
    "packed-int4": (15.098, "torchao", weights(lambda b: PackedInt4(64))),
    "w8a8": (11.743, "torchao", weights(lambda b: W8A8())),
    "smoothquant": (11.514, "torchao", weights(lambda b: SmoothQuant(0.5, b.calibration(32)))),
    "smoothquant-0.8": (11.672, "torchao", weights(lambda b: SmoothQuant(0.8, b.calibration(32)))),
    "awq": (12.731, "torchao", weights(lambda b: AWQ(64, b.calibration(8)))),
    "nf4": (14.444, "bitsandbytes", weights(lambda b: NF4(64))),
    "gptq": (12.434, "llm-compressor", None),
    "cache-float32": (9.070, "transformers", cache(None)),
    "cache-quanto-int4-token": (9.234, "quanto", quanto(4, 0)),
    "cache-quanto-int4-channel": (9.274, "quanto", quanto(4, -1)),
    "cache-quanto-int2-token": (45.6, "quanto", quanto(2, 0)),
    "cache-quanto-int2-channel": (18.6, "quanto", quanto(2, -1)),
    "cache-fp8": (9.149, "transformers", cache("fp8")),
    "kv-int4-token": (9.234, "quanto", quantize_kv(kind="int4")),
    "kv-int4-channel": (9.274, "quanto", quantize_kv(kind="int4", **CHANNEL)),
    "kv-int2-token": (45.6, "quanto", quantize_kv(kind="int2")),
    "kv-int2-channel": (18.6, "quanto", quantize_kv(kind="int2", **CHANNEL)),
    "kv-fp8": (9.149, "transformers", quantize_kv(kind="fp8")),
}
"""What was measured before, by which library, and how it is measured here; GPTQ needs a checkpoint."""
ELSEWHERE = {
    "llm-compressor SmoothQuant W8A8 .5": 11.538, "llm-compressor AWQ": 12.943, "gptqmodel GPTQ symmetric": 13.063,
    "hqq int4": 13.705, "bitsandbytes LLM.int8": 11.600, "quanto int8": 11.424, "quanto int4": 17.011,
    "quanto W8 + static A8": 20.749, "gguf Q8_0": 11.427, "gguf Q4_0": 14.735, "gguf Q4_1": 11.407,
    "cache hqq int8": 9.069, "cache hqq int4 axis 1": 9.192, "cache hqq int4 axis 0": 9.331,
    "cache hqq int2 axis 1": 30.6, "cache hqq int2 axis 0": 32.3,
}  # fmt: skip
"""Measured before by libraries that nothing here uses."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=ROWS, help="a row; all by default; may be repeated")
    parser.add_argument("--gptq", metavar="DIR", help="a prepared checkpoint")
    parser.add_argument("--list", action="store_true", help="print what was measured before; run nothing")
    given = parser.parse_args()
    if given.list:
        for name, before in {**{name: row[0] for name, row in ROWS.items()}, **ELSEWHERE}.items():
            print(f"{name:36s} {before:8.3f}")
        return

    bench = Bench(rs.load("demo"))
    off = []
    print(f"{'':28s} {'library':15s} {'before':>8s} {'here':>8s} {'apart':>7s} {'bits':>6s} {'changed':>8s} {'s':>6s}")
    for name in given.only or ROWS:
        before, library, measure = ROWS[name]
        measure = gptq(given.gptq) if name == "gptq" and given.gptq else measure
        line = f"{name:28s} {library:15s} {before:8.3f}"
        if measure is None:
            print(f"{line}   not run: give --gptq DIR")
            continue
        start = time.perf_counter()
        with torch.no_grad():
            found = measure(bench)
        apart = found.perplexity / before - 1
        off += [name] if abs(apart) > CLOSE else []
        seconds = time.perf_counter() - start
        numbers = f"{found.perplexity:8.3f} {apart:+7.2%} {found.bits:6.2f} {found.changed:8.1%} {seconds:6.1f}"
        print(f"{line} {numbers.replace('nan%', '   -').replace('nan', '  -')}", flush=True)
    if not given.only:
        print("\nmeasured before, not run here")
        for name, before in ELSEWHERE.items():
            print(f"{name:44s} {before:8.3f}")
    if off:
        sys.exit(f"more than {CLOSE:.0%} off: {', '.join(off)}")


if __name__ == "__main__":
    main()

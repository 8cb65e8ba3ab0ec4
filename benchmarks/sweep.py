"""What depth sweeps cost: all layers of the demo model over 32 prompts, against one hooked forward of the batch each.

First both are compared on some of the prompts, then timed in turns in this process. Prints each manipulation's median
seconds and the median ratio of a round; a sweep's time includes its own recording.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

import rotoscope as rs
from rotoscope.interventions.manipulate import noised, prefix_keys
from rotoscope.interventions.sweep import Prompts, Sweep
from rotoscope.model.layers import decoder_layers
from rotoscope.model.lm import LM
from rotoscope.tasks import find

PROMPTS, CHECKED, ROUNDS = 32, 4, 3
TARGETS = {"freeze": 0.30, "skip": 0.15, "noise": 0.65}
TOLERANCE = 2e-2  # of logits that reach some 20, in float32: with frozen states, rounding grows from layer to layer


def capitals(lm: LM) -> Prompts:
    """The capitals task's prompts."""
    return Prompts.of([lm.encode(e.prompt).tolist() for e in find("capitals").examples(lm, PROMPTS, 0)])


def hooked(lm: LM, prompts: Prompts, kind: str) -> list[Tensor]:
    """One forward of the whole batch for each layer, with plain hooks."""
    layers: Any = decoder_layers(lm.model)
    given = {**prompts.arguments(lm.model), "use_cache": False, "logits_to_keep": 1}
    keys = prefix_keys(prompts.ids, prompts.mask.bool())
    held: dict[int, Tensor] = {}

    def act(k: int, layer: int) -> Callable[..., Any]:
        def freeze(module: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
            if layer == k:
                held[0] = args[0]
                return None
            return (torch.cat([held[0][:, :-1], args[0][:, -1:]], 1), *args[1:]), kwargs

        def noise(module: Any, args: tuple[Any, ...], kwargs: Any) -> Any:
            return (noised(args[0], prompts.previous, keys, 0, k), *args[1:]), kwargs

        return freeze if kind == "freeze" else noise

    def silence(module: Any, args: tuple[Any, ...], output: Any) -> Any:
        return (torch.zeros_like(output[0]), *output[1:])

    out = []
    for k in range(len(layers)):
        with ExitStack() as hooks:
            for layer in range(k, k + 1 if kind == "noise" else len(layers)):
                if kind == "skip":
                    hooks.enter_context(layers[layer].self_attn.register_forward_hook(silence))
                else:
                    hooks.enter_context(layers[layer].register_forward_pre_hook(act(k, layer), with_kwargs=True))
            with torch.no_grad():
                out.append(lm.model(**given).logits)
    return out


def swept(lm: LM, prompts: Prompts, kind: str) -> list[Tensor]:
    """The same by a sweep."""
    sweep = Sweep.over(lm, prompts)
    return [logits for _, logits in getattr(sweep, kind)(range(sweep.past.depth))]


def seconds(run: Callable[..., list[Tensor]], *arguments: Any) -> float:
    start = time.perf_counter()
    run(*arguments)
    return time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--only", choices=TARGETS)
    given = parser.parse_args()
    rounds = given.rounds
    lm = rs.load("demo")
    prompts = capitals(lm)
    few = Prompts(prompts.ids[:CHECKED], prompts.mask[:CHECKED], prompts.prompt)
    rows, tokens = prompts.ids.shape
    print(
        f"{len(decoder_layers(lm.model))} depths, {rows} prompts of {tokens} tokens, {torch.get_num_threads()} threads"
    )
    for kind, target in TARGETS.items():
        if given.only not in (None, kind):
            continue
        pairs = zip(swept(lm, few, kind), hooked(lm, few, kind), strict=True)
        worst = max((a - b).abs().max().item() for a, b in pairs)
        if worst > TOLERANCE:
            raise SystemExit(f"{kind}: sweep and hooks differ by {worst:.1e}")
        times = [(seconds(swept, lm, prompts, kind), seconds(hooked, lm, prompts, kind)) for _ in range(rounds)]
        mine, naive = (statistics.median(column) for column in zip(*times, strict=True))
        ratios = sorted(a / b for a, b in times)
        print(
            f"{kind:7s} {mine:6.2f} s of {naive:6.2f} s   x {statistics.median(ratios):.3f} ({ratios[0]:.3f} to "
            f"{ratios[-1]:.3f}), target {target:.2f}   largest difference {worst:.1e}",
            flush=True,
        )


if __name__ == "__main__":
    main()

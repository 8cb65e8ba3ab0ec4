"""A model of Llama-2-7B's shape, random bfloat16 weights, observed on a machine that holds it only once.

Prints seconds and peak memory of building, wrapping and observing one text under ``--max-memory``, and what becomes of
the random-weights twin, which does not fit beside the model. Takes some minutes and 15 GB.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time

TOKENS, BOUND = 64, "100MB"


def build(layers: int):  # type: ignore[no-untyped-def]
    """The model without its own initialisation, which would take minutes: cheap uniform weights of std 0.02."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.initialization import no_init_weights

    with no_init_weights(), torch.no_grad():
        config = LlamaConfig(num_hidden_layers=layers, max_position_embeddings=4096)
        model = LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.uniform_(-0.035, 0.035)
            else:
                parameter.fill_(1)
    return model.eval()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--max-memory", default=BOUND)
    given = parser.parse_args()

    import psutil

    needed = given.layers * 0.41e9 + 2e9
    if psutil.virtual_memory().available < needed:
        sys.exit(f"skipped: needs {needed / 1e9:.0f} GB of free memory")

    import rotoscope as rs
    from rotoscope.engine import REFUSED, Engine
    from rotoscope.studies import Options, observe
    from rotoscope.studies.memory import capture, in_words, parse_bytes
    from rotoscope.studies.texts import Text

    started = time.perf_counter()

    def say(what: str) -> None:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        print(f"{what:44s} {time.perf_counter() - started:7.1f} s   peak {in_words(peak)}", flush=True)

    say("imported")
    model = build(given.layers)
    say(f"built, {sum(p.numel() for p in model.parameters()):,} parameters")
    lm = rs.wrap(model, source="random 7B")
    say("wrapped")
    text = Text(tuple(range(100, 100 + given.tokens)), "")
    options = Options(size="quick", tokens=given.tokens, max_memory=parse_bytes(given.max_memory))
    cells = observe.cells(lm, options, [text])
    layers = lm.anatomy.attention
    some, every = (in_words(capture(part, given.tokens)) for part in (layers[: cells[0].at_once], layers))
    print(f"{cells[0].at_once} of {len(layers)} layers at once: {some}; all at once would take {every}")
    with Engine(None, progress=False) as engine:
        done = engine.run(lm, cells[:1])
        say(f"observed {given.tokens} tokens")
        left = engine.run(lm, cells[1:2])
    say("tried a random-weights twin")
    heads = done[cells[0].name]["heads"]
    print(f"{len(heads)} heads, mean form 1 r {heads.form1.mean():.3f}")
    if REFUSED in left[cells[1].name]:
        print(f"P2 would read: not tested, {left[cells[1].name][REFUSED].reason[0]}")


if __name__ == "__main__":
    main()

"""What a shallow prefill saves: time to the first token of a 1,024-token prompt on the demo model, in one process.

The prompt goes through plain prefill with a cache and through `shallow_prefill` at half and at three quarters of the
depth, one after the other in every round. Before anything is timed, the shallow logits are compared with those under
`Freeze`. Prints medians, and medians of each round's own ratio to plain.
"""

from __future__ import annotations

import argparse
import statistics
import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch

import rotoscope as rs
from rotoscope.interventions import Freeze
from rotoscope.studies.options import Options
from rotoscope.studies.texts import texts

TOKENS, ROUNDS = 1024, 9
TARGETS = {2 / 4: 1.5, 3 / 4: 1.2}  # depth as a share of L: at least so many times faster


def first(lm: rs.LM, ids: torch.Tensor, under: AbstractContextManager[Any]) -> tuple[torch.Tensor, float]:
    """Logits of the first new token ``[vocabulary]``, and the seconds that they took."""
    with under:
        start = time.perf_counter()
        logits = lm.model(ids, use_cache=True, logits_to_keep=1).logits[0, -1]
        return logits, time.perf_counter() - start


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    rounds = parser.parse_args().rounds
    lm = rs.load("demo")
    ids = torch.tensor([texts(lm, Options(texts=1, tokens=TOKENS))[0].ids])
    layers = len(lm.anatomy.layers)
    depths = {int(share * layers): target for share, target in TARGETS.items()}
    for k in depths:
        shallow, _ = first(lm, ids, rs.shallow_prefill(lm, depth=k))
        frozen, _ = first(lm, ids, Freeze(k).on(lm))
        apart = (shallow - frozen).abs().max().item()
        assert apart < 1e-3, f"depth {k}: {apart:.1e} from Freeze"
        assert int(shallow.argmax()) == int(frozen.argmax())
    seconds: dict[int, list[float]] = {k: [] for k in (layers, *depths)}
    for _ in range(rounds):
        for k, times in seconds.items():
            times.append(first(lm, ids, rs.shallow_prefill(lm, depth=k) if k < layers else nullcontext())[1])
    print(f"{TOKENS} tokens, {rounds} rounds, {torch.get_num_threads()} threads; medians")
    print(f"plain prefill        {statistics.median(seconds[layers]):6.3f} s")
    for k, target in depths.items():
        ratios = [plain / own for plain, own in zip(seconds[layers], seconds[k], strict=True)]
        print(
            f"shallow, depth {k:2d}/{layers} {statistics.median(seconds[k]):6.3f} s   "
            f"{statistics.median(ratios):.2f} times faster (wanted: {target})"
        )


if __name__ == "__main__":
    main()

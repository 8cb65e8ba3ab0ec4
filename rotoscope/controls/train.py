"""Trains the controls: the same decoder four times over, from the same seeds on the same rows in the same order."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from rotoscope.controls import corpus, data
from rotoscope.controls.curve import Curve, held_out_loss
from rotoscope.controls.plan import PLANS, Plan
from rotoscope.controls.sets import RECORD
from rotoscope.errors import BadInput, RotoscopeError
from rotoscope.model.control import ControlConfig, ControlForCausalLM
from rotoscope.model.lm import LM, wrap
from rotoscope.model.shipped import POSITIONS, shipped_set
from rotoscope.results import write_atomic
from rotoscope.studies.arms import TAUGHT
from rotoscope.tasks import evaluate

ROPE_BASE = 10_000.0
SAVED_EVERY = 300


def name_of(positions: str, seed: int) -> str:
    """A control's folder within its set."""
    return f"{positions}-{seed}"


def train(
    out: Path,
    size: str = "small",
    *,
    positions: Sequence[str] = POSITIONS,
    seeds: Sequence[int] = (0, 1),
    steps: int | None = None,
    jobs: int = 2,
    resume: bool = False,
    told: Callable[[str], None] = print,
) -> list[dict[str, Any]]:
    """Train a set, several models at a time, each in a process of its own.

    Parameters
    ----------
    out : Path
        One folder for each model, the tokenizer and the manifest of the sources beside them.
    size : str
        ``small`` or ``large``.
    positions : sequence of str
        Which of ``rope``, ``learned``, ``alibi`` and ``none``.
    seeds : sequence of int
        Of the weights and of the order of rows.
    steps : int, optional
        In place of the size's own.
    jobs : int
        Models at a time.
    resume : bool
        Go on with what ``out`` holds: finished models are kept, others continue from their last checkpoint.
    told : callable
        Gets a line for each model that is done.

    Returns
    -------
    list of dict
        The record of each model, as its ``train.json`` holds it.

    Raises
    ------
    BadInput
        If the size or a variant is not known, or ``out`` holds a set and `resume` is off.
    """
    if size not in PLANS:
        raise BadInput(f"size {size!r} is not one of {', '.join(PLANS)}")
    if unknown := [p for p in positions if p not in POSITIONS]:
        raise BadInput(f"positions {unknown[0]!r} is not one of {', '.join(POSITIONS)}")
    if out.exists() and any(out.iterdir()) and not resume:
        raise BadInput(f"{out} exists; add --resume to continue it or choose another --out")
    plan = PLANS[size].of(steps)
    out.mkdir(parents=True, exist_ok=True)
    _same_set(out, size, plan)
    data.prepare(out, plan.rows)
    if other := corpus.differences(_manifest(out), _manifest(shipped_set())):
        told(f"trained on other sources than the set that comes with rotoscope: {', '.join(other)}")
    every = [(p, s) for s in seeds for p in positions]

    def one(what: tuple[str, int]) -> dict[str, Any]:
        record = out / name_of(*what) / RECORD
        if not record.exists():
            _run(out, size, *what, steps)
        told(_line(found := json.loads(record.read_text("utf-8"))))
        return dict(found)

    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(one, every))


def _same_set(out: Path, size: str, plan: Plan) -> None:
    """Models of one set have one plan: remember it, or compare."""
    path = out / "set.json"
    now = json.loads(json.dumps({"size": size, **asdict(plan)}))
    if not path.exists():
        write_atomic(path, json.dumps(now, indent=2) + "\n")
    elif (then := json.loads(path.read_text("utf-8"))) != now:
        key = next(key for key in now if then.get(key) != now[key])
        raise BadInput(f"{out} was begun with {key} = {then.get(key)}, now it is {now[key]}; choose another --out")


def _manifest(folder: Path) -> dict[str, Any]:
    path = folder / corpus.MANIFEST
    return json.loads(path.read_text("utf-8")) if path.exists() else {"sources": []}


def _line(record: dict[str, Any]) -> str:
    return (
        f"{record['name']}: {record['parameters']:,} parameters, held-out loss {record['loss']:.4f}, "
        f"key-value of one pair {record['one_pair']:.2f}, of ten {record['key_value']:.2f}, "
        f"{record['cpu_seconds'] / 60:.1f} CPU minutes"
    )


def _run(out: Path, size: str, positions: str, seed: int, steps: int | None) -> None:
    arguments = [str(out), size, positions, str(seed), *([str(steps)] if steps else [])]
    threads = {name: str(PLANS[size].threads) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    log = out / f"{name_of(positions, seed)}.log"
    with log.open("a", encoding="utf-8") as stream:
        code = subprocess.run(
            [sys.executable, "-m", "rotoscope.controls.train", *arguments],
            env={**os.environ, **threads}, stdout=stream, stderr=stream, check=False,
        ).returncode  # fmt: skip
    if code:
        raise RotoscopeError(f"training of {name_of(positions, seed)} ended with exit code {code}; see {log}")


def config(plan: Plan, positions: str, tokenizer: Any) -> ControlConfig:
    """The decoder's configuration."""
    return ControlConfig(
        positions=positions,
        vocab_size=len(tokenizer),
        hidden_size=plan.hidden,
        intermediate_size=plan.mlp,
        num_hidden_layers=plan.layers,
        num_attention_heads=plan.heads,
        num_key_value_heads=plan.heads,
        max_position_embeddings=data.LENGTH,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )


def train_one(out: Path, size: str, positions: str, seed: int, steps: int | None = None) -> dict[str, Any]:
    """Train one model of a set whose rows are prepared, from its last checkpoint if it has one."""
    from transformers import Trainer, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    plan = PLANS[size].of(steps)
    folder = out / name_of(positions, seed)
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer, rows = data.prepare(out, plan.rows)
    torch.manual_seed(seed)
    model = ControlForCausalLM(config(plan, positions, tokenizer))
    curve = Curve(wrap(model, tokenizer, source=folder.name), rows.held_out, folder)
    arguments = TrainingArguments(
        output_dir=str(folder / "checkpoints"),
        max_steps=plan.steps,
        per_device_train_batch_size=plan.batch,
        learning_rate=plan.rate,
        lr_scheduler_type="cosine",
        warmup_steps=max(1, plan.steps // 20),
        weight_decay=plan.decay,
        adam_beta2=0.95,
        bf16=True,
        use_cpu=not torch.cuda.is_available(),
        seed=seed,
        data_seed=seed,
        save_steps=SAVED_EVERY,
        save_total_limit=1,
        logging_steps=50,
        report_to=[],
        disable_tqdm=True,
    )
    trainer = Trainer(
        model=model, args=arguments, train_dataset=_Dataset(rows.trained), callbacks=[_measuring(curve, plan)]
    )
    kept = folder / "checkpoints"
    trainer.train(resume_from_checkpoint=get_last_checkpoint(kept) if kept.is_dir() else None)
    tokenizer.save_pretrained(folder)
    given = [] if steps is None else ["--steps", str(steps)]
    command = ["rotoscope controls train --size", size, "--positions", positions, "--seeds", str(seed), *given]
    labels = {"name": folder.name, "positions": positions, "seed": seed, "size": size, "command": " ".join(command)}
    return _finish(folder, trainer.model, curve, labels | {"plan": asdict(plan)})


class _Dataset(torch.utils.data.Dataset):
    def __init__(self, rows: Any):
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> dict[str, torch.Tensor]:
        ids = torch.from_numpy(self.rows[i].astype("int64"))
        return {"input_ids": ids, "labels": ids}


def _measuring(curve: Curve, plan: Plan) -> Any:
    from transformers import TrainerCallback

    class Measuring(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step == 0:
                self._measure(0)

        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step in plan.logged or state.global_step == plan.steps:
                self._measure(state.global_step)

        def _measure(self, step: int) -> None:
            found = curve.measure(step)
            print(json.dumps({"step": step, **{k: round(v, 4) for k, v in found.items()}}), flush=True)

    return Measuring()


def _finish(folder: Path, model: Any, curve: Curve, labels: dict[str, Any]) -> dict[str, Any]:
    """Write the weights in half precision, and the record with the loss that they have then."""
    import transformers

    last = curve.last()
    before = held_out_loss(curve.lm, curve.held_out)
    model.config.use_cache = True  # which the trainer turns off
    model.half().save_pretrained(folder)
    model.float()
    record = {
        **labels,
        "parameters": sum(p.numel() for p in model.parameters()),
        "loss": held_out_loss(curve.lm, curve.held_out),
        "loss_before_rounding": before,
        "one_pair": one_pair(curve.lm),
        **{task: last[task] for task in ("key_value", "known_values", "passkey")},
        "cpu_seconds": round(last["cpu_seconds"], 1),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "cpu": torch.backends.cpu.get_cpu_capability(),
    }
    write_atomic(folder / RECORD, json.dumps(record, indent=2) + "\n")
    return record


def one_pair(lm: LM) -> float:
    """Accuracy of key-value retrieval where a single pair is told: of copying, without the choice among pairs."""
    return float(evaluate(lm, TAUGHT[1], n=60, seed=1).correct.mean())


if __name__ == "__main__":
    to, of_size, kind, number, *rest = sys.argv[1:]
    torch.set_num_threads(PLANS[of_size].threads)
    train_one(Path(to), of_size, kind, int(number), int(rest[0]) if rest else None)

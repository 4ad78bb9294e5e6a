"""Runs conversions and their controls, and adds a line of JSON for each to a file; what the file has is not run again.

python -m examples.linearize.run --task byte_lm --row linear_20 --seed 0 --folder teachers --out linearize.jsonl"""

import argparse
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from examples.arguments import existing
from examples.learning.run import append, read
from examples.linearize import byte_lm, copy_of_symbols, encoder, recall, speech, vision
from examples.linearize.task import Data, Task
from examples.linearize.training import fit, teacher
from linattn.cli.argument_types import SEED
from linattn.linearize import (
    Budget,
    Progress,
    choose_layers,
    convert,
    fine_tune,
    make_teacher,
    plan,
    restore_layers,
    transfer,
)
from linattn.linearize.controls import CONTROLS, controlled
from linattn.linearize.scores import scores
from linattn.linearize.stages import FIRST_STAGE

TASKS: dict[str, Task] = {
    module.TASK.name: module.TASK for module in (byte_lm, recall, encoder, copy_of_symbols, vision, speech)
}
Line = Callable[[str], None]
# of models from scratch, as of `linattn train`
SCRATCH_LR = 5e-3


@dataclass(frozen=True, kw_only=True)
class Row:
    """A conversion with `share` of the teacher's steps. `kept` layers stay softmax; they are chosen after the first
    stage. Linear attention has a `window` of softmax beside it, of the task's size. A control trains without a teacher
    for as many processor seconds as the row `as_long_as` took."""

    method: str = "taylor2"
    share: float = 0.0
    kept: int = 0
    window: bool = True
    as_long_as: str | None = None


ROWS: dict[str, Row] = {
    "linear_5": Row(share=0.05),
    "linear_20": Row(share=0.2),
    "linear_50": Row(share=0.5),
    "kept_20": Row(share=0.2, kept=1),
    "plain_20": Row(share=0.2, window=False),
    "plain_50": Row(share=0.5, window=False),
    "hedgehog_50": Row(method="hedgehog", share=0.5),
    "delta_20": Row(method="gated_delta", share=0.2),
    "delta_50": Row(method="gated_delta", share=0.5),
    "window_20": Row(method="local", share=0.2),
    "window_50": Row(method="local", share=0.5),
    "teacher_20": Row(method="softmax", as_long_as="linear_20"),
    "teacher_50": Row(method="softmax", as_long_as="linear_50"),
    "scratch_20": Row(as_long_as="linear_20"),
    "scratch_50": Row(as_long_as="linear_50"),
}


def run(task: Task, name: str, seed: int, folder: Path, runs: Sequence[dict[str, Any]], say: Line) -> dict[str, Any]:
    """Run a row of a task, and return all there is to say about it."""
    row = ROWS[name]
    seconds = next((run["seconds"] for run in runs if _key(run) == (task.name, row.as_long_as, seed)), None)
    if row.as_long_as is not None and seconds is None:
        raise SystemExit(f"{name} takes as long as {row.as_long_as}, which must be run first")
    trained = teacher(task, seed, folder, say)
    torch.manual_seed(seed)
    data = task.data(seed + 100)
    record = {"task": task.name, "row": name, "seed": seed, "teacher_seconds": trained.config.training_seconds}
    if seconds is None:
        return record | _converted(task, row, trained, data, say)
    model, frozen, lr = trained, make_teacher(trained), task.lr
    if row.method != "softmax":
        model, lr = task.model(), SCRATCH_LR
        planned = plan(model, data.batch(), method=row.method, window=task.window)
        convert(model, planned, [data.batch() for _ in range(4)])
    taken, steps = fit(model, data, task, seconds=seconds, lr=lr, orthogonal=True, report=say)
    return record | {"seconds": round(taken, 1), "steps": steps, "scores": _scores(model, frozen, data)}


def _converted(task: Task, row: Row, model: PreTrainedModel, data: Data, say: Line) -> dict[str, Any]:
    steps = round(row.share * task.steps)
    first = max(1, round(FIRST_STAGE * steps))
    clock = Clock()
    with clock:
        planned = plan(model, data.batch(), method=row.method, window=task.window if row.window else 0)
        conversion = convert(model, planned, [data.batch() for _ in range(4)])
    frozen = conversion.teacher
    record: dict[str, Any] = {"steps": steps, "new_weights": planned.new_weights}
    record["state_numbers"] = sum(layer.state_numbers for layer in planned.layers)
    record["swapped"] = _scores(model, frozen, data)
    with clock:
        transfer(model, frozen, _batches(data, first), _budget("transfer", first, say))
        if row.kept:
            chosen = choose_layers(model, frozen, data.held_out()[:2], row.kept)
            restore_layers(model, frozen, chosen.kept)
            record |= {"kept": chosen.kept, "restored": chosen.restored}
    record["transferred"] = _scores(model, frozen, data)
    with clock:
        budget = _budget("fine-tune", steps - first, say)
        fine_tune(model, frozen, _batches(data, steps - first), budget)
    controls = {}
    for name, control in CONTROLS.items():
        with controlled(model, control):
            controls[name] = _scores(model, frozen, data)
    return record | {
        "seconds": round(clock.seconds, 1),
        "scores": _scores(model, frozen, data),
        "teacher": _scores(frozen, frozen, data),
        "controls": controls,
    }


class Clock:
    """Sums the processor seconds of the blocks that it is around."""

    seconds = 0.0

    def __enter__(self) -> None:
        self.seconds -= time.process_time()

    def __exit__(self, *_: object) -> None:
        self.seconds += time.process_time()


def _batches(data: Data, count: int) -> list[dict[str, torch.Tensor]]:
    return [data.batch() for _ in range(count)]


def _budget(stage: str, steps: int, say: Line) -> Budget:
    def report(progress: Progress) -> None:
        if not progress.step % 20 or progress.step == steps:
            say(f"{stage} step {progress.step} of {steps}: loss {progress.loss:.4f}")

    return Budget(steps=steps, report=report)


def _scores(model: PreTrainedModel, frozen: PreTrainedModel, data: Data) -> dict[str, Any]:
    found = scores(model, frozen, data.held_out())._asdict()
    return {name: round(value, 5) for name, value in found.items() if isinstance(value, float)}


def _key(record: dict[str, Any]) -> tuple[str, str, int]:
    return record["task"], record["row"], record["seed"]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    task = TASKS[options.task]
    if (options.task == vision.TASK.name) != (options.images is not None):
        parser.error("--images is for the task vision, which needs it")
    if options.images is not None:
        task = replace(task, data=partial(task.data, path=options.images))
    for seed in options.seed:
        for row in options.row:
            runs = read(options.out)
            if (options.task, row, seed) in map(_key, runs):
                continue
            label = f"{options.task} {row} seed {seed}:"
            record = run(
                task,
                row,
                seed,
                options.folder,
                runs,
                lambda line, label=label: print(label, line, flush=True),
            )
            append(options.out, record)
            print(label, record["scores"], flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--task", choices=TASKS, required=True)
    parser.add_argument("--row", nargs="+", choices=ROWS, required=True, help="a control comes after its row")
    parser.add_argument("--seed", nargs="+", **SEED, default=[0])
    parser.add_argument("--folder", type=Path, required=True, help="for teachers, which are trained once")
    parser.add_argument("--out", type=Path, required=True, help="the file of JSON lines")
    parser.add_argument("--images", type=existing, help="vision: MNIST's images, a file beside that of their labels")
    return parser


if __name__ == "__main__":
    main()

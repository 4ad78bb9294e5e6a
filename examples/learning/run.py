"""Runs tasks by methods and seeds, and adds a line of JSON for each to a file; what the file has is not run again.

python -m examples.learning.run --task recall --method softmax elu --seed 0 1 --out learning.jsonl"""

import argparse
import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from examples.arguments import existing
from examples.learning import characters, copying, haystack, library, recall, tracking
from examples.learning.task import Task
from examples.learning.training import settings, train
from examples.learning.variants import VARIANTS
from linattn.cli.argument_types import COUNT, NATURAL, POSITIVE, SEED

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *recall.TASKS,
        *tracking.TASKS,
        haystack.TASK,
        characters.TASK,
        *library.TASKS,
        *library.RARE,
        copying.TASK,
    )
}


def read(path: Path) -> list[dict[str, Any]]:
    """The runs in a file of JSON lines. A last line that was cut off counts as none."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text().splitlines(keepends=True) if line.endswith("\n")]


def append(path: Path, record: dict[str, Any]) -> None:
    """Adds a line, after cutting off what another run left of its own."""
    path.parent.mkdir(parents=True, exist_ok=True)
    whole = path.read_bytes() if path.exists() else b""
    with path.open("r+b" if path.exists() else "wb") as file:
        file.seek(whole.rfind(b"\n") + 1)
        file.truncate()
        file.write(json.dumps(record).encode() + b"\n")


def is_done(record: dict[str, Any], task: Task, method: str, seed: int, variant: str | None) -> bool:
    key = {"task": task.name, "method": method, "seed": seed, "steps": task.training.steps, **settings(task.training)}
    return key.items() <= record.items() and record.get("variant") == variant


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.data is None and (name := next((name for name in options.task if TASKS[name].needs_text), None)):
        parser.error(f"the task {name} needs a text: --data")
    given = {name: getattr(options, name) or [None] for name in ("steps", "optimizer", "lr", "warmup")}
    for seed, name, *values in itertools.product(options.seed, options.task, *given.values()):
        task, chosen = TASKS[name], zip(given, values, strict=True)
        training = replace(task.training, **{name: value for name, value in chosen if value is not None})
        # a number of steps stands for itself
        training = replace(training, seconds=None) if options.steps else training
        for method, variant in itertools.product(options.method or task.methods, options.variant):
            if method in task.methods:
                _run(replace(task, training=training), method, seed, variant, options)


def _run(task: Task, method: str, seed: int, variant: str | None, options: argparse.Namespace) -> None:
    if any(is_done(record, task, method, seed, variant) for record in read(options.out)):
        return
    label = " ".join(map(str, (task.name, method, variant or "", "seed", seed, *settings(task.training).values())))
    report = partial(print, label, flush=True)
    append(options.out, train(task, method, seed, variant=variant, data=options.data, report=report))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    methods = sorted({method for task in TASKS.values() for method in task.methods})
    rare = [task.name for task in library.RARE]
    usual = [name for name in TASKS if name not in rare]
    parser.add_argument("--task", nargs="+", choices=TASKS, default=usual, help=f"(all but {', '.join(rare)})")
    parser.add_argument("--method", nargs="+", choices=methods, help="those that a task has not are left out (all)")
    parser.add_argument("--seed", nargs="+", **SEED, default=[0])
    parser.add_argument("--steps", nargs="+", **COUNT, help="instead of the task's own number or time")
    parser.add_argument("--optimizer", nargs="+", choices=("adamw", "muon"), help="instead of the task's own")
    parser.add_argument("--lr", nargs="+", **POSITIVE, help="instead of the task's own learning rate")
    parser.add_argument("--warmup", nargs="+", **NATURAL, help="instead of the task's own steps of warm-up")
    parser.add_argument("--variant", nargs="+", choices=VARIANTS, default=[None], help="models with one thing changed")
    parser.add_argument("--data", type=existing, help="the text for characters and prose")
    parser.add_argument("--out", type=Path, required=True, help="the file of JSON lines")
    return parser


if __name__ == "__main__":
    main()

"""The gain of a few steps: a byte model converted with the command's rates and split of steps, from 5 to 40 steps.

python -m examples.linearize.few_steps --seed 0 1"""

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from examples.linearize import byte_lm
from examples.linearize.task import CHUNK, Task
from examples.linearize.training import teacher
from linattn.cli.argument_types import COUNT, SEED
from linattn.linearize import Budget, convert, fine_tune, plan, scores, transfer
from linattn.linearize.stages import FIRST_STAGE

TASK = replace(byte_lm.TASK, name="byte_lm_400", steps=400)
HELD_OUT = 96


def results(task: Task, seed: int, folder: Path, steps: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Yield the bits and the KL divergence, on 96 windows that are held out, after so many steps (0: swapped in)."""
    for total in (0, *steps):
        model = teacher(task, seed, folder)
        torch.manual_seed(seed)
        data = task.data(seed + 100)
        batches = [data.batch() for _ in range(max(4, total))]
        conversion = convert(model, plan(model, batches[0], window=task.window), batches[:4])
        if total:
            first = max(1, round(FIRST_STAGE * total))
            transfer(model, conversion.teacher, batches, Budget(steps=first))
            fine_tune(model, conversion.teacher, batches[first:], Budget(steps=total - first))
        found = scores(model, conversion.teacher, data.held_out()[: HELD_OUT // CHUNK])
        yield {"seed": seed, "steps": total, "bits": found.loss, "kl": found.kl}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", nargs="+", **SEED, default=[0])
    parser.add_argument("--steps", nargs="+", **COUNT, default=[5, 10, 20, 40])
    parser.add_argument("--folder", type=Path, help="for teachers, which are trained once")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    with TemporaryDirectory() as folder:
        for seed in options.seed:
            for found in results(TASK, seed, options.folder or Path(folder), options.steps):
                print(json.dumps(found), flush=True)


if __name__ == "__main__":
    main()

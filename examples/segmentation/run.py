"""Trains small segmentation networks with and without attention, and draws what they predict beside the truth.

    python -m examples.segmentation.run --mnist t10k-images-idx3-ubyte.gz --nuclei nuclei96.npz --out pictures

Without files it draws digits of its own, and leaves the nuclei out. Two processes, some nine minutes on two cores."""

import argparse
import json
import multiprocessing
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from examples.arguments import existing
from examples.segmentation.brightest import BrightestDigit
from examples.segmentation.glyphs import drawn, mnist
from examples.segmentation.model import MIXERS
from examples.segmentation.nuclei import Nuclei, otsu
from examples.segmentation.picture import draw
from examples.segmentation.task import Task, mean_iou
from examples.segmentation.training import train
from linattn.cli.argument_types import COUNT

DRAWN_DIGITS = 2_000
# the mixers for each task
ON = {BrightestDigit.name: tuple(MIXERS), Nuclei.name: ("none", "efficient")}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = _parser()
    options = parser.parse_args(arguments)
    if options.task == [Nuclei.name] and options.nuclei is None:
        parser.error(f"the task {Nuclei.name} needs a file: --nuclei")
    options.out.mkdir(parents=True, exist_ok=True)
    tasks = _tasks(options)
    jobs = [(task, mixer, options.steps) for task in tasks for mixer in options.mixer if mixer in ON[task.name]]
    runs = _run(jobs, options.jobs)
    for task in tasks:
        mine = [run for run in runs if run["task"] == task.name]
        if task.name == Nuclei.name:
            mine.append(_threshold(task))
        draw(task.test, mine, options.out / f"segmentation-{task.name.replace(' ', '-')}.svg")
        print(table(mine), flush=True)
    with (options.out / "segmentation.jsonl").open("w") as file:
        for run in runs:
            file.write(json.dumps({key: value for key, value in run.items() if key != "predicted"}) + "\n")


def _tasks(options: argparse.Namespace) -> list[Task]:
    tasks: list[Task] = []
    if "brightest digit" in options.task:
        tasks.append(BrightestDigit(_glyphs(options.mnist)))
    if "nuclei" in options.task and options.nuclei is not None:
        tasks.append(Nuclei(options.nuclei))
    return tasks


def _glyphs(path: Path | None) -> torch.Tensor:
    return drawn(DRAWN_DIGITS, torch.Generator().manual_seed(0)) if path is None else mnist(path)


def _run(jobs: Sequence[tuple[Task, str, int | None]], processes: int) -> list[dict[str, Any]]:
    if processes == 1:
        return [_one(job) for job in jobs]
    with multiprocessing.get_context("spawn").Pool(processes) as pool:
        return pool.map(_one, jobs, chunksize=1)


def _one(job: tuple[Task, str, int | None]) -> dict[str, Any]:
    task, mixer, steps = job
    run = train(task, mixer, steps=steps)
    print(f"{run['task']}, {mixer}: mean IoU {run['mean IoU']:.3f} after {run['CPU s']:.0f} CPU s", flush=True)
    return run


def _threshold(task: Task) -> dict[str, Any]:
    """Otsu's threshold, which learns nothing: what a local task is worth."""
    predicted = otsu(task.test.images)
    iou = round(mean_iou(predicted, task.test.masks), 4)
    return {"mixer": "threshold", "mean IoU": iou, "CPU s": 0.0, "weights": 0, "steps": 0, "predicted": predicted}


def table(runs: Sequence[dict[str, Any]]) -> str:
    columns = ("mixer", "mean IoU", "steps", "CPU s", "weights")
    lines = ["| " + " | ".join(columns) + " |", "|---|" + "---:|" * (len(columns) - 1)]
    for run in runs:
        cells = (
            run["mixer"],
            f"{run['mean IoU']:.3f}",
            str(run["steps"]),
            f"{run['CPU s']:.0f}",
            f"{run['weights']:,}",
        )
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mnist", type=existing, help="MNIST's images in its own format; without it, digits are drawn")
    parser.add_argument("--nuclei", type=existing, help="an .npz of images and packed masks; without it, no nuclei")
    parser.add_argument("--task", nargs="+", choices=ON, default=list(ON))
    parser.add_argument("--mixer", nargs="+", choices=MIXERS, default=list(MIXERS))
    parser.add_argument("--steps", **COUNT, help="instead of the tasks' own numbers")
    parser.add_argument("--jobs", **COUNT, default=2, help="runs at a time, each on one thread (2)")
    parser.add_argument("--out", type=Path, required=True, help="the folder for pictures and segmentation.jsonl")
    return parser


if __name__ == "__main__":
    main()

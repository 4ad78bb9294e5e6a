"""Tables and pictures of the runs in a file of JSON lines: tables go into a page of Markdown between
`<!-- table recall -->` and `<!-- end -->`, the pictures that the page shows beside it.

    python -m examples.learning.report docs/learning.jsonl docs/learning.md"""

import argparse
import re
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from examples.learning import recall, tracking
from examples.learning.run import TASKS, read
from examples.learning.task import Task, label
from linattn import LanguageModel, map_state

Run = dict[str, Any]


def state_size(task: Task, method: str) -> int:
    """Numbers that generation keeps for a sequence, after one of the task's length."""
    model, sizes = LanguageModel(task.methods[method]).eval(), []
    with torch.no_grad():
        _, state = model.extend(torch.zeros(1, task.length, dtype=torch.long))
    map_state(lambda part: sizes.append(part.numel()) or part, state)
    return sum(sizes)


def table(task: Task, runs: Sequence[Run]) -> str:
    """A row for each method, in the task's order; two seeds side by side."""
    runs = [run for run in runs if run["task"] == task.name]
    seeds = sorted({run["seed"] for run in runs})
    kinds = [*task.others.values(), *(f"at {step:,}" for step in task.moments), ""]
    head = ["method", *(f"seed {seed}{comma(kind)}" for kind in kinds for seed in seeds)]
    lines = [[*head, "steps", "CPU s", "weights", "state"]]
    for method in task.methods:
        by_seed = {run["seed"]: run for run in sorted(runs, key=_seed) if run["method"] == method}
        if by_seed:
            lines.append([label(method), *_figures(task, by_seed, seeds), *_costs(task, method, by_seed)])
    return _markdown(lines)


def recall_table(runs: Sequence[Run]) -> str:
    """A row for each method, the largest state first, in all tasks of recall, without and with a SiLU."""
    tasks, kinds = recall.TASKS, {"": str, "with SiLU: ": recall.with_silu}
    titles = [task.title.removeprefix("recall of ") for task in tasks]
    rows = []
    for method in dict.fromkeys(name for task in tasks for name in task.methods if "silu" not in name):
        figures = [_recalled(task, rename(method), runs) for rename in kinds.values() for task in tasks]
        if any(figures):
            first = next(task for task in tasks if method in task.methods)
            rows.append((state_size(first, method), label(method), figures))
    rows.sort(key=lambda row: -row[0])
    head = ["method", "state", *(f"{kind}{title}" for kind in kinds for title in titles)]
    return _markdown([head, *([method, f"{size:,}", *figures] for size, method, figures in rows)])


def _recalled(task: Task, method: str, runs: Sequence[Run]) -> str:
    """The accuracy of each seed, and the steps after which a run had solved the task before its last."""
    runs = sorted((run for run in runs if (run["task"], run["method"]) == (task.name, method)), key=_seed)
    return " / ".join(show(task, at(run, "accuracy", None)) + _sooner(task, run) for run in runs)


def _sooner(task: Task, run: Run) -> str:
    step = run["curve"][-1]["step"]
    return f" ({step:,})" if step < task.training.steps else ""


def _markdown(lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def _seed(run: Run) -> int:
    return run["seed"]


def comma(text: str) -> str:
    return f", {text}" if text else ""


def _figures(task: Task, by_seed: dict[int, Run], seeds: Iterable[int]) -> list[str]:
    kinds = [*((name, None) for name in task.others), *((task.metric, step) for step in (*task.moments, None))]
    return [show(task, at(by_seed.get(seed), *kind)) for kind in kinds for seed in seeds]


def at(run: Run | None, metric: str, step: int | None) -> float | None:
    """The figure at a step (None: the last). A run that had solved the task before keeps what it had."""
    if run is None:
        return None
    points = [point for point in run["curve"] if step is None or point["step"] <= step]
    return points[-1][metric]


def show(task: Task, figure: float | None) -> str:
    if figure is None:
        return ""
    return f"{100 * figure:.1f} %" if task.metric == "accuracy" else f"{figure:.3f}"


def _costs(task: Task, method: str, by_seed: dict[int, Run]) -> list[str]:
    steps, seconds = ([run[name] for run in by_seed.values()] for name in ("curve", "cpu_seconds"))
    return [
        " / ".join(f"{curve[-1]['step']:,}" for curve in steps),
        " / ".join(f"{second:.0f}" for second in seconds),
        f"{next(iter(by_seed.values()))['parameters']:,}",
        f"{state_size(task, method):,}",
    ]


def with_tables(page: str, runs: Sequence[Run]) -> str:
    """Return the page with the table of each task that was run between its marks, in the place of what was there. The
    tasks of recall have one table together."""
    together = {task.name for task in recall.TASKS}
    for name in dict.fromkeys("recall" if run["task"] in together else run["task"] for run in runs):
        marks = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marks.search(page):
            raise ValueError(f"the page has no place for a table: <!-- table {name} --> … <!-- end -->")
        text = recall_table(runs) if name == "recall" else table(TASKS[name], runs)
        page = marks.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, help="the file of JSON lines")
    parser.add_argument("page", type=Path, help="the page of Markdown; pictures become PAGE-NAME.svg")
    options = parser.parse_args(arguments)
    runs = read(options.runs)
    page = with_tables(options.page.read_text(), runs)
    options.page.write_text(page)
    for name, draw in pictures().items():
        path = options.page.with_name(f"{options.page.stem}-{name}.svg")
        if path.name in page:
            draw(runs, path)


def pictures() -> dict[str, Callable[[Sequence[Run], Path], None]]:
    # matplotlib is imported where something is drawn
    from examples.learning import curves, points

    return {
        **{name: partial(curves.draw, task) for name, task in TASKS.items()},
        "states": partial(points.draw_states, recall.TASKS, state_size),
        "places": partial(points.draw_places, tracking.TASKS),
    }


if __name__ == "__main__":
    main()

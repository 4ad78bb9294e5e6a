"""Tables and pictures of the runs in a file of JSON lines: tables go into a page of Markdown between
`<!-- table recall -->` and `<!-- end -->`, the pictures that the page shows beside it.

    python -m examples.learning.report docs/learning.jsonl docs/learning.md"""

import argparse
import itertools
import math
import re
import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from examples.arguments import existing
from examples.learning import haystack, library, recall, tracking
from examples.learning.run import TASKS, read
from examples.learning.task import Task, label
from examples.learning.training import settings
from examples.learning.variants import VARIANTS
from linattn import LanguageModel, map_state

Run = dict[str, Any]
OPTIMIZERS = ("adamw", "muon")
# what runs with a number of steps are told apart by, beside the task and the learning rate
KIND = ("steps", "method", "optimizer", "warmup")
# what a model of another size has more of
SCALES: dict[str, Callable[[Run], float]] = {
    "weights": lambda run: run["parameters"],
    "processor time of training, s": lambda run: run["curve"][-1]["seconds"],
}
# tasks that compare each method at its best learning rate
TUNED = {"bytes": library.TASKS, "long": library.LONG, "prose": library.PROSE, "plays": library.PLAYS}


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
    kinds = [*(f"at {step:,}" for step in task.moments), ""]
    head = ["method", *(f"seed {seed}{comma(kind)}" for kind in kinds for seed in seeds)]
    lines = [[*head, "steps", "CPU s", "weights", "state"]]
    for method in task.methods:
        by_seed = {run["seed"]: run for run in sorted(runs, key=_seed) if run["method"] == method}
        if by_seed:
            lines.append([label(method), *_figures(task, by_seed, seeds), *_costs(task, method, by_seed)])
    return markdown(lines)


class Column(NamedTuple):
    """A column of a table of several tasks: a figure of one of them, of each method under its name there."""

    heading: str
    task: Task
    metric: str
    name: Callable[[str], str] = str


# tasks that have one table together
TOGETHER = {
    "recall": [
        Column(kind + task.title.removeprefix("recall of "), task, task.metric, name)
        for kind, name in (("", str), ("with SiLU: ", recall.with_silu))
        for task in recall.TASKS
    ],
    "tracking": [
        Column(f"{task.name}, {tokens}", task, metric)
        for task in tracking.TASKS
        for metric, tokens in (("accuracy_32", "17–32"), (task.metric, "33–128"))
    ],
    "haystack": [Column(f"{length:,} tokens", haystack.TASK, f"accuracy_{length}") for length in haystack.LENGTHS],
    "sizes": [Column(task.title, task, task.metric) for task in library.SIZES],
}


def joint_table(columns: Sequence[Column], runs: Sequence[Run]) -> str:
    """A row for each method, the largest state first. A method that a column renames is not in a row of its own."""
    runs, rows = sorted(runs, key=_seed), []
    names = dict.fromkeys(name for column in columns for name in column.task.methods)
    renamed = {column.name(name) for column in columns for name in names if column.name(name) != name}
    for method in (name for name in names if name not in renamed):
        figures = [_seeds(column, method, runs) for column in columns]
        if any(figures):
            first = next(column.task for column in columns if method in column.task.methods)
            rows.append((state_size(first, method), label(method), figures))
    rows.sort(key=lambda row: -row[0])
    head = ["method", "state", *(column.heading for column in columns)]
    return markdown([head, *([method, f"{size:,}", *figures] for size, method, figures in rows)])


def _seeds(column: Column, method: str, runs: Sequence[Run]) -> str:
    """The figure of each seed, and the steps after which a run had solved the task before its last."""
    method = column.name(method)
    return _figures_of(column, [run for run in runs if (run["task"], run["method"]) == (column.task.name, method)])


def _figures_of(column: Column, runs: Sequence[Run]) -> str:
    return " / ".join(show(column.task, at(run, column.metric, None)) + _sooner(column, run) for run in runs)


def _sooner(column: Column, run: Run) -> str:
    step = run["curve"][-1]["step"]
    return f" ({step:,})" if column.metric == column.task.metric and step < column.task.training.steps else ""


def optimizers_table(task: Task, runs: Sequence[Run]) -> str:
    """A row for each method that was trained by Muon, and each variant, with both optimizers at their best learning
    rate."""
    lines = [["method", "state", "AdamW", "Muon"]]
    for method, variant in itertools.product(task.methods, (None, *VARIANTS)):
        key = task.name, method, variant
        own = [run for run in of_usual_length(runs) if (run["task"], run["method"], run.get("variant")) == key]
        by_optimizer = [best(task, [run for run in own if run["optimizer"] == name]) for name in OPTIMIZERS]
        if by_optimizer[1] or (variant and own):
            row = label(method) + comma(variant or ""), f"{state_size(task, method):,}"
            lines.append([*row, *(_figures_of(Column("", task, task.metric), own) for own in by_optimizer)])
    return markdown(lines)


def tuned_table(tasks: Sequence[Task], runs: Sequence[Run]) -> str:
    """A row for each method, variant and optimizer, with the runs of its best learning rate and warm-up at each task;
    all have the task's time."""
    runs = of_usual_length(runs)
    head = ["method", "optimizer", "state", *(cell for task in tasks for cell in (task.title, "rate, warm-up"))]
    lines = []
    for method, variant, optimizer in itertools.product(tasks[0].methods, (None, *VARIANTS), OPTIMIZERS):
        kind, cells = (method, variant, optimizer), []
        for task in tasks:
            own = [run for run in runs if run["task"] == task.name]
            chosen = best(task, [run for run in own if _kind_of_best(run) == kind])
            figures = " / ".join(
                f"{show(task, at(run, task.metric, None))} ({run['curve'][-1]['step']:,})" for run in chosen
            )
            cells += [figures, f"{chosen[0]['lr']:g}, {chosen[0]['warmup']}" if chosen else ""]
        if any(cells):
            row = label(method) + comma(variant or ""), optimizer, f"{state_size(tasks[0], method):,}"
            lines.append([*row, *cells])
    return markdown([head, *lines])


def _kind_of_best(run: Run) -> tuple[str, str | None, str]:
    return run["method"], run.get("variant"), run["optimizer"]


def best(task: Task, runs: Sequence[Run]) -> list[Run]:
    """Return the runs, one per seed, of a learning rate and warm-up: of those with the most seeds, the ones with which
    the first seed is best."""
    chosen: list[list[Run]] = [
        [run for run in sorted(runs, key=_seed) if (run["lr"], run["warmup"]) == setting]
        for setting in {(run["lr"], run["warmup"]) for run in runs}
    ]
    sign = -1 if task.metric == "accuracy" else 1
    return min(chosen, key=lambda own: (-len(own), sign * own[0]["curve"][-1][task.metric]), default=[])


def rates_table(tasks: Sequence[Task], runs: Sequence[Run]) -> str:
    """The figures of the first seed with each learning rate, of runs that have a number of steps instead of a time."""
    names = {task.name: task for task in tasks}
    runs = [run for run in runs if run["seed"] == 0 and run["steps"] < names[run["task"]].training.steps]
    rates = sorted({run["lr"] for run in runs})
    lines = [["task", "steps", "method", "optimizer", "warm-up", *(f"{rate:g}" for rate in rates)]]
    kinds = {(run["task"], run["steps"], run["method"], run["optimizer"], run["warmup"]) for run in runs}
    tasks_first, methods = list(names), list(tasks[0].methods)
    for kind in sorted(kinds, key=lambda kind: (tasks_first.index(kind[0]), kind[1], methods.index(kind[2]), kind[3:])):
        name, steps, method, optimizer, warmup = kind
        own = [run for run in runs if (run["task"], *(run[key] for key in KIND)) == kind]
        figures = {run["lr"]: show(names[name], at(run, names[name].metric, None)) for run in own}
        cells = [names[name].title, f"{steps:,}", label(method), optimizer, str(warmup)]
        lines.append([*cells, *(figures.get(rate, "") for rate in rates)])
    return markdown(lines)


class PowerLaw(NamedTuple):
    """y = `factor` · x^−`exponent`, fitted to the logarithms; no point is farther from it than `deviation`."""

    factor: float
    exponent: float
    deviation: float

    def __call__(self, x: float) -> float:
        return self.factor * x**-self.exponent

    @classmethod
    def fit(cls, points: Sequence[tuple[float, float]]) -> "PowerLaw":
        slope, offset = statistics.linear_regression(
            *zip(*((math.log(x), math.log(y)) for x, y in points), strict=True)
        )
        law = cls(math.exp(offset), -slope, 0.0)
        return law._replace(deviation=max(abs(law(x) - y) for x, y in points))


def by_size(runs: Sequence[Run], scale: Callable[[Run], float], seed: int = 0) -> dict[str, list[tuple[float, float]]]:
    """Return for each method of the task of scaling the points (scale, bits) of its sizes, in their order."""
    runs = sorted((run for run in _of_scaling(runs) if run["seed"] == seed), key=scale)
    kinds = dict.fromkeys(name.partition(":")[0] for name in library.SCALING.methods)
    points = {
        kind: [(scale(run), run["bits"]) for run in runs if run["method"].partition(":")[0] == kind] for kind in kinds
    }
    return {kind: own for kind, own in points.items() if own}


def _of_scaling(runs: Sequence[Run]) -> list[Run]:
    return sorted((run for run in runs if run["task"] == library.SCALING.name), key=_seed)


def scaling_table(runs: Sequence[Run]) -> str:
    """A row for each method, with the bits and the seconds of training of each size, and what the fits say: the
    exponent, and in brackets the largest distance of a point. Seeds are side by side, and each has fits of its own."""
    runs = _of_scaling(runs)
    lines = [
        ["method", *(f"{x} channels" for x in library.WIDTHS), *(f"exponent, {x.partition(',')[0]}" for x in SCALES)]
    ]
    for kind in dict.fromkeys(name.partition(":")[0] for name in library.SCALING.methods):
        sizes = [[run for run in runs if run["method"] == f"{kind}:{width}"] for width in library.WIDTHS]
        seeds = dict.fromkeys(run["seed"] for own in sizes for run in own)
        laws = [[PowerLaw.fit(by_size(runs, scale, seed)[kind]) for seed in seeds] for scale in SCALES.values()]
        measured = [[(f"{run['bits']:.3f}", f"{run['curve'][-1]['seconds']:,.0f}") for run in own] for own in sizes]
        fitted = [[(f"{law.exponent:.3f}", f"{law.deviation:.3f}") for law in own] for own in laws]
        if seeds:
            lines.append([kind, *(_side_by_side(own, " s") for own in measured), *map(_side_by_side, fitted)])
    return markdown(lines)


def _side_by_side(pairs: Sequence[tuple[str, str]], unit: str = "") -> str:
    """Return the first of each pair, and in brackets the second."""
    return "{} ({}{})".format(*(" / ".join(part) for part in zip(*pairs, strict=True)), unit) if pairs else ""


def markdown(lines: Sequence[Sequence[str]]) -> str:
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join("| " + " | ".join(line) + " |" for line in (lines[0], rule, *lines[1:]))


def _seed(run: Run) -> int:
    return run["seed"]


def comma(text: str) -> str:
    return f", {text}" if text else ""


def _figures(task: Task, by_seed: dict[int, Run], seeds: Iterable[int]) -> list[str]:
    return [show(task, at(by_seed.get(seed), task.metric, step)) for step in (*task.moments, None) for seed in seeds]


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


def usual(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with the settings of their tasks."""
    return [run for run in of_usual_length(runs) if settings(TASKS[run["task"]].training).items() <= run.items()]


def of_usual_length(runs: Sequence[Run]) -> list[Run]:
    """Return the runs with the number of steps of their tasks."""
    return [run for run in runs if run["steps"] == TASKS[run["task"]].training.steps]


def _of_both(runs: Sequence[Run]) -> set[str]:
    """Return the tasks that were learned with an optimizer that is not theirs."""
    return {run["task"] for run in runs if run["optimizer"] != TASKS[run["task"]].training.optimizer}


def unchanged(runs: Sequence[Run]) -> list[Run]:
    """Return the runs of models as their tasks have them."""
    return [run for run in runs if "variant" not in run]


# what variants are compared by, after so many steps of a task
COMPARED_STEPS = {library.TASKS[0].name: 400, haystack.TASK.name: haystack.TASK.training.steps}
COMPARED = [
    Column("bits per byte", library.TASKS[0], "bits"),
    Column("read again, saved", library.TASKS[0], "saved"),
    *(Column(f"haystack, {column.heading}", *column[1:]) for column in TOGETHER["haystack"]),
]


def variants_table(runs: Sequence[Run]) -> str:
    """A row for each method of which variants were run, and one for each of these, with the same rates."""
    setting = ("task", "method", "optimizer", "lr", "warmup")
    runs = [run for run in runs if run["steps"] == COMPARED_STEPS.get(run["task"])]
    changed = {tuple(run[name] for name in setting) for run in runs if "variant" in run}
    runs = [run for run in sorted(runs, key=_seed) if tuple(run[name] for name in setting) in changed]
    names = dict.fromkeys(_without_silu(name) for task in (library.TASKS[0], haystack.TASK) for name in task.methods)
    lines = [["method", "changed", *(column.heading for column in COMPARED)]]
    for name, variant in itertools.product(names, (None, *VARIANTS)):
        own = [run for run in runs if (_without_silu(run["method"]), run.get("variant")) == (name, variant)]
        if own:
            cells = [
                " / ".join(show(task, at(run, metric, None)) for run in own if _has(run, task, metric))
                for _, task, metric, _ in COMPARED
            ]
            lines.append([label(name), variant or "", *cells])
    return markdown(lines)


def _has(run: Run, task: Task, metric: str) -> bool:
    """Return whether it is a run of the task; those of before have no passages that are read again."""
    return run["task"] == task.name and metric in run["curve"][-1]


def _without_silu(method: str) -> str:
    """Return what a method of both tasks is called: "gla" for "gla+silu4" and "gla+silu"."""
    return re.sub(r"\+silu4?", "", method)


def tables(runs: Sequence[Run]) -> dict[str, str]:
    """Return the tables of the tasks that were run, by name."""
    every, runs = runs, unchanged(runs)
    at_best = {task.name: name for name, tasks in TUNED.items() for task in tasks}
    tuned, others = [run for run in every if run["task"] in at_best], usual(runs)
    of_bytes = [run for run in unchanged(tuned) if at_best[run["task"]] == "bytes"]
    tuned_names = {at_best[run["task"]] for run in tuned}
    done = {run["task"] for run in others} - at_best.keys()
    together = {name: columns for name, columns in TOGETHER.items() if done & {column.task.name for column in columns}}
    alone = done - {library.SCALING.name} - {column.task.name for columns in together.values() for column in columns}
    return {
        **{name: joint_table(columns, others) for name, columns in together.items()},
        **{name: table(TASKS[name], others) for name in alone},
        **{name: tuned_table(TUNED[name], tuned) for name in tuned_names},
        **({"rates": rates_table(library.TASKS, of_bytes)} if of_bytes else {}),
        **({"scaling": scaling_table(others)} if library.SCALING.name in done else {}),
        **({"variants": variants_table(every)} if len(every) > len(runs) else {}),
        **{f"{name}-optimizers": optimizers_table(TASKS[name], every) for name in _of_both(runs) - at_best.keys()},
    }


def with_tables(page: str, runs: Sequence[Run]) -> str:
    """Return the page with the tables of what was run between their marks, in the place of what was there."""
    for name, text in tables(runs).items():
        page = replaced(page, name, text)
    return page


def replaced(page: str, name: str, text: str) -> str:
    """Return the page with the text between the marks of a table."""
    marks = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
    if not marks.search(page):
        raise ValueError(f"the page has no place for a table: <!-- table {name} --> … <!-- end -->")
    return marks.sub(lambda found: f"{found[1]}{text}\n{found[2]}", page)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=existing, help="the file of JSON lines")
    parser.add_argument("page", type=existing, help="the page of Markdown; pictures become PAGE-NAME.svg")
    options = parser.parse_args(arguments)
    runs = read(options.runs)
    page = with_tables(options.page.read_text("utf-8"), runs)
    options.page.write_text(page, "utf-8")
    for name, draw in pictures().items():
        path = options.page.with_name(f"{options.page.stem}-{name}.svg")
        if path.name in page:
            draw(usual(unchanged(runs)), path)


def pictures() -> dict[str, Callable[[Sequence[Run], Path], None]]:
    # matplotlib is imported where something is drawn
    from examples.learning import curves, points

    return {
        **{name: partial(curves.draw, task) for name, task in TASKS.items()},
        "states": partial(points.draw_states, recall.TASKS, state_size),
        "places": partial(points.draw_places, tracking.TASKS, trained=tracking.TRAIN_LENGTH),
        "haystack": partial(points.draw_places, [haystack.TASK], trained=haystack.LENGTHS[0], scale="log"),
        "scaling": partial(points.draw_scaling, SCALES, by_size, PowerLaw.fit),
    }


if __name__ == "__main__":
    main()

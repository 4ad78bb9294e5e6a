"""Tables of runs in a file of JSON lines, for a page of Markdown: between `<!-- table recall -->` and `<!-- end -->`.

python -m examples.linearize.report docs/linearize.jsonl docs/linearize.md"""

import argparse
import re
from collections.abc import Sequence
from typing import Any

from examples.arguments import existing
from examples.learning.run import read
from examples.linearize.run import ROWS, TASKS, Row
from examples.linearize.task import Task

Run = dict[str, Any]
COLUMNS = {
    "byte_lm": {"loss": "bits per byte", "kl": "KL, bits", "agreement": "same most likely byte"},
    "recall": {"accuracy": "accuracy", "kl": "KL, bits", "agreement": "same answer"},
    "copying": {"accuracy": "accuracy", "kl": "KL, bits", "agreement": "same symbol"},
    "encoder": {"accuracy": "accuracy", "cosine": "cosine of the outputs"},
    "vision": {"accuracy": "accuracy", "kl": "KL, bits", "agreement": "same class"},
    "speech": {"accuracy": "accuracy", "kl": "KL, bits", "agreement": "same word"},
}
MOMENTS = {"swapped": "swapped in", "transferred": "after stage 1", "scores": "after stage 2"}


def table(task: Task, runs: Sequence[Run]) -> str:
    """A line for each row and seed, in the order of `ROWS`, below the teacher's."""
    runs = [run for run in runs if run["task"] == task.name]
    columns, (first, *_) = COLUMNS[task.name], COLUMNS[task.name]
    head = ["", "seed", *(f"{columns[first]}, {moment}" for moment in MOMENTS.values()), *[*columns.values()][1:]]
    lines = [[*head, "steps", "CPU s"]]
    for run in sorted(runs, key=_place):
        if "teacher" in run and run["seed"] not in (line[1] for line in lines):
            figures = [_show(name, run["teacher"][name]) for name in columns]
            lines.append(
                ["**the teacher**", run["seed"], "", "", *figures, f"{task.steps:,}", f"{run['teacher_seconds']:.0f}"]
            )
    lines += [_line(ROWS[run["row"]], run, columns, first) for run in sorted(runs, key=_place)]
    rule = ["---", *["---:"] * (len(head) + 1)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (lines[0], rule, *lines[1:]))


def _line(row: Row, run: Run, columns: dict[str, str], first: str) -> list[Any]:
    moments = [_show(first, run[moment][first]) if moment in run else "" for moment in MOMENTS]
    rest = [_show(name, run["scores"][name]) for name in [*columns][1:]]
    return [_label(row), run["seed"], *moments, *rest, f"{run['steps']:,}", f"{run['seconds']:.0f}"]


def _label(row: Row) -> str:
    if row.as_long_as is not None:
        what = "the teacher trained on" if row.method == "softmax" else "linear from scratch"
        return f"*{what}, as long as that of {100 * ROWS[row.as_long_as].share:.0f} %*"
    method = "a window alone" if row.method == "local" else row.method
    parts = [method, *["without a window"] * (not row.window), *[f"{row.kept} layer stays softmax"] * row.kept]
    return ", ".join([*parts, f"{100 * row.share:.0f} % of the steps"])


def _place(run: Run) -> tuple[int, ...]:
    return [*TASKS].index(run["task"]), [*ROWS].index(run["row"]), run["seed"]


def _show(name: str, figure: float) -> str:
    return f"{100 * figure:.1f} %" if name in ("accuracy", "agreement") else f"{figure:.3f}"


def controls(runs: Sequence[Run]) -> str:
    """A line for each run by the default method, with what is left of it by the controls."""
    lines = [["", "seed", "linear", "window alone", "linear part off", "uniform attention"]]
    for run in sorted(runs, key=_place):
        if "controls" in run and ROWS[run["row"]].method == Row.method:
            name = next(iter(COLUMNS[run["task"]]))
            figures = [run["scores"], *run["controls"].values()]
            lines.append(
                [f"{run['task']}, {_label(ROWS[run['row']])}", run["seed"], *(_show(name, x[name]) for x in figures)]
            )
    rule = ["---", *["---:"] * (len(lines[0]) - 1)]
    return "\n".join("| " + " | ".join(map(str, line)) + " |" for line in (lines[0], rule, *lines[1:]))


def with_tables(page: str, runs: Sequence[Run]) -> str:
    """The page with each table between its marks, in the place of what was there."""
    tables = {name: table(task, runs) for name, task in TASKS.items()} | {"controls": controls(runs)}
    for name, text in tables.items():
        marks = re.compile(rf"(<!-- table {name} -->\n).*?(<!-- end -->)", re.DOTALL)
        if not marks.search(page):
            raise ValueError(f"the page has no place for a table: <!-- table {name} --> … <!-- end -->")
        page = marks.sub(lambda found, text=text: f"{found[1]}{text}\n{found[2]}", page)
    return page


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=existing, help="the file of JSON lines")
    parser.add_argument("page", type=existing, help="the page of Markdown")
    options = parser.parse_args(arguments)
    page = options.page.read_text("utf-8")
    options.page.write_text(with_tables(page, read(options.runs)), "utf-8")


if __name__ == "__main__":
    main()

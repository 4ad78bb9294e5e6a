"""A picture of a task: what each method had reached after how many steps."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from examples.learning.task import Task, label
from examples.pictures import save

# Okabe and Ito's colours, which the colour-blind can tell apart; markers say the same once more
COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "p")
UNITS = {"loss": "loss, nats per character", "bits": "loss, bits per byte"}
SEEDS = ("-", "--", ":")


def styles(names: Iterable[str]) -> dict[str, dict[str, Any]]:
    """Return a colour and a marker for each name. Their numbers have no common divisor, so that 88 pairs differ."""
    return {
        name: {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 6}
        for i, name in enumerate(names)
    }


def shown_methods(tasks: Sequence[Task], runs: Sequence[dict[str, Any]]) -> list[str]:
    """Return the methods that were run, in the order of the tasks."""
    done = {(run["task"], run["method"]) for run in runs}
    return list(dict.fromkeys(name for task in tasks for name in task.methods if (task.name, name) in done))


def draw(task: Task, runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw the first seed with full lines and markers, the second dashed. Other sizes of a method, and those with a
    SiLU alone, are left out."""
    plt.rcParams["font.size"] = 11
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    methods = [name for name in shown_methods([task], runs) if ":" not in name and not name.endswith("+silu")]
    for method, style in styles(methods).items():
        for run in runs:
            if (run["task"], run["method"]) == (task.name, method):
                _line(axes, task, run, style)
        # outside the picture: what the legend shows
        axes.plot([], [], linewidth=1.8, label=label(method), **style)
    _label(axes, task)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    save(figure, path)
    plt.close(figure)


def _line(axes: Any, task: Task, run: dict[str, Any], style: dict[str, Any]) -> None:
    axes.plot(
        [point["step"] for point in run["curve"]],
        [point[task.metric] * (100 if task.metric == "accuracy" else 1) for point in run["curve"]],
        linestyle=SEEDS[run["seed"] % len(SEEDS)],
        linewidth=1.8,
        **(style if run["seed"] == 0 else style | {"marker": None}),
    )


def _label(axes: Any, task: Task) -> None:
    percent = task.metric == "accuracy"
    axes.set(xlabel="steps", ylabel="accuracy, %" if percent else f"validation {UNITS[task.metric]}")
    axes.set_xlim(left=0)
    if percent:
        axes.set_ylim(-2, 102)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{task.title}: seed 0 with marks, seed 1 dashed", fontsize=11, loc="left")

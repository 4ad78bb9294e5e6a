"""A picture of a task: what each method had reached after how many steps."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from examples.learning.task import Task, label

# Okabe and Ito's colours, which the colour-blind can tell apart; markers say the same once more
COLOURS = ("#000000", "#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#7f7f7f")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*")
SEEDS = ("-", "--", ":")


def draw(task: Task, runs: Sequence[dict[str, Any]], path: Path) -> None:
    """The first seed with full lines and markers, the second dashed; text stays text in the SVG."""
    plt.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "linattn", "font.size": 11})
    figure, axes = plt.subplots(figsize=(8, 4.8), layout="constrained")
    for method, colour, marker in zip(task.methods, COLOURS, MARKERS, strict=False):
        mine = [run for run in runs if (run["task"], run["method"]) == (task.name, method)]
        for run in mine:
            _line(axes, task, run, colour, marker)
        if mine:
            # outside the picture: what the legend shows
            axes.plot([], [], color=colour, marker=marker, markersize=6, linewidth=1.8, label=label(method))
    _label(axes, task)
    axes.legend(loc="center left", bbox_to_anchor=(1, 0.5), frameon=False)
    figure.savefig(path, metadata={"Date": None})
    plt.close(figure)


def _line(axes: Any, task: Task, run: dict[str, Any], colour: str, marker: str) -> None:
    axes.plot(
        [point["step"] for point in run["curve"]],
        [point[task.metric] * (100 if task.metric == "accuracy" else 1) for point in run["curve"]],
        color=colour,
        linestyle=SEEDS[run["seed"] % len(SEEDS)],
        marker=marker if run["seed"] == 0 else None,
        markersize=6,
        linewidth=1.8,
    )


def _label(axes: Any, task: Task) -> None:
    percent = task.metric == "accuracy"
    axes.set(xlabel="steps", ylabel="accuracy, %" if percent else "validation loss, nats a character")
    axes.set_xlim(left=0)
    if percent:
        axes.set_ylim(-2, 102)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_title(f"{task.name}: seed 0 with marks, seed 1 dashed", fontsize=11, loc="left")

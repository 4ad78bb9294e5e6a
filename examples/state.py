"""A picture of a state: one book, read once, and what may go on from it.

python -m examples.state --out docs/state.svg"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from examples.family import BLUE, GREY, ORANGE, box
from examples.pictures import parsed_out, save

USES = (
    ("generate(…, state=S)", "a question, and its answer"),
    ("states.repeat(S, 3)", "three continuations of one past"),
    ("ContinuousBatch, Request(…, state=S)", "many requests, each with a past of its own"),
    ("states.PrefixCache", "the past some tokens ago, or of another text that begins alike"),
    ("states.save_state(S, …)", "a file for another process, or another day"),
)
TOKENS, CELL, ROW = 20, 0.22, 0.72
CENTRE = {"ha": "center", "va": "center"}


def draw(path: Path) -> None:
    plt.rcParams.update({"font.size": 10})
    figure = plt.figure(figsize=(11, 3.2))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-0.2, 13), ylim=(-0.1, 3.7))
    axes.set_axis_off()
    middle, state, uses = 1.8, TOKENS * CELL + 0.9, TOKENS * CELL + 3.3
    for i in range(TOKENS):
        box(axes, i * CELL, middle - CELL / 2, CELL * 0.8, CELL, GREY)
    axes.text(TOKENS * CELL / 2, middle + 0.5, "a book: any number of tokens,\nread once", **CENTRE)
    arrow(axes, (TOKENS * CELL, middle), (state - 0.08, middle), GREY)
    box(axes, state, middle - 0.55, 1.1, 1.1, ORANGE)
    axes.text(state + 0.55, middle, "S", size=18, color=ORANGE, **CENTRE)
    axes.text(state + 0.55, middle - 1.0, "a state of\nconstant size", color=ORANGE, **CENTRE)
    for row, (call, use) in enumerate(USES):
        y = middle + (len(USES) // 2 - row) * ROW
        arrow(axes, (state + 1.18, middle), (uses - 0.1, y), BLUE)
        axes.text(uses, y + 0.13, call, family="monospace", va="center", color=BLUE, weight="bold")
        axes.text(uses, y - 0.15, use, va="center")
    save(figure, path, text="path")
    plt.close(figure)


def arrow(axes: Any, start: tuple[float, float], end: tuple[float, float], colour: str) -> None:
    axes.annotate("", end, start, arrowprops={"arrowstyle": "->", "color": colour, "linewidth": 1.5})


def main(arguments: Sequence[str] | None = None) -> None:
    draw(parsed_out(__doc__, arguments))


if __name__ == "__main__":
    main()

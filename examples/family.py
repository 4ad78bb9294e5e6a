"""A picture of the family of linear attention: how each method updates its state.

python -m examples.family --out docs/family.svg"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from examples.pictures import parsed_out, save

# both are seen on white and on black
BLUE, ORANGE, GREEN, GREY = "#2688ab", "#d55e00", "#2e8b57", "#7f7f7f"


class Cell(NamedTuple):
    """A state update: its place in the table, the names of its methods, its formula, and what is known by it."""

    row: int
    column: int
    names: str
    formula: str
    known: str


ROWS = {
    "a token\nadds to\nthe state": BLUE,
    "a token\ncorrects\nthe state": ORANGE,
    "it removes\nwith a key\nof its own": GREEN,
}
COLUMNS = ("nothing fades", "fades at a fixed rate", "a gate per head", "a gate per channel")
DELTA = "$S_i = \\tilde S + \\beta_i k_i (v_i - \\tilde S^\\top k_i)^\\top$\n$\\tilde S = "
REMOVAL = "$S_i = (\\mathrm{diag}(\\alpha_i)$\n$ - (a_i \\circ r_i)\\, r_i^\\top) S_{i-1}"
CELLS = (
    Cell(0, 0, "elu, taylor2, favor …", "$S_i = S_{i-1} + \\varphi(k_i) v_i^\\top$", "a feature map φ for each name"),
    Cell(0, 1, "retention", "$S_i = \\gamma S_{i-1} + k_i v_i^\\top$", "RetNet"),
    Cell(0, 2, "ssd", "$S_i = \\alpha_i S_{i-1} + \\Delta_i k_i v_i^\\top$", "Mamba-2"),
    Cell(0, 3, "gla", "$S_i = \\mathrm{diag}(\\alpha_i) S_{i-1} + k_i v_i^\\top$", "gated linear attention"),
    Cell(1, 0, "delta", f"{DELTA}S_{{i-1}}$", "DeltaNet"),
    Cell(1, 2, "gated_delta", f"{DELTA}\\alpha_i S_{{i-1}}$", "gated DeltaNet, Qwen3-Next"),
    Cell(1, 3, "kda", f"{DELTA}\\mathrm{{diag}}(\\alpha_i) S_{{i-1}}$", "Kimi Linear"),
    Cell(2, 3, "rwkv7", f"{REMOVAL}{{}} + w_i v_i^\\top$", "RWKV-7"),
)
SOFTMAX = "$y_i = \\sum_j e^{q_i \\cdot k_j} v_j \\,/\\, \\sum_j e^{q_i \\cdot k_j}$"
STEP = (
    "linear attention replaces $e^{q \\cdot k}$ by $\\varphi(q) \\cdot \\varphi(k)$: "
    "a state $S$ of constant size holds all keys and values, and $y_i = S_i^\\top \\varphi(q_i)$"
)
OTHERS = (
    "The gates $\\alpha_i$, $\\beta_i$, $\\Delta_i$ and $a_i$ are computed from the token. "
    "Other methods have no such state: local sees the last tokens only,\n"
    "linformer projects the keys to fewer. One layer can mix methods, head by head: local+elu."
)
WIDTH, HEIGHT, GAP = 3.0, 1.5, 0.12


def draw(path: Path) -> None:
    plt.rcParams.update({"font.size": 10, "mathtext.fontset": "cm"})
    figure = plt.figure(figsize=(11, 6.4))
    axes = figure.add_axes((0, 0, 1, 1), xlim=(-1.25, 4 * WIDTH + 0.02), ylim=(-2.52, 4.9))
    axes.set_axis_off()
    box(axes, 0, 4.15, 4 * WIDTH - GAP, 0.7, GREY)
    centre = {"ha": "center", "va": "center"}
    axes.text(2 * WIDTH, 4.5, f"softmax attention keeps every key and value:  {SOFTMAX}", size=11, **centre)
    axes.annotate("", (0.4, 3.65), (0.4, 4.15), arrowprops={"arrowstyle": "->", "color": "black"})
    axes.text(0.6, 3.9, STEP, va="center")
    for column, title in enumerate(COLUMNS):
        axes.text(column * WIDTH + (WIDTH - GAP) / 2, 3.42, title, weight="bold", **centre)
    for row, (title, colour) in enumerate(ROWS.items()):
        axes.text(-0.12, bottom(row) + HEIGHT / 2, title, ha="right", va="center", weight="bold", color=colour)
    for cell in CELLS:
        draw_cell(axes, cell)
    axes.text(0, -2.12, OTHERS, va="center", linespacing=1.5)
    save(figure, path, text="path")
    plt.close(figure)


def bottom(row: int) -> float:
    return 3.2 - HEIGHT - row * (HEIGHT + GAP)


def draw_cell(axes: Any, cell: Cell) -> None:
    x, y = cell.column * WIDTH, bottom(cell.row)
    box(axes, x, y, WIDTH - GAP, HEIGHT, list(ROWS.values())[cell.row])
    middle, centre = x + (WIDTH - GAP) / 2, {"ha": "center", "va": "center"}
    axes.text(middle, y + HEIGHT - 0.22, cell.names, weight="bold", family="monospace", **centre)
    axes.text(middle, y + HEIGHT / 2 - 0.02, cell.formula, size=12, linespacing=1.4, **centre)
    axes.text(middle, y + 0.2, cell.known, size=9, **centre)


def box(axes: Any, x: float, y: float, width: float, height: float, colour: str) -> None:
    axes.add_patch(plt.Rectangle((x, y), width, height, fill=False, edgecolor=colour, linewidth=1.5))


def main(arguments: Sequence[str] | None = None) -> None:
    draw(parsed_out(__doc__, arguments))


if __name__ == "__main__":
    main()

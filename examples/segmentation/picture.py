"""Predictions beside the truth: a row for each image, a column for each network."""

import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot as plt

from examples.pictures import save
from examples.segmentation.task import Batch

ROWS = 5


def draw(test: Batch, runs: Sequence[dict[str, Any]], path: Path) -> None:
    """Green is right, red is wrongly marked, blue is missed."""
    plt.rcParams.update({"font.size": 10})
    # a heading may not be wider than its column
    titles = ["image", "truth", *(f"{textwrap.fill(run['mixer'], 14)}\n{run['mean IoU']:.2f}" for run in runs)]
    figure, axes = plt.subplots(ROWS, len(titles), figsize=(1.5 * len(titles), 1.5 * ROWS + 0.5), layout="constrained")
    for row in range(ROWS):
        image, mask = test.images[row, 0].numpy(), test.masks[row].numpy()
        pictures = [image, mask, *(_compared(run["predicted"][row].numpy(), mask) for run in runs)]
        for column, picture in enumerate(pictures):
            axes[row, column].imshow(picture, cmap="gray", vmin=0, vmax=1, interpolation="nearest")
            axes[row, column].set_axis_off()
            if row == 0:
                axes[row, column].set_title(titles[column])
    save(figure, path)
    plt.close(figure)


def _compared(predicted: Any, mask: Any) -> Any:
    picture = 0.0 * predicted[..., None].repeat(3, axis=-1)
    picture[predicted & mask] = (0.0, 0.62, 0.45)
    picture[predicted & ~mask] = (0.84, 0.37, 0.0)
    picture[~predicted & mask] = (0.0, 0.45, 0.7)
    return picture

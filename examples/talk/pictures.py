"""The common style of the talk's pictures: colours that the colour-blind can tell apart, and no background."""

from pathlib import Path
from typing import Any

from examples import pictures
from examples.learning.curves import COLOURS, plt

BLACK, ORANGE, BLUE, GREEN, PINK, YELLOW, SKY, GREY = COLOURS

__all__ = ["BLACK", "BLUE", "GREEN", "GREY", "ORANGE", "PINK", "SKY", "YELLOW", "panels", "save", "tidy"]


def panels(count: int, *, width: float = 5.0, height: float = 4.0) -> tuple[Any, Any]:
    """A figure and its axes, side by side."""
    plt.rcParams.update({"font.size": 10})
    return plt.subplots(1, count, figsize=(count * width, height), layout="constrained", squeeze=False)


def tidy(axes: Any, **labels: Any) -> None:
    axes.set(**labels)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)


def save(figure: Any, path: Path) -> None:
    pictures.save(figure, path)
    plt.close(figure)

"""The learning curve of a run, drawn from its log."""

import io
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from linattn.cli.atomic import write_atomically

PARTS = {"training": {"linewidth": 0.8, "alpha": 0.6}, "validation": {"marker": "o", "markersize": 4}}


def draw_curve(records: Iterable[dict[str, Any]], path: Path) -> None:
    """Plot bits per byte against the tokens seen."""
    records = list(records)
    figure = Figure(figsize=(7, 4.5), layout="constrained")
    axes = figure.add_subplot()
    for part, style in PARTS.items():
        points = [(record["tokens"], record[name]) for record in records if (name := f"{part}_bits_per_byte") in record]
        if points:
            axes.plot(*zip(*points, strict=True), label=part, **style)
    axes.set(xlabel="tokens", ylabel="bits per byte")
    axes.grid(alpha=0.3)
    axes.legend()
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=130)
    write_atomically(path, image.getvalue())

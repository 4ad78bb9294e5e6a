"""The page of a conversion's report: the tables of report.html, and figures of layers, losses and generation."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import matplotlib

from linattn.console.page import COLOURS, TEXT, axes, render, svg

Record = dict[str, Any]
"""The contents of report.json."""
BLACK, RED, BLUE, *_ = COLOURS
COLUMNS = ("loss", "accuracy", "kl", "agreement", "cosine")


def html(record: Record) -> str:
    with matplotlib.rc_context(TEXT):
        plots = enumerate(_plots(record))
        figures = [svg(plot.figure, f"figure-{place}", plot.get_title("left")) for place, plot in plots]
    known = {name for row in record["scores"].values() for name, score in row.items() if score is not None}
    columns = [name for name in COLUMNS if name in known]
    return render("linearize/command/report.html", record=record, columns=columns, figures=figures)


def _plots(record: Record) -> Iterator[Any]:
    layers = record["layers"]
    places = range(len(layers))
    plot = axes("error of each layer", "layer")
    plot.bar(places, [layer["error"] or 0 for layer in layers], color=BLUE)
    plot.set_xticks(places)
    yield plot
    plot = axes("entropy of attention, bits", "layer")
    for offset, field, colour, label in ((-0.2, "teacher_entropy", BLACK, "teacher"), (0.2, "entropy", BLUE, "linear")):
        plot.bar([x + offset for x in places], [layer[field] for layer in layers], 0.4, color=colour, label=label)
    plot.set_xticks(places)
    plot.legend(frameon=False)
    yield plot
    for stage, losses in record["losses"].items():
        plot = axes(f"loss of {stage}", "step")
        plot.plot(range(1, len(losses) + 1), _smooth(losses), color=RED, linewidth=1.7)
        plot.set_yscale("log")
        yield plot
    for stage, validations in record["validations"].items():
        if len(validations) > 1:
            plot = axes(f"held-out text, {stage}", "step")
            steps = [int(step) for step in validations]
            for name, colour in zip(next(iter(validations.values())), (RED, BLUE, BLACK), strict=False):
                rows = [figures[name] for figures in validations.values()]
                plot.plot(steps, rows, color=colour, marker="o", label=name)
            plot.legend(frameon=False)
            yield plot
    if record["costs"]:
        plot = axes("ms per generated token", "tokens before it")
        for name, colour, label in (("teacher", BLACK, "softmax with the KV cache"), ("model", BLUE, "linear")):
            points = [(pair[name]["tokens"], 1e3 * pair[name]["seconds"]) for pair in record["costs"]]
            plot.plot(*zip(*points, strict=True), color=colour, marker="o", label=label)
        plot.set_xscale("log", base=2)
        plot.set_ylim(bottom=0)
        plot.legend(frameon=False)
        yield plot


def _smooth(losses: Sequence[float]) -> list[float]:
    """Return the moving average over a fortieth of the steps."""
    width = max(1, len(losses) // 40)
    return [fmean(losses[max(0, end - width) : end]) for end in range(1, len(losses) + 1)]

"""The report of a conversion as a page, whose tables are in report.html: pictures of layers, losses and generation."""

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import Any

import matplotlib

from linattn.console.page import COLOURS, TEXT, axes, render, svg

Made = dict[str, Any]
BLACK, RED, BLUE, *_ = COLOURS
COLUMNS = ("loss", "accuracy", "kl", "agreement", "cosine")


def html(made: Made) -> str:
    """Return the page of what report.json holds."""
    with matplotlib.rc_context(TEXT):
        pictures = enumerate(_pictures(made))
        drawings = [svg(plot.figure, f"picture-{place}", plot.get_title("left")) for place, plot in pictures]
    known = {name for row in made["scores"].values() for name, score in row.items() if score is not None}
    # the cosine of logits says little where there is a divergence
    columns = [name for name in COLUMNS if name in known and not (name == "cosine" and "kl" in known)]
    return render("linearize/command/report.html", made=made, columns=columns, drawings=drawings)


def _pictures(made: Made) -> Iterator[Any]:
    layers = made["layers"]
    places = range(len(layers))
    plot = axes("error of each layer", "layer")
    plot.bar(places, [each["error"] or 0 for each in layers], color=BLUE)
    plot.set_xticks(places)
    yield plot
    plot = axes("entropy of attention, bits", "layer")
    plot.bar([x - 0.2 for x in places], [each["teacher_entropy"] for each in layers], 0.4, color=BLACK, label="teacher")
    plot.bar([x + 0.2 for x in places], [each["entropy"] for each in layers], 0.4, color=BLUE, label="linear")
    plot.set_xticks(places)
    plot.legend(frameon=False)
    yield plot
    for stage, losses in made["losses"].items():
        plot = axes(f"loss of {stage}", "step")
        plot.plot(range(1, len(losses) + 1), _smooth(losses), color=RED, linewidth=1.7)
        plot.set_yscale("log")
        yield plot
    if made["costs"]:
        plot = axes("ms per generated token", "tokens before it")
        for name, colour in (("teacher", BLACK), ("model", BLUE)):
            points = [(pair[name]["tokens"], 1e3 * pair[name]["seconds"]) for pair in made["costs"]]
            label = "softmax with the KV cache" if name == "teacher" else "linear"
            plot.plot(*zip(*points, strict=True), color=colour, marker="o", label=label)
        plot.set_xscale("log", base=2)
        plot.set_ylim(bottom=0)
        plot.legend(frameon=False)
        yield plot


def _smooth(losses: Sequence[float]) -> list[float]:
    """Average over a fortieth of the steps."""
    width = max(1, len(losses) // 40)
    return [fmean(losses[max(0, end - width) : end]) for end in range(1, len(losses) + 1)]

"""The report of a conversion as a page: tables, and pictures of layers, losses and generation."""

from collections.abc import Iterator, Sequence
from typing import Any

import matplotlib
from matplotlib.figure import Figure

from linattn.cli.page import COLOURS, TEXT, render, svg

Made = dict[str, Any]
Rows = list[list[str]]
BLACK, RED, BLUE, *_ = COLOURS
COLUMNS = {
    "loss": "loss",
    "accuracy": "accuracy",
    "kl": "KL to the teacher",
    "agreement": "agreement",
    "cosine": "cosine",
}


def html(made: Made) -> str:
    """Return the page of what report.json holds."""
    with matplotlib.rc_context(TEXT):
        figures = {name: figure for name, figure in _pictures(made)}
        drawings = [svg(figure, name.replace(" ", "-"), name) for name, figure in figures.items()]
    return render(
        "linearize/report.html", made=made, scores=_scores(made), drawings=drawings, tables=list(_tables(made))
    )


def _scores(made: Made) -> Rows:
    rows = made["scores"]
    shown = [name for name in COLUMNS if any(row[name] is not None for row in rows.values())]
    # the cosine of logits says little where there is a divergence
    shown = shown if "kl" not in shown else [name for name in shown if name != "cosine"]
    head = ["", *(COLUMNS[name] for name in shown)]
    return [head, *([name, *(f"{row[each]:.4f}" for each in shown)] for name, row in rows.items())]


def _tables(made: Made) -> Iterator[tuple[str, Rows]]:
    figures = ("error", "entropy", "teacher_entropy")
    rows = [[each["name"], *(_number(each[name]) for name in figures)] for each in made["layers"]]
    yield "Layers", [["", "relative error", "entropy, bits", "the teacher's"], *rows]
    sizes = ("new_weights", "state_numbers", "cache_numbers")
    rows = [
        [each["name"], each["reason"] or "linear", *(f"{each[name]:,}" for name in sizes)]
        for each in made["plan"]["layers"]
    ]
    yield "Plan", [["", "becomes", "new weights", "numbers of state", "numbers of cache per token"], *rows]
    if made["recall"]:
        head = ["tokens", "linear", "teacher", "window alone", "linear, passage not seen"]
        names = ("model", "teacher", "window_alone", "without")
        rows = [[f"{each['length']:,}", *(f"{each[name]:.1%}" for name in names)] for each in made["recall"]]
        yield "Recall: the second half of a passage that the text began with", [head, *rows]
    if made["costs"]:
        head = ["after tokens", "ms per token", "with the KV cache", "bytes of state", "of KV cache"]
        pairs = [(pair["model"], pair["teacher"]) for pair in made["costs"]]
        rows = [
            [f"{pair[0]['tokens']:,}", *(f"{1e3 * x['seconds']:.2f}" for x in pair), *(f"{x['bytes']:,}" for x in pair)]
            for pair in pairs
        ]
        yield "Generation", [head, *rows]


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _pictures(made: Made) -> Iterator[tuple[str, Figure]]:
    layers = made["layers"]
    places = range(len(layers))
    figure, axes = _axes("error of each layer", "layer")
    axes.bar(places, [each["error"] or 0 for each in layers], color=BLUE)
    axes.set_xticks(places)
    yield "error of each layer", figure
    figure, axes = _axes("entropy of attention, bits", "layer")
    axes.bar([x - 0.2 for x in places], [each["teacher_entropy"] for each in layers], 0.4, color=BLACK, label="teacher")
    axes.bar([x + 0.2 for x in places], [each["entropy"] for each in layers], 0.4, color=BLUE, label="linear")
    axes.set_xticks(places)
    axes.legend(frameon=False)
    yield "entropy of attention", figure
    for stage, losses in made["losses"].items():
        figure, axes = _axes(f"loss of {stage}", "step")
        axes.plot(range(1, len(losses) + 1), _smooth(losses), color=RED, linewidth=1.7)
        axes.set_yscale("log")
        yield f"loss of {stage}", figure
    if made["costs"]:
        figure, axes = _axes("ms per generated token", "tokens before it")
        for name, colour in (("teacher", BLACK), ("model", BLUE)):
            points = [(pair[name]["tokens"], 1e3 * pair[name]["seconds"]) for pair in made["costs"]]
            label = "softmax with the KV cache" if name == "teacher" else "linear"
            axes.plot(*zip(*points, strict=True), color=colour, marker="o", label=label)
        axes.set_xscale("log", base=2)
        axes.set_ylim(bottom=0)
        axes.legend(frameon=False)
        yield "time per generated token", figure


def _axes(title: str, label: str) -> tuple[Figure, Any]:
    figure = Figure(figsize=(4.5, 3.2), layout="constrained", facecolor="white")
    axes = figure.subplots()
    axes.set_title(title, loc="left")
    axes.set_xlabel(label)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    return figure, axes


def _smooth(losses: Sequence[float]) -> list[float]:
    """Average over a fortieth of the steps."""
    width = max(1, len(losses) // 40)
    starts = (max(0, place - width) for place in range(1, len(losses) + 1))
    return [sum(piece) / len(piece) for place, start in enumerate(starts, 1) for piece in [losses[start:place]]]

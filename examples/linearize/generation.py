"""The cost of a generated token after more and more tokens, before and after a conversion: a picture and a table.

The weights do not matter for time, so they are random.

python -m examples.linearize.generation --out docs/linearize-generation.svg"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from matplotlib.figure import Figure

from examples.linearize import byte_lm
from examples.pictures import picture, save
from linattn.cli.argument_types import COUNT
from linattn.linearize import convert, plan
from linattn.linearize.probes import Cost, costs, fused_softmax

LENGTHS = (256, 1_024, 4_096, 8_192)


def measured(lengths: Sequence[int], rows: int, *, compiled: bool = False) -> list[list[Cost]]:
    """Softmax with the cache of keys and values, and linear attention, at each length."""
    torch.manual_seed(0)
    model = byte_lm.model().eval()
    batch = byte_lm.ByteText(0).batch()
    teacher = convert(model, plan(model, batch), [batch]).teacher
    # the compiler's own time is that of the first few
    repeats = 8 if compiled else 3
    with fused_softmax(teacher):
        return [costs([teacher, model], tokens, rows=rows, repeats=repeats, compiled=compiled) for tokens in lengths]


def table(pairs: Sequence[Sequence[Cost]]) -> str:
    lines = ["| tokens before | softmax, ms | linear, ms | | softmax, KiB | linear, KiB |", "| ---: " * 6 + "|"]
    for softmax, linear in pairs:
        times = f"{1e3 * softmax.seconds:.1f} | {1e3 * linear.seconds:.1f} | {softmax.seconds / linear.seconds:.1f} ×"
        lines.append(f"| {softmax.tokens:,} | {times} | {softmax.bytes / 1024:,.0f} | {linear.bytes / 1024:,.0f} |")
    return "\n".join(lines)


def draw(pairs: Sequence[Sequence[Cost]], path: Path) -> None:
    figure = Figure(figsize=(9, 3.4), layout="constrained")
    for axes, name, factor in zip(figure.subplots(1, 2), ("seconds", "bytes"), (1e3, 1 / 1024), strict=True):
        for points, colour, label in zip(
            zip(*pairs, strict=True), ("black", "#0072b2"), ("softmax", "linear"), strict=True
        ):
            values = [factor * getattr(point, name) for point in points]
            axes.plot([point.tokens for point in points], values, color=colour, marker="o", label=label)
        axes.set_xlabel("tokens before")
        axes.set_title("ms per generated token" if name == "seconds" else "KiB of cache or state", loc="left")
        axes.set_ylim(bottom=0)
        axes.grid(alpha=0.3)
        axes.legend(frameon=False)
    save(figure, path)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", nargs="+", **COUNT, default=LENGTHS)
    parser.add_argument("--rows", **COUNT, default=8, help="sequences that are generated at once (default: 8)")
    parser.add_argument("--compile", action="store_true", help="compile the tokens of both models by torch.compile")
    parser.add_argument("--out", type=picture, required=True, help="the picture")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    pairs = measured(options.lengths, options.rows, compiled=options.compile)
    draw(pairs, options.out)
    print(table(pairs))


if __name__ == "__main__":
    main()

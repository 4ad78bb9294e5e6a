"""Time and memory of a training step of the detector against the number of tokens, for each attention.

    python -m examples.detr.measure --side 256 512 1024

Prints a table in Markdown. Each measurement is a process of its own: memory is the most that a process ever held."""

import argparse
import multiprocessing
import resource
import sys
import time
from collections.abc import Sequence

import torch

from examples.detr.attentions import ATTENTIONS
from examples.detr.images import collate
from examples.detr.model import Detector
from linattn.cli.argument_types import COUNT

DIM, HEADS = 64, 4


def step(name: str, side: int) -> tuple[float, float]:
    """Seconds of a step, and MB more than before it, for two images, of which one is half as high."""
    torch.manual_seed(0)
    tokens = (-(-side // 8)) ** 2
    model = Detector(lambda keys: ATTENTIONS[name](DIM, HEADS, keys), longest=tokens, depth=1)
    batch, mask = collate([torch.randn(3, side, side), torch.randn(3, side // 2, side)])
    before, started = _peak(), time.perf_counter()
    classes, boxes = model(batch, mask)
    (classes.square().mean() + boxes.square().mean()).backward()
    return time.perf_counter() - started, _peak() - before


def apart(name: str, side: int) -> tuple[float, float]:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(step, (name, side))


def _peak() -> float:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (1e6 if sys.platform == "darwin" else 1e3)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--side", nargs="+", **COUNT, default=[256, 512, 1024], help="pixels")
    parser.add_argument("--attention", nargs="+", choices=ATTENTIONS, default=list(ATTENTIONS))
    options = parser.parse_args(arguments)
    print("| attention | " + " | ".join(f"{(-(-side // 8)) ** 2:,} tokens" for side in options.side) + " |")
    print("|---|" + "---:|" * len(options.side))
    for name in options.attention:
        cells = []
        for side in options.side:
            seconds, memory = apart(name, side)
            cells.append(f"{seconds:.2f} s, {memory:,.0f} MB")
        print(f"| {name} | " + " | ".join(cells) + " |", flush=True)


if __name__ == "__main__":
    main()

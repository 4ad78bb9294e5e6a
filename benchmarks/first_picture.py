"""Time and memory against length, beside softmax attention: the picture on the first page.

    python -m benchmarks.first_picture [--out docs/first-picture.svg] [--threads 1] [--longest 65536]

Left, the forward and backward of causal attention, 8 heads of 64 channels, elu + 1 against torch's fused softmax
attention: medians of three turns. Right, the bytes that generation keeps for one sequence and layer: the state of the
one, the keys and values of the other, as tensors of the library's own states hold them."""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import matplotlib
import torch
from torch import Tensor

import linattn
from examples.pictures import save

matplotlib.use("svg")
from matplotlib import pyplot

HEADS, CHANNELS = 8, 64
METHODS = {"softmax": ("softmax attention", "#c0504d"), "elu": ("linear attention (elu)", "#2688ab")}
# a method stops where one turn would take longer
PATIENCE = 60.0


def tokens(n: int) -> list[Tensor]:
    return [torch.randn(1, HEADS, n, CHANNELS, requires_grad=True) for _ in range(3)]


def seconds(name: str, n: int) -> float:
    q, k, v = tokens(n)
    grad = torch.randn(1, HEADS, n, CHANNELS)

    def call() -> float:
        start = time.perf_counter()
        torch.autograd.grad(linattn.attend(q, k, v, name, is_causal=True), (q, k, v), grad)
        return time.perf_counter() - start

    first = call()
    return statistics.median(call() for _ in range(3)) if first < PATIENCE / 3 else first


def state_bytes(name: str, n: int) -> float:
    attention = linattn.named_attention(name, num_heads=HEADS, head_dim=CHANNELS, causal=True)
    with torch.no_grad():
        _, state = attention.extend(*tokens(n))
    sizes: list[int] = []
    linattn.map_state(lambda tensor: sizes.append(tensor.numel() * tensor.element_size()) or tensor, state)
    return sum(sizes)


def lengths(longest: int) -> Iterator[int]:
    n = 256
    while n <= longest:
        yield n
        n *= 2


def measured(measure: Callable[[str, int], float], longest: int, limit: float) -> dict[str, dict[int, float]]:
    """Measure each method at each length, in turns, until one value reaches the limit."""
    found: dict[str, dict[int, float]] = {name: {} for name in METHODS}
    for n in lengths(longest):
        for name, values in found.items():
            # four times the length's last value but one is what the next would cost softmax
            if not values or 4 * max(values.values()) < limit:
                values[n] = measure(name, n)
                print(f"{measure.__name__:12} {name:8} {n:7,} {values[n]:.4g}", flush=True)
    return found


def draw(panels: dict[str, dict[str, dict[int, float]]], out: Path) -> None:
    matplotlib.rcParams["font.size"] = 11
    figure, axes = pyplot.subplots(1, 2, figsize=(10, 2.7), layout="constrained")
    for axis, (title, found) in zip(axes, panels.items(), strict=True):
        for name, values in found.items():
            label, colour = METHODS[name]
            axis.plot(list(values), list(values.values()), "o-", label=label, color=colour, markersize=4, linewidth=2)
        axis.set(title=title, xlabel="tokens", xscale="log", yscale="log")
        axis.set_xticks([256, 1024, 4096, 16384, 65536], ["256", "1k", "4k", "16k", "64k"], minor=False)
        axis.minorticks_off()
        axis.grid(alpha=0.3)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].legend(frameon=False)
    save(figure, out)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("docs/first-picture.svg"))
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--longest", type=int, default=65536)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    times = measured(seconds, arguments.longest, PATIENCE)
    sizes = measured(state_bytes, arguments.longest, float("inf"))
    ms = {name: {n: 1e3 * value for n, value in values.items()} for name, values in times.items()}
    mib = {name: {n: value / 2**20 for n, value in values.items()} for name, values in sizes.items()}
    panels: dict[str, Any] = {
        "training step of a layer's attention, ms": ms,
        "memory of generation per layer, MiB": mib,
    }
    draw(panels, arguments.out)
    both = {n: times["softmax"][n] / times["elu"][n] for n in times["softmax"]}
    print(json.dumps({"times faster": {n: round(ratio, 1) for n, ratio in both.items()}}))


if __name__ == "__main__":
    main()

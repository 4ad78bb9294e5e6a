"""Simulate one sequence over many devices: the seconds of a forward pass and of a training step, by way of exchange.

    python -m benchmarks.scaling [--tokens 1000000,10000000] [--devices 8,64,512] [--picture docs/devices-scaling.svg]
    python -m benchmarks.scaling --check        # two processes of a CPU, beside what was measured

Each rank has a clock for its products and one for its wire, and every block, message and collective of an exchange
(`exchanges.py`) moves them. The seconds of a block are FLOP and bytes over rates; the wires have a bandwidth and a
latency (`timeline.py`). Nothing is run on a GPU: the defaults are an H100's data sheet and shares of it that others
reach."""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import matplotlib

from benchmarks.exchanges import ENGINES, LINEAR, SOFTMAX, ring, scan, wave
from benchmarks.timeline import Machine, Model, Run, Wire
from examples.pictures import save
from linattn.cli.argument_types import counts

matplotlib.use("svg")
from matplotlib import pyplot


def alone(run: Run, attention: str) -> float:
    """Return the seconds of one device with all tokens."""
    return {LINEAR: wave, SOFTMAX: ring}[attention](replace(run, ranks=1)).seconds()


def fits(model: Model, name: str, ranks: int) -> bool:
    """Tell whether an exchange can have so many ranks."""
    return name != "all-to-all" or ranks <= model.heads


# an H100 SXM: the data sheet's dense bfloat16 and memory, NVLink and a ConnectX-7 per device, each way
OPTIONS: dict[str, tuple[float, str]] = {
    "peak": (989e12, "FLOP per second of a device"),
    "dense-share": (0.5, "share of the peak that the products with weights reach"),
    "softmax-share": (0.6, "share of the peak that softmax attention reaches"),
    "memory": (3.35e12, "bytes per second of a device's memory"),
    "memory-share": (0.8, "share of them that kernels reach"),
    "near-bandwidth": (450e9, "bytes per second each way within a node of 8"),
    "near-latency": (10e-6, "seconds of a message within a node"),
    "far-bandwidth": (50e9, "bytes per second each way of one device to another node"),
    "far-latency": (20e-6, "seconds of a message between nodes"),
}
SIZES = {"depth": "layers", "dim": "channels", "heads": "heads", "vocab": "tokens in the vocabulary"}


def parsed(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=counts, default=(10**6, 10**7), help="lengths, with commas between")
    parser.add_argument("--devices", type=counts, default=(8, 64, 512), help="up to 8, or multiples of 8")
    for name, text in SIZES.items():
        parser.add_argument(f"--{name}", type=int, default=getattr(Model, name), help=f"{text} (%(default)s)")
    for name, (value, text) in OPTIONS.items():
        parser.add_argument(f"--{name}", type=float, default=value, help=f"{text} (%(default)g)")
    parser.add_argument("--picture", type=Path, help="draw the seconds of a training step on 1 to 512 devices")
    parser.add_argument("--check", action="store_true", help="two processes of a CPU, beside what was measured")
    return parser.parse_args(arguments)


def machine_from(options: argparse.Namespace) -> Machine:
    return Machine(
        dense=options.peak * options.dense_share,
        softmax=options.peak * options.softmax_share,
        memory=options.memory * options.memory_share,
        near=Wire(options.near_bandwidth, options.near_latency),
        far=Wire(options.far_bandwidth, options.far_latency),
    )


def table(run: Run, devices: Sequence[int]) -> list[str]:
    """Return the lines of a table: the seconds, one device's seconds over theirs and over the devices, the MB that each
    device receives for one layer of a forward pass, and the GB that it stores for the backward pass."""
    lines = ["| attention | exchange | devices | forward, s | training, s | of linear scaling | MB per layer | GB |"]
    lines.append("|---|---|" + "---:|" * 6)
    for attention in (LINEAR, SOFTMAX):
        seconds = [alone(replace(run, training=training), attention) for training in (False, True)]
        lines.append(row(attention, "one device", replace(run, ranks=1), *seconds, 0.0, 1.0))
    for ranks in devices:
        read, train = (replace(run, ranks=ranks, training=training) for training in (False, True))
        for (attention, name), engine in ENGINES.items():
            if fits(run.model, name, ranks):
                forward, step = engine(read), engine(train).seconds()
                share = alone(train, attention) / ranks / step
                lines.append(row(attention, name, train, forward.seconds(), step, forward.bytes_per_layer(), share))
            else:
                lines.append(f"| {attention} | {name} | {ranks} | more devices than heads | | | | |")
    return lines


def row(attention: str, name: str, run: Run, forward: float, training: float, num_bytes: float, share: float) -> str:
    seconds = f"{digits(forward)} | {digits(training)} | {share:.0%}"
    sizes = f"{digits(num_bytes / 1e6)} | {digits(run.stored_bytes / 1e9)}"
    return f"| {attention} | {name} | {run.ranks} | {seconds} | {sizes} |"


def digits(x: float) -> str:
    """Return a number with three digits, without an exponent."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


# one thread of the machine on which the engines were measured: products, and bytes as the operator's own seconds tell
CPU = Machine(75e9, 75e9, 1.9e9, Wire(1e9, 1e-4), Wire(1e9, 1e-4), element=4, recompute=False)
CPU_RUN = Run(Model(depth=6, dim=256, heads=8, vocab=257), CPU, 16_384, 2, training=False)
# one process's seconds over those of two, forward and training; and over those of one with half of the tokens
MEASURED = {"wave": (2.04, 2.12), "scan": (1.92, 1.87)}
HALF = (2.14, 2.08)


def check() -> list[str]:
    """Return what two processes gain, in the model and measured. Half of the tokens take less than half of the time on
    a CPU, as they fit its cache better, so the model's figures are multiplied by what was measured for that."""
    lines = ["| exchange | work | model | model and cache | measured |", "|---|---|---:|---:|---:|"]
    for name, engine in (("wave", wave), ("scan", scan)):
        for training, work in enumerate(("forward", "training")):
            run = replace(CPU_RUN, training=bool(training))
            ratio = alone(run, LINEAR) / engine(run).seconds()
            cached, found = ratio * HALF[training] / 2, MEASURED[name][training]
            lines.append(f"| {name} | {work} | {ratio:.2f} | {cached:.2f} | {found:.2f} |")
    return lines


COLOURS = ("#0072b2", "#d55e00", "#e69f00", "#009e73", "#7f7f7f", "#cc79a7")
DEVICES = [2**i for i in range(10)]


def draw(path: Path, model: Model, machine: Machine, lengths: Sequence[int]) -> None:
    figure, panels = pyplot.subplots(1, len(lengths), figsize=(11, 4.8), squeeze=False, layout="constrained")
    for axes, tokens in zip(panels[0], lengths, strict=True):
        curves(axes, Run(model, machine, tokens, 1, training=True))
        axes.set(xscale="log", yscale="log", xlabel="devices", title=f"{tokens:,} tokens")
        axes.set_xticks(DEVICES, [str(ranks) for ranks in DEVICES])
        axes.minorticks_off()
        axes.grid(alpha=0.25)
    panels[0][0].set_ylabel("seconds of a training step, simulated")
    figure.legend(*panels[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=4, frameon=False)
    save(figure, path)
    pyplot.close(figure)


def curves(axes: Any, run: Run) -> None:
    for attention in (LINEAR, SOFTMAX):
        label = "one device ÷ devices" if attention == LINEAR else None
        axes.plot(DEVICES, [alone(run, attention) / ranks for ranks in DEVICES], ":", color="black", label=label)
    for ((attention, name), engine), colour in zip(ENGINES.items(), COLOURS, strict=True):
        runs = [replace(run, ranks=ranks) for ranks in DEVICES if fits(run.model, name, ranks)]
        style = {"marker": "o" if attention == LINEAR else "s", "markersize": 4, "color": colour}
        axes.plot([x.ranks for x in runs], [engine(x).seconds() for x in runs], label=f"{name}, {attention}", **style)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parsed(arguments)
    if options.check:
        return print(*check(), sep="\n")
    model, machine = Model(*(getattr(options, name) for name in SIZES)), machine_from(options)
    for tokens in options.tokens:
        run = Run(model, machine, tokens, 1, training=True)
        print(f"\n{tokens:,} tokens\n", *table(run, options.devices), sep="\n")
    if options.picture:
        draw(options.picture, model, machine, options.tokens)


if __name__ == "__main__":
    main()

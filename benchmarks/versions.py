"""The operators of this checkout beside those of another one: does a change cost time?

    git worktree add ../before COMMIT
    python benchmarks/versions.py ../before [--repeats 15] [--only linear,gla,kda] [--tokens 2048] [--channels 64]

A process for each checkout computes the same calls in turns. Times are processor times of one thread in milliseconds
(medians); `ratio` is the median of the ratios of neighbouring turns, this checkout over the other, with the quartiles
of these ratios: on a noisy machine, a ratio says something if both quartiles are on one side of 1."""

import argparse
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import normalize

HERE = Path(__file__).resolve().parent.parent
HEADS = 8
# a turn lasts at least so many seconds
SPAN = 0.1
METHODS = "linear", "all_keys", "per_head", "gla", "delta", "gated_delta", "kda"
WORKS = "forward", "training"


def operator(method: str, n: int, d: int) -> Callable[[], Tensor]:
    """Return a call of one method on random inputs, which require gradients."""
    import linattn

    q, k, v = (torch.randn(1, HEADS, n, d, requires_grad=True) for _ in range(3))
    beta = torch.rand(1, HEADS, n, requires_grad=True)
    per_head = (-0.5 * torch.rand(1, HEADS, n)).requires_grad_()
    per_channel = (-0.5 * torch.rand(1, HEADS, n, d)).requires_grad_()
    unit_q, unit_k = (normalize(x, dim=-1).detach().requires_grad_() for x in (q, k))

    def linear(**options: object) -> Tensor:
        return linattn.causal_linear_attention(q, k, v, **options)[0]

    def delta(**options: object) -> Tensor:
        return linattn.causal_delta_attention(unit_q, unit_k, v, beta, **options)[0]

    return {
        "linear": lambda: linear(feature_map="elu_plus_one"),
        "all_keys": lambda: linattn.linear_attention(q, k, v, feature_map="elu_plus_one"),
        "per_head": lambda: linear(log_decay=per_head, normalize=None),
        "gla": lambda: linear(log_decay=per_channel, normalize=None),
        "delta": lambda: delta(),
        "gated_delta": lambda: delta(log_decay=per_head),
        "kda": lambda: delta(log_decay=per_channel),
    }[method]


def seconds(call: Callable[[], Tensor], work: str) -> float:
    """Return the processor time per call, of as many calls as last `SPAN` seconds."""
    calls, start = 0, time.process_time()
    while calls == 0 or time.process_time() - start < SPAN:
        with torch.set_grad_enabled(work == "training"):
            y = call()
        if work == "training":
            y.sum().backward()
        calls += 1
    return (time.process_time() - start) / calls


def measure_on_request(n: int, d: int) -> None:
    """Answer each line "method work" of the standard input by the seconds of a call. Runs in a checkout's process."""
    torch.set_num_threads(1)
    calls: dict[str, Callable[[], Tensor]] = {}
    for line in sys.stdin:
        method, work = line.split()
        if method not in calls:
            torch.manual_seed(0)
            # one at a time in memory
            calls = {method: operator(method, n, d)}
        print(seconds(calls[method], work), flush=True)


class Checkout:
    """A process that imports linattn from one checkout."""

    def __init__(self, folder: Path, options: argparse.Namespace):
        sizes = ["--tokens", str(options.tokens), "--channels", str(options.channels)]
        command = [sys.executable, __file__, str(folder), "--answer", *sizes]
        environment = os.environ | {"PYTHONPATH": str(folder)}
        self.process = subprocess.Popen(command, stdin=-1, stdout=-1, env=environment, cwd=folder, text=True)

    def seconds(self, method: str, work: str) -> float:
        assert self.process.stdin and self.process.stdout
        print(method, work, file=self.process.stdin, flush=True)
        return float(self.process.stdout.readline())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("other", type=Path, help="a folder with another checkout")
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--only", default=",".join(METHODS))
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--channels", type=int, default=64)
    parser.add_argument("--answer", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.answer:
        return measure_on_request(options.tokens, options.channels)
    if unknown := set(options.only.split(",")) - set(METHODS):
        parser.error(f"argument --only: there is no {', '.join(sorted(unknown))}, but {', '.join(METHODS)}")
    other, this = (Checkout(folder.resolve(), options) for folder in (options.other, HERE))
    # the processes end when their input does
    with other.process, this.process:
        print(f"{'':22}{'other':>10}{'this':>10}{'ratio':>8}   quartiles")
        for method in options.only.split(","):
            for work in WORKS:
                turns = [(other.seconds(method, work), this.seconds(method, work)) for _ in range(options.repeats + 1)]
                # the first turn warms up
                report(method, work, turns[1:])


def report(method: str, work: str, turns: list[tuple[float, float]]) -> None:
    other, this = (1e3 * statistics.median(x) for x in zip(*turns, strict=True))
    low, ratio, high = statistics.quantiles([b / a for a, b in turns], n=4)
    print(f"{method:12}{work:10}{other:10.2f}{this:10.2f}{ratio:8.3f}   {low:.3f} to {high:.3f}", flush=True)


if __name__ == "__main__":
    main()

"""The operator's time and memory on this machine's CPU, beside softmax attention in the same run.

    python benchmarks/linear_operator.py [--threads 1] [--tokens 16384] [--repeats 7] [--json FILE]

Contenders take turns, medians are printed with the fastest and slowest run. A share is the time that the operator's
matrix products would take at the rate of batched 64 × 64 × 64 products, measured in the same run, over its own time."""

import argparse
import json
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch.nn.functional import scaled_dot_product_attention

from linattn.ops import causal_linear_attention

HEADS, CHANNELS, CHUNK = 8, 64, 64
# 4 block products of the forward, 13 with the gradient, each of 2·C·d FLOP a token and head
FORWARD_FLOP, TRAINING_FLOP = 4 * 2 * CHUNK * CHANNELS, 13 * 2 * CHUNK * CHANNELS

Times = dict[str, list[float]]


def inputs(n: int, *, grad: bool) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, n, CHANNELS).requires_grad_(grad) for _ in range(3)]


def linear(feature_map: str) -> Callable[..., torch.Tensor]:
    return lambda q, k, v: causal_linear_attention(q, k, v, feature_map=feature_map)[0]


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return scaled_dot_product_attention(q, k, v, is_causal=True)


def forward(attention: Callable[..., torch.Tensor], n: int) -> Callable[[], object]:
    tensors = inputs(n, grad=False)
    return lambda: attention(*tensors)


def training(attention: Callable[..., torch.Tensor], n: int) -> Callable[[], object]:
    tensors, upstream = inputs(n, grad=True), torch.randn(1, HEADS, n, CHANNELS)
    return lambda: torch.autograd.grad(attention(*tensors), tensors, upstream)


def step(feature_map: str) -> Callable[[], object]:
    one = inputs(1, grad=False)
    _, state = causal_linear_attention(*one, feature_map=feature_map)
    return lambda: causal_linear_attention(*one, state, feature_map=feature_map)


def products() -> Callable[[], object]:
    a, b = torch.randn(64, 64, 64), torch.randn(64, 64, 64)
    out = torch.empty_like(a)
    return lambda: torch.bmm(a, b, out=out)


def measure(contenders: dict[str, tuple[Callable[[], object], int]], repeats: int) -> Times:
    """Seconds a call; each contender is called as often in a run as its count says, and once before: a virtual machine's
    host takes back memory that stood free while the others ran."""
    times: Times = {name: [] for name in contenders}
    for round_ in range(repeats + 1):
        for name, (call, count) in contenders.items():
            call()
            start = time.perf_counter()
            for _ in range(count):
                call()
            if round_ > 0:
                times[name].append((time.perf_counter() - start) / count)
        print(f"\rround {round_} of {repeats}", end="", file=sys.stderr, flush=True)
    print(file=sys.stderr)
    return times


def peak_above_inputs(n: int) -> float:
    """Of a forward with φ inside: bytes of peak memory above inputs and output, over the bytes of q, k and v."""
    with torch.no_grad():
        q, k, v = inputs(n, grad=False)
        causal_linear_attention(q[..., :1024, :], k[..., :1024, :], v[..., :1024, :], feature_map="elu_plus_one")
        unit = 1 if platform.system() == "Darwin" else 1024
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
        y, _ = causal_linear_attention(q, k, v, feature_map="elu_plus_one")
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
    of_inputs = 3 * q.numel() * q.element_size()
    return (after - before - y.numel() * y.element_size()) / of_inputs


def report(times: Times, n: int) -> list[dict[str, object]]:
    rate = 64 * 2 * 64**3 / statistics.median(times["64³ products"])
    rows: list[dict[str, object]] = []
    for name, seconds in times.items():
        median = statistics.median(seconds)
        row: dict[str, object] = {"name": name, "median_s": median, "min_s": min(seconds), "max_s": max(seconds)}
        if "step" not in name and "products" not in name:
            row["ns_per_token_and_head"] = median / n / HEADS * 1e9
            kind = "training" if "training" in name else "forward"
            row["softmax_takes_times"] = statistics.median(times[f"softmax {kind}"]) / median
            if "softmax" not in name:
                flop = TRAINING_FLOP if kind == "training" else FORWARD_FLOP
                row["share_of_product_rate"] = flop * n * HEADS / rate / median
        rows.append(row)
    print(f"{platform.machine()}, torch {torch.__version__}, {torch.get_num_threads()} threads, float32, B=1, ", end="")
    print(f"H={HEADS}, D={CHANNELS}, n={n}; 64³ products at {rate / 1e9:.0f} GFLOP/s")
    print(f"{'':30} {'median':>10} {'min–max':>21} {'ns/token-head':>14} {'softmax takes':>14} {'share':>6}")
    for row in rows:
        unit, factor = ("µs", 1e6) if row["median_s"] < 1e-3 else ("ms", 1e3)  # type: ignore[operator]
        median, low, high = (f"{row[key] * factor:.1f}" for key in ("median_s", "min_s", "max_s"))  # type: ignore
        cells = [f"{row['name']:30}", f"{median + ' ' + unit:>10}", f"{low + '–' + high:>21}"]
        if "ns_per_token_and_head" in row:
            cells.append(f"{row['ns_per_token_and_head']:14.0f}")
            cells.append(f"{row['softmax_takes_times']:13.1f}×")
        if "share_of_product_rate" in row:
            cells.append(f"{row['share_of_product_rate']:6.2f}")
        print(" ".join(cells))
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the rows here too")
    parser.add_argument("--peak", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    if options.peak:
        print(peak_above_inputs(options.peak))
        return
    n = options.tokens
    # in a process of its own, as peak memory never goes down; and first, as a process begins with its parent's
    command = [sys.executable, __file__, "--threads", str(options.threads), "--peak", "65536"]
    peak = float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    contenders = {
        "64³ products": (products(), 100),
        "linear forward, features given": (forward(linear("identity"), n), 1),
        "linear forward, elu + 1": (forward(linear("elu_plus_one"), n), 1),
        "softmax forward": (forward(softmax, n), 1),
        "linear training, elu + 1": (training(linear("elu_plus_one"), n), 1),
        "softmax training": (training(softmax, n), 1),
        "linear step, elu + 1": (step("elu_plus_one"), 1000),
    }
    rows = report(measure(contenders, options.repeats), n)
    print(f"peak memory of a forward at n=65536 above inputs and output: {100 * peak:.1f} % of q, k and v")
    if options.json:
        record = {"threads": options.threads, "tokens": n, "torch": torch.__version__, "rows": rows, "peak": peak}
        options.json.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()

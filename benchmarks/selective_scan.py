"""Mamba-1's selective scan of 1,024 channels with 16 numbers each, by transformers' function and by ours, on this CPU.

    python benchmarks/selective_scan.py [--threads 1] [--lengths 256,512,1024] [--repeats 3] [--stock-steps 1]

Both take turns in one process. Times are medians of processor time. A step is the forward pass and the gradients of all
inputs. `saved` is what autograd keeps for it, with all tensors that share memory counted once, per token and channel.
`apart` is the largest relative difference of an output or a gradient."""

import argparse
import statistics
import time
from collections.abc import Callable

import torch
from torch import Tensor
from transformers.models.mamba.modeling_mamba import mamba_selective_scan

from linattn.cli.argument_types import counts
from linattn.integrations.transformers.hybrids.scans import mamba_scan

CHANNELS, STATES = 1024, 16
Scan = Callable[..., Tensor]


def inputs(n: int) -> list[Tensor]:
    """Return hidden states, time steps before softplus, rates, keys and queries, laid out as in the models."""
    torch.manual_seed(0)
    x, dt = (torch.randn(1, n, CHANNELS).mT for _ in range(2))
    B, C = (torch.randn(1, n, STATES).mT for _ in range(2))
    A = -torch.arange(1.0, STATES + 1).expand(CHANNELS, STATES)
    return [y.clone().requires_grad_() for y in (x, dt - 3, A, B, C)]


def forward(scan: Scan, arguments: list[Tensor]) -> list[Tensor]:
    with torch.no_grad():
        return [scan(*arguments, delta_softplus=True)]


def step(scan: Scan, arguments: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad(scan(*arguments, delta_softplus=True).square().sum(), arguments))


def saved_bytes(scan: Scan, arguments: list[Tensor]) -> int:
    storages: dict[int, int] = {}
    alive: list[Tensor] = []

    def keep(x: Tensor) -> Tensor:
        alive.append(x)
        storages[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda x: x):
        scan(*arguments, delta_softplus=True)
    return sum(storages.values())


def seconds(work: Callable[..., list[Tensor]], scan: Scan, arguments: list[Tensor]) -> float:
    start = time.process_time()
    work(scan, arguments)
    return time.process_time() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--lengths", type=counts, default=(256, 512, 1024))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--stock-steps", type=int, default=1, help="how often transformers' step, of minutes, is timed")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    both = {"stock": mamba_selective_scan, "ours": mamba_scan}
    for n in options.lengths:
        arguments = inputs(n)
        saved = {who: saved_bytes(scan, arguments) / (n * CHANNELS) for who, scan in both.items()}
        print(f"n {n:6,}  saved    stock {saved['stock']:7.0f} B  ours {saved['ours']:7.0f} B", flush=True)
        for work in (forward, step):
            times: dict[str, list[float]] = {who: [] for who in both}
            forward(both["ours"], arguments), step(both["ours"], arguments)
            for i in range(options.repeats):
                for who, scan in both.items():
                    if work is forward or who == "ours" or i < options.stock_steps:
                        times[who].append(seconds(work, scan, arguments))
            stock, ours = (statistics.median(times[who]) for who in ("stock", "ours"))
            print(
                f"n {n:6,}  {work.__name__:7}  stock {stock:8.3f} s  ours {ours:7.3f} s  {stock / ours:6.1f} ×",
                flush=True,
            )
        # the step of transformers' function takes minutes where it is long
        if n <= 256:
            stock, ours = ([*forward(scan, arguments), *step(scan, arguments)] for scan in both.values())
            apart = max(((y - x).norm() / x.norm()).item() for x, y in zip(stock, ours, strict=True))
            print(f"n {n:6,}  apart {apart:.0e}", flush=True)


if __name__ == "__main__":
    main()

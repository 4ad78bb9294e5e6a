"""The delta rule on this machine's CPU, beside what transformers runs where flash-linear-attention is not installed.

    python benchmarks/second_generation.py [--repeats 5] [--only memory,gated,kda,lengths]

Both compute in float32 from the same tensors, in transformers' layout (batch, tokens, heads, channels), which is a
strided view for us. Times are processor times of one thread, medians of turns; a machine that is slow for a while is
then slow for both, so read their ratio. `apart` is the relative difference of outputs, or of the worst gradient. The
rate is that of products of 64 × 64 × 64 blocks, and `share` the time that the products of the chunked form would take
at that rate, over its time.

`lengths` takes the time per token of ours at two lengths in turns. `memory` trains once in a process of its own, and
reports the most that it held above the inputs, the outputs and the gradients; stock needs minutes for this."""

import argparse
import multiprocessing
import resource
import statistics
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from linear_operator import batched_products
from torch import Tensor
from torch.nn.functional import normalize
from transformers.models.kimi_linear.modeling_kimi_linear import chunk_kimi_delta_attention
from transformers.models.qwen3_next.modeling_qwen3_next import torch_chunk_gated_delta_rule

from linattn.cli.argument_types import names_from
from linattn.ops import causal_delta_attention

Operator = Callable[..., Tensor]
Name = TypeVar("Name")

HEADS = 8
# stock's function, whether its decays are per channel, and the sizes (channels, tokens)
OPERATORS: dict[str, tuple[Callable[..., Any], bool, tuple[tuple[int, int], ...]]] = {
    "gated": (torch_chunk_gated_delta_rule, False, ((64, 2048), (64, 8192), (128, 8192))),
    "kda": (chunk_kimi_delta_attention, True, ((64, 2048), (128, 2048))),
}
# tokens per chunk of the form whose products count
CHUNK = 32
LENGTHS = 2048, 65536
# a turn lasts at least so many seconds
SPAN = 0.1


def inputs(n: int, d: int, per_channel: bool) -> list[Tensor]:
    """Queries, keys, values, decays and β, (1, n, heads, …), as a model computes them."""
    q, k, v = (torch.randn(1, n, HEADS, d) for _ in range(3))
    log_decay = -0.5 * torch.rand(1, n, HEADS, *([d] if per_channel else []))
    found = [normalize(q, dim=-1), normalize(k, dim=-1), v, log_decay, torch.rand(1, n, HEADS)]
    return [x.requires_grad_() for x in found]


def ours(*given: Tensor) -> Tensor:
    """Scale queries by d^(−1/2), as stock does."""
    q, k, v, log_decay, beta = (x.transpose(1, 2) for x in given)
    return causal_delta_attention(q, k, v, beta, log_decay=log_decay, scale=q.shape[-1] ** -0.5)[0].transpose(1, 2)


def without_gradients(operator: Operator, given: list[Tensor]) -> Callable[[], tuple[Tensor, ...]]:
    def call() -> tuple[Tensor, ...]:
        with torch.no_grad():
            return (operator(*given),)

    return call


def with_gradients(operator: Operator, given: list[Tensor], upstream: Tensor) -> Callable[[], tuple[Tensor, ...]]:
    return lambda: torch.autograd.grad(operator(*given), given, upstream)


def flop(d: int, work: str) -> int:
    """Return the floating-point operations per token and head of the products of the chunked form."""
    # with the state, and among the tokens of a chunk
    forward, gradient = 6 * d * d + 8 * CHUNK * d, 14 * d * d + 16 * CHUNK * d
    return forward if work == "forward" else forward + gradient


def difference(a: Tensor, b: Tensor) -> float:
    return ((a - b).norm() / b.norm()).item()


def measure(name: str, d: int, n: int, repeats: int) -> None:
    function, per_channel, _ = OPERATORS[name]
    given, upstream = inputs(n, d, per_channel), torch.randn(1, n, HEADS, d)

    def stock(*tensors: Tensor) -> Tensor:
        return function(*tensors)[0]

    forward = {"stock": without_gradients(stock, given), "ours": without_gradients(ours, given)}
    training = {"stock": with_gradients(stock, given, upstream), "ours": with_gradients(ours, given, upstream)}
    products, products_flop = batched_products()
    for work, calls in (("forward", forward), ("training", training)):
        apart = max(map(difference, calls["ours"](), calls["stock"]()))
        medians = in_turns(calls | {"products": products}, repeats)
        each = {who: x / n / HEADS * 1e9 for who, x in medians.items()}
        rate, ratio = products_flop / medians["products"] / 1e9, each["stock"] / each["ours"]
        share = flop(d, work) / rate / each["ours"]
        print(
            f"{name:5}  d {d:3}  n {n:5,}  {work:8}  stock {each['stock']:9,.0f}  ours {each['ours']:7,.0f} "
            f"ns per token and head  {ratio:6.1f} ×  rate {rate:4.0f} GFLOP/s  share {share:.2f}  apart {apart:.0e}",
            flush=True,
        )


def lengths(name: str, d: int, repeats: int) -> None:
    """Compare the time per token of ours at two lengths."""
    for work in ("forward", "training"):
        calls = {}
        for n in LENGTHS:
            given, upstream = inputs(n, d, OPERATORS[name][1]), torch.randn(1, n, HEADS, d)
            calls[n] = without_gradients(ours, given) if work == "forward" else with_gradients(ours, given, upstream)
        short, long = (x / n / HEADS * 1e9 for n, x in in_turns(calls, repeats).items())
        figures = "  ".join(f"n {n:,} {x:,.0f}" for n, x in zip(LENGTHS, (short, long), strict=True))
        print(f"{name:5}  d {d:3}  {work:8}  {figures} ns per token and head  {long / short:.2f} ×", flush=True)


def in_turns(calls: dict[Name, Callable[[], object]], repeats: int) -> dict[Name, float]:
    """Return the median processor time of each call, after one that does not count. Short calls are repeated."""
    for call in calls.values():
        call()
    once = {name: processor_time(call) for name, call in calls.items()}
    times: dict[Name, list[float]] = {name: [] for name in calls}
    for _ in range(repeats):
        for name, call in calls.items():
            times[name] += [processor_time(call) for _ in range(max(1, int(SPAN / once[name])))]
    return {name: statistics.median(x) for name, x in times.items()}


def processor_time(call: Callable[[], object]) -> float:
    start = time.process_time()
    call()
    return time.process_time() - start


def memory(name: str, d: int, n: int) -> None:
    mebibytes = {}
    for who in ("ours", "stock"):
        with multiprocessing.get_context("spawn").Pool(1) as pool:
            mebibytes[who] = pool.apply(trained, (name, who, d, n)) / 2**20
        print(f"{name:5}  d {d:3}  n {n:5,}  {who:5}  {mebibytes[who]:6,.0f} MiB in training", flush=True)
    print(f"{name:5}  d {d:3}  n {n:5,}  ours / stock {mebibytes['ours'] / mebibytes['stock']:.3f}", flush=True)


def trained(name: str, who: str, d: int, n: int) -> int:
    """Return the bytes that a training step held at most above the inputs, the outputs and the gradients."""
    torch.set_num_threads(1)
    function, per_channel, _ = OPERATORS[name]
    operator = ours if who == "ours" else lambda *tensors: function(*tensors)[0]
    small = inputs(64, d, per_channel)
    with_gradients(operator, small, torch.randn(1, 64, HEADS, d))()
    given, upstream = inputs(n, d, per_channel), torch.randn(1, n, HEADS, d)
    before = most_memory()
    with_gradients(operator, given, upstream)()
    return most_memory() - before - sum(x.nbytes for x in (*given, upstream))


def most_memory() -> int:
    """Return the most bytes that this process has held."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    # memory comes first, because a child's count begins at what its parent has held
    parts = ("memory", *OPERATORS, "lengths")
    parser.add_argument("--only", type=names_from(parts), default=parts)
    options = parser.parse_args()
    torch.set_num_threads(1)
    for name in options.only:
        if name == "lengths":
            lengths("gated", 64, options.repeats)
        elif name == "memory":
            memory("kda", 128, 2048)
        else:
            for d, n in OPERATORS[name][2]:
                measure(name, d, n, options.repeats)


if __name__ == "__main__":
    main()

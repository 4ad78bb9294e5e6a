"""The operator alone on this machine's CPU, without the modules around it, beside softmax attention in the same run.

    python benchmarks/linear_operator.py [--threads 1] [--tokens 16384] [--repeats 7] [--json FILE]

It is measured, and written, as `linattn bench` does it: `linattn bench --redraw FILE` draws the report, and
`linattn bench --compare A.json B.json` lists what changed. The share is the time that the operator's matrix products
would take at the rate of batched products of 64 × 64 × 64, measured in the same rounds, divided by its time."""

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from linattn.cli.bench import DECODING, FORWARD, SOFTMAX, TRAINING
from linattn.cli.bench.attentions import prepare
from linattn.cli.bench.measure import Call, call_cost, interleaved_times
from linattn.cli.bench.record import BYTES, SECONDS, Case, Measurement, Record, Setup, write_record
from linattn.cli.bench.report import printed
from linattn.console.machine import machine_facts
from linattn.ops import causal_linear_attention
from linattn.ops.softmax.kernel import softmax_attention

HEADS, CHANNELS, LONG = 8, 64, 65_536
GIVEN, ELU = "linear, features given", "linear, elu + 1 inside"
# the products of the blocks that chunked attention consists of, whose side is also the length of a chunk
PRODUCTS, BLOCK = "batched 64³ products", 64
# seconds of untimed calls before each timed one
WARM = 1.0
Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def linear(feature_map: str, **options: Any) -> Attention:
    return lambda q, k, v: causal_linear_attention(q, k, v, feature_map=feature_map, **options)[0]


ATTENTIONS: dict[str, Attention] = {
    SOFTMAX: lambda q, k, v: softmax_attention(q, k, v, causal=True),
    GIVEN: linear("identity"),
    ELU: linear("elu_plus_one"),
}


def inputs(n: int, count: int = 3) -> list[torch.Tensor]:
    return [torch.randn(1, HEADS, n, CHANNELS) for _ in range(count)]


def forward(attention: Attention, n: int) -> Call:
    tensors = inputs(n)
    return lambda: attention(*tensors)


def training(attention: Attention, n: int) -> Call:
    *tensors, upstream = inputs(n, 4)
    tensors = [x.requires_grad_() for x in tensors]
    return lambda: torch.autograd.grad(attention(*tensors), tensors, upstream)


def step() -> Call:
    one = inputs(1)
    _, state = causal_linear_attention(*one, feature_map="elu_plus_one")
    return lambda: causal_linear_attention(*one, state, feature_map="elu_plus_one")


def operator_flop(tokens: int, features: int, channels: int, *, training: bool) -> float:
    """Count the FLOP of the causal operator: qkᵀ, its product with v, qS and kᵀv in chunks, and 13 such with
    gradients."""
    return tokens * (2 * BLOCK * (features + channels) + 4 * features * channels) * (13 / 4 if training else 1)


def batched_products() -> tuple[Call, float]:
    """Return a call that multiplies batches of 64 × 64 × 64 blocks, and its FLOP. Its rate is the most that chunked
    attention can reach."""
    batch = 64
    a, b, out = (torch.randn(batch, BLOCK, BLOCK) for _ in range(3))
    return lambda: torch.bmm(a, b, out=out), batch * 2.0 * BLOCK**3


def measure(n: int, repeats: int) -> list[Measurement]:
    works = {FORWARD: forward, TRAINING: training}
    calls = {(work, name): build(each, n) for work, build in works.items() for name, each in ATTENTIONS.items()}
    calls |= {(FORWARD, PRODUCTS): batched_products()[0], (DECODING, ELU): step()}
    times = interleaved_times(calls, repeats, warm=WARM)
    return [Measurement(work, name, "float32", n, SECONDS, tuple(x)) for (work, name), x in times.items()]


def shares(measurements: Sequence[Measurement]) -> Iterator[str]:
    """Yield the nanoseconds per token and head, with the share that the products alone would take."""
    median = {(each.workload, each.method): each.point.value for each in measurements if each.quantity == SECONDS}
    per_flop = median[FORWARD, PRODUCTS] / batched_products()[1]
    for each in measurements:
        if each.method in ATTENTIONS and each.workload != DECODING and each.quantity == SECONDS:
            tokens = HEADS * each.n
            flop = operator_flop(tokens, CHANNELS, CHANNELS, training=each.workload == TRAINING)
            share = "" if each.method == SOFTMAX else f", share {flop * per_flop / each.point.value:.2f}"
            yield f"{each.workload}, {each.method}: {each.point.value / tokens * 1e9:,.0f} ns per token and head{share}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path, help="write the record here too")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    started = time.monotonic()
    setup = Setup(heads=HEADS, head_dim=CHANNELS, threads=options.threads)
    peak = call_cost(prepare, setup, Case(FORWARD, "elu", "float32", LONG)).bytes
    measurements = measure(options.tokens, options.repeats)
    measurements.append(Measurement(FORWARD, ELU, "float32", LONG, BYTES, (peak,)))
    record = Record(
        command="python benchmarks/linear_operator.py " + " ".join(sys.argv[1:]),
        machine=machine_facts("cpu", options.threads),
        options={"batch": 1, "heads": HEADS, "head_dim": CHANNELS, "causal": True, "repeats": options.repeats},
        measurements=tuple(measurements),
        dropped={},
        seconds=round(time.monotonic() - started, 1),
    )
    print(printed(record), *shares(measurements), sep="\n")
    of_output = 4 * HEADS * LONG * CHANNELS
    print(f"\npeak above inputs and output at n = {LONG:,}: {100 * (peak / of_output - 1) / 3:.1f} % of q, k and v")
    if options.json:
        write_record(record, options.json)


if __name__ == "__main__":
    main()

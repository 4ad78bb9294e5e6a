"""The operator alone on this machine's CPU, without the modules around it, beside softmax attention in the same run.

    python benchmarks/linear_operator.py [--threads 1] [--tokens 16384] [--repeats 7] [--json FILE]

It is measured, and written, as `linattn bench` does it: `linattn bench --redraw FILE` draws the report, and
`linattn bench --compare A.json B.json` says what changed."""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from linattn.cli.bench import DECODING, FORWARD, RATE, TRAINING
from linattn.cli.bench.measure import alternate, peak_memory
from linattn.cli.bench.record import BYTES, SECONDS, Case, Measurement, Record, Setup, describe_machine, write_record
from linattn.cli.bench.report import printed
from linattn.cli.bench.workloads import Call, batched_products, operator_flop
from linattn.ops import causal_linear_attention
from linattn.ops.softmax.kernel import softmax_attention

HEADS, CHANNELS, LONG = 8, 64, 65_536
SOFTMAX, GIVEN, ELU = "softmax", "linear, features given", "linear, elu + 1 inside"
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


def measure(n: int, repeats: int) -> list[Measurement]:
    works = {FORWARD: forward, TRAINING: training}
    calls = {(work, name): make(each, n) for work, make in works.items() for name, each in ATTENTIONS.items()}
    products = batched_products("cpu", torch.float32)
    times = alternate(calls | {(FORWARD, RATE): products.call, (DECODING, ELU): step()}, repeats, warm=1.0)
    per_flop = statistics.median(times[FORWARD, RATE]) / products.flop
    found = []
    for (work, name), values in times.items():
        limit = None
        if work != DECODING and name not in (SOFTMAX, RATE):
            needed = operator_flop(HEADS * n, CHANNELS, CHANNELS, causal=True, training=work == TRAINING)
            limit = needed * per_flop
        found.append(Measurement(work, name, "float32", n, SECONDS, tuple(values), limit))
    return found


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
    peak = peak_memory(setup, Case(FORWARD, "elu", "float32", LONG), 600.0).bytes
    record = Record(
        command="python benchmarks/linear_operator.py " + " ".join(sys.argv[1:]),
        machine=describe_machine("cpu", options.threads),
        options={"batch": 1, "heads": HEADS, "head_dim": CHANNELS, "causal": True, "repeats": options.repeats},
        measurements=(
            *measure(options.tokens, options.repeats),
            Measurement(FORWARD, ELU, "float32", LONG, BYTES, (peak,)),
        ),
        dropped=(),
        seconds=round(time.monotonic() - started, 1),
    )
    print(printed(record))
    for each in record.measurements:
        if each.quantity == SECONDS and each.workload != DECODING and each.method != RATE:
            print(f"{each.workload}, {each.method}: {each.point.value / each.n / HEADS * 1e9:,.0f} ns a token and head")
    of_output = 4 * HEADS * LONG * CHANNELS
    print(f"\npeak above inputs and output at n = {LONG:,}: {100 * (peak / of_output - 1) / 3:.1f} % of q, k and v")
    if options.json:
        write_record(record, options.json)


if __name__ == "__main__":
    main()

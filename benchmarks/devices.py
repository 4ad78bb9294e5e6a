"""What sequence parallelism costs on one device, on one thread: the maps of segments beside the attentions themselves.

    python benchmarks/devices.py [--tokens 16384] [--repeats 7] [--parts summary]

Times are medians of turns, in seconds of the process, so that others on the machine count little."""

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from linattn import named_attention
from linattn.attention.gates import AnyNeeds, Gates
from linattn.distributed.segments import segment
from linattn.ops.nested import map_state

PARTS = ("summary",)
HEADS, CHANNELS = 8, 64
ATTENTIONS = ("elu", "favor", "roformer", "retention", "ssd", "gla", "delta", "gated_delta", "kda", "local")


def gates(needs: AnyNeeds, n: int) -> Any:
    """Draw gates as a model has them: decays of about 0.95, and strengths between 0 and 1."""
    if needs is None:
        return None
    sizes = {None: None, "head": (1, HEADS, n), "channel": (1, HEADS, n, CHANNELS)}[needs.decay]
    log_decay = None if sizes is None else -F.softplus(torch.randn(sizes) - 3)
    return Gates(log_decay, None if needs.write is None else torch.rand(1, HEADS, n))


def leaves(state: Any) -> list[Tensor]:
    found: list[Tensor] = []
    map_state(found.append, state)
    return [x for x in found if x.requires_grad]


def summary(tokens: int, repeats: int) -> None:
    """Compare the map of a segment with the attention: without gradients, and with those of keys, values and gates."""
    print(f"{'':12} {'forward':>24} {'with gradients':>32}")
    for name in ATTENTIONS:
        attention = named_attention(name, num_heads=HEADS, head_dim=CHANNELS, causal=True)
        q, k, v = (torch.randn(1, HEADS, tokens, CHANNELS) for _ in range(3))
        own = gates(attention.needs, tokens)

        def attend(attention=attention, q=q, k=k, v=v, own=own) -> Any:
            return attention.extend(q, k, v, gates=own)[0]

        def summarize(attention=attention, k=k, v=v, own=own) -> Any:
            return segment(attention, k, v, gates=own)

        with torch.no_grad():
            forward = medians((attend, summarize), repeats)
        map_state(Tensor.requires_grad_, (q, k, v, own))
        training = medians([lambda call=call: backward(call()) for call in (attend, summarize)], repeats)
        pairs = (f"{1000 * a:5.0f} ms, map {1000 * b:5.0f} ms {b / a:+7.0%}" for a, b in (forward, training))
        print(f"{name:12} {' | '.join(pairs)}")


def backward(result: Any) -> None:
    """Compute the gradients of all inputs that the result depends on."""
    torch.autograd.backward(results := leaves(result), [torch.ones_like(x) for x in results])


def medians(calls: Any, repeats: int) -> list[float]:
    """Return the process seconds of each call, the median of `repeats` turns after one that does not count."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, own in zip(calls, times, strict=True):
            own.append(seconds(call))
    return [statistics.median(own[1:]) for own in times]


def seconds(call: Callable[[], object]) -> float:
    started = time.process_time()
    call()
    return time.process_time() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=16_384)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--parts", default=",".join(PARTS))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "summary" in arguments.parts.split(","):
        summary(arguments.tokens, arguments.repeats)


if __name__ == "__main__":
    main()

"""The gain of several processes that share one sequence, and its cost, on one thread each.

    python benchmarks/devices.py [--parts sequence] [--ranks 2] [--tokens 16384,65536] [--repeats 5] [--engine wave]
    python benchmarks/devices.py --parts summary [--tokens 16384]

sequence: each rank holds its part of the tokens of a model with random weights, of 6 layers of 256 channels. Times are
medians of turns in which one process reads, or trains on, all tokens, then all ranks their parts, and then all ranks as
many tokens each without any exchange, which is the most that this machine lets several processes gain. A turn with few
tokens before them does not count. With `--clock process` they are the processor seconds of the slowest rank, which do
not count the time that it waits for others.

summary: the maps of segments, which the scan needs, beside the attentions themselves, in seconds of the process."""

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor

from linattn import LanguageModel, LanguageModelConfig, named_attention
from linattn.attention.gates import AnyNeeds, Gates
from linattn.cli.argument_types import METHODS, counts, names_from
from linattn.console.processes import average_gradients
from linattn.distributed import sequence_loss, shard_sequence, split_sequence
from linattn.distributed.segments import segment
from linattn.models.loss import next_token_loss
from linattn.nn.modes import evaluating
from linattn.ops.nested import map_state

MODELS = ("elu", "local+elu", "ssd", "gated_delta", "kda")
SIZES: dict[str, Any] = {"vocab_size": 257, "dim": 256, "depth": 6, "num_heads": 8, "window": 64, "convolution": 4}
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}
HEADS, CHANNELS = 8, 64
# tokens of the turn that does not count
WARM_UP = 4096
ATTENTIONS = ("elu", "favor", "roformer", "retention", "ssd", "gla", "delta", "gated_delta", "kda", "local")


def model(attention: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(**SIZES, attention=attention))


def prefill(reader: LanguageModel, tokens: torch.Tensor) -> None:
    with torch.inference_mode(), evaluating(reader):
        reader.hidden(tokens)


def seconds_of_all(call: Callable[[], object], clock: str) -> float:
    """Return the largest seconds of all ranks, which begin together."""
    dist.barrier()
    started = CLOCKS[clock]()
    call()
    spent = torch.tensor(CLOCKS[clock]() - started)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def reading_and_training(model: LanguageModel, tokens: Any, group: Any = None) -> dict[str, Callable[[], None]]:
    """Return what is measured: of one process with all `tokens`, or of a rank of the group with its part of them."""

    def training() -> None:
        if group is None:
            next_token_loss(model(tokens), tokens).backward()
            return
        sequence_loss(model(tokens.tokens), tokens.labels, group=group).backward()
        average_gradients(model.parameters(), group)

    return {"prefill": lambda: prefill(model, tokens if group is None else tokens.tokens), "training": training}


def sequence(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=options.ranks)
    group = dist.group.WORLD
    assert group is not None
    for attention in options.attentions:
        for tokens in options.tokens:
            compare(attention, tokens, group, options)
    dist.barrier()
    dist.destroy_process_group()


def compare(attention: str, length: int, group: Any, options: argparse.Namespace) -> None:
    """Print the seconds of one process, of all, and of all without an exchange, and the bytes that the first rank sends
    per layer."""
    whole, sharded = model(attention), model(attention)
    sharding = shard_sequence(sharded, group, engine=options.engine)
    counts = [min(length, WARM_UP), *[length] * options.repeats]
    for name in ("prefill", "training"):
        times, sent = [], 0
        for n in counts:
            tokens = torch.randint(256, (1, n), generator=torch.Generator().manual_seed(0))
            alone = reading_and_training(whole, tokens)[name]
            together = reading_and_training(sharded, split_sequence(tokens, group=group), group)[name]
            # while one process has all tokens, the others wait
            apart = reading_and_training(whole, tokens[:, : -(-n // options.ranks)])[name]
            one = seconds_of_all(alone if dist.get_rank() == 0 else lambda: None, options.clock)
            before = sharding.line.bytes_sent
            times.append((one, seconds_of_all(together, options.clock), seconds_of_all(apart, options.clock)))
            sent = sharding.line.bytes_sent - before
        if dist.get_rank() == 0:
            one, several, _ = (statistics.median(x) for x in zip(*times[1:], strict=True))
            gains = [statistics.median(turn[0] / turn[i] for turn in times[1:]) for i in (1, 2)]
            figures = f"{one:7.2f} s alone, {several:7.2f} s on {options.ranks} ranks: {gains[0]:5.2f} ×"
            figures, layer = f"{figures}, of {gains[1]:.2f} × without an exchange", sent / SIZES["depth"] / 1000
            print(f"{attention:12} {name:9} {length:>7,} tokens {figures}, {layer:,.0f} kB/layer", flush=True)
    sharding.undo()


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
    parser.add_argument("--parts", type=names_from(("sequence", "summary")), default=("sequence",))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=counts, default=(16_384,), help="lengths, with commas between")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attentions", type=METHODS, default=MODELS)
    parser.add_argument("--engine", choices=("wave", "scan"), default=None)
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "sequence" in options.parts:
        with tempfile.TemporaryDirectory() as folder:
            mp.start_processes(sequence, (folder, options), nprocs=options.ranks, start_method="spawn")
    if "summary" in options.parts:
        for tokens in options.tokens:
            summary(tokens, options.repeats)


if __name__ == "__main__":
    main()

"""What several processes gain with one sequence: the time of one process over that of several, on one thread each.

    python benchmarks/devices.py [--ranks 2] [--tokens 16384] [--repeats 5] [--attentions elu,ssd] [--clock wall]

Each rank holds its part of the tokens of a model with random weights, of 6 layers of 256 channels. Times are medians of
turns in which one process reads, or trains on, all tokens, and then all ranks their parts. With `--clock process` they are
the processor seconds of the slowest rank, which do not count the time that it waits for others."""

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

from linattn import LanguageModel, LanguageModelConfig
from linattn.distributed import sequence_loss, shard_sequence, split_sequence
from linattn.models.loss import next_token_loss
from linattn.nn.modes import evaluating

ATTENTIONS = ("elu", "local+elu", "ssd", "gated_delta", "kda")
SIZES: dict[str, Any] = {"vocab_size": 257, "dim": 256, "depth": 6, "num_heads": 8, "window": 64, "convolution": 4}
CLOCKS = {"wall": time.perf_counter, "process": time.process_time}


def model(attention: str) -> LanguageModel:
    torch.manual_seed(0)
    return LanguageModel(LanguageModelConfig(**SIZES, attention=attention))


def prefill(reader: LanguageModel, tokens: torch.Tensor) -> None:
    with torch.inference_mode(), evaluating(reader):
        reader.hidden(tokens)


def seconds(call: Callable[[], object], clock: str) -> float:
    """Return the largest seconds of all ranks, which begin together."""
    dist.barrier()
    started = CLOCKS[clock]()
    call()
    spent = torch.tensor(CLOCKS[clock]() - started)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return spent.item()


def work(rank: int, folder: str, options: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=options.ranks)
    group = dist.group.WORLD
    assert group is not None
    for attention in options.attentions.split(","):
        whole, sharded = model(attention), model(attention)
        sharding = shard_sequence(sharded, group)
        tokens = torch.randint(256, (1, options.tokens), generator=torch.Generator().manual_seed(0))
        part = split_sequence(tokens, group=group)

        def train(whole: LanguageModel = whole, tokens: torch.Tensor = tokens) -> None:
            next_token_loss(whole(tokens), tokens).backward()

        def train_part(sharded: LanguageModel = sharded, part: Any = part) -> None:
            sequence_loss(sharded(part.tokens), part.labels, group=group).backward()
            for parameter in sharded.parameters():
                dist.all_reduce(parameter.grad)

        # while one process has all tokens, the others wait
        alone = {"prefill": lambda: prefill(whole, tokens), "training": train}
        together = {"prefill": lambda: prefill(sharded, part.tokens), "training": train_part}
        for name in alone:
            ratios, times = [], []
            for _ in range(options.repeats + 1):
                one = seconds(alone[name] if rank == 0 else lambda: None, options.clock)
                sent = sharding.line.bytes_sent
                several = seconds(together[name], options.clock)
                sent = sharding.line.bytes_sent - sent
                ratios.append(one / several)
                times.append((one, several))
            if rank == 0:
                one, several = (statistics.median(x) for x in zip(*times[1:], strict=True))
                ratio, layer = statistics.median(ratios[1:]), sent / SIZES["depth"] / 1000
                figures = f"{one:7.2f} s alone, {several:7.2f} s on {options.ranks} ranks: {ratio:5.2f} ×"
                print(
                    f"{attention:12} {name:9} {options.tokens:>7,} tokens {figures}, {layer:,.0f} kB/layer", flush=True
                )
        sharding.undo()
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16384)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attentions", default=",".join(ATTENTIONS))
    parser.add_argument("--clock", choices=CLOCKS, default="wall")
    options = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory() as folder:
        mp.start_processes(work, (folder, options), nprocs=options.ranks, start_method="spawn")


if __name__ == "__main__":
    main()

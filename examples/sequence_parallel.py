"""Train on one sequence that several processes share: each holds a part of it, and the states go from rank to rank.

    torchrun --nproc-per-node=2 -m examples.sequence_parallel [--tokens 1048576] [--steps 3] [--dim 64]

The sequence is Python source, of which there is enough in every installation. Each step reads all of it and learns from
every token; gradients are averaged by DDP. On GPUs, start it with as many processes as there are GPUs."""

import argparse
import os
import resource
import sys
import sysconfig
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from linattn import LanguageModel, LanguageModelConfig
from linattn.cli.argument_types import COUNT, METHOD
from linattn.distributed import last_state, sequence_loss, shard_sequence, split_sequence


def source(tokens: int) -> torch.Tensor:
    """Return so many bytes of the standard library's files, as one sequence (1, n)."""
    text = b""
    for path in sorted(Path(sysconfig.get_path("stdlib")).glob("*.py")):
        text += path.read_bytes()
        if len(text) >= tokens:
            break
    return torch.frombuffer(bytearray(text[:tokens]), dtype=torch.uint8).long().unsqueeze(0)


def train(tokens: int, steps: int, attention: str, dim: int) -> list[float]:
    """Return the loss of each step, in nats per byte, that of the whole sequence on every rank."""
    # every process makes the same model; its memory does not depend on the sequence
    torch.manual_seed(0)
    config = LanguageModelConfig(vocab_size=256, dim=dim, depth=2, num_heads=2, attention=attention, convolution=4)
    model = LanguageModel(config)
    # from here on, the model takes the part of a sequence that this process has, and hands its states on to the next
    sharding = shard_sequence(model, dist.group.WORLD)
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(trained.parameters(), lr=3e-3)
    # the last label of a part is the first token of the next one; the memory of a step is that of a part
    part, losses = split_sequence(source(tokens), group=dist.group.WORLD), []
    for step in range(steps):
        started = time.perf_counter()
        # the mean over all tokens of all processes; each gets the gradient from its own, and DDP averages them
        loss = sequence_loss(trained(part.tokens), part.labels, group=dist.group.WORLD)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if dist.get_rank() == 0:
            seconds = time.perf_counter() - started
            kilobytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // (1024 if sys.platform == "darwin" else 1)
            speed = f"{tokens / seconds:,.0f} tokens/s, at most {kilobytes / 1e6:.1f} GB per process"
            print(f"step {step + 1}: {loss.item():.3f} nats per byte, {seconds:.1f} s, {speed}", flush=True)
    # what all processes have read is one state of constant size, which the last one sends to all
    with torch.no_grad():
        state = last_state(model.extend(part.tokens)[1], group=dist.group.WORLD)
    sharding.undo()
    # from here each process goes on by itself, after all tokens of all processes
    model.extend(torch.tensor([[ord("d")]]), state)
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", **COUNT, default=65_536)
    parser.add_argument("--steps", **COUNT, default=3)
    parser.add_argument("--attention", type=METHOD, default="gated_delta")
    parser.add_argument("--dim", **COUNT, default=64)
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun starts the processes: see --help")
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    dist.init_process_group("gloo")
    train(options.tokens, options.steps, options.attention, options.dim)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a small model on this file's own bytes, with its heads, its data, or both shared among processes.

    torchrun --nproc-per-node 2 -m examples.tensor_parallel              # each process has half of the heads
    torchrun --nproc-per-node 2 -m examples.tensor_parallel --data 2     # each process has half of the batch
    torchrun --nproc-per-node 4 -m examples.tensor_parallel --data 2     # two groups of two processes

The loss is the same in all cases."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

from linattn import LanguageModel, LanguageModelConfig
from linattn.cli.argument_types import COUNT
from linattn.distributed import tensor_parallel
from linattn.models import next_token_loss

CONFIG = LanguageModelConfig(vocab_size=256, dim=32, depth=2, num_heads=4, attention="local:2+gated_delta:2")
BATCH, LENGTH = 8, 64


def train(mesh: DeviceMesh, steps: int) -> list[float]:
    """Return the loss of each step over the whole batch. The mesh has the dimensions "data" and "heads"."""
    # the same weights and the same batches on every process
    torch.manual_seed(0)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = LanguageModel(CONFIG)
    tensor_parallel(model, mesh["heads"])
    for block in model.blocks:
        fully_shard(block, mesh=mesh["data"])
    fully_shard(model, mesh=mesh["data"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(steps):
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1))
        windows = text[starts + torch.arange(LENGTH)]
        tokens = windows.chunk(mesh["data"].size())[mesh["data"].get_local_rank()]
        loss = next_token_loss(model(tokens), tokens)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / mesh["data"].size()
        dist.all_reduce(mean, group=mesh["data"].get_group())
        losses.append(mean.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", **COUNT, default=1, help="groups of processes, each with its part of the batch")
    parser.add_argument("--steps", **COUNT, default=50, help="steps of training")
    options = parser.parse_args()
    if "RANK" not in os.environ:
        parser.error("torchrun starts the processes: see --help")
    dist.init_process_group("gloo")
    if dist.get_world_size() % options.data:
        parser.error(f"--data {options.data} does not divide the {dist.get_world_size()} processes")
    shape = (options.data, dist.get_world_size() // options.data)
    losses = train(init_device_mesh("cpu", shape, mesh_dim_names=("data", "heads")), options.steps)
    if dist.get_rank() == 0:
        print(f"{shape[0]} × {shape[1]} processes: loss {losses[0]:.4f}, after {options.steps} steps {losses[-1]:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""The processes that train a model together: each takes its share of the batches of an update."""

import os
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from linattn.console.processes import average_gradients, have_joined, message_device
from linattn.linearize.calls import Batch


def process_count() -> int:
    """Return the number of processes in torch's default group, 1 without such a group."""
    return dist.get_world_size() if have_joined() else 1


def process_rank() -> int:
    return dist.get_rank() if process_count() > 1 else 0


def require_group() -> None:
    """Raise ValueError if a launcher has started several processes that do not know each other."""
    if process_count() == 1 and (launched := int(os.environ.get("WORLD_SIZE", "1"))) > 1:
        raise ValueError(
            f"there are {launched} processes, but no group of them: call torch.distributed.init_process_group first"
        )


def own_batches(batches: Sequence[Batch], updates: range, accumulate: int) -> Iterator[Batch]:
    """Yield this process's share of the batches that the `updates` of the weights read. Each process reads `accumulate`
    batches per update. The batches repeat if they are fewer."""
    ranks, per_update = process_count(), accumulate * process_count()
    for number in range(updates.start * per_update + process_rank(), updates.stop * per_update, ranks):
        yield batches[number % len(batches)]


def first_batches(batches: Sequence[Batch], updates: int, accumulate: int) -> Iterator[Batch]:
    """Yield this process's share of the batches of so many first `updates`, or of fewer if there are no more batches
    for them without repeating."""
    most = -(-len(batches) // (accumulate * process_count()))
    return own_batches(batches, range(min(updates, most)), accumulate)


def gather(x: Any) -> list[Any]:
    """Return the x of all processes, in the order of their ranks. Tensors in it must be on the CPU."""
    if (ranks := process_count()) == 1:
        return [x]
    found = [None] * ranks
    dist.all_gather_object(found, x)
    return found


def sum_over_processes(*numbers: float) -> list[float]:
    """Return each of the numbers summed over processes."""
    if process_count() == 1:
        return list(numbers)
    totals = torch.tensor(numbers, dtype=torch.float64, device=message_device())
    dist.all_reduce(totals)
    return totals.tolist()


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Overwrite the tensors with those of the first process."""
    if process_count() > 1:
        for x in tensors:
            dist.broadcast(x.detach(), 0)


def sum_gradients(weights: Sequence[nn.Parameter]) -> None:
    """Replace the gradient of each weight by its sum over processes. A weight that some process did not use counts as
    zero there; one that no process used keeps no gradient. Those that processes share are averages already."""
    if (ranks := process_count()) == 1:
        return
    used = torch.tensor([weight.grad is not None for weight in weights], dtype=torch.int32, device=message_device())
    dist.all_reduce(used)
    for weight, count in zip(weights, used.tolist(), strict=True):
        if count and weight.grad is None:
            weight.grad = torch.zeros_like(weight)
    average_gradients(weight for weight in weights if not isinstance(weight, DTensor))
    for weight in weights:
        if weight.grad is not None:
            weight.grad *= ranks

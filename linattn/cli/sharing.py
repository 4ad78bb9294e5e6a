"""The processes of a run: how they share its sequences, its layers and its weights."""

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainingArguments

from linattn.cli.options import TrainOptions, flag
from linattn.console.errors import CommandError
from linattn.console.processes import from_first, message_device
from linattn.distributed import SequenceSharding, shard_sequence, tensor_parallel
from linattn.integrations.transformers import LinattnForCausalLM

SHARED = ("sequence_parallel", "tensor_parallel")
"""The options whose processes have the same sequences."""


def group_size(options: TrainOptions) -> int:
    """Return the number of processes that have the same sequences."""
    return options.sequence_parallel * options.tensor_parallel


def check_sharing(options: TrainOptions, processes: int) -> None:
    """Raise ValueError unless this number of `processes` can run with the options as they are."""
    shown = {name: f"{flag(name)} {ranks}" for name in SHARED if (ranks := getattr(options, name)) > 1}
    for name in ("segment", "carry"):
        if shown and getattr(options, name) is not None:
            raise ValueError(f"--{name} does not work with {flag(next(iter(shown)))}")
    if processes % group_size(options):
        text = " times ".join(shown.values())
        raise ValueError(f"{text} must divide the number of processes, but there are {processes}")
    if options.context % options.sequence_parallel:
        raise ValueError(f"{shown['sequence_parallel']} must divide --context, but that is {options.context:,}")
    if options.fsdp and processes == 1:
        raise ValueError("--fsdp needs several processes, but there is one")


def sequences_per_update(options: TrainOptions, processes: int) -> int:
    return options.batch * options.accumulate * (processes // group_size(options))


def with_updates_of(options: TrainOptions, sequences: int, processes: int, accumulate: int | None) -> TrainOptions:
    """Return the options of a resumed run with --accumulate such that an update takes as many `sequences` as before,
    for any number of processes. Raise CommandError if no --accumulate does that, or only another one than the user gave
    (`accumulate`, None: not given)."""
    at_a_time = options.batch * (processes // group_size(options))
    if sequences % at_a_time == 0 and accumulate in (None, sequences // at_a_time):
        return replace(options, accumulate=sequences // at_a_time)
    given = "" if accumulate is None else f" and --accumulate {accumulate}"
    batches, rest = divmod(sequences, accumulate or 1)
    groups, choices = processes // group_size(options), list[str]()
    if not rest and batches % options.batch == 0:
        numbers = [group_size(options) * number for number in _numbers(batches // options.batch, accumulate)]
        choices.append(f"{_listed(numbers)} {'process' if numbers == [1] else 'processes'}")
    if not rest and batches % groups == 0:
        choices.append(f"--batch {_listed(_numbers(batches // groups, accumulate))}")
    raise CommandError(
        f"an update of the run takes {sequences} sequences, but {processes} processes with --batch {options.batch}"
        f"{given} take another number: choose {', or '.join(choices) or 'other numbers'}"
    )


def _numbers(product: int, accumulate: int | None) -> list[int]:
    """Return the numbers that a message suggests: all divisors of `product` if --accumulate is free, otherwise
    `product` alone."""
    return [i for i in range(1, product + 1) if product % i == 0] if accumulate is None else [product]


def _listed(numbers: list[int]) -> str:
    *others, last = map(str, numbers)
    return f"{', '.join(others)} or {last}" if others else last


@dataclass(frozen=True)
class Sharing:
    """Says how a model is shared: `sequence` if each process has a part of every sequence, `layers` if it has a part of
    each layer, whose processes draw the same random numbers, and `averages` if the Trainer averages the gradients over
    this group itself, because DDP takes no DTensors. The text `facts` are for the report."""

    sequence: SequenceSharding | None = None
    layers: dist.ProcessGroup | None = None
    averages: dist.ProcessGroup | None = None
    is_sharded: bool = False
    facts: tuple[str, ...] = ()


def share(model: LinattnForCausalLM, options: TrainOptions, args: TrainingArguments) -> Sharing:
    """Share the model among the processes, in place. Raise ValueError for what they cannot share."""
    processes, device, facts = args.world_size, args.device.type, list[str]()
    sequences, layers = options.sequence_parallel, options.tensor_parallel
    sequence = tensor = averages = None
    if options.fsdp or layers > 1:
        nn.Module.to(model, args.device)
        mesh = init_device_mesh(device, (processes // layers, layers), mesh_dim_names=("data", "tensor"))
        if layers > 1:
            tensor_parallel(model.model, mesh["tensor"])
            tensor = mesh["tensor"].get_group()
            facts.append(f"each layer over {layers} processes")
        if options.fsdp:
            for part in (*model.model.blocks, model):
                fully_shard(part, mesh=mesh["data"])
            facts.append(f"the weights over {processes} processes")
        elif processes > layers:
            averages = mesh["data"].get_group()
    if sequences > 1:
        shape = processes // group_size(options), sequences, layers
        mesh = init_device_mesh(device, shape, mesh_dim_names=("data", "sequence", "tensor"))
        sequence = shard_sequence(model.model, mesh["sequence"])
        facts.append(f"each sequence over {sequences} processes")
    return Sharing(sequence, tensor, averages, options.fsdp or layers > 1, tuple(facts))


def align_random_numbers(group: dist.ProcessGroup) -> None:
    """Let all processes of the group draw the random numbers of its first one."""
    on_gpu = torch.cuda.get_rng_state() if message_device() is not None else None
    own, on_gpu = from_first((torch.get_rng_state(), on_gpu), group)
    torch.set_rng_state(own)
    if on_gpu is not None:
        torch.cuda.set_rng_state(on_gpu)
